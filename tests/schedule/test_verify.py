import time

import pytest

from ds_fold.schedule import (
    OPS,
    Action,
    Overlap,
    Program,
    VerificationError,
    bubble_fraction,
    compute_order,
    forward_order,
    lower,
    verify,
)
from ds_fold.schedule.verify import HANDLERS


def program(schedule="aiao", P=2, v=2, M=3, **options):
    return lower(compute_order(schedule, P, v, M), v, M, **options)


def test_every_action_type_is_handled():
    assert set(HANDLERS) == set(OPS)


def test_unknown_action_is_refused():
    broken = program()
    broken.ranks[0].insert(0, Action("Q", 0, 0))
    with pytest.raises(VerificationError, match=r"rank 0, action 0 \(Q0.0\): is not understood"):
        verify(broken)


#: more segments than any program here has
EARLY = frozenset(range(1, 99))
OVERLAPS = [Overlap(), Overlap(reduce=True), Overlap(gather=True), Overlap(True, True, 1), Overlap(True, False, 1, EARLY),
            Overlap(True, True, None, EARLY), Overlap(True, True, None, align=True), Overlap(True, False, 1, align=True),
            Overlap(True, True, None, EARLY, True)]
SHARDED = [Overlap(shard=True), Overlap(True, True, 1, shard=True), Overlap(True, True, None, EARLY, shard=True)]


@pytest.mark.parametrize("overlap", OVERLAPS + SHARDED[:2])  # with an early step and no gather after it, the step steps the rest
def test_no_action_can_be_left_out(overlap):
    """Drop each action of each rank in turn: the proof must fail every time."""
    whole = program(v=3 if overlap.shard else 2, overlap=overlap)
    for r in range(whole.P):
        for i in range(len(whole.ranks[r])):
            ranks = [list(actions) for actions in whole.ranks]
            dropped = ranks[r].pop(i)
            with pytest.raises(VerificationError):
                verify(Program(whole.P, whole.v, whole.M, ranks, shard_params=overlap.shard))
                pytest.fail(f"rank {r} without {dropped} was accepted")


@pytest.mark.parametrize("overlap", OVERLAPS + SHARDED)
def test_no_action_can_appear_twice(overlap):
    whole = program(overlap=overlap)
    for r in range(whole.P):
        for i, action in enumerate(whole.ranks[r]):
            ranks = [list(actions) for actions in whole.ranks]
            ranks[r].insert(i + 1, action)
            with pytest.raises(VerificationError):
                verify(Program(whole.P, whole.v, whole.M, ranks, shard_params=overlap.shard))
                pytest.fail(f"rank {r} with {action} twice was accepted")


@pytest.mark.parametrize("op,message", [("F", "runs before"), ("B", "runs before"), ("SA", "runs before"), ("SG", "runs before"),
                                        ("WSA", "not launched"), ("WRA", "not posted"), ("WRG", "not posted"),
                                        ("WSG", "not launched"), ("STEP", "before the last backward"),
                                        ("RT", "before the last backward"), ("R", "before the last backward of segment 1"),
                                        ("WR", "not launched"), ("G", "before the step")])
def test_waits_and_uses_cannot_come_before_what_they_need(op, message):
    whole = program(M=2)
    r, i = next((r, i) for r in (1, 0) for i, a in enumerate(whole.ranks[r]) if a.op == op)
    ranks = [list(actions) for actions in whole.ranks]
    ranks[r].insert(0, ranks[r].pop(i))
    with pytest.raises(VerificationError, match=message):
        verify(Program(whole.P, whole.v, whole.M, ranks))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "aiao", "aiao_all_forward"])
@pytest.mark.parametrize("P,v,M", [(1, 1, 1), (1, 3, 2), (2, 4, 5), (4, 3, 8)])
def test_reductions_and_gathers_stand_where_overlap_says(schedule, P, v, M):
    v = 1 if schedule == "1f1b" else v
    for overlap in OVERLAPS:
        whole = program(schedule, P, v, M, overlap=overlap)
        report = verify(whole)
        if overlap.in_flight and schedule.startswith("aiao"):  # elsewhere the backwards of segments alternate
            assert max(report.peak_reducing) <= overlap.in_flight + 1
        for actions in whole.ranks:
            at = {str(a): i for i, a in enumerate(actions)}
            last_compute = max(i for i, a in enumerate(actions) if a.op in "FB")
            for k in range(v):
                last_backward = max(i for i, a in enumerate(actions) if a.op == "B" and a.segment == k)
                first_forward = min(i for i, a in enumerate(actions) if a.op == "F" and a.segment == k)
                between = [a.op for a in actions[last_backward + 1:at[f"R{k}"]]]
                if overlap.align:
                    assert between.count("B") <= whole.ranks.index(actions)
                else:
                    assert set(between) <= {"SG"} if overlap.reduce else at[f"R{k}"] > last_compute
                assert at[f"WG{k}"] < first_forward if overlap.gather else at[f"WG{k}"] > max(at[f"G{k}"], at["STEP"])
                if k and overlap.early:
                    assert actions[at[f"S{k}"] - 1].op == "WR" and at[f"S{k}"] == at[f"G{k}"] - 1 == at[f"R{k - 1}"] + 2
                else:
                    assert f"S{k}" not in at and at[f"G{k}"] > at["STEP"]


def test_aiao_reduces_while_it_computes_and_bounds_what_is_in_flight():
    text = program("aiao", 1, 3, 2, overlap=Overlap(True, True, 1)).format(0)
    assert text == ("rank 0: WG0 L0.0 F0.0 L0.1 F0.1 WG1 F1.0 F1.1 WG2 F2.0 B2.0 F2.1 B2.1 R2 B1.0 B1.1 R1 WR2 B0.0 B0.1 R0 "
                    "RT WR1 WR0 STEP G0 G1 G2")


@pytest.mark.parametrize("P", [2, 4])
def test_aligned_reductions_are_launched_by_all_ranks_after_the_same_sweep(P):
    """Rank 0 is last to finish a segment; at its last backward of segment k > 0 rank r has done r more backwards."""
    v, M = 3, 2 * P
    whole = program("aiao", P, v, M, overlap=Overlap(True, align=True))
    for r, actions in enumerate(whole.ranks):
        ops = [str(a) for a in actions if a.op in "BR"]
        done = [sum(op[0] == "B" for op in ops[:ops.index(f"R{k}")]) for k in reversed(range(v))]
        assert done == [M + r, 2 * M + r, 3 * M]


def test_aligned_launches_do_not_exceed_what_may_be_in_flight():
    """One segment is reduced and not waited for, or complete and held, when another's backward begins."""
    ranks = program("aiao", 4, 3, 2, overlap=Overlap(True, False, 1, align=True)).ranks
    text = [" ".join(str(a) for a in actions if a.op in ("B", "R", "WR")) for actions in ranks]
    assert text[1] == "B2.0 B2.1 B1.0 R2 B1.1 WR2 B0.0 R1 B0.1 R0 WR1 WR0"
    assert text[3] == "B2.0 B2.1 B1.0 B1.1 R2 WR2 B0.0 B0.1 R1 R0 WR1 WR0"


def test_an_early_step_follows_the_launch_of_the_next_reduction():
    text = program("aiao", 1, 3, 2, overlap=Overlap(True, True, 1, EARLY)).format(0)
    assert text == ("rank 0: WG0 L0.0 F0.0 L0.1 F0.1 WG1 F1.0 F1.1 WG2 F2.0 B2.0 F2.1 B2.1 R2 B1.0 B1.1 R1 WR2 S2 G2 B0.0 B0.1 R0 "
                    "WR1 S1 G1 RT WR0 STEP G0")


def test_what_is_not_stepped_early_is_waited_for_with_the_rest():
    text = program("aiao", 1, 3, 2, overlap=Overlap(True, True, None, frozenset([1]))).format(0)
    assert text.endswith("B2.1 R2 B1.0 B1.1 R1 B0.0 B0.1 R0 WR1 S1 G1 RT WR2 WR0 STEP G0 G2")


def test_sharded_parameters_are_gathered_for_a_sweep_one_segment_ahead_and_released_after_it():
    sharded = program("aiao", 1, 4, 2, overlap=Overlap(True, True, 1, shard=True))
    assert sharded.format(0) == (
        "rank 0: G0 G1 WG0 L0.0 F0.0 L0.1 F0.1 XG0 G2 WG1 F1.0 F1.1 XG1 G3 WG2 F2.0 F2.1 WG3 F3.0 B3.0 F3.1 B3.1 R3 "
        "XG3 G1 B2.0 B2.1 R2 XG2 G0 WG1 WR3 B1.0 B1.1 R1 XG1 WG0 WR2 B0.0 B0.1 R0 XG0 RT WR1 WR0 STEP")
    assert Program.parse(sharded.format()) == sharded


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "aiao", "aiao_all_forward"])
@pytest.mark.parametrize("P, v, M", [(1, 2, 1), (1, 5, 4), (2, 3, 5), (4, 4, 8), (3, 6, 7)])
@pytest.mark.parametrize("ahead", [False, True])
def test_two_segments_are_whole_at_most_and_aiao_gathers_each_twice_whatever_m(schedule, P, v, M, ahead):
    sharded = program(schedule, P, v, M, overlap=Overlap(True, ahead, 1, shard=True))
    assert verify(sharded).peak_whole == [2] * P
    if schedule.startswith("aiao"):
        for actions in sharded.ranks:
            assert [actions.count(Action("G", k)) for k in range(v)] == [2] * (v - 2) + [1, 1]


@pytest.mark.parametrize("moved, to, message", [
    ("XG0 G2 ", "G2 XG0 ", "G2.*makes 3 segments whole at once .0, 1, 2.; at most 2"),
    ("WG1 F1.0", "F1.0 WG1", "F1.0.*while the parameters of segment 1 are not whole"),
    ("WG0 WR2 B0.0", "WR2 B0.0 WG0", "B0.0.*while the parameters of segment 0 are not whole"),
    ("B1.1 R1 XG1 ", "XG1 B1.1 R1 ", "B1.1.*while the parameters of segment 1 are not whole"),
    ("G2 WG1", "G2 XG2 WG1", "XG2.*which are not whole"),
    ("XG0 RT WR1 WR0 STEP", "RT WR1 WR0 STEP XG0", "STEP.*steps while the parameters of segment 0 are whole"),
    (" shard_params", "", "G0.*gathers before the step"),
])
def test_sharded_parameters_are_whole_where_they_are_used(moved, to, message):
    text = program("aiao", 1, 3, 2, overlap=Overlap(True, True, 1, shard=True)).format()
    assert moved in text
    with pytest.raises(VerificationError, match=message):
        verify(Program.parse(text.replace(moved, to)))


@pytest.mark.parametrize("moved, message", [
    ("S2 WR2 G2", r"S2.*steps before the reduction of segment 2 is over"),
    ("WR2 G2 S2", r"G2.*gathers before the step"),
    ("WR2 S1 G2", r"S1.*steps before the reduction of segment 1 is over"),
    ("WR2 STEP S2 G2", r"STEP.*before the last backward"),
])
def test_an_early_step_stands_between_its_reduction_and_its_gather(moved, message):
    text = program("aiao", 1, 3, 2, overlap=Overlap(True, True, 1, EARLY)).format()
    with pytest.raises(VerificationError, match=message):
        verify(Program.parse(text.replace("WR2 S2 G2", moved)))
    with pytest.raises(VerificationError, match=r"S2.*comes after the step"):
        verify(Program.parse(text.replace("S2 G2 ", "").replace("STEP", "STEP S2 G2")))


def test_parameters_cannot_be_waited_for_after_their_first_use():
    late = program("aiao", 1, 2, 1, overlap=Overlap(True, True))
    actions = late.ranks[0]
    i = actions.index(Action("WG", 1))
    actions[i], actions[i + 1] = actions[i + 1], actions[i]
    with pytest.raises(VerificationError, match="WG1.*after their first use"):
        verify(late)


def test_ranks_that_wait_for_each_other_are_found():
    text = ("program pipeline_ranks=2 segments=2 micro_batches=1 forward_only\n"
            "rank 0: L0.0 F0.0 SA0.0 WSA0.0 RA1.0 WRA1.0 F1.0 SA1.0 WSA1.0\n"
            "rank 1: RA1.0 RA0.0 WRA0.0 F0.0 SA0.0 WSA0.0 L1.0 WRA1.0 F1.0\n")
    with pytest.raises(VerificationError, match="expects micro-batch 0 at virtual stage 3"):
        verify(Program.parse(text))
    crossed = text.replace("RA1.0 RA0.0 WRA0.0", "RA0.0 WRA0.0").replace("L1.0 WRA1.0", "L1.0 RA1.0 WRA1.0")
    verify(Program.parse(crossed))
    stuck = crossed.replace("F0.0 SA0.0 WSA0.0 RA1.0", "F0.0 RA1.0 WRA1.0 SA0.0 WSA0.0").replace("SA0.0 WSA0.0 WRA1.0 F1.0",
                                                                                              "SA0.0 WSA0.0 F1.0")
    with pytest.raises(VerificationError, match=r"deadlock.*\n  rank 0 at action 3 of 9: WRA1.0\n  rank 1 at action 1 of"):
        verify(Program.parse(stuck))


def test_evaluation_programs():
    for P in range(1, 6):
        for v in range(1, 5):
            for M in (1, 2, 3, 8, 17):
                report = verify(lower(forward_order(P, v, M), v, M, forward_only=True))
                assert max(report.peak_posted) <= 4


@pytest.mark.parametrize("ahead", [1, 2, 3, 16])
@pytest.mark.parametrize("schedule", ["aiao", "interleaved_1f1b", "aiao_all_forward"])
def test_any_look_ahead_is_free_of_deadlock_and_bounds_the_posted_receives(schedule, ahead):
    for P, v, M in [(2, 2, 4), (3, 4, 7), (4, 2, 8), (4, 3, 2)]:
        assert max(verify(program(schedule, P, v, M, receive_ahead=ahead)).peak_posted) <= ahead


def test_bubble_fraction_of_the_papers():
    for P, v, M in [(4, 1, 8), (4, 2, 8), (4, 4, 8), (8, 4, 16)]:
        schedule = "1f1b" if v == 1 else "aiao"
        assert bubble_fraction(program(schedule, P, v, M)) == pytest.approx((P - 1) / (v * M + P - 1))


def test_a_thousand_ranks_worth_of_actions_is_proved_in_seconds():
    start = time.process_time()
    large = program("aiao", 64, 8, 512)
    report = verify(large)
    seconds = time.process_time() - start
    assert large.num_actions > 2_500_000 and report.peak_live[63] == 7 * 512 + 1
    assert seconds < 20, f"64 ranks x 8 segments x 512 micro-batches took {seconds:.1f} s"

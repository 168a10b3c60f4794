import time
from importlib import import_module

import pytest

from ds_fold.events import COMPUTE, DATA_PARALLEL, PIPELINE, WAITING
from ds_fold.plan import HANDLERS, Cluster, Costs, Link, PlanError, Profile, simulate
from ds_fold.schedule import OPS, Overlap, Program, compute_order, compute_times, forward_order, lower, makespan, verify

FREE = Cluster(hosts=64, inter_host=Link(bytes_per_s=1e18))
ALL = Overlap(reduce=True, gather=True)


def program(schedule="aiao", P=2, v=2, M=3, **options):
    return lower(compute_order(schedule, P, v, M), v, M, **options)


def network(rate, latency_s=0.0):
    return Cluster(hosts=64, inter_host=Link(bytes_per_s=rate, latency_s=latency_s))


def test_every_action_type_is_handled():
    assert set(HANDLERS) == set(OPS)


SHAPES = [("gpipe", 4, 1, 8), ("1f1b", 1, 1, 3), ("1f1b", 2, 1, 2), ("1f1b", 4, 1, 8), ("1f1b", 8, 1, 11),
          ("interleaved_1f1b", 2, 2, 4), ("interleaved_1f1b", 4, 4, 8), ("interleaved_1f1b", 3, 2, 7), ("aiao", 1, 3, 2),
          ("aiao", 2, 2, 3), ("aiao", 4, 4, 8), ("aiao", 8, 3, 9), ("aiao_all_forward", 4, 2, 6)]


@pytest.mark.parametrize("schedule,P,v,M", SHAPES)
@pytest.mark.parametrize("overlap", [Overlap(), ALL])
def test_the_closed_forms_hold_with_free_communication(schedule, P, v, M, overlap):
    result = simulate(program(schedule, P, v, M, overlap=overlap), Costs.uniform(P, v, 1 / v), FREE)
    assert result.step_s == pytest.approx(3 * M + 3 * (P - 1) / v)
    assert result.bubble_fraction == pytest.approx((P - 1) / (v * M + P - 1))
    assert [rank.compute_s for rank in result.ranks] == [pytest.approx(3 * M)] * P


@pytest.mark.parametrize("schedule,P,v,M", SHAPES)
def test_computes_run_when_compute_times_says(schedule, P, v, M):
    whole = program(schedule, P, v, M)
    timeline = simulate(whole, Costs.uniform(P, v, 1.0, 1.5), FREE).timeline()
    simulated = {(e.rank, e.action): (e.start, e.end) for e in timeline.events if e.action[0] in "FB"}
    expected = {(span.rank, str(span.action)): (span.start, span.end) for span in compute_times(whole, 1.0, 1.5)}
    assert simulated.keys() == expected.keys()
    assert all(simulated[key] == pytest.approx(expected[key]) for key in expected)


def test_evaluation_programs_run_without_a_step():
    whole = lower(forward_order(4, 2, 8), 2, 8, forward_only=True)
    result = simulate(whole, Costs.uniform(4, 2, 1.0, boundary_bytes=10.0), FREE)
    assert result.step_s == pytest.approx(makespan(whole))
    # activations are not kept: those of one chunk, and at most 4 receives posted ahead
    assert result.ranks[0].peak_bytes == 10 + 4 * 10 and list(result.memory(0))[-1][1] == 0


@pytest.mark.parametrize("P,v", [(2, 1), (3, 1), (2, 3), (4, 2)])
def test_every_message_shows_where_one_micro_batch_runs_alone(P, v):
    """Nothing overlaps: 3 per virtual stage, and each boundary twice; the step ends with two agreements of all ranks."""
    cluster = network(8.0, 0.25)
    result = simulate(program("1f1b" if v == 1 else "aiao", P, v, 1), Costs.uniform(P, v, 1.0, boundary_bytes=4.0), cluster)
    S = P * v
    assert result.step_s == pytest.approx(3 * S + 2 * (S - 1) * (4 / 8 + 0.25) + 2 * cluster.agreement_s(P))


def test_messages_inside_a_host_use_its_own_link():
    cluster = Cluster(hosts=2, ranks_per_host=2, inter_host=Link(bytes_per_s=1), intra_host=Link(bytes_per_s=4))
    result = simulate(program("1f1b", 4, 1, 1), Costs.uniform(4, 1, 1.0, boundary_bytes=4.0), cluster)
    assert result.step_s == pytest.approx(3 * 4 + 2 * (1 + 4 + 1))


def test_replicas_on_a_host_share_its_card():
    cluster = Cluster(hosts=2, ranks_per_host=2, inter_host=Link(bytes_per_s=4), intra_host=Link(bytes_per_s=4))
    result = simulate(program("1f1b", 2, 1, 1), Costs.uniform(2, 1, 1.0, boundary_bytes=4.0, trainable_bytes=8.0), cluster, D=2)
    # both replicas' messages leave at once: 2 s instead of 1; reduction and gather stay inside: 4 bytes each
    assert result.step_s == pytest.approx(3 * 2 + 2 * 2 + 1 + 1)


def test_nothing_moves_before_the_receive_is_posted():
    text = ("program pipeline_ranks=2 segments=1 micro_batches=2 forward_only\n"
            "rank 0: L0.0 F0.0 SA0.0 L0.1 F0.1 SA0.1 WSA0.0 WSA0.1\n"
            "rank 1: RA0.0 {early}WRA0.0 L0.0 F0.0 {late}WRA0.1 L0.1 F0.1\n")
    costs = Costs.uniform(2, 1, 1.0, boundary_bytes=1.0)._replace(forward_s=[1.0, 3.0])
    early = simulate(Program.parse(text.format(early="RA0.1 ", late="")), costs, network(1.0))
    late = simulate(Program.parse(text.format(early="", late="RA0.1 ")), costs, network(1.0))
    assert early.step_s == 8 and early.ranks[0].waits_s["WSA"] == 1  # the second message arrives at 3
    assert late.step_s == 9 and late.ranks[0].waits_s["WSA"] == 4  # posted at 5, there at 6


@pytest.mark.parametrize("priority,step_s,ends", [(False, 27, {"R1": [16, 12], "R0": [23, 20]}),
                                                  (True, 24, {"R1": [15, 12], "R0": [20, 18]})])
def test_messages_and_reductions_share_the_card(priority, step_s, ends):
    """Two ranks, two segments, one micro-batch; F=1, B=2, a message alone 1 s, a reduction or gather alone 2 s.

    fair      F0 [0,1] a F0 [2,3] a F1 [4,5] a F1 [6,7] B1 [7,9]; the gradient and R1 share rank 1's card: [9,11], R1 [9,12];
              B1 [11,13]; [13,15], R1 [13,16]; B0 [15,17]; [17,19], R0 [17,20]; B0 [19,21]; R0 [21,23]; G0 G1 [23,27]
    priority  the gradient first: [9,10], R1 [10,12]; B1 [10,12]; [12,13], R1 [13,15]; B0 [13,15]; [15,16], R0 [16,18];
              B0 [16,18]; R0 [18,20]; G0 G1 [20,24]
    """
    whole = program("aiao", 2, 2, 1, overlap=Overlap(reduce=True))
    costs = Costs.uniform(2, 2, 1.0, boundary_bytes=4.0, trainable_bytes=16.0)
    result = simulate(whole, costs, network(4.0), D=2, priority=priority)
    assert result.step_s == pytest.approx(step_s)
    for action, expected in ends.items():
        assert [t.end for record in result.records for t in record.transfers if t.action == action] == pytest.approx(expected)


def test_gathers_are_paid_for_in_the_next_step():
    """One rank, two segments, one micro-batch; F=1, B=2, each reduction or gather 3 s.

    first   F0 [0,1] F1 [1,2] B1 [2,4] B0 [4,6]; R1 [4,7] R0 [7,10]; step; G0 [10,13] G1 [13,16]
    then    F0 [13,14] F1 [16,17] B1 [17,19] B0 [19,21]; R1 [19,22] R0 [22,25]: 15 s, of which 1 of G1 and 2 of R1 are hidden
    """
    costs = Costs.uniform(1, 2, 1.0, trainable_bytes=6.0)
    result = simulate(program("aiao", 1, 2, 1, overlap=ALL), costs, network(1.0), D=2)
    assert result.steps_s == pytest.approx([10, 15])
    rank, = result.ranks
    assert (rank.compute_s, rank.transfer_s, rank.exposed_s) == pytest.approx((6, 12, 9)) and result.hidden == pytest.approx(0.25)
    assert rank.waits_s["WG"] == pytest.approx(3 + 2) and rank.waits_s["WR"] == pytest.approx(4)
    # launched at, on the wire from, to
    expected = {"G0": (0, 0, 3), "G1": (0, 3, 6), "R1": (9, 9, 12), "R0": (11, 12, 15)}
    assert {t.action: t[1:4] for t in result.records[0].transfers} == {action: pytest.approx(t) for action, t in expected.items()}


def test_gradients_of_half_the_size_are_reduced_in_half_the_time_and_gathered_in_the_same():
    """As above, with reductions of 1.5 s: R1 [4,5.5] R0 [6,7.5]; G0 [7.5,10.5] G1 [10.5,13.5]; F1 waits for
    that, R0 ends at 20."""
    costs = Costs.uniform(1, 2, 1.0, trainable_bytes=6.0)
    result = simulate(program("aiao", 1, 2, 1, overlap=ALL), costs, network(1.0), D=2, reduced=0.5)
    assert result.steps_s == pytest.approx([7.5, 12.5]) and result.ranks[0].transfer_s == pytest.approx(6 + 3)


@pytest.mark.parametrize("overlap,P,v,M", [(ALL, 2, 2, 3), (ALL, 4, 4, 8), (Overlap(), 2, 2, 3), (Overlap(gather=True), 3, 2, 4)])
def test_the_step_that_is_reported_repeats(monkeypatch, overlap, P, v, M):
    whole = program("aiao", P, v, M, overlap=overlap)
    arguments = (whole, Costs.uniform(P, v, 1.0, boundary_bytes=2.0, trainable_bytes=9.0), network(3.0, 0.01), 2)
    found = simulate(*arguments)
    monkeypatch.setattr(import_module("ds_fold.plan.simulate"), "_alike", lambda *_: False)
    longer = simulate(*arguments)
    assert len(longer.steps_s) == 20 and longer.step_s == pytest.approx(sum(longer.steps_s[10:]) / 10)
    last = len(found.steps_s) - 1
    assert longer.steps_s[:last + 1] == found.steps_s and longer.steps_s[last:] == pytest.approx([found.step_s] * (20 - last))
    assert found.hidden == pytest.approx(longer.hidden) and found.ranks[0].waits_s == pytest.approx(longer.ranks[0].waits_s)
    assert (last == 0) != overlap.gather  # gathers that are deferred are not there in the first step


def test_steps_that_repeat_in_pairs_are_found():
    """Unequal chunks, gradients of half the size: what one step leaves on the network for the next is not what that one leaves."""
    whole = program("aiao", 4, 4, 8, overlap=Overlap(True, True, early=frozenset({1, 2, 3})))
    profile = Profile.uniform(32, 0.02, parameter_bytes=7698432.0, activation_bytes=32768.0)
    cluster = Cluster(hosts=8, collective="pairwise", inter_host=Link(gbit_per_s=0.1195, latency_s=3e-4))
    cuts = [0, 1, 2, 3, 5, 7, 9, 12, 14, 16, 18, 20, 22, 25, 28, 30, 32]
    result = simulate(whole, profile.costs(cuts, 4), cluster, D=2, by_layer=True, reduced=0.5)
    assert len(result.steps_s) < 20 and result.step_s == pytest.approx(sum(result.steps_s[-2:]) / 2)


@pytest.mark.parametrize("zero_stage,stock,exchanges", [(0, True, 2), (1, True, 3), (1, False, 2), (2, False, 2)])
def test_without_overlap_all_communication_is_exposed(zero_stage, stock, exchanges):
    """A reduce-scatter or gather moves (D-1)/D of the bytes, an all-reduce twice that."""
    costs = Costs.uniform(2, 2, 1.0, trainable_bytes=8.0)
    result = simulate(program("aiao", 2, 2, 4), costs, network(1.0), D=4, zero_stage=zero_stage, stock_optimizer=stock)
    alone = simulate(program("aiao", 2, 2, 4), costs, network(1.0), D=4, zero_stage=zero_stage, data_parallel=False)
    communication = exchanges * 3 / 4 * 16
    assert alone.step_s == pytest.approx(3 * 8 + 3)
    # the last rank is done with its backward first, and reduces while the other one computes
    assert result.step_s == pytest.approx(alone.step_s + communication)
    assert result.ranks[0].exposed_s == pytest.approx(communication) and result.ranks[0].transfer_s == pytest.approx(communication)


def test_layers_leave_within_the_last_backward():
    """One rank, one segment of two layers: F [0,2] B [2,6]; by layer, the second layer's 3 s leave at 4, the first one's follow."""
    whole, cluster = program("aiao", 1, 1, 1, overlap=Overlap(reduce=True)), network(1.0)
    costs = Profile.uniform(2, 1.0, parameter_bytes=6.0).costs([0, 2], 1)
    assert simulate(whole, costs, cluster, D=2).step_s == pytest.approx(6 + 6 + 6)  # the gather is as long
    result = simulate(whole, costs, cluster, D=2, by_layer=True)
    assert result.step_s == pytest.approx(10 + 6) and result.ranks[0].exposed_s == pytest.approx(12 - 2)
    assert [(t.action, t.start, t.end) for t in result.records[0].transfers] == [("R0", 4, 7), ("R0", 7, 10), ("G0", 10, 16)]
    # gathered 10-13 and 13-16; with the first layer's forward 13-14, the second's can begin at 16
    ahead = program("aiao", 1, 1, 1, overlap=Overlap(reduce=True, gather=True))
    assert simulate(ahead, costs, cluster, D=2, by_layer=True).step_s == pytest.approx(10 + 6 - 1)
    with pytest.raises(PlanError, match="right after its last backward"):
        simulate(program("aiao", 1, 2, 1), Costs.uniform(1, 2, 1.0), cluster, D=2, by_layer=True)


def test_what_fits_behind_compute_is_hidden():
    """Only segment 0's reduction and gather have nothing of their own rank to hide behind."""
    result = simulate(program("aiao", 1, 2, 4, overlap=ALL), Costs.uniform(1, 2, 1.0, trainable_bytes=6.0), network(1.0), D=2)
    assert result.step_s == pytest.approx(24 + 3 + 3) and result.ranks[0].exposed_s == pytest.approx(6)
    fast = simulate(program("aiao", 1, 2, 4, overlap=ALL), Costs.uniform(1, 2, 1.0, trainable_bytes=6.0), network(1e15), D=2)
    assert fast.step_s == pytest.approx(24)


def test_tied_weights_are_summed_by_the_first_and_the_last_rank():
    """1F1B of one micro-batch on three ranks: the last is through at 5, the first at 9; then 6 bytes go both ways at once."""
    costs = Costs.uniform(3, 1, 1.0, tied_bytes=6.0)
    result = simulate(program("1f1b", 3, 1, 1), costs, network(2.0))
    assert result.step_s == pytest.approx(9 + 3)
    assert [rank.waits_s["RT"] for rank in result.ranks] == pytest.approx([3, 0, 12 - 5])
    assert simulate(program("1f1b", 1, 1, 1), Costs.uniform(1, 1, 1.0, tied_bytes=6.0), network(2.0)).step_s == 3


def test_the_setting_of_the_benchmarks():
    """docs/benchmarks.md: what the shapes of its schedules and the rate of its cards imply."""
    cluster = network(0.956 * 100e6 / 8, 3e-4)

    def run(schedule, v, **options):
        whole = program(schedule, 4, v, 8, overlap=ALL if v > 1 else Overlap())
        return simulate(whole, Costs.uniform(4, v, 0.04 / v, boundary_bytes=32768, trainable_bytes=12.5e6 / v), cluster, D=2,
                        zero_stage=int(v > 1), **options).step_s

    one, looped, folded = (("1f1b", 1), ("interleaved_1f1b", 4), ("aiao", 4))
    all_reduce = 12.5e6 / cluster.inter_host.rate
    assert run(*one) == pytest.approx(run(*one, data_parallel=False) + all_reduce, abs=1e-3)
    # an overlapped step lies between the free one and one that hides nothing, and folding hides more than interleaving
    for shape in (looped, folded):
        assert run(*shape, data_parallel=False) < run(*shape) < run(*shape, data_parallel=False) + all_reduce
    assert run(*folded) < 0.9 * run(*looped) < 0.9 * run(*one)
    # segment 0 of rank 0 has only the others' bubble to hide behind: a quarter of the bytes stays exposed
    assert run(*folded) > run(*folded, data_parallel=False) + all_reduce / 4


def test_optimizer_and_overhead_take_their_time():
    costs = Costs.uniform(2, 1, 1.0, trainable_bytes=8.0, step_s_per_byte=0.5, overhead_s=0.125)
    result = simulate(program("1f1b", 2, 1, 1), costs, FREE, D=2)
    # on the way from rank 0's forward to its backward: 4 computes, 2 messages sent and 2 received; then a step on half of 8 bytes
    assert result.step_s == pytest.approx(6 + 8 * 0.125 + 2)
    assert result.ranks[0].compute_s == pytest.approx(3)
    assert simulate(program("1f1b", 2, 1, 1), costs, FREE, D=2, zero_stage=0).step_s == pytest.approx(6 + 8 * 0.125 + 4)


def test_a_slow_chunk_sets_the_pace():
    costs = Costs.uniform(4, 1, 1.0)
    slow = costs._replace(forward_s=[1.0, 1.0, 2.0, 1.0], backward_s=[2.0, 2.0, 4.0, 2.0])
    # rank 2: its first input comes at 2, its first gradient 3 after its first forward, of which the second one fills 2; at the end
    # two backwards of 2 follow
    assert simulate(program("1f1b", 4, 1, 32), slow, FREE).step_s == pytest.approx(2 + 32 * 6 + 1 + 4)


@pytest.mark.parametrize("schedule,P,v,M", SHAPES)
def test_peak_slots_are_those_of_the_proof(schedule, P, v, M):
    whole = program(schedule, P, v, M)
    result = simulate(whole, Costs.uniform(P, v, 1.0), FREE)
    assert [rank.peak_slots for rank in result.ranks] == [live / v for live in verify(whole).peak_live]


@pytest.mark.parametrize("zero_stage,static", [(0, 2 * 100 + 2 * 100 + 2 * 2 * 100), (1, 2 * 100 + 2 * 100 + 2 * 100),
                                               (2, 2 * 100 + 2 * 100)])
def test_memory_of_one_rank(zero_stage, static):
    """Two segments of 100 bytes and activations of 10: parameters, gradients (ZeRO-2: of one segment at a time, by then half of
    the activations are gone), Adam's two states (halved with ZeRO)."""
    costs = Costs.uniform(1, 2, 1.0, boundary_bytes=10.0, trainable_bytes=100.0)
    result = simulate(program("aiao_all_forward", 1, 2, 3, overlap=Overlap(True, True, 0)), costs, FREE, D=2,
                      zero_stage=zero_stage)
    held = [bytes for _, bytes in result.memory(0)]
    first_backward = 100 if zero_stage == 2 else 0
    assert held[0] == static and max(held) == result.ranks[0].peak_bytes == static + 60 + first_backward
    assert held[-1] == static


def test_messages_are_held_until_they_are_used():
    costs = Costs.uniform(2, 1, 1.0, boundary_bytes=10.0)._replace(activation_bytes=[0.0, 0.0])
    whole = program("1f1b", 2, 1, 1)
    times = list(simulate(whole, costs, network(10.0)).memory(1))
    # posted at 0; used at 2 (F 2-3, B 3-5); the input's gradient is made by the backward and has left at 6
    assert times[:6] == [(0.0, 0.0), (0.0, 10.0), (2.0, 0.0), (3.0, 10.0), (5.0, 10.0), (6.0, 0.0)]
    assert {held for _, held in times[6:]} == {0.0}  # there are no parameters to reduce and to step


def test_the_timeline_tells_all():
    whole = program("aiao", 2, 2, 3, overlap=ALL)
    result = simulate(whole, Costs.uniform(2, 2, 1.0, boundary_bytes=1.0, trainable_bytes=8.0), network(4.0), D=2)
    timeline = result.timeline("t")
    assert timeline[:5] == ("t", 2, 2, 2, 3) and timeline.steps == [0.0, result.step_s]
    assert all(0 <= e.start < e.end <= result.step_s + 1e-9 for e in timeline.events)
    by_rank = [[e[1:] for e in timeline.events if e.rank == rank] for rank in range(4)]
    assert by_rank[0] == by_rank[1] and by_rank[2] == by_rank[3]  # replicas
    for events in by_rank:
        own = sorted((start, end) for track, _, start, end, _ in events if track in (COMPUTE, WAITING))
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(own, own[1:]))
        assert {action for track, action, *_ in events if track == DATA_PARALLEL} == {"R0", "R1", "G0", "G1"}
    spans = {(e.rank, e.track, e.action): (e.start, e.end) for e in timeline.events}
    messages = {(rank, action) for rank, track, action in spans if track == PIPELINE}
    assert messages == {(2 * r + d, str(a)) for r in range(2) for d in range(2) for a in whole.ranks[r] if a.op in
                        ("SA", "SG", "RA", "RG")}
    assert {e.bytes for e in timeline.events if e.track == PIPELINE} == {1}
    sent, received = spans[0, PIPELINE, "SA0.0"], spans[2, PIPELINE, "RA0.0"]
    assert sent[0] == spans[0, COMPUTE, "F0.0"][1] and sent[1] == received[1] == spans[2, COMPUTE, "F0.0"][0]


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(PlanError, match="2 pipeline ranks x 2 segments, but the costs are those of 4 ranks and 4 chunks"):
        simulate(program(), Costs.uniform(4, 1, 1.0), FREE)
    with pytest.raises(PlanError, match="need 128 ranks"):
        simulate(program(), Costs.uniform(2, 2, 1.0), FREE, D=64)
    with pytest.raises(PlanError, match="zero_stage=3"):
        simulate(program(), Costs.uniform(2, 2, 1.0), FREE, zero_stage=3)
    stuck = Program.parse("program pipeline_ranks=2 segments=1 micro_batches=1 forward_only\nrank 0: L0.0 F0.0 SA0.0 WSA0.0\n"
                          "rank 1: L0.0 F0.0\n")
    with pytest.raises(PlanError, match="deadlocks: rank 0 at WSA0.0"):
        simulate(stuck, Costs.uniform(2, 1, 1.0), FREE)


def test_a_million_actions_take_seconds():
    whole = program("aiao", 8, 8, 800, overlap=ALL)
    costs = Costs.uniform(8, 8, 1.0, boundary_bytes=32768.0, trainable_bytes=1e6)
    start = time.process_time()
    result = simulate(whole, costs, network(1e6, 1e-4), D=2)
    seconds = time.process_time() - start
    actions = whole.num_actions * len(result.steps_s)
    assert actions > 1_000_000 and seconds < 10, f"{actions} actions took {seconds:.1f} s"

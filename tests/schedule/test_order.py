import itertools

import pytest
from beside import beside

from ds_fold.schedule import PRESETS, ScheduleError, compute_order, lower, makespan, split_groups, verify
from ds_fold.schedule.actions import B, F


def staircase(schedule, P, v, M, **options):
    """One line per rank: forwards as 'k.m', backwards as '[k.m]'."""
    return [" ".join(f"{a.segment}.{a.micro_batch}" if a.op == F else f"[{a.segment}.{a.micro_batch}]" for a in order)
            for order in compute_order(schedule, P, v, M, **options)]


def test_gpipe():
    assert staircase("gpipe", 2, 1, 3) == [
        "0.0 0.1 0.2 [0.0] [0.1] [0.2]",
        "0.0 0.1 0.2 [0.0] [0.1] [0.2]",
    ]


def test_1f1b():
    assert staircase("1f1b", 3, 1, 4) == [
        "0.0 0.1 0.2 [0.0] 0.3 [0.1] [0.2] [0.3]",
        "0.0 0.1 [0.0] 0.2 [0.1] 0.3 [0.2] [0.3]",
        "0.0 [0.0] 0.1 [0.1] 0.2 [0.2] 0.3 [0.3]",
    ]


def test_interleaved_1f1b():
    assert staircase("interleaved_1f1b", 2, 2, 4) == [
        "0.0 0.1 1.0 1.1 0.2 [1.0] 0.3 [1.1] 1.2 [0.0] 1.3 [0.1] [1.2] [1.3] [0.2] [0.3]",
        "0.0 0.1 1.0 [1.0] 1.1 [1.1] 0.2 [0.0] 0.3 [0.1] 1.2 [1.2] 1.3 [1.3] [0.2] [0.3]",
    ]


def test_aiao():
    assert staircase("aiao", 2, 2, 3) == [
        "0.0 0.1 0.2 1.0 1.1 1.2 [1.0] [1.1] [1.2] [0.0] [0.1] [0.2]",
        "0.0 0.1 0.2 1.0 [1.0] 1.1 [1.1] 1.2 [1.2] [0.0] [0.1] [0.2]",
    ]


def test_aiao_all_forward_is_the_figure_of_the_paper():
    line = "0.0 0.1 0.2 1.0 1.1 1.2 [1.0] [1.1] [1.2] [0.0] [0.1] [0.2]"
    assert staircase("aiao_all_forward", 2, 2, 3) == [line, line]


def test_immediate_head_backward_follows_its_forward():
    assert staircase("aiao_all_forward", 2, 2, 3, head_backward="immediate")[1] == \
        "0.0 0.1 0.2 1.0 [1.0] 1.1 [1.1] 1.2 [1.2] [0.0] [0.1] [0.2]"
    assert staircase("gpipe", 2, 1, 2, head_backward="immediate") == ["0.0 0.1 [0.0] [0.1]", "0.0 [0.0] 0.1 [0.1]"]


@pytest.mark.parametrize("M,P,group,sizes", [(8, 4, 4, [4, 4]), (9, 4, 4, [5, 4]), (7, 4, 4, [7]), (11, 2, 3, [4, 4, 3]),
                                             (3, 4, 4, [3]), (12, 4, 12, [12])])
def test_no_group_is_smaller_than_asked(M, P, group, sizes):
    assert split_groups(M, P, group) == sizes


def cases():
    for P, v, M in itertools.product(range(1, 9), range(1, 7), range(1, 25)):
        for schedule, preset in PRESETS.items():
            if v == 1 or preset.looped:
                yield schedule, P, v, M, None
                if preset.looped and M > P + 1:
                    yield schedule, P, v, M, (P + M) // 2


@beside
def proved_combinations(folder):
    """How many of ``cases`` were proved and reached the closed form."""
    checked = 0
    for schedule, P, v, M, group in cases():
        orders = compute_order(schedule, P, v, M, group)
        for order in orders:
            backwards = [[] for _ in range(v)]
            for op, k, m in order:
                if op == B:
                    backwards[k].append(m)
            assert backwards == [list(range(M))] * v, (schedule, P, v, M, group)
        program = lower(orders, v, M)
        report = verify(program)
        assert max(report.peak_posted) <= 4, (schedule, P, v, M, group)
        if M >= P:
            assert makespan(program, 1 / v, 2 / v) == pytest.approx(3 * M + 3 * (P - 1) / v), (schedule, P, v, M, group)
        checked += 1
    return checked


def test_every_accepted_combination_is_proved_and_reaches_the_closed_form(proved_combinations):
    """P 1-8, v 1-6, M 1-24: complete, paired, deadlock-free, FIFO over micro-batches, makespan 3M + 3(P-1)/v."""
    assert proved_combinations == 6696


def test_immediate_head_backward_is_proved_or_refused_with_the_remedy():
    accepted = refused = 0
    for schedule, P, v, M, group in cases():
        if P > 4 or M > 12:
            continue
        try:
            orders = compute_order(schedule, P, v, M, group, head_backward="immediate")
        except ScheduleError as error:
            assert "head_backward='scheduled'" in str(error)
            refused += 1
            continue
        order = orders[-1]
        for i, action in enumerate(order):
            if action.op == F and action.segment == v - 1:
                assert order[i + 1] == (B, v - 1, action.micro_batch)
        verify(lower(orders, v, M))
        accepted += 1
    assert accepted > 500 and refused > 0


@pytest.mark.parametrize("P,r", [(2, 0), (4, 1), (4, 3)])
def test_memory_of_1f1b_does_not_grow_with_the_micro_batches(P, r):
    for M in (8, 32):
        assert verify(lower(compute_order("1f1b", P, 1, M), 1, M)).peak_live[r] == P - r


def test_bounded_aiao_holds_less_than_all_forward():
    for P, v, M in [(2, 2, 8), (4, 4, 8), (4, 2, 16)]:
        bounded = verify(lower(compute_order("aiao", P, v, M), v, M)).peak_live
        everything = verify(lower(compute_order("aiao_all_forward", P, v, M), v, M)).peak_live
        assert everything == [v * M] * P
        assert bounded == [min(v * M, 2 * (P - r - 1) + (v - 1) * M + 1) for r in range(P)]


@pytest.mark.parametrize("options,message", [
    (dict(schedule="1f1b", P=4, v=4, M=8), r"segments=4; use segments=1 or .*aiao"),
    (dict(schedule="aia", P=4, v=4, M=8), r"'aia' is not a schedule; use one of gpipe"),
    (dict(schedule="aiao", P=4, v=2, M=8, group=3), r"micro_batch_group=3 .*ranks \(4\).*micro-batches \(8\).*4\.\.8"),
    (dict(schedule="aiao", P=4, v=2, M=8, group=9), r"micro_batch_group=9"),
    (dict(schedule="gpipe", P=4, v=1, M=8, group=4), r"no meaning for schedule 'gpipe'"),
    (dict(schedule="aiao", P=0, v=2, M=8), r"num_stages=0"),
    (dict(schedule="aiao", P=2, v=2, M=0), r"micro-batches=0"),
])
def test_what_cannot_run_is_refused_with_values_and_remedy(options, message):
    with pytest.raises(ScheduleError, match=message):
        compute_order(**options)

import re

import pytest

from ds_fold.schedule import bubble_fraction, compute_order, lower
from ds_fold.timeline import of_program, staircase
from ds_fold.trace.report import measure


def program(schedule, P, v, M):
    return lower(compute_order(schedule, P, v, M), v, M)


def test_staircase_names_segments_and_brackets_backwards():
    assert staircase(program("aiao_all_forward", 2, 2, 2)) == [
        "rank 0  a0 a1 b0 b1 .  .  .  [ b0 ][ b1 ][ a0 ][ a1 ]",
        "rank 1  .  a0 a1 b0 b1 [ b0 ][ b1 ][ a0 ][ a1 ].  .  ",
    ]


@pytest.mark.parametrize("schedule,P,v,M", [("1f1b", 3, 1, 12), ("gpipe", 2, 1, 3), ("aiao", 4, 3, 5)])
def test_colour_changes_no_character(schedule, P, v, M):
    plain, painted = staircase(program(schedule, P, v, M)), staircase(program(schedule, P, v, M), colour=True)
    assert [re.sub("\033\\[[0-9;]*m", "", line) for line in painted] == plain != painted
    assert len(set(map(len, plain))) == 1 and len(plain) == P


@pytest.mark.parametrize("schedule,P,v,M", [("1f1b", 4, 1, 8), ("interleaved_1f1b", 2, 2, 4), ("aiao", 4, 3, 8)])
def test_a_programs_timeline_has_its_bubble(schedule, P, v, M):
    one = program(schedule, P, v, M)
    assert measure(of_program("", one))[0].bubble_fraction == pytest.approx(bubble_fraction(one))
    assert len(of_program("", one).events) == 2 * P * v * M

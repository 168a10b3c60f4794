import subprocess
import sys

import pytest

from ds_fold.schedule import OPS, Action, Program, compute_order, forward_order, lower
from ds_fold.schedule.actions import BATCH_OPS, SEGMENT_OPS


@pytest.mark.parametrize("op", OPS)
def test_every_action_prints_and_parses_back(op):
    action = Action(op) if op in BATCH_OPS else Action(op, 3) if op in SEGMENT_OPS else Action(op, 3, 17)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("token", ["", "F", "F1", "F1.", "F-1.2", "X1.2", "STEP1.2", "f1.2", "F1.2 ", "import os", "R", "R1.2",
                                   "WG", "STEP1"])
def test_what_is_not_an_action_is_refused(token):
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(token)


@pytest.mark.parametrize("P,v,M,schedule", [(1, 3, 2, "aiao"), (2, 2, 4, "aiao_all_forward"), (3, 4, 7, "interleaved_1f1b"),
                                            (4, 1, 5, "1f1b")])
def test_program_text_is_read_back_as_the_same_program(P, v, M, schedule):
    program = lower(compute_order(schedule, P, v, M), v, M)
    assert Program.parse(program.format()) == program
    evaluation = lower(forward_order(P, v, M), v, M, forward_only=True)
    assert Program.parse(evaluation.format()) == evaluation


def test_one_line_per_rank():
    program = lower(compute_order("gpipe", 2, 1, 1), 1, 1)
    assert program.format() == ("program pipeline_ranks=2 segments=1 micro_batches=1\n"
                                "rank 0: L0.0 RG0.0 F0.0 SA0.0 WRG0.0 WSA0.0 B0.0 RT R0 WR0 STEP G0 WG0\n"
                                "rank 1: L0.0 RA0.0 WRA0.0 F0.0 B0.0 SG0.0 WSG0.0 RT R0 WR0 STEP G0 WG0\n")
    assert program.format(0) == program.format().splitlines()[1]


@pytest.mark.parametrize("text,message", [
    ("", "line 1"),
    ("rank 0: F0.0", "line 1"),
    ("program pipeline_ranks=1 segments=1 micro_batches=1\nrank 1: F0.0", "line 2.*rank 0"),
    ("program pipeline_ranks=1 segments=1 micro_batches=1\nrank 0: F0.0 Q0.0", "line 2.*'Q0.0'"),
    ("program pipeline_ranks=2 segments=1 micro_batches=1\nrank 0: F0.0", "2 lists"),
])
def test_bad_text_names_the_line(text, message):
    with pytest.raises(ValueError, match=message):
        Program.parse(text)


def test_the_schedule_package_does_not_import_torch():
    code = "import sys, ds_fold.schedule, ds_fold.partition; sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

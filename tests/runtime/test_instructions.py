from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

from ds_fold.runtime.engine import PipelineEngine
from ds_fold.runtime.instructions import INSTRUCTIONS, ProgramSchedule
from ds_fold.schedule import OPS, compute_order, lower


def test_every_action_has_an_instruction_and_the_engine_a_method():
    assert set(INSTRUCTIONS) == set(OPS) == set(PipelineEngine.ACTION_METHODS)
    assert set(PipelineEngine._INSTRUCTION_MAP) == set(INSTRUCTIONS.values())
    assert all(issubclass(kind, PipeInstruction) for kind in INSTRUCTIONS.values())


def test_a_program_is_a_deepspeed_schedule():
    program = lower(compute_order("aiao", 2, 2, 3), 2, 3)
    schedule = ProgramSchedule(program, 1)
    assert isinstance(schedule, PipeSchedule) and schedule.stage == 1 and schedule.num_micro_batches == 3
    commands = [command for step in schedule for command in step]
    assert [type(c) for c in commands] == [INSTRUCTIONS[a.op] for a in program.ranks[1]]
    forward = next(c for c in commands if type(c) is INSTRUCTIONS["F"] and c.kwargs["segment"] == 1)
    assert forward.kwargs == {"segment": 1, "micro_batch": 0, "buffer_id": 3}
    assert list(schedule) == [[c] for c in commands], "a schedule can be iterated again"

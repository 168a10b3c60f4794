"""Programs as DeepSpeed schedules: each action becomes a ``PipeInstruction``, each rank's program a ``PipeSchedule``."""

from typing import Dict, List, Type

from ..compat import stock_schedule as stock
from ..schedule import actions as op
from ..schedule.actions import Program


class WaitSendActivation(stock.BufferOpInstruction):
    """Wait until the output of a chunk has left. Roughly: ``act_out.wait_send()``"""


class WaitRecvActivation(stock.BufferOpInstruction):
    """Wait until the input of a chunk has arrived. Roughly: ``slot.inputs = act_in.wait_receive()``"""


class WaitSendGrad(stock.BufferOpInstruction):
    """Wait until the gradient of a chunk's input has left. Roughly: ``grad_out.wait_send()``"""


class WaitRecvGrad(stock.BufferOpInstruction):
    """Wait until the gradient of a chunk's output has arrived. Roughly: ``slot.output_grads = grad_in.wait_receive()``"""


class WaitReduceGrads(stock.PipeInstruction):
    """Wait for the data-parallel reduction of a segment that ``ReduceGrads`` launched."""


class StepSegment(stock.PipeInstruction):
    """Step a segment's parameters ahead of ``OptimizerStep``, which validates it."""


class GatherParams(stock.PipeInstruction):
    """Launch the gather of a segment's stepped parameters."""


class WaitGatherParams(stock.PipeInstruction):
    """Wait for the gather of a segment's parameters. Roughly: before their first use in the next batch."""


class ReleaseParams(stock.PipeInstruction):
    """Free a segment's parameters but for this replica's shard."""


#: op of an action -> its instruction. DeepSpeed's own classes where they exist, so that patches of its map keep working.
INSTRUCTIONS: Dict[str, Type[stock.PipeInstruction]] = {
    op.LOAD: stock.LoadMicroBatch,
    op.F: stock.ForwardPass,
    op.B: stock.BackwardPass,
    op.SEND_ACT: stock.SendActivation,
    op.WAIT_SEND_ACT: WaitSendActivation,
    op.RECV_ACT: stock.RecvActivation,
    op.WAIT_RECV_ACT: WaitRecvActivation,
    op.SEND_GRAD: stock.SendGrad,
    op.WAIT_SEND_GRAD: WaitSendGrad,
    op.RECV_GRAD: stock.RecvGrad,
    op.WAIT_RECV_GRAD: WaitRecvGrad,
    op.REDUCE_TIED: stock.ReduceTiedGrads,
    op.REDUCE: stock.ReduceGrads,
    op.WAIT_REDUCE: WaitReduceGrads,
    op.STEP_SEGMENT: StepSegment,
    op.STEP: stock.OptimizerStep,
    op.GATHER: GatherParams,
    op.WAIT_GATHER: WaitGatherParams,
    op.RELEASE: ReleaseParams,
}


class ProgramSchedule(stock.PipeSchedule):
    """One pipeline rank's program as a DeepSpeed ``PipeSchedule``; every action is a step of one instruction.

    Instructions on a micro-batch carry ``segment``, ``micro_batch`` and ``buffer_id = segment * M + micro_batch``, those on a
    segment ``segment``.
    """

    def __init__(self, program: Program, stage_id: int):
        super().__init__(micro_batches=program.M, stages=program.P, stage_id=stage_id)
        self.program = program
        self.instructions: List[stock.PipeInstruction] = [_instruction(a, program.M) for a in program.ranks[stage_id]]

    def steps(self):
        for instruction in self.instructions:
            yield [instruction]

    def num_pipe_buffers(self) -> int:
        return self.program.v * self.program.M


def _instruction(action: op.Action, M: int) -> stock.PipeInstruction:
    kind = INSTRUCTIONS[action.op]
    if action.op in op.BATCH_OPS:
        return kind()
    if action.op in op.SEGMENT_OPS:
        return kind(segment=action.segment)
    return kind(action.segment * M + action.micro_batch, segment=action.segment, micro_batch=action.micro_batch)

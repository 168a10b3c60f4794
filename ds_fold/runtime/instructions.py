"""Programs as DeepSpeed schedules: each action becomes a ``PipeInstruction``, each rank's program a ``PipeSchedule``."""

from itertools import chain
from typing import Dict, List, Type

from ..compat import stock_schedule as stock
from ..schedule import Orders, ScheduleError
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


#: instruction of a message -> the other end: the pipeline rank before (-1) or behind (1), around the ring
OTHER_END: Dict[Type[stock.PipeInstruction], int] = {
    **{INSTRUCTIONS[name]: -1 for name in (op.RECV_ACT, op.WAIT_RECV_ACT, op.SEND_GRAD, op.WAIT_SEND_GRAD)},
    **{INSTRUCTIONS[name]: 1 for name in (op.SEND_ACT, op.WAIT_SEND_ACT, op.RECV_GRAD, op.WAIT_RECV_GRAD)},
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


def orders_of(schedule: Type[stock.PipeSchedule], P: int, M: int) -> Orders:
    """The compute order of every pipeline rank under a script's own training schedule: what it forwards and backwards when. The
    rest is added anew.

    Raises:
        ScheduleError: it has instructions that DeepSpeed's training schedule has not, or works on a buffer that holds nothing.
    """
    orders = []
    for r in range(P):
        held, order, forwards = {}, [], 0  # buffer -> micro-batch
        for instruction in chain.from_iterable(schedule(micro_batches=M, stages=P, stage_id=r).steps()):
            if isinstance(instruction, stock.ForwardPass):
                held[instruction.buffer_id] = forwards
                order.append(op.Action(op.F, 0, forwards))
                forwards += 1
            elif isinstance(instruction, stock.BackwardPass):
                if instruction.buffer_id not in held:
                    raise ScheduleError(f"{schedule.__name__}, rank {r}: {instruction!r}, but no forward has filled this buffer")
                order.append(op.Action(op.B, 0, held.pop(instruction.buffer_id)))
            elif type(instruction) not in INSTRUCTIONS.values():
                raise ScheduleError(f"{schedule.__name__}, rank {r}: ds_fold's engine does not know {instruction!r}; it runs the "
                                    f"forwards and backwards of a script's schedule, and adds the rest itself")
        orders.append(order)
    return orders


def _instruction(action: op.Action, M: int) -> stock.PipeInstruction:
    kind = INSTRUCTIONS[action.op]
    if action.op in op.BATCH_OPS:
        return kind()
    if action.op in op.SEGMENT_OPS:
        return kind(segment=action.segment)
    return kind(action.segment * M + action.micro_batch, segment=action.segment, micro_batch=action.micro_batch)

"""What a simulation found: one step of the steady state, as numbers per rank and as a timeline."""

from functools import cached_property
from statistics import fmean
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from ..events import COMPUTE, DATA_PARALLEL, PIPELINE, WAITING, Event, Timeline
from ..schedule.actions import (
    RECV_GRAD,
    REDUCE_TIED,
    SEND_ACT,
    SEND_GRAD,
    STEP,
    STEP_SEGMENT,
    WAIT_GATHER,
    WAIT_RECV_ACT,
    WAIT_RECV_GRAD,
    WAIT_REDUCE,
    WAIT_SEND_ACT,
    WAIT_SEND_GRAD,
    B,
    F,
    Program,
)
from .costs import Costs
from .memory import States, held, memory_efficiency

#: what a rank may wait in
WAITS = (WAIT_SEND_ACT, WAIT_RECV_ACT, WAIT_SEND_GRAD, WAIT_RECV_GRAD, REDUCE_TIED, WAIT_REDUCE, STEP, WAIT_GATHER)


class Transfer(NamedTuple):
    """A reduction or gather that was on the wire from start to end, in the step's seconds, cut to the step."""
    action: str
    launch: float
    start: float
    end: float
    bytes: int


class Record(NamedTuple):
    """What one pipeline rank did in the step, in seconds since its begin.

    Attributes:
        begun, ended: of each action of its program.
        agreed: all ranks had come to the norm in :data:`STEP`.
        messages: op of a send or receive -> (both ends were ready, over) of each, in order.
        transfers: in order of time, one at a time.
    """
    begun: List[float]
    ended: List[float]
    agreed: float
    messages: Dict[str, List[Tuple[float, float]]]
    transfers: List[Transfer]


class RankSummary(NamedTuple):
    """One pipeline rank in one step.

    Attributes:
        compute_s: forwards and backwards.
        transfer_s: data-parallel transfers were on the wire.
        exposed_s: of that, the time in which the rank computed nothing.
        waits_s: op -> time in it; :data:`STEP` is the agreement on the gradients' norm.
        peak_slots: most live activations, in forwards of a micro-batch through all of the rank's chunks.
        peak_bytes: most memory held: parameters, gradients, optimizer state, activations and messages.
    """
    compute_s: float
    transfer_s: float
    exposed_s: float
    waits_s: Dict[str, float]
    peak_slots: float
    peak_bytes: float


class Result:
    """One step of the steady state.

    Attributes:
        program, costs, D, zero_stage, states: what was simulated.
        steps_s: time of every simulated step.
        step_s: mean of the last ``period`` of them, which repeat.
        records: per pipeline rank, of the last one.
    """

    def __init__(self, program: Program, costs: Costs, D: int, zero_stage: int, steps_s: List[float], records: List[Record],
                 states: Optional[States] = None, period: int = 1):
        self.program, self.costs, self.D, self.zero_stage = program, costs, D, zero_stage
        self.states = states or States.usual(costs.optimizer_bytes_per_byte, D, zero_stage, program.shard_params)
        self.steps_s, self.step_s, self.records = steps_s, fmean(steps_s[-period:]), records

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which an average rank runs no forward and no backward."""
        return 1 - sum(rank.compute_s for rank in self.ranks) / (len(self.ranks) * self.step_s)

    @property
    def hidden(self) -> float:
        """Share of the data-parallel communication's time behind which its rank computes; 1 where there is none."""
        total = sum(rank.transfer_s for rank in self.ranks)
        return 1 - sum(rank.exposed_s for rank in self.ranks) / total if total else 1.0

    @cached_property
    def ranks(self) -> List[RankSummary]:
        """Per pipeline rank."""
        return [self._summary(r) for r in range(self.program.P)]

    def _summary(self, r: int) -> RankSummary:
        record, overhead = self.records[r], self.costs.overhead_s
        waits = dict.fromkeys(WAITS, 0.0)
        compute: List[Tuple[float, float]] = []
        live = peak_live = 0
        for a, start, end in zip(self.program.ranks[r], record.begun, record.ended):
            if a.op == F:
                compute.append((start, end))
                live += 1
                peak_live = max(peak_live, live)
            elif a.op == B:
                compute.append((start, end))
                live -= 1
            elif a.op in (WAIT_RECV_ACT, WAIT_RECV_GRAD):
                waits[a.op] += end - start - overhead
            elif a.op in waits:
                waits[a.op] += (record.agreed if a.op == STEP else end) - start
        busy = sum(end - start - overhead for start, end in compute)
        on_wire = sum(t.end - t.start for t in record.transfers)
        behind = _overlap(compute, [(t.start, t.end) for t in record.transfers])
        peak = max(held for _, held in self.memory(r))
        return RankSummary(busy, on_wire, on_wire - behind, waits, peak_live / self.program.v, peak)

    def memory(self, r: int) -> Iterable[Tuple[float, float]]:
        """(time, bytes held from then on) of pipeline rank r, in order of time; see :func:`ds_fold.plan.memory.held`."""
        record = self.records[r]
        return held(self.costs, self.states, r, self.program.ranks[r], record.begun, record.ended, self.program.forward_only)

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return max(rank.peak_bytes for rank in self.ranks)

    def memory_efficiency(self, samples: float) -> Optional[float]:
        """ME in samples/s per GiB of the fullest rank, for ``samples`` a step."""
        return memory_efficiency(samples / self.step_s, self.peak_bytes)

    def timeline(self, title: str = "simulation") -> Timeline:
        """The step as events of all ranks; replicas do the same.

        Reductions and gathers last from their launch to their end. A gather that is waited for in the next step appears at this
        step's begin, as the one of the step before, and from its launch to this step's end.
        """
        P, D, boundary = self.program.P, self.D, self.costs.boundary_bytes
        events: List[Event] = []
        for r, record in enumerate(self.records):
            messages = {op: iter(spans) for op, spans in record.messages.items()}
            mine = [(DATA_PARALLEL, t.action, t.launch, t.end, t.bytes) for t in record.transfers]
            for a, start, end in zip(self.program.ranks[r], record.begun, record.ended):
                if a.op in messages:
                    ready, over = next(messages[a.op])
                    s = a.segment * P + r
                    size = int(boundary[s if a.op in (SEND_ACT, RECV_GRAD) else s - 1])
                    mine.append((PIPELINE, str(a), end if a.op in (SEND_ACT, SEND_GRAD) else ready, over, size))
                elif a.op in (F, B, STEP, STEP_SEGMENT):
                    mine.append((COMPUTE, str(a), start, end, 0))
                elif a.op in WAITS:
                    mine.append((WAITING, str(a), start, end, 0))
            events += [Event(r * D + d, *event) for d in range(D) for event in mine if event[3] > event[2]]
        return Timeline(title, P, D, self.program.v, self.program.M, events, [0.0, self.steps_s[-1]],
                        {"bubble fraction": self.bubble_fraction, "hidden": self.hidden})


def _overlap(first: List[Tuple[float, float]], second: List[Tuple[float, float]]) -> float:
    """Length of the intersection of two lists of disjoint intervals, each in order."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total

"""The actions that a pipeline rank executes, and the program that holds them: the one language all readers share.

An action prints as ``<op><segment>.<micro_batch>`` (``F1.3``: forward of micro-batch 3 through segment 1), one that concerns a
whole segment as ``<op><segment>`` (``R1``), one that concerns the whole batch as its bare op (``STEP``). A program prints one
line per pipeline rank, and :func:`Program.parse` reads back exactly what :func:`Program.format` wrote.
"""

import re
from functools import lru_cache
from typing import Dict, List, NamedTuple, Optional

# compute
F = "F"
B = "B"
# data
LOAD = "L"
# point to point: launch and wait are two actions, so that compute can stand between them
SEND_ACT = "SA"
WAIT_SEND_ACT = "WSA"
RECV_ACT = "RA"
WAIT_RECV_ACT = "WRA"
SEND_GRAD = "SG"
WAIT_SEND_GRAD = "WSG"
RECV_GRAD = "RG"
WAIT_RECV_GRAD = "WRG"
# data parallel and step
REDUCE_TIED = "RT"
REDUCE = "R"
WAIT_REDUCE = "WR"
STEP_SEGMENT = "S"
STEP = "STEP"
GATHER = "G"
WAIT_GATHER = "WG"
RELEASE = "XG"

#: op -> what it does. Every reader of a program (verify, instruction map, timeline) handles each of these; tests prove it.
OPS: Dict[str, str] = {
    LOAD: "pull micro-batch m from the data iterator (inputs on the first pipeline rank, labels on the last)",
    F: "forward of micro-batch m through segment k",
    B: "backward of micro-batch m through segment k",
    SEND_ACT: "launch the send of segment k's output (and labels, where they travel) to the next virtual stage",
    WAIT_SEND_ACT: "wait until that output has left",
    RECV_ACT: "post the receive of segment k's input from the previous virtual stage",
    WAIT_RECV_ACT: "wait until that input has arrived",
    SEND_GRAD: "launch the send of the gradient of segment k's input to the previous virtual stage",
    WAIT_SEND_GRAD: "wait until that gradient has left",
    RECV_GRAD: "post the receive of the gradient of segment k's output from the next virtual stage",
    WAIT_RECV_GRAD: "wait until that gradient has arrived",
    REDUCE_TIED: "sum the gradients of weights tied across pipeline ranks",
    REDUCE: "launch the data-parallel reduction of segment k's gradients, of all that has not left within its last backward",
    WAIT_REDUCE: "wait for that reduction",
    STEP_SEGMENT: "step segment k's parameters, to be validated by the optimizer step",
    STEP: "optimizer step: validates what was stepped, and steps the rest",
    GATHER: "launch the gather of segment k's parameters, where they are sharded, or of those that were stepped elsewhere",
    WAIT_GATHER: "wait for that gather: in this batch, or before the first forward of segment k in the next",
    RELEASE: "free segment k's parameters but for this replica's shard, until their next gather",
}

#: ops that carry neither a segment nor a micro-batch: they concern the batch as a whole
BATCH_OPS = frozenset((REDUCE_TIED, STEP))
#: ops that carry a segment and no micro-batch
SEGMENT_OPS = frozenset((REDUCE, WAIT_REDUCE, STEP_SEGMENT, GATHER, WAIT_GATHER, RELEASE))
#: ops that a program may leave out
OPTIONAL_OPS = frozenset((STEP_SEGMENT, RELEASE))

_TOKEN = re.compile(r"([A-Z]+)(?:(\d+)(?:\.(\d+))?)?")
_HEADER = re.compile(r"program pipeline_ranks=(\d+) segments=(\d+) micro_batches=(\d+)(?: (forward_only))?(?: (label_transport))?"
                     r"(?: (shard_params))?")
_RANK_LINE = re.compile(r"rank (\d+):(.*)")


class Action(NamedTuple):
    """One thing a rank does. ``micro_batch`` is -1 where the op concerns a segment, ``segment`` too where the whole batch."""
    op: str
    segment: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        if self.micro_batch < 0:
            return self.op if self.segment < 0 else f"{self.op}{self.segment}"
        return f"{self.op}{self.segment}.{self.micro_batch}"

    @classmethod
    def parse(cls, token: str) -> "Action":
        """The action that ``token`` names. Raises ValueError for anything that :meth:`__str__` would not write."""
        match = _TOKEN.fullmatch(token)
        if match is None or match[1] not in OPS:
            raise ValueError(f"{token!r} is not an action; expected <op><segment>.<micro_batch> with op one of "
                             f"{', '.join(OPS)}, such as F0.3 or {STEP}")
        form = "" if match[1] in BATCH_OPS else "<segment>" if match[1] in SEGMENT_OPS else "<segment>.<micro_batch>"
        if form.count("<") != sum(part is not None for part in match.groups()[1:]):
            raise ValueError(f"{token!r} is not an action; expected {match[1]}{form}")
        return cls(match[1], *(int(part) for part in match.groups()[1:] if part is not None))


@lru_cache(maxsize=None)
def action_table(op: str, segments: int, micro_batches: int) -> List[List[Action]]:
    """``table[k][m]`` is ``Action(op, k, m)``. Shared between ranks: large programs are lists of references."""
    return [[Action(op, k, m) for m in range(micro_batches)] for k in range(segments)]


class Program:
    """What every pipeline rank of one replica executes for one batch.

    Attributes:
        P: number of pipeline ranks.
        v: number of segments (model chunks per rank).
        M: number of micro-batches.
        ranks: ``ranks[r]`` is the list of :class:`Action` of pipeline rank r.
        forward_only: an evaluation program (no backward, no step).
        label_transport: labels travel with the activations, so that only the first pipeline rank loads.
        shard_params: parameters are whole only between their gathers and releases within the batch.
    """

    def __init__(self, P: int, v: int, M: int, ranks: List[List[Action]], forward_only: bool = False,
                 label_transport: bool = False, shard_params: bool = False):
        if len(ranks) != P:
            raise ValueError(f"a program for {P} pipeline ranks needs {P} lists of actions, got {len(ranks)}")
        self.P, self.v, self.M, self.ranks = P, v, M, ranks
        self.forward_only, self.label_transport, self.shard_params = forward_only, label_transport, shard_params

    def __eq__(self, other) -> bool:
        return isinstance(other, Program) and vars(self) == vars(other)

    __hash__ = None

    def __repr__(self) -> str:
        return f"Program(P={self.P}, v={self.v}, M={self.M}, actions={self.num_actions})"

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.ranks))

    def format(self, rank: Optional[int] = None) -> str:
        """Text form; one rank's line only if ``rank`` is given."""
        if rank is not None:
            return f"rank {rank}: " + " ".join(map(str, self.ranks[rank]))
        header = f"program pipeline_ranks={self.P} segments={self.v} micro_batches={self.M}"
        header += " forward_only" * self.forward_only + " label_transport" * self.label_transport
        header += " shard_params" * self.shard_params
        return "\n".join([header] + [self.format(r) for r in range(self.P)]) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Read :meth:`format`'s text. Raises ValueError naming the line that is not understood."""
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        header = _HEADER.fullmatch(lines[0][1]) if lines else None
        if header is None:
            raise ValueError("line 1: expected 'program pipeline_ranks=P segments=v micro_batches=M'")
        P, v, M = int(header[1]), int(header[2]), int(header[3])
        ranks = []
        for number, line in lines[1:]:
            match = _RANK_LINE.fullmatch(line)
            if match is None or int(match[1]) != len(ranks):
                raise ValueError(f"line {number}: expected 'rank {len(ranks)}: <actions>'")
            try:
                ranks.append([Action.parse(token) for token in match[2].split()])
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
        return cls(P, v, M, ranks, *(flag is not None for flag in header.groups()[3:]))

"""What ran when: the one form in which a simulation and a recorded run are reported, drawn and compared."""

from typing import Any, Dict, List, NamedTuple

#: the rows of one rank: its own work, its messages along the pipeline, its data-parallel transfers, and what it waits for
COMPUTE, PIPELINE, DATA_PARALLEL, WAITING = TRACKS = ("compute", "pipeline", "data parallel", "waiting")

#: keys of a timeline's ``about``: samples of a step over all replicas, and most bytes that any rank held
SAMPLES, PEAK = "samples a step", "peak bytes"


class Event(NamedTuple):
    """Something that took time.

    Attributes:
        rank: global rank.
        track: one of :data:`TRACKS`.
        action: the action's text, such as ``F0.3``, ``SA1.2`` (from launch to end of the transfer), ``R1``, ``WRA0.1`` (waiting).
        start, end: seconds since the begin of the timeline, the same clock on all ranks.
        bytes: moved, 0 for compute.
    """
    rank: int
    track: str
    action: str
    start: float
    end: float
    bytes: int = 0


class Timeline(NamedTuple):
    """Events of one or more steps.

    Attributes:
        title: what ran.
        P, D, v, M: pipeline ranks, replicas in it, segments, micro-batches. Rank ``pipeline_rank * D + replica``.
        events: in any order.
        steps: begin of each step and end of the last, in seconds; ``steps + 1`` numbers.
        about: anything else that is worth telling, for people.
    """
    title: str
    P: int
    D: int
    v: int
    M: int
    events: List[Event]
    steps: List[float]
    about: Dict[str, Any] = {}

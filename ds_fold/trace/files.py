"""Trace files: what one rank recorded, as JSON; all ranks' files together are a timeline.

A file holds the rank's program as text and, for each step, the times between its actions: action i ran from ``marks[i]`` to
``marks[i + 1]``. Times are seconds of the rank's own clock; plus ``clock_offset`` they are rank 0's.
"""

import glob
import json
import os
import tempfile
import warnings
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from ..events import COMPUTE, DATA_PARALLEL, PEAK, PIPELINE, SAMPLES, WAITING, Event, Timeline
from ..schedule import actions as op
from ..schedule.actions import Action

SCHEMA = 1

#: launch -> the wait that ends it
WAIT_OF = {
    op.SEND_ACT: op.WAIT_SEND_ACT,
    op.RECV_ACT: op.WAIT_RECV_ACT,
    op.SEND_GRAD: op.WAIT_SEND_GRAD,
    op.RECV_GRAD: op.WAIT_RECV_GRAD,
    op.REDUCE: op.WAIT_REDUCE,
    op.GATHER: op.WAIT_GATHER,
}
LAUNCH_OF = {wait: launch for launch, wait in WAIT_OF.items()}
#: what a rank does by itself, and where it waits for others
WORK, WAITS = frozenset((op.LOAD, op.F, op.B, op.STEP, op.STEP_SEGMENT, op.RELEASE)), frozenset((*LAUNCH_OF, op.REDUCE_TIED))
DATA_PARALLEL_OPS = frozenset((op.REDUCE, op.WAIT_REDUCE, op.GATHER, op.WAIT_GATHER))


class TraceError(ValueError):
    """Traces that cannot be read or drawn; the message names the file, what is wrong and the remedy."""


class Step(NamedTuple):
    """One recorded step of one rank.

    Attributes:
        number: global step.
        samples: trained when it was over.
        marks: begin of each action and end of the last, in seconds of the rank's clock.
    """
    number: int
    samples: int
    marks: List[float]


class RankTrace(NamedTuple):
    """What one rank recorded.

    Attributes:
        run: the same on all ranks of one recording, and different from all others.
        title: what ran.
        P, D, v, M, rank: see :class:`~ds_fold.events.Timeline`; ``rank`` is the global one.
        clock_offset: to be added to this rank's times, in seconds.
        ended: seconds since 1970 at which the recording ended.
        blocking_reduce: DeepSpeed's wrappers reduce: R0 returns when all is over.
        bytes: that this rank sends or receives in one transfer, by its launch without the micro-batch (``SA1``, ``R0``). 0:
            nothing moves, and there is no transfer; left out: not known.
        actions: this rank's program.
        steps: in order.
        samples_per_step: over all replicas; 0: not known.
        peak_bytes: most memory that the rank held; 0: not known.
    """
    run: str
    title: str
    P: int
    D: int
    v: int
    M: int
    rank: int
    clock_offset: float
    ended: float
    blocking_reduce: bool
    bytes: Dict[str, int]
    actions: List[Action]
    steps: List[Step]
    samples_per_step: int = 0
    peak_bytes: int = 0


# one rank's file ----------------------------------------------------------------------------------------------------------


def save(trace: RankTrace, folder: str) -> str:
    """Write a rank's file, complete or not at all. Returns its path. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"rank{trace.rank}.json")
    content = {"schema": SCHEMA, **trace._asdict()}
    content["actions"] = " ".join(map(str, trace.actions))
    content["steps"] = [{**step._asdict(), "marks": [round(t, 7) for t in step.marks]} for step in trace.steps]
    handle, unfinished = tempfile.mkstemp(dir=folder, prefix=f".rank{trace.rank}-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return path


def load(path: str) -> RankTrace:
    """Read a rank's file. Raises TraceError."""
    try:
        with open(path) as file:
            content = json.load(file)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise TraceError(f"{path} is cut short or is no JSON; record again or remove it") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, int):
        raise TraceError(f"{path} is not a trace of ds_fold: it has no schema version")
    if schema > SCHEMA:
        raise TraceError(f"{path} has schema {schema}, but this ds_fold knows up to {SCHEMA}; draw it with the newer release that "
                         f"recorded it")
    try:
        content = {**RankTrace._field_defaults, **content}
        trace = RankTrace(**{name: content[name] for name in RankTrace._fields})
        trace = trace._replace(actions=[Action.parse(word) for word in trace.actions.split()],
                               steps=[Step(**step) for step in trace.steps])
        for step in trace.steps:
            if len(step.marks) != len(trace.actions) + 1:
                raise ValueError(f"step {step.number} has {len(step.marks)} marks for {len(trace.actions)} actions")
        if not all(isinstance(count, int) and count >= 0 for count in (trace.samples_per_step, trace.peak_bytes)):
            raise ValueError(f"{trace.samples_per_step} samples a step, {trace.peak_bytes} bytes")
        if not 0 <= trace.rank < trace.P * trace.D:
            raise ValueError(f"rank {trace.rank} of {trace.P * trace.D}")
        return trace
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TraceError(f"{path} is damaged ({error}); record again or remove it") from None


# all ranks' files ---------------------------------------------------------------------------------------------------------


def read(folder: str, steps: Optional[Tuple[int, int]] = None, warn: Callable[[str], None] = warnings.warn) -> Timeline:
    """The timeline of a folder of trace files. What can be shown is shown; ``warn`` is told what cannot.

    Args:
        folder: the config's ``trace.path``.
        steps: (first, one past the last) global step to keep; default: all.
        warn: called with a message for each file that is missing, unreadable, or of another run than the newest.

    Raises:
        TraceError: nothing can be shown.
    """
    if not os.path.isdir(folder):
        raise TraceError(f"there is no folder {folder!r}; give the one that ds_fold.trace.path named")
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), "rank*.json")))
    if not paths:
        raise TraceError(f"{folder!r} holds no trace (rank0.json, ...); files are written when the last step of "
                         f"ds_fold.trace.steps is over")
    traces = []
    for path in paths:
        try:
            traces.append(load(path))
        except TraceError as error:
            if len(paths) == 1:
                raise
            warn(f"{error}; it is left out")
    if not traces:
        raise TraceError(f"no file in {folder!r} can be read")
    run = max(traces, key=lambda trace: trace.ended).run
    others = sorted(trace.rank for trace in traces if trace.run != run)
    if others:
        warn(f"{folder!r} mixes traces of different runs: the files of ranks {', '.join(map(str, others))} belong to an older run "
             f"and are left out; give each run a ds_fold.trace.path of its own")
    traces = [trace for trace in traces if trace.run == run]
    missing = sorted(set(range(traces[0].P * traces[0].D)) - {trace.rank for trace in traces})
    if missing:
        warn(f"{folder!r}: no trace of rank {', '.join(map(str, missing))}; copy rank{missing[0]}.json here from its host")
    if steps is not None:
        recorded = [step.number for step in traces[0].steps]
        traces = [trace._replace(steps=[s for s in trace.steps if steps[0] <= s.number < steps[1]]) for trace in traces]
        if not all(trace.steps for trace in traces):
            raise TraceError(f"--steps {steps[0]}:{steps[1]}: {folder!r} holds steps {recorded[0]}:{recorded[-1] + 1}")
    return assemble(traces)


def assemble(traces: List[RankTrace]) -> Timeline:
    """One timeline of ranks of one run, on rank 0's clock, from the begin of the first step.

    A transfer begins when it is launched and ends when it is first known to be over, that is when a wait for it ended: its own
    or, for a message, that of its other end. A receive is shown from when its message was launched, where that rank's trace is
    there. A gather is waited for in the next step; one from before the first step begins with it, one that nobody waited for ends
    with the last.
    """
    first = traces[0]
    begin = min(trace.steps[0].marks[0] + trace.clock_offset for trace in traces)
    events: List[Event] = []
    for trace in traces:
        events += _events(trace, trace.clock_offset - begin)
    starts = [min(trace.steps[i].marks[0] + trace.clock_offset for trace in traces) - begin for i in range(len(first.steps))]
    end = max(trace.steps[-1].marks[-1] + trace.clock_offset for trace in traces) - begin
    return Timeline(first.title, first.P, first.D, first.v, first.M, _meet(events, first.P, first.D), [*starts, end],
                    {"run": first.run, "first step": first.steps[0].number, SAMPLES: first.samples_per_step,
                     PEAK: max(trace.peak_bytes for trace in traces)})


def _events(trace: RankTrace, shift: float) -> List[Event]:
    events: List[Event] = []
    launched: Dict[Action, float] = {}
    begin, end = trace.steps[0].marks[0] + shift, trace.steps[-1].marks[-1] + shift

    def transfer(a: Action, start: float, stop: float) -> None:
        size = trace.bytes.get(f"{a.op}{a.segment}")
        if size != 0:
            track = DATA_PARALLEL if a.op in DATA_PARALLEL_OPS else PIPELINE
            events.append(Event(trace.rank, track, str(a), start, stop, size or 0))

    for step in trace.steps:
        for a, start, stop in zip(trace.actions, step.marks, step.marks[1:]):
            start, stop = start + shift, stop + shift
            if a.op in WORK:
                events.append(Event(trace.rank, COMPUTE, str(a), start, stop))
            elif a.op == op.REDUCE and trace.blocking_reduce:
                if a.segment == 0:  # it reduces all segments at once
                    events.append(Event(trace.rank, WAITING, str(a), start, stop))
                    transfer(a, start, stop)
            elif a.op in WAIT_OF:
                launched[a] = start
            else:
                launch = a._replace(op=LAUNCH_OF[a.op]) if a.op in LAUNCH_OF else None
                if launch is not None and not (a.op == op.WAIT_REDUCE and trace.blocking_reduce):
                    transfer(launch, launched.pop(launch, begin), stop)
                events.append(Event(trace.rank, WAITING, str(a), start, stop))
    for launch, start in launched.items():
        transfer(launch, start, end)
    return events


def messages(timeline: Timeline) -> List[Tuple[int, int]]:
    """(index of a send, index of its receive) in ``timeline.events``, for all messages whose two ends are there."""
    return _pairs(timeline.events, timeline.P, timeline.D)


def _pairs(events: List[Event], P: int, D: int) -> List[Tuple[int, int]]:
    sends: Dict[Tuple, List[int]] = {}
    receives: Dict[Tuple, List[int]] = {}
    for i, event in enumerate(events):
        if event.track != PIPELINE:
            continue
        a = Action.parse(event.action)
        # a message is known by its replica, the virtual stage it is for, its micro-batch and direction
        stage = a.segment * P + event.rank // D + {op.SEND_ACT: 1, op.SEND_GRAD: -1}.get(a.op, 0)
        key = (event.rank % D, stage, a.micro_batch, a.op in (op.SEND_ACT, op.RECV_ACT))
        (sends if a.op in (op.SEND_ACT, op.SEND_GRAD) else receives).setdefault(key, []).append(i)
    # the same message comes once a step, in order
    return [pair for key, indices in sends.items() for pair in zip(indices, receives.get(key, ()))]


def _meet(events: List[Event], P: int, D: int) -> List[Event]:
    """Both ends of a message know what either knows of when it was in flight."""
    for i, j in _pairs(events, P, D):
        send, receive = events[i], events[j]
        end = min(send.end, receive.end)
        events[i] = send._replace(end=end)
        # clocks agree up to some microseconds: never before its begin
        start = max(send.start, receive.start)
        events[j] = receive._replace(start=start, end=max(start, end))
    return events

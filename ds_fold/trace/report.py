"""What a timeline says about a step, in numbers."""

from bisect import bisect_left, bisect_right
from collections import deque
from typing import Deque, Dict, List, NamedTuple, Optional, Tuple

from ..events import COMPUTE, DATA_PARALLEL, PEAK, SAMPLES, WAITING, Event, Timeline
from ..plan.memory import describe_efficiency, memory_efficiency
from ..schedule import actions as op
from .files import DATA_PARALLEL_OPS, messages


class Metrics(NamedTuple):
    """Of one step, averaged over the ranks that the timeline shows.

    Attributes:
        step_s: seconds from its begin to the next's (the last: to its end).
        bubble_fraction: share of the time from its begin to its last backward, on any rank, in which no forward or backward runs.
            Comparable with (P-1) / (v*M + P-1), which is what is left of it where messages are free.
        exposed_data_parallel_s: seconds for which a rank waits for reductions and gathers. What DeepSpeed's ZeRO-1 gathers inside
            of its step is not seen.
        hidden_data_parallel: 1 - exposed / time in which any reduction or gather of the rank is in flight; None without any.
        exposed_pipeline_s: seconds for which a rank waits for a message that is on its way; waiting before it was sent is bubble.
        memory_efficiency: HIPPIE's ME, samples/s per GiB of the fullest rank; None where memory or samples are not known.
    """
    step_s: float
    bubble_fraction: float
    exposed_data_parallel_s: float
    hidden_data_parallel: Optional[float]
    exposed_pipeline_s: float
    memory_efficiency: Optional[float] = None


def measure(timeline: Timeline) -> List[Metrics]:
    """The metrics of every step of a timeline."""
    ranks = len({event.rank for event in timeline.events})
    arriving: Dict[Tuple[int, str], Deque[Event]] = {}
    for receive in sorted({j for _, j in messages(timeline)}, key=lambda j: timeline.events[j].start):
        event = timeline.events[receive]
        arriving.setdefault((event.rank, "W" + event.action), deque()).append(event)
    samples, peak = timeline.about.get(SAMPLES, 0), timeline.about.get(PEAK, 0)
    return [_measure(events, begin, end, ranks, arriving)._replace(
                memory_efficiency=memory_efficiency(samples / (end - begin), peak) if samples and end > begin else None)
            for events, begin, end in zip(_by_step(timeline), timeline.steps, timeline.steps[1:])]


def _by_step(timeline: Timeline) -> List[List[Event]]:
    """The events of each step, cut to it, in order of time."""
    begins, result = timeline.steps[:-1], [[] for _ in timeline.steps[1:]]
    for event in sorted(timeline.events, key=lambda e: e.start):
        for i in range(max(0, bisect_right(begins, event.start) - 1), bisect_left(begins, event.end)):
            begin, end = timeline.steps[i:i + 2]
            if event.start < end and event.end > begin:
                result[i].append(event._replace(start=max(event.start, begin), end=min(event.end, end)))
    return result


def _measure(events: List[Event], begin: float, end: float, ranks: int, arriving: Dict[Tuple[int, str], Deque[Event]]) -> Metrics:
    """Of one step; ``arriving`` loses the messages that were over before a wait for a later one."""
    compute = exposed = exposed_pipeline = 0.0
    over = begin
    transfers: Dict[int, List[Tuple[float, float]]] = {}
    for e in events:
        kind = op.Action.parse(e.action).op
        if e.track == COMPUTE and kind in (op.F, op.B):
            compute += e.end - e.start
            over = max(over, e.end) if kind == op.B else over
        elif e.track == DATA_PARALLEL:
            transfers.setdefault(e.rank, []).append((e.start, e.end))
        elif e.track == WAITING and kind in DATA_PARALLEL_OPS:
            exposed += e.end - e.start
        elif e.track == WAITING and kind != op.REDUCE_TIED:
            coming = arriving.get((e.rank, e.action), ())
            while coming and coming[0].end < e.start:
                coming.popleft()
            exposed_pipeline += e.end - max(e.start, min(e.end, coming[0].start) if coming else e.start)
    in_flight = sum(map(_covered, transfers.values()))
    return Metrics(end - begin, 1 - compute / (ranks * (over - begin)) if over > begin else 0.0, exposed / ranks,
                   max(0.0, 1 - exposed / in_flight) if in_flight else None, exposed_pipeline / ranks)


def table(timeline: Timeline, tokens_per_sample: Optional[int] = None) -> str:
    """A line for each step of a timeline, and one on throughput and memory where they are known."""
    lines = [f"step {number}: {describe(metrics)}"
             for number, metrics in enumerate(measure(timeline), timeline.about.get("first step", 0))]
    samples = timeline.about.get(SAMPLES)
    if samples:
        mean = (timeline.steps[-1] - timeline.steps[0]) / len(lines)
        lines.append(describe_efficiency(samples / mean, timeline.about.get(PEAK, 0), tokens_per_sample))
    return "\n".join(lines)


def summary(timeline: Timeline, scale: float = 1e3, unit: str = "ms") -> str:
    """The mean over all steps, as a line for people."""
    steps = measure(timeline)
    known = [[value for value in values if value is not None] for values in zip(*steps)]
    mean = Metrics(*(sum(values) / len(values) if values else None for values in known))
    return describe(mean, scale, f"{unit} a step" if len(steps) > 1 else unit)


def describe(metrics: Metrics, scale: float = 1e3, unit: str = "ms") -> str:
    """Metrics as a line for people; ``scale`` makes their times count in ``unit``."""
    words = [f"{scale * metrics.step_s:.4g} {unit}", f"bubble {metrics.bubble_fraction:.1%}"]
    if metrics.hidden_data_parallel is not None:
        words.append(f"exposed data parallel {scale * metrics.exposed_data_parallel_s:.3g} ({metrics.hidden_data_parallel:.0%} "
                     f"hidden)")
    if metrics.exposed_pipeline_s:
        words.append(f"exposed messages {scale * metrics.exposed_pipeline_s:.3g}")
    if metrics.memory_efficiency is not None:
        words.append(f"memory efficiency {metrics.memory_efficiency:.4g} samples/s per GiB")
    return ", ".join(words)


def _covered(intervals: List[Tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

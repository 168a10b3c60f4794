"""Timelines as trace events for Perfetto and chrome://tracing: a process per rank, a thread per track, arrows along messages."""

import json
from typing import List

from ..events import PIPELINE, TRACKS, Timeline
from .files import messages

_LANES = 1000  # threads of a track: boxes of one thread must not overlap


def write(timelines: List[Timeline], path: str) -> None:
    """Write ``{"traceEvents": [...]}``, times in microseconds."""
    events, first_process = [], 0
    for index, timeline in enumerate(timelines):
        events += _events(timeline, first_process, index)
        first_process += timeline.P * timeline.D
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _events(timeline: Timeline, first_process: int, index: int) -> List[dict]:
    result, free, threads = [], {}, [0] * len(timeline.events)
    for i in sorted(range(len(timeline.events)), key=lambda i: timeline.events[i].start):
        event = timeline.events[i]
        lane = _lane(free.setdefault((event.rank, event.track), []), event.start, event.end)
        threads[i] = _LANES * TRACKS.index(event.track) + lane
        result.append({"ph": "X", "name": event.action, "cat": event.track, "pid": first_process + event.rank, "tid": threads[i],
                       "ts": 1e6 * event.start, "dur": 1e6 * (event.end - event.start), "args": {"bytes": event.bytes}})
    for number, (send, receive) in enumerate(messages(timeline)):
        for phase, i in (("s", send), ("f", receive)):
            event = timeline.events[i]
            result.append({"ph": phase, "bp": "e", "id": f"{index}.{number}", "name": "message", "cat": PIPELINE,
                           "pid": first_process + event.rank, "tid": threads[i], "ts": 1e6 * event.start})
    for (rank, track), lanes in sorted(free.items()):
        pid = first_process + rank
        result.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank} ({timeline.title})"}})
        result.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        for lane in range(len(lanes)):
            tid = _LANES * TRACKS.index(track) + lane
            result.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
            result.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return result


def _lane(ends: List[float], start: float, end: float) -> int:
    """The first lane that is free at ``start``; ``ends`` holds when each lane is free again."""
    lane = next((i for i, free in enumerate(ends) if free <= start), len(ends))
    ends[lane:lane + 1] = [end]
    return lane

"""The recorder: notes when each action of the recorded steps begins on this rank.

What runs while recording is one reading of the clock per action; memory is counted in the step before. Everything else happens when
the last step is over: each rank writes its file, and rank 0 gathers all recordings and reports them.
"""

import secrets
import time
from contextlib import contextmanager
from typing import Callable, Iterator, List, Tuple

import torch
import torch.distributed as dist
from deepspeed.utils import logger

from ..runtime.memory import MeasuredMemory
from .files import RankTrace, Step, assemble, save
from .report import describe, measure

#: exchanges with rank 0 that align a clock; the fastest counts
PINGS = 16


class HostClock:
    """Marks are readings of the host's clock, in seconds."""

    def __init__(self, clock: Callable[[], float]):
        self.mark = clock

    def seconds(self, marks: List[float]) -> List[float]:
        return marks


class DeviceClock:
    """Marks are events in CUDA's current stream, so that what is timed is the device's work and nothing waits for it. Launches
    take no time there. Not run on the machine this was written on."""

    def __init__(self, clock: Callable[[], float]):
        torch.cuda.synchronize()
        self._origin, self._origin_s = self.mark(), clock()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: List[torch.cuda.Event]) -> List[float]:
        marks[-1].synchronize()
        return [self._origin_s + 1e-3 * self._origin.elapsed_time(mark) for mark in marks]


class Recorder:
    """Records the steps [first, last) of one engine.

    Args:
        engine: the pipeline engine.
        group: a gloo group of all ranks; None where there is one rank.
        clock: seconds, any origin. Ranks of one host have the same by default.
    """

    def __init__(self, engine, group, clock: Callable[[], float] = time.perf_counter):
        self.engine, self.group, self.clock = engine, group, clock
        self.config = engine.fold.trace
        self._steps: List[Tuple[int, int, list]] = []
        self._peak_bytes = 0

    @contextmanager
    def count_memory(self) -> Iterator[None]:
        """Around each training batch: counts what the rank holds in the one before the first that is recorded, whose times do not
        matter. Where the first of all is recorded, memory is not known."""
        if self.engine.global_steps != self.config.steps[0] - 1 or self.engine.measured_memory is not None:
            yield
            return
        with MeasuredMemory(self.engine) as memory:
            yield
        self._peak_bytes = memory.peak_bytes

    def covers(self, step: int) -> bool:
        return self.config.steps[0] <= step < self.config.steps[1]

    def watch(self, schedule) -> Iterator:
        """``schedule``'s steps, one action each; notes when each is taken and when the last is over."""
        number = self.engine.global_steps
        if not self._steps or number != self._steps[-1][0] + 1:  # the first; or a checkpoint was loaded in between
            self._begin()
        self._program, mark = schedule.program, self._marks.mark
        marks = [mark()]
        for step in schedule:
            yield step
            marks.append(mark())
        self._steps.append((number, self.engine.global_samples, marks))
        if number + 1 == self.config.steps[1]:
            trace = self._save()
            everyone = [trace]
            if self.group is not None:
                everyone = [None] * dist.get_world_size() if trace.rank == 0 else None
                dist.gather_object(trace, everyone, 0, group=self.group)
            if trace.rank == 0:
                self._report(everyone)

    def close(self) -> None:
        """Training ended before the last step that was to be recorded: write what there is."""
        if self._steps:
            self._save()

    def _begin(self) -> None:
        self._steps = []
        run = torch.tensor(secrets.randbits(62))
        if self.group is not None:
            dist.broadcast(run, 0, group=self.group)
        self._run = f"{int(run):016x}"
        self._offset = clock_offset(self.clock, self.group)
        self._marks = (DeviceClock if self.engine.device.type == "cuda" else HostClock)(self.clock)

    def _save(self) -> RankTrace:
        engine, program, path = self.engine, self._program, self.config.path
        steps = [Step(number, samples, self._marks.seconds(marks)) for number, samples, marks in self._steps]
        self._steps = []
        trace = RankTrace(run=self._run, title=engine.describe_run(), P=program.P, D=engine.dp_world_size, v=program.v, M=program.M,
                          rank=engine.global_rank, clock_offset=self._offset, ended=time.time(),
                          blocking_reduce=not engine.shards_optimizer, bytes=engine.transfer_bytes(),
                          actions=program.ranks[engine.stage_id], steps=steps, samples_per_step=engine.train_batch_size(),
                          peak_bytes=self._peak_bytes)
        try:
            save(trace, path)
        except OSError as error:  # a picture is not worth a training run
            logger.error(f"ds_fold.trace.path={path!r}: no trace written on rank {trace.rank}: {error}")
        return trace

    def _report(self, traces: List[RankTrace]) -> None:
        timeline = assemble(traces)
        monitor = []
        for step, metrics in zip(traces[0].steps, measure(timeline)):
            # printed as DeepSpeed prints a step's loss: its logger is silent below warnings
            print(f"ds_fold step {step.number}: {describe(metrics)}")
            monitor += [(f"Train/Fold/{name}", value, step.samples)
                        for name, value in metrics._asdict().items() if value is not None]
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events(monitor)
        print(f"ds_fold: steps {traces[0].steps[0].number}:{self.config.steps[1]} recorded; to draw them: "
              f"python -m ds_fold trace {self.config.path} -o timeline.html", flush=True)


def clock_offset(clock: Callable[[], float], group) -> float:
    """What to add to this rank's ``clock`` to have rank 0's, in seconds; half of the fastest exchange's time is its error bound.
    Call on all ranks of ``group``, which is gloo and of all ranks; None: there is one rank."""
    if group is None:
        return 0.0
    rank, reply = dist.get_rank(), torch.zeros((), dtype=torch.float64)
    if rank == 0:
        for peer in range(1, dist.get_world_size()):
            for _ in range(PINGS):
                dist.recv(reply, peer, group=group)
                dist.send(torch.tensor(clock(), dtype=torch.float64), peer, group=group)
        return 0.0
    best, offset = float("inf"), 0.0
    for _ in range(PINGS):
        start = clock()
        dist.send(reply, 0, group=group)
        dist.recv(reply, 0, group=group)
        end = clock()
        if end - start < best:
            best, offset = end - start, float(reply) - (start + end) / 2
    return offset

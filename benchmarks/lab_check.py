"""The lab's self-check: what gloo measures between the hosts, against what cables of that rate would give.

    one way    host0 --- 4 MB ---> host1                     bytes / useful rate
    all-reduce host0 ---> host1 ---> ... ---> host0 (ring)   2 (n-1)/n x bytes / useful rate

The useful rate is 95.6 % of the line's: 1448 of the 1514 bytes of a full packet are data.
"""

import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Callable, List, NamedTuple, Optional

from lab import CpuUse, Lab, LabError, timed

USEFUL = 1448 / 1514
BYTES = 4 << 20
BULK_BYTES = 24 << 20
REPEATS = 5
TOLERANCE = 0.10


def one_way_s(size: int, rate_mbit: float) -> float:
    """Seconds that ``size`` bytes take from one host to another."""
    return size / (USEFUL * rate_mbit * 1e6 / 8)


def all_reduce_s(size: int, rate_mbit: float, hosts: int) -> float:
    """Seconds that a ring all-reduce of ``size`` bytes takes over so many hosts."""
    return 2 * (hosts - 1) / hosts * one_way_s(size, rate_mbit)


class Figure(NamedTuple):
    """One measurement (the fastest of several) beside its theory, both in s."""
    name: str
    measured_s: float
    theory_s: float

    @property
    def off(self) -> float:
        """0.05: takes 5 % longer than in theory."""
        return self.measured_s / self.theory_s - 1

    def __str__(self) -> str:
        return f"{self.name}: {1e3 * self.measured_s:.1f} ms, theory {1e3 * self.theory_s:.1f} ms ({100 * self.off:+.1f} %)"


@dataclass(frozen=True)
class Report:
    """What a self-check found."""
    figures: List[Figure]
    latency_s: float  # one way, 4 bytes, idle network, median; there is no theory to compare it with
    latency_in_bulk_s: float  # the same while ds_fold reduces 24 MiB between each two hosts; nan if that was over too soon
    cpu: CpuUse  # while measuring
    flags: List[str]  # of the run (see lab.Result)
    wall_s: float

    @property
    def wrong(self) -> List[Figure]:
        return [figure for figure in self.figures if abs(figure.off) > TOLERANCE]

    def after(self, earlier: "Report") -> "Report":
        """This report with each figure from where it was nearer to theory: other work on the machine disturbs each by chance."""
        return replace(self, figures=[min(pair, key=lambda figure: abs(figure.off)) for pair in zip(earlier.figures, self.figures)])

    def __str__(self) -> str:
        lines = [*map(str, self.figures), f"4 B one way, idle: {1e6 * self.latency_s:.0f} us, during a reduction of 24 MiB: "
                 f"{1e6 * self.latency_in_bulk_s:.0f} us", f"CPU while measuring: {self.cpu}"]
        return "\n".join(lines + [f"not to be trusted: {flag}" for flag in self.flags])


def check(lab: Lab, attempts: int = 3, python: Optional[str] = None) -> Report:
    """Measure the lab's network with one rank on every host.

    Args:
        attempts: times to measure in all, because the machine may be doing something else. The best of each figure counts.
        python: an interpreter with torch (this one).

    Raises:
        LabError: the lab has one host, the ranks failed, or the best of a figure was more than 10 % off theory.
    """
    if lab.hosts < 2:
        raise LabError("a self-check needs at least two hosts")
    report = measure(lab, python)
    for _ in range(attempts - 1):
        if not report.wrong:
            break
        report = measure(lab, python).after(report)
    if report.wrong:
        raise LabError(f"the network is more than {100 * TOLERANCE:.0f} % off theory in {attempts} attempts. Is the machine busy? "
                       f"Best figures:\n{report}")
    return report


def measure(lab: Lab, python: Optional[str] = None) -> Report:
    """One measurement, without judging it. Raises a LabError if the ranks fail."""
    timeout = 60 + 10 * (REPEATS + 1) * one_way_s(BYTES, lab.rate_mbit)
    result = lab.run([python or sys.executable, os.path.abspath(__file__)], timeout=timeout)
    if not result.ok:
        raise LabError(f"the self-check's ranks did not finish: {result}\n{result.outputs[result.first_failure or 0][-2000:]}")
    times = json.loads(result.outputs[0].splitlines()[-1])
    figures = [Figure("4 MB one way", times["one_way"], one_way_s(BYTES, lab.rate_mbit)),
               Figure("4 MB all-reduce over 2 hosts", times["all_reduce_2"], all_reduce_s(BYTES, lab.rate_mbit, 2))]
    if lab.hosts > 2:
        figures.append(Figure(f"4 MB all-reduce over {lab.hosts} hosts", times["all_reduce"],
                              all_reduce_s(BYTES, lab.rate_mbit, lab.hosts)))
    return Report(figures, times["latency"], times["latency_in_bulk"], result.cpu, result.flags, result.wall_s)


# in the ranks -------------------------------------------------------------------------------------------------------------


def rank_program() -> None:
    """What each rank of the check runs. Rank 0 prints the times, in s, as one line of JSON."""
    import torch
    import torch.distributed as dist

    from ds_fold.runtime.collectives import Replicas
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 1])
    payload = torch.zeros(BYTES // 4)

    def fastest(once: Callable[[], float]) -> float:
        once()  # opens connections and their windows
        return min(once() for _ in range(REPEATS))  # other work on the machine only ever adds time

    def all_reduce(group: Optional[dist.ProcessGroup]) -> float:
        dist.barrier(group)
        start = time.monotonic()
        dist.all_reduce(payload, group=group)
        return time.monotonic() - start

    neighbours = [dist.new_group([first, first + 1]) for first in range(0, world - 1, 2)]
    replicas = None if world % 2 else Replicas(neighbours[rank // 2])
    gradients = torch.zeros(BULK_BYTES // 4)
    times = {}
    with timed():
        if rank < 2:
            times["latency"] = _latency_s(rank, 50)
            times["one_way"] = fastest(lambda: _one_way_s(rank, payload))
            times["all_reduce_2"] = fastest(lambda: all_reduce(pair))
        dist.barrier()
        if world > 2:
            times["all_reduce"] = fastest(lambda: all_reduce(None))
        dist.barrier()
        times["latency_in_bulk"] = math.nan
        if replicas is not None:
            reduction = replicas.reduce_scatter(gradients)
            latency_s = _latency_s(rank, 20) if rank < 2 else math.nan
            waits = time.monotonic()
            reduction.wait()
            if time.monotonic() - waits > 0.005:
                times["latency_in_bulk"] = latency_s
    if rank == 0:
        print(json.dumps(times), flush=True)
    if replicas is not None:
        replicas.destroy()
    dist.destroy_process_group()


def _one_way_s(rank: int, payload) -> float:
    """From the start of rank 0's send to rank 1 having it all, on the clock that all hosts share. Known on both."""
    import torch
    import torch.distributed as dist
    clock = torch.zeros(1, dtype=torch.float64)
    if rank == 1:
        receive = dist.irecv(payload, 0)
        dist.send(clock, 0)  # the receive is posted
        receive.wait()
        clock[0] = time.monotonic()
        dist.send(clock, 0)
        dist.recv(clock, 0)
        return clock.item()
    dist.recv(clock, 1)
    start = time.monotonic()
    dist.send(payload, 1)
    dist.recv(clock, 1)
    clock -= start
    dist.send(clock, 1)
    return clock.item()


def _latency_s(rank: int, rounds: int) -> float:
    """Half of the median round trip of 4 bytes, the receives posted ahead."""
    import torch
    import torch.distributed as dist
    peer, trips = 1 - rank, []
    ball, caught = torch.zeros(1), torch.zeros(1)
    for _ in range(rounds):
        receive = dist.irecv(caught, peer)
        start = time.monotonic()
        if rank == 0:
            dist.send(ball, peer)
        receive.wait()
        if rank == 1:
            dist.send(ball, peer)
        trips.append(time.monotonic() - start)
    return statistics.median(trips) / 2


if __name__ == "__main__":
    rank_program()

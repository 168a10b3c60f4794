"""Measures the network between the ranks it runs on, and what their devices hold: the cluster file.

Pairs of ranks are measured one after the other, while all others wait:

    within a host     ranks 0-1, 1-2, ...                  the median is intra_host
    between hosts     first ranks of hosts 0-1, 1-2, ...   the median is inter_host

Latency is half of a round trip of 4 bytes, the rate what a large message adds to it. Both are what applications see.
"""

import socket
import statistics
from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

from .. import compat
from ..runtime.collectives import Replicas
from .costs import GIB, Cluster, Link, PlanError

ROUNDS, TRIPS = 30, 5


class Pair(NamedTuple):
    """What was measured between two ranks."""
    ranks: Tuple[int, int]
    same_host: bool
    latency_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        place = "within a host" if self.same_host else "between hosts"
        return (f"ranks {self.ranks[0]:3d} and {self.ranks[1]:3d} {place}: {1e6 * self.latency_s:8.1f} us, "
                f"{8e-9 * self.bytes_per_s:8.3f} Gbit/s")


class Exchange(NamedTuple):
    """A reduce-scatter and an all-gather among all ranks, measured and as the cluster file predicts them, in s."""
    bytes: int
    measured_s: float
    predicted_s: float

    def __str__(self) -> str:
        return (f"reduce-scatter and all-gather of {self.bytes / 1e6:.1f} MB: {1e3 * self.measured_s:.2f} ms, predicted "
                f"{1e3 * self.predicted_s:.2f} ms ({self.measured_s / self.predicted_s - 1:+.0%})")


class Network(NamedTuple):
    """What :func:`measure` found."""
    cluster: Cluster
    pairs: List[Pair]
    exchange: Exchange


def measure(size: Optional[int] = None, host: Optional[str] = None) -> Network:
    """Measure the network. Call on all ranks of the job, with ``torch.distributed`` up and nothing else on the wire.

    Args:
        size: bytes of the large messages; default: 4 MiB on gloo, 64 MiB elsewhere.
        host: name of this rank's host; default: the machine's.

    Raises:
        PlanError: on every rank: there is one rank only, or hosts differ in their number of ranks.
    """
    world, gloo = dist.get_world_size(), dist.get_backend() == "gloo"
    if world < 2:
        raise PlanError("there is one rank and nothing between ranks to measure: launch netcheck on the ranks of the training")
    size = (4 if gloo else 64) << 20 if size is None else size
    device = torch.device("cpu") if gloo else compat.current_device()
    everyone: List = [None] * world
    dist.all_gather_object(everyone, (host or socket.gethostname(), compat.device_memory_bytes()))
    hosts, per_host = _hosts([name for name, _ in everyone])
    # the devices of a CPU are one memory, which its ranks share
    share = per_host if compat.current_device().type == "cpu" else 1
    memory = [round(held / share / GIB, 3) for _, held in everyone]

    inside = [(r, r + 1) for r in range(world) if (r + 1) % per_host]
    between = [(h * per_host, (h + 1) * per_host) for h in range(hosts - 1)]
    if hosts > 2:
        between.append(((hosts - 1) * per_host, 0))
    pairs = [_pair(ranks, ranks in inside, size, device) for ranks in inside + between]
    intra, inter = (_median([pair for pair in pairs if pair.same_host == same]) for same in (True, False))
    cluster = Cluster(hosts=hosts, ranks_per_host=per_host, inter_host=inter or intra, intra_host=intra,
                      memory_gib=memory[0] if len(set(memory)) == 1 else memory, collective="pairwise" if gloo else "ring")
    measured_s = _exchange_s(size, device)
    if not gloo and 1 < per_host < world:  # NCCL chooses; the formula that comes nearest
        cluster = min((cluster.model_copy(update={"collective": kind}) for kind in ("ring", "hierarchical")),
                      key=lambda candidate: abs(_predicted_s(candidate, size) - measured_s))
    return Network(cluster, pairs, Exchange(size, measured_s, _predicted_s(cluster, size)))


def _hosts(names: List[str]) -> Tuple[int, int]:
    """(hosts, ranks per host) of ranks on hosts with these names. Raises PlanError where the cluster file cannot describe them."""
    order = list(dict.fromkeys(names))
    counts = [names.count(name) for name in order]
    if len(set(counts)) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in zip(order, counts))
        raise PlanError(f"hosts differ in their number of ranks: {listed}; launch equally many on each (hostfile slots)")
    if names != [name for name in order for _ in range(counts[0])]:
        raise PlanError(f"ranks of one host do not follow each other: {', '.join(names)}; launch them host by host")
    return len(order), counts[0]


def _pair(ranks: Tuple[int, int], same_host: bool, size: int, device: torch.device) -> Pair:
    """Measured by the first of the two, known to all."""
    result = torch.zeros(2, dtype=torch.float64, device=device)
    rank = dist.get_rank()
    dist.barrier()
    if rank in ranks:
        peer = ranks[1 - ranks.index(rank)]
        short = _one_way_s(torch.zeros(1, device=device), peer, rank == ranks[0], ROUNDS)
        long = _one_way_s(torch.zeros(size, dtype=torch.uint8, device=device), peer, rank == ranks[0], TRIPS)
        result[0], result[1] = short, size / max(long - short, 1e-9)
    dist.broadcast(result, ranks[0])
    return Pair(ranks, same_host, *result.tolist())


def _one_way_s(ball: torch.Tensor, peer: int, starts: bool, rounds: int) -> float:
    """Half of the median round trip; the first, which opens connections, does not count."""
    caught, trips = torch.empty_like(ball), []
    for _ in range(rounds + 1):
        receive = dist.irecv(caught, peer)
        start = compat.synchronized_time()
        if starts:
            dist.send(ball, peer)
        receive.wait()
        if not starts:
            dist.send(ball, peer)
        trips.append(compat.synchronized_time() - start)
    return statistics.median(trips[1:]) / 2


def _exchange_s(size: int, device: torch.device) -> float:
    """Median of a reduce-scatter and an all-gather of ``size`` bytes among all ranks, the slowest rank's; known to all."""
    replicas = Replicas(dist.group.WORLD)
    flat = torch.zeros(size // 4 // replicas.size * replicas.size, device=device)
    times = []
    for _ in range(TRIPS + 1):
        dist.barrier()
        start = compat.synchronized_time()
        replicas.reduce_scatter(flat).wait()
        replicas.all_gather(flat).wait()
        times.append(compat.synchronized_time() - start)
    replicas.destroy()
    result = torch.tensor(statistics.median(times[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return float(result)


def _predicted_s(cluster: Cluster, size: int) -> float:
    exchange = cluster.exchange(size, cluster.hosts * cluster.ranks_per_host).twice()
    link = cluster.inter_host if cluster.hosts > 1 else cluster.intra_host
    return exchange.bytes / link.rate + exchange.delay_s


def _median(pairs: List[Pair]) -> Optional[Link]:
    if not pairs:
        return None
    return Link(bytes_per_s=statistics.median(pair.bytes_per_s for pair in pairs),
                latency_s=statistics.median(pair.latency_s for pair in pairs))


__all__ = ["Exchange", "Network", "Pair", "measure"]

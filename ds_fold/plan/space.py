"""What the planner chooses from: every way to train one batch on all ranks of a cluster. Pure Python."""

from functools import lru_cache
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ..schedule.order import PRESETS, split_groups
from .costs import Cluster, PlanError

#: most segments that are tried
MOST_SEGMENTS = 8
#: keys of the ``ds_fold`` block that a plan decides or sets back to their defaults; the others stay as they are given
PLANNED = ("schedule", "segments", "last_segment", "micro_batch_group", "head_backward", "partition", "recompute",
           "overlap_grad_reduce", "align_grad_reduce", "overlap_param_gather", "shard_params", "optimizer_step", "early_segments",
           "plan")
RECOMPUTE = ("none", "all", "auto")


class Candidate(NamedTuple):
    """Everything of a plan but its cuts and, for ``recompute="auto"``, the layers that are recomputed. Words as in FoldConfig."""
    P: int
    D: int
    micro_batch_size: int
    M: int
    schedule: str
    segments: int
    group: Optional[int]
    head_backward: str
    zero_stage: int
    reduce: str
    gather: bool
    recompute: str

    def block(self) -> Dict[str, Any]:
        """Of the ``ds_fold`` block, all that is not FoldConfig's default; cuts and recomputed layers come besides."""
        block: Dict[str, Any] = {"schedule": self.schedule, "segments": self.segments}
        if self.group is not None:
            block["micro_batch_group"] = self.group
        if self.head_backward != "scheduled":
            block["head_backward"] = self.head_backward
        return {**block, "overlap_grad_reduce": self.reduce, "overlap_param_gather": self.gather}

    def __str__(self) -> str:
        group = f" N={self.group}" if self.group else ""
        overlap = [f"reduce by {self.reduce}"] * (self.reduce != "off") + ["gather overlapped"] * self.gather
        return " ".join([f"P={self.P} D={self.D} {self.schedule} v={self.segments}{group} micro-batch {self.micro_batch_size} "
                         f"M={self.M} ZeRO-{self.zero_stage} recompute {self.recompute}", *overlap])


def live(c: Candidate) -> List[Tuple[int, ...]]:
    """By pipeline rank, micro-batches of each segment whose activations live right before the rank's first backward."""
    return _live(c.schedule, c.P, c.segments, c.M, c.group, c.head_backward == "immediate")


@lru_cache(maxsize=4096)
def _live(schedule: str, P: int, v: int, M: int, group: Optional[int], immediate: bool) -> List[Tuple[int, ...]]:
    preset = PRESETS[schedule]
    sizes = split_groups(M, P, group or preset.group(P, M))
    found = []
    for r in range(P):
        starved = v > 1 and M < P  # as in compute_order
        left = v * M if starved else min(v * M, preset.warm_up(P, v, sizes[0], r) + 1)
        counts = [0] * v
        for size in sizes:
            for k in range(v):
                taken = min(size, left)
                counts[k] += taken
                left -= taken
        if immediate and r == P - 1:
            counts[-1] = min(1, counts[-1])
        found.append(tuple(counts))
    return found


def divisors(number: int) -> List[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def schedules(P: int, M: int, layers: int) -> Iterator[Tuple[str, int, Optional[int], str]]:
    """(schedule, segments, micro_batch_group, head_backward) whose orders differ on P ranks with M micro-batches.

    With one segment a group changes nothing; ``interleaved_1f1b`` is a loop in groups of P, and ``aiao`` one in groups of M.
    Groups between are P times a power of two. An immediate head backward changes GPipe, and loops with fewer micro-batches than
    ranks; the others' last virtual stage runs so already, or refuses it.
    """
    yield "1f1b", 1, None, "scheduled"
    if M > 1:
        yield "gpipe", 1, None, "scheduled"
        if P > 1:
            yield "gpipe", 1, None, "immediate"
    for v in range(2, min(layers // P, MOST_SEGMENTS) + 1):
        if M < P:
            yield "aiao", v, None, "scheduled"
            if M > 1:
                yield "aiao", v, None, "immediate"
            continue
        seen = {(M, )}
        yield "aiao", v, None, "scheduled"
        group = P
        while group < M:
            sizes = tuple(split_groups(M, P, group))
            if sizes not in seen:
                seen.add(sizes)
                yield ("interleaved_1f1b", v, None, "scheduled") if group == P else ("aiao", v, group, "scheduled")
            group *= 2


def exchanges(D: int, shards: bool) -> Iterator[Tuple[int, str, bool]]:
    """(ZeRO stage, overlap_grad_reduce, overlap_param_gather) that differ; ``shards``: ds_fold's own optimizer may be used."""
    if D == 1:
        yield from ((0, "off", False), (1, "off", False))
        if shards:
            yield 2, "segment", False
        return
    for zero_stage in (0, 1, 2) if shards else (0, 1):
        for reduce in ("off", "segment", "layer") if shards else ("off", ):
            if zero_stage == 2 and reduce == "off":
                continue  # it reduces segment by segment anyway
            for gather in (False, True) if zero_stage and shards else (False, ):
                yield zero_stage, reduce, gather


def candidates(cluster: Cluster, layers: int, batch: int, shards: bool) -> Tuple[List[Candidate], Dict[Tuple[int, int], str]]:
    """All candidates, and why a layout (P, D) has none.

    Args:
        cluster: all its ranks are used.
        layers: of the model.
        batch: samples of a step.
        shards: ds_fold's own optimizer may be used.

    Raises:
        PlanError: no layout has a candidate.
    """
    ranks = cluster.hosts * cluster.ranks_per_host
    found: List[Candidate] = []
    refused: Dict[Tuple[int, int], str] = {}
    for P in divisors(ranks):
        D = ranks // P
        if layers < P:
            refused[P, D] = f"{layers} layers cannot fill {P} pipeline ranks"
            continue
        if batch % D:
            refused[P, D] = f"train_batch_size={batch} is no multiple of {D} replicas"
            continue
        try:
            cluster.check(P, D)
        except PlanError as error:
            refused[P, D] = str(error)
            continue
        for size in divisors(batch // D):
            M = batch // D // size
            found += [Candidate(P, D, size, M, *schedule, *exchange, recompute) for schedule in schedules(P, M, layers)
                      for exchange in exchanges(D, shards) for recompute in RECOMPUTE]
    if not found:
        reasons = "; ".join(f"P={P} D={D}: {reason}" for (P, D), reason in refused.items())
        raise PlanError(f"no layout of the cluster's {ranks} ranks can train batches of {batch} samples with {layers} layers: "
                        f"{reasons}. Change train_batch_size to a multiple of a number of replicas, or the cluster")
    return found, refused

"""Finds the best plan: bounds for all candidates, one simulation of those that are near, and a search of cuts for the best.

Branch and bound in two rounds. The first simulates candidates once, with balanced cuts, until no bound is below the best found. The
second searches cuts and recomputed layers, the best of the first round first, and leaves out whatever its bound excludes. Work is
limited by simulated actions and not by time, so that a plan is the same on every machine; where the limit strikes, the answer says
how much better what was left out could be at most.
"""

from functools import lru_cache
from math import comb, inf
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from ..config import WHOLE_MATRICES, FoldConfig, fold_config
from ..partition import partition_balanced
from ..schedule import Program
from .closed_forms import ClosedForms, Exchange
from .costs import GIB, Cluster, PlanError, Profile
from .memory import memory_efficiency
from .partition import COMPLETE, Chain, Score, search
from .placement import simulation_options
from .space import PLANNED, Candidate, candidates

#: simulated actions in each round (0.004 ms each, with lowering, proof and two steps)
QUICK_ACTIONS, THOROUGH_ACTIONS = 3_000_000, 5_000_000
#: what a search may simulate and bound, and what it takes in all, in simulations
SIMULATIONS, BOUNDS, WORK = 20, 8_000, 40
#: balanced cuts are computed on whole numbers; this is the heaviest layer's
_FINEST = 10**6


class Found(NamedTuple):
    """A candidate with its cuts and recomputed layers, and what the simulator says of them.

    Attributes:
        searched: cuts were searched for, and not only balanced.
    """
    candidate: Candidate
    cuts: Tuple[int, ...]
    recompute: FrozenSet[int]
    score: Score
    searched: bool

    @property
    def throughput(self) -> float:
        """Samples per second."""
        c = self.candidate
        return c.micro_batch_size * c.M * c.D / self.score.step_s

    @property
    def peak_gib(self) -> float:
        return self.score.peak_bytes / GIB

    @property
    def efficiency(self) -> Optional[float]:
        return memory_efficiency(self.throughput, self.score.peak_bytes)


class Answer(NamedTuple):
    """What the planner found.

    Attributes:
        found: each simulated candidate's best, best first; those that do not fit into memory are left out.
        layouts: (P, D) -> why the best plan is not one of it; the best one's own is missing.
        counts: of candidates, of those that cannot fit into memory and of the others that cannot be better than the best, both by
            their bounds, and of those that were simulated and whose cuts were searched.
        gap: how much better than the best could be what was not searched completely, by its bounds and with all or no layers
            recomputed, as a share of the best's value; 0: the best is proved.
    """
    found: List[Found]
    layouts: Dict[Tuple[int, int], str]
    counts: Dict[str, int]
    gap: float


class Planner:
    """A batch, a model and a cluster.

    Args:
        config: the ds_config, with ``train_batch_size``.
        profiles: of one model, each of another micro-batch size.
        cluster: all its ranks are used.
        objective: "memory_efficiency", "throughput" or "memory".

    Raises:
        ConfigError, PlanError: what cannot be planned.
    """

    def __init__(self, config: Dict[str, Any], profiles: Sequence[Profile], cluster: Cluster, objective: str):
        self.config, self.profiles, self.cluster, self.objective = config, profiles, cluster, objective
        self.batch = config.get("train_batch_size")
        if not isinstance(self.batch, int) or isinstance(self.batch, bool) or self.batch < 1:
            raise PlanError(f"train_batch_size={self.batch!r}: a plan keeps the batch, so the ds_config has to give "
                            f"train_batch_size, a whole number of samples a step")
        self.layers = len(profiles[0].layers)
        self.kept = {key: value for key, value in (config.get("ds_fold") or {}).items() if key not in PLANNED}
        self._check_config(fold_config(config))
        for other in profiles[1:]:
            other.check_model([layer.name for layer in profiles[0].layers], [layer.parameter_count for layer in profiles[0].layers])
        self.bounds = ClosedForms(cluster, self.profile)
        self.most_memory = max((cluster.memory_bytes(r, 1) or inf) for r in range(cluster.hosts * cluster.ranks_per_host))
        self._exchanges: Dict[Tuple, Tuple[Dict[str, Any], Exchange]] = {}

    def _check_config(self, fold: FoldConfig) -> None:
        zero = self.config.get("zero_optimization") or {}
        if zero.get("offload_optimizer") or zero.get("offload_param"):
            raise PlanError("zero_optimization has offload_optimizer or offload_param, whose time and memory no profile knows; "
                            "remove it, or choose P and D by hand")
        optimizer = str((self.config.get("optimizer") or {}).get("type", "")).lower()
        self.shards = not any(word in optimizer for word in WHOLE_MATRICES)
        named = [fold.partition[-1] - 1] if isinstance(fold.partition, list) else []
        named += fold.recompute[-1:] if isinstance(fold.recompute, list) else []
        if (isinstance(fold.partition, list) and named[0] + 1 != self.layers) or max(named, default=0) >= self.layers:
            raise PlanError(f"the profile has {self.layers} layers, but the ds_config's ds_fold.partition or ds_fold.recompute is "
                            f"that of another model, whose last layer is {max(named)}; measure this one: python -m ds_fold profile")

    @lru_cache(maxsize=None)  # noqa: B019, a planner lives as long as its command
    def profile(self, micro_batch_size: int) -> Profile:
        """That of the nearest measured size, scaled."""
        def distance(profile: Profile) -> float:
            return max(profile.micro_batch_size, micro_batch_size) / min(profile.micro_batch_size, micro_batch_size)

        return min(self.profiles, key=distance).scaled(micro_batch_size)

    def fold(self, c: Candidate) -> FoldConfig:
        """The candidate's ``ds_fold`` block."""
        return FoldConfig(**{**self.kept, **c.block()})

    def exchange(self, c: Candidate) -> Tuple[Dict[str, Any], Exchange]:
        """Options for ``simulate``, and what bounds need to know of them."""
        key = (c.D, c.zero_stage, c.reduce, c.gather)
        if key not in self._exchanges:
            fold = self.fold(c)
            options = simulation_options(self.config, fold, c.zero_stage, c.D)
            self._exchanges[key] = options, Exchange.of(options, fold.overlap(c.zero_stage))
        return self._exchanges[key]

    @lru_cache(maxsize=8)  # noqa: B019
    def program(self, P: int, M: int, schedule: str, v: int, group: Optional[int], head: str, reduce: bool, gather: bool,
                two: bool) -> Program:
        """Proved; one for all candidates that differ in what a program does not say."""
        c = Candidate(P, 1, 1, M, schedule, v, group, head, 2 if two else 1, "segment" if reduce else "off", gather, "none")
        return self.fold(c).train_program(P, M, c.zero_stage)

    def chain(self, c: Candidate, objective: Optional[str] = None) -> Chain:
        """What cuts are searched in, for the planner's objective unless told."""
        program = self.program(c.P, c.M, c.schedule, c.segments, c.group, c.head_backward, c.reduce != "off", c.gather,
                               c.zero_stage == 2)
        return Chain(program, self.profile(c.micro_batch_size), self.cluster, objective or self.objective, **self.exchange(c)[0])

    def actions(self, c: Candidate) -> int:
        """Of the program, about."""
        return c.P * c.segments * c.M * (2 if c.P == 1 else 10)

    def score(self, step_s: float, peak_bytes: float) -> Score:
        """Of a bound; what is over the largest device's memory is over it."""
        value = {"throughput": step_s, "memory": peak_bytes, "memory_efficiency": step_s * peak_bytes}[self.objective]
        return Score(max(0.0, peak_bytes - self.most_memory), value, step_s, peak_bytes)

    # search ---------------------------------------------------------------------------------------------------------------

    def plan(self, progress: Callable[[int, int, str], None] = lambda done, total, what: None) -> Answer:
        """The best plans. ``progress(candidates done, of how many, what is done)`` is called now and then.

        Raises:
            PlanError: no candidate exists, or none fits into memory.
        """
        every, refused = candidates(self.cluster, self.layers, self.batch, self.shards)
        bounds: Dict[Candidate, Score] = {}
        for i, c in enumerate(every):
            bounds[c] = self.score(*self.bounds(c, self.exchange(c)[1]))
            progress(i + 1, len(every), "bounds")
        open_ones = [c for c in every if not bounds[c].excess]
        found = self._simulate(open_ones, bounds, progress)
        self._search(open_ones, bounds, found, progress)
        fitting = sorted((f for f in found.values() if not f.score.excess), key=_order)
        same: Dict[Tuple, Found] = {}  # what "auto" chose may be all or no layers
        for f in fitting:
            same.setdefault((f.candidate[:-1], f.cuts, f.recompute), f)
        fitting = list(same.values())
        if not fitting:
            fitting = [self._nearest(min(found.values(), key=_order).candidate if found else min(every, key=bounds.__getitem__))]
        best = fitting[0]
        left = [c for c in open_ones if _below(bounds[c], best.score)]
        counts = {"candidates": len(every), "memory": len(every) - len(open_ones), "bounds": len(open_ones) - len(left),
                  "simulated": len(found), "searched": sum(f.searched for f in found.values())}
        proved = {c for c in found if found[c].searched and self._ways(c) <= COMPLETE}
        unproved = [c for c in left if c.recompute != "auto" and c not in proved]
        gap = max([0.0, *(1 - bounds[c].value / best.score.value for c in unproved)])
        return Answer(fitting, {**refused, **self._reasons(every, bounds, found, best)}, counts, gap)

    def _simulate(self, open_ones: List[Candidate], bounds: Dict[Candidate, Score], progress) -> Dict[Candidate, Found]:
        """The first round. Bounds are looser for some kinds of candidates than for others: the next one is that whose bound times
        what its kind's last simulation was above its own is least."""
        found: Dict[Candidate, Found] = {}
        kinds: Dict[Tuple, List[Candidate]] = {}
        for c in sorted((c for c in open_ones if c.recompute != "auto"), key=bounds.__getitem__, reverse=True):
            kinds.setdefault((c.P, c.schedule, c.segments, c.zero_stage, c.recompute), []).append(c)
        above = dict.fromkeys(kinds, 1.0)
        best, spent = None, 0
        while kinds and spent < QUICK_ACTIONS:
            kind = min(kinds, key=lambda kind: above[kind] * bounds[kinds[kind][-1]].value)
            c = kinds[kind].pop()
            beaten = best is not None and not best.excess and not _below(bounds[c], best)
            if beaten or not kinds[kind]:
                del kinds[kind]  # the others' bounds are no better
            if beaten:
                continue
            spent += self.actions(c)
            cuts, recompute = self.balanced(c), frozenset(range(self.layers) if c.recompute == "all" else ())
            score = self.chain(c).score(cuts, recompute)
            found[c] = Found(c, cuts, recompute, score, False)
            # what does not fit makes its kind look twice as bad
            above[kind] = max(1.0, score.value / bounds[c].value) * (2 if score.excess else 1)
            best = score if best is None else min(best, score)
            progress(min(spent, QUICK_ACTIONS), QUICK_ACTIONS, "simulations")
        return found

    def balanced(self, c: Candidate) -> Tuple[int, ...]:
        """Chunks of nearly equal time; recomputed as all or no layers are."""
        each = self.profile(c.micro_batch_size).costs(range(self.layers + 1), 1, range(self.layers) if c.recompute == "all" else ())
        seconds = [f + b for f, b in zip(each.forward_s, each.backward_s)]
        unit = max(*seconds, 1e-30) / _FINEST
        return tuple(partition_balanced([round(s / unit) for s in seconds], c.P * c.segments))

    def _search(self, open_ones: List[Candidate], bounds: Dict[Candidate, Score], found: Dict[Candidate, Found], progress) -> None:
        """The second round."""
        best, spent = min((f.score for f in found.values()), default=None), 0
        known: Dict[Candidate, Tuple] = {}  # cuts for one way to exchange gradients serve the others, where no search is complete

        def promise(c: Candidate) -> Tuple:
            alike = (c, c._replace(recompute="none"), c._replace(recompute="all"))
            near = [found[other].score for other in alike if other in found]
            return (0, min(near), c.recompute != "auto") if near else (1, bounds[c], c.recompute != "auto")

        for done, c in enumerate(sorted(open_ones, key=promise), 1):
            progress(done, len(open_ones), "searches")
            if best is not None and not best.excess and not _below(bounds[c], best):
                continue
            plain = found.get(c._replace(recompute="none"))
            if c.recompute == "auto" and self.objective == "throughput" and plain is not None and not plain.score.excess:
                continue  # what fits anyway is only slower with layers recomputed
            shape = c._replace(zero_stage=0, reduce="off", gather=False)
            cuts, recompute = known.get(shape, (None, {"none": frozenset(), "all": frozenset(range(self.layers))}.get(c.recompute)))
            ways = self._ways(c)
            work = self.actions(c) * (1 if cuts is not None else min(WORK, ways) if c.recompute != "auto" else WORK)
            if spent + work > THOROUGH_ACTIONS and spent:
                continue
            spent += work
            chain = self.chain(c)
            if cuts is None:
                cuts, recompute, score = search(chain, None, recompute, SIMULATIONS * chain.program.num_actions, most_bounds=BOUNDS)
            else:
                score = chain.score(cuts, recompute)
            if ways > COMPLETE:
                known[shape] = cuts, recompute
            if c not in found or score <= found[c].score:
                found[c] = Found(c, tuple(cuts), frozenset(recompute), score, True)
            else:
                found[c] = found[c]._replace(searched=True)
            if best is None or found[c].score < best:
                best = found[c].score

    def _nearest(self, c: Candidate) -> Found:
        """Where nothing fits: this one with the cuts and recomputed layers that take the least memory. Raises PlanError where they
        do not fit, either."""
        c = c._replace(recompute="auto")
        chain = self.chain(c, "memory")
        cuts, recompute, score = search(chain, None, None, SIMULATIONS * chain.program.num_actions, most_bounds=BOUNDS)
        if not score.excess:
            return Found(c, tuple(cuts), recompute, self.chain(c).score(cuts, recompute), True)
        raise PlanError(f"no plan fits into the devices' memory: the nearest, {c} with {len(recompute)} of {self.layers} layers "
                        f"recomputed, needs {score.peak_bytes / GIB:.3f} GiB on a device, which has "
                        f"{(score.peak_bytes - score.excess) / GIB:.3f} ({score.excess / GIB:.3f} too little); use more or larger "
                        f"devices, or a smaller train_batch_size")

    def _ways(self, c: Candidate) -> int:
        """To cut the layers."""
        return comb(self.layers - 1, c.P * c.segments - 1)

    # words ----------------------------------------------------------------------------------------------------------------

    def _reasons(self, every: List[Candidate], bounds: Dict[Candidate, Score], found: Dict[Candidate, Found],
                 best: Found) -> Dict[Tuple[int, int], str]:
        """(P, D) -> why it was not chosen."""
        reasons = {}
        of_layout: Dict[Tuple[int, int], List[Candidate]] = {}
        for c in every:
            of_layout.setdefault((c.P, c.D), []).append(c)
        for layout, mine in of_layout.items():
            if layout == (best.candidate.P, best.candidate.D):
                continue
            least = min(bounds[c] for c in mine)
            simulated = min((found[c].score for c in mine if c in found), default=None)
            if least.excess:
                reasons[layout] = f"needs at least {least.peak_bytes / GIB:.3g} GiB on a device, which has " \
                                  f"{self.most_memory / GIB:.3g}"
            elif not _below(least, best.score) and (simulated is None or simulated.excess):
                reasons[layout] = f"at least {self.worse(least, best.score)}"
            elif simulated is None:
                reasons[layout] = "not simulated: its bounds are no better than those of others"
            elif simulated.excess:
                reasons[layout] = f"lacks {simulated.excess / GIB:.3g} GiB on a device"
            else:
                reasons[layout] = self.worse(simulated, best.score)
        return reasons

    def worse(self, score: Score, best: Score) -> str:
        """How much worse a score is, in words."""
        more = score.value / best.value - 1 if best.value else 0.0
        return {"throughput": f"{more:.1%} slower", "memory": f"{more:.1%} more memory",
                "memory_efficiency": f"{1 - 1 / (1 + more):.1%} less memory efficiency"}[self.objective]


def _below(bound: Score, best: Score) -> bool:
    """Whether what is bound so could be better."""
    return (bound.excess, bound.value, bound.step_s) < (best.excess, best.value, best.step_s)


def _order(found: Found) -> Tuple:
    return found.score, found.candidate.zero_stage

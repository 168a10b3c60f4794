"""Cuts and recomputed layers that are best for the whole step, as the simulator sees it. The same on every rank.

Scores are ordered: first what fits into memory, then the objective. Bounds (:mod:`~ds_fold.plan.bounds`) say for a hundred
candidates in the time of one simulation how good each can be at most. Where there are few, all whose bound is below the best found
are simulated; otherwise a beam search moves cuts and recomputed layers by their bounds, and the best of it are simulated. Work is
limited by simulated actions and not by time, so that the answer depends on the files alone.
"""

from functools import cached_property
from itertools import combinations
from math import comb, inf
from typing import (
    Any,
    Collection,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Literal,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    get_args,
)

import numpy as np

from ..partition import partition_balanced, partition_uniform
from ..schedule.actions import Program
from .bounds import Bounds
from .costs import GIB, Cluster, Link, PlanError, Profile
from .result import Result
from .simulate import simulate

Objective = Literal["memory_efficiency", "throughput", "memory"]
OBJECTIVES = get_args(Objective)
#: chains with at most so many cuts are searched completely
COMPLETE = 500
#: simulated actions (0.003 ms each and step) in a search that is not complete
MOST_ACTIONS = 400_000
#: levels of memory that are tried when layers to recompute are chosen
LEVELS = 12
#: bounds in the same (0.05 ms each with 1,000 forwards and backwards), and in a round of its beam
MOST_BOUNDS, ROUND_BOUNDS = 80_000, 4_000
#: candidates that a round of the beam starts from, at least; neighbouring cuts that move together, at most
WIDTH, RUN = 8, 8

Cuts = Tuple[int, ...]
Candidate = Tuple[Cuts, FrozenSet[int]]


class Score(NamedTuple):
    """Smaller is better.

    Attributes:
        excess: bytes by which the rank that is most over its memory is over it.
        value: of the objective: s, bytes, or their product (1 / ME but for the samples of a step).
    """
    excess: float
    value: float
    step_s: float
    peak_bytes: float


def free_cluster(ranks: int) -> Cluster:
    """Communication that costs nothing, and memory without limit."""
    return Cluster(hosts=ranks, inter_host=Link(bytes_per_s=1e18))


class Chain:
    """A profile's layers under one program, whose cuts and recomputed layers are open.

    Args:
        program: of P pipeline ranks and v segments.
        profile, cluster: what layers and transfers take.
        objective: of :data:`OBJECTIVES`.
        D, zero_stage, options: as :func:`~ds_fold.plan.simulate.simulate` takes them.
    """

    def __init__(self, program: Program, profile: Profile, cluster: Cluster, objective: str, D: int = 1, zero_stage: int = 1,
                 **options: Any):
        self.program, self.profile, self.cluster, self.objective = program, profile, cluster, objective
        self.D, self.zero_stage, self.options = D, zero_stage, options
        self.limits = [cluster.memory_bytes(r, D) or inf for r in range(program.P)]
        self.simulated: Dict[Candidate, Score] = {}
        self.bounded: Dict[Candidate, Tuple[float, ...]] = {}
        self._levels: Dict[Cuts, List[FrozenSet[int]]] = {}

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.program, self.profile, self.cluster, self.D, self.zero_stage, **self.options)

    @property
    def chunks(self) -> int:
        return self.program.P * self.program.v

    def score(self, cuts: Sequence[int], recompute: FrozenSet[int]) -> Score:
        """What the simulator says of the step, remembered."""
        key = (tuple(cuts), recompute)
        if key not in self.simulated:
            result = self.simulate(cuts, recompute)
            step_s, peaks = result.step_s, np.array([max(held for _, held in result.memory(r)) for r in range(self.program.P)])
            excess, value = self._rate(step_s, peaks)
            self.simulated[key] = Score(float(excess), float(value), step_s, float(peaks.max()))
        return self.simulated[key]

    def simulate(self, cuts: Sequence[int], recompute: Collection[int], **more: Any) -> Result:
        costs = self.profile.costs(cuts, self.program.P, recompute)
        return simulate(self.program, costs, self.cluster, self.D, self.zero_stage, **self.options, **more)

    def _rate(self, step_s, peaks):
        """(excess, value); ranks are the last axis of ``peaks``."""
        peak = peaks.max(axis=-1)
        value = {"throughput": step_s, "memory": peak, "memory_efficiency": step_s * peak}[self.objective]
        return np.maximum(0.0, (peaks - np.array(self.limits)).max(axis=-1)), value

    def bound(self, candidates: Iterable[Candidate]) -> None:
        """Note in ``bounded`` for each (excess, value) that no simulation goes below, and what decides between equals: a longer
        step or a larger peak, and unevenness of the ranks."""
        new = [candidate for candidate in dict.fromkeys(candidates) if candidate not in self.bounded]
        if not new:
            return
        sets = list(dict.fromkeys(recompute for _, recompute in new))
        mask = np.zeros((len(sets), len(self.profile.layers)), dtype=bool)
        for row, recompute in zip(mask, sets):
            row[list(recompute)] = True
        place = {recompute: i for i, recompute in enumerate(sets)}
        step_s, peaks = self.bounds(np.array([cuts for cuts, _ in new]), mask[[place[recompute] for _, recompute in new]])
        excess, value = self._rate(step_s, peaks)
        uneven = step_s / step_s.min() + (peaks**2).sum(axis=1) / max((peaks**2).sum(axis=1).min(), 1e-30)
        self.bounded.update(zip(new, zip(excess.tolist(), value.tolist(), uneven.tolist())))

    def recompute_at(self, cuts: Cuts) -> List[FrozenSet[int]]:
        """Sets that bring every rank below levels of memory, from none to all layers that save anything.

        Within a rank, those layers come first that save most memory for their time, counted as often as their activations live at
        once: so the last virtual stage, whose backward follows at once, comes last.
        """
        if cuts not in self._levels:
            self._levels[cuts] = self._find_levels(cuts)
        return self._levels[cuts]

    def _find_levels(self, cuts: Cuts) -> List[FrozenSet[int]]:
        P, bounds = self.program.P, self.bounds
        saved, cost = bounds.kept - bounds.recomputed_kept, np.maximum(bounds.recomputed_s - bounds.backward_s, 1e-12)
        base = bounds.peaks(np.array([cuts]), np.zeros((1, len(saved)), dtype=bool))[0]
        ladders: List[List[Tuple[float, FrozenSet[int]]]] = []
        for r in range(P):
            most = bounds.most_live(r)
            order = sorted((-most[k] * saved[i] / cost[i], most[k], i) for k in range(self.program.v)
                           for i in range(cuts[k * P + r], cuts[k * P + r + 1]) if most[k] * saved[i] > 0)
            held, ladder, chosen = base[r], [(base[r], frozenset())], []
            for _, live, i in order:
                held, chosen = held - live * saved[i], [*chosen, i]
                ladder.append((held, frozenset(chosen)))
            ladders.append(ladder)
        high, low = (max(ladder[end][0] for ladder in ladders) for end in (0, -1))
        levels = [high + (low - high) * j / LEVELS for j in range(LEVELS + 1)]
        return list(dict.fromkeys(frozenset().union(*(_first_below(ladder, min(level, limit)) for ladder, limit
                                                      in zip(ladders, self.limits))) for level in levels))


def _first_below(ladder: List[Tuple[float, FrozenSet[int]]], level: float) -> FrozenSet[int]:
    return next((chosen for held, chosen in ladder if held <= level), ladder[-1][1])


# searches -----------------------------------------------------------------------------------------------------------------


def search(chain: Chain, cuts: Optional[Sequence[int]] = None, recompute: Optional[FrozenSet[int]] = None,
           most_actions: int = MOST_ACTIONS, complete: int = COMPLETE,
           most_bounds: int = MOST_BOUNDS) -> Tuple[Cuts, FrozenSet[int], Score]:
    """The best cuts, layers to recompute, or both; what is given stays.

    Args:
        most_actions, most_bounds: simulated actions and bounds, about, where there are more than ``complete`` candidates.
    """
    n, chunks = len(chain.profile.layers), chain.chunks
    given = None if cuts is None else tuple(cuts)
    if recompute is not None and (given is not None or comb(n - 1, chunks - 1) <= complete):
        every = [given] if given is not None else [(0, *inner, n) for inner in combinations(range(1, n), chunks - 1)]
        chain.bound((each, recompute) for each in every)
        best = _simulate_best(chain, [(each, recompute) for each in every], inf)
    else:
        best = _beam(chain, given, recompute, most_actions, most_bounds)
    return best[0], best[1], chain.score(*best)


def _beam(chain: Chain, cuts: Optional[Cuts], recompute: Optional[FrozenSet[int]], most_actions: int,
          most_bounds: int) -> Candidate:
    """Move by bounds from several starts, then simulate in the order of the bounds."""
    n = len(chain.profile.layers)
    sets = [frozenset(), frozenset(range(n))] if recompute is None else [recompute]
    pool = [(begin, chosen) for chosen in sets for begin in ([cuts] if cuts is not None else starts(chain, chosen))]
    chain.bound(pool)
    around: Dict[Candidate, List[Candidate]] = {}  # of those that were expanded
    seen = dict.fromkeys(pool)

    def expand(candidates: Iterable[Candidate]) -> int:
        """Look at the neighbours of the candidates. Returns how many are new to it."""
        fresh = [candidate for candidate in candidates if candidate not in around]
        for candidate in fresh:
            around[candidate] = _neighbours(chain, candidate, cuts is None, recompute is None)
        found = [other for candidate in fresh for other in around[candidate]]
        chain.bound(found)
        seen.update(dict.fromkeys(found))
        return len(fresh)

    # each start by itself, down to where no move helps, then the best of all together
    while len(seen) < most_bounds // 2 and expand(pool):
        pool = list(dict.fromkeys(min([candidate, *around[candidate]], key=chain.bounded.get) for candidate in pool))
    width = max(WIDTH, ROUND_BOUNDS * len(around) // max(1, sum(map(len, around.values()))))
    while len(seen) < most_bounds and expand(sorted(seen, key=chain.bounded.get)[:width]):
        pass
    left = max(WIDTH, most_actions // max(1, chain.program.num_actions))
    best = _simulate_best(chain, seen, left // 2)
    # where contention decides, the bounds do not: go on around what the simulator finds best
    left -= left // 2
    simulated = set()  # whose neighbours are, as far as their bounds allow
    while left > 0 and best not in simulated:
        before = len(chain.simulated)
        expand([best])
        simulated.add(best)
        again = _simulate_best(chain, around[best], left)
        left -= max(1, len(chain.simulated) - before)
        best = min(best, again, key=lambda candidate: chain.score(*candidate))
    return best


def _simulate_best(chain: Chain, candidates: Iterable[Candidate], most: float) -> Candidate:
    """Simulate in the order of the bounds until none below the best found is left, or so many are done."""
    best, score, done = None, None, 0
    for candidate in sorted(dict.fromkeys(candidates), key=chain.bounded.get):
        if score is not None and (chain.bounded[candidate][:2] >= score[:2] or done >= most):
            break
        done += candidate not in chain.simulated
        found = chain.score(*candidate)
        if score is None or found < score:
            best, score = candidate, found
    return best


def _neighbours(chain: Chain, candidate: Candidate, move_cuts: bool, move_layers: bool) -> List[Candidate]:
    cuts, chosen = candidate
    found = [(other, chosen) for other in _moves(cuts, chain.program.P)] if move_cuts else []
    if move_layers:
        found += [(cuts, level) for level in chain.recompute_at(cuts)]
        found += [(cuts, chosen ^ {i}) for i in range(len(chain.profile.layers))]
    return found


def starts(chain: Chain, recompute: FrozenSet[int]) -> List[Cuts]:
    """Chunks of equal length, of equal time, of equal memory, and between the last two."""
    n, chunks, bounds = len(chain.profile.layers), chain.chunks, chain.bounds
    mask = np.isin(np.arange(n), list(recompute))
    seconds = bounds.forward_s + np.where(mask, bounds.recomputed_s, bounds.backward_s)
    kept, states = np.where(mask, bounds.recomputed_kept, bounds.kept), bounds.parameters + bounds.trainable
    live = np.mean([sum(bounds.most_live(r)) for r in range(chain.program.P)])
    weights = [seconds, states, kept]
    # what a rank holds of a layer, and how that and time are traded
    held = live * kept + 2 * states
    shares = [w / total for w in (seconds, held) if (total := w.sum()) > 0]
    if len(shares) == 2:
        weights += [(1 - j / 4) * shares[0] + j / 4 * shares[1] for j in range(1, 5)]
    cuts = [partition_uniform(n, chunks)]
    for weight in weights:
        unit = max(weight.max(), 1e-30) / 1e6  # the weights must be whole numbers
        cuts.append(partition_balanced([round(w / unit) for w in weight.tolist()], chunks))
    return list(dict.fromkeys(map(tuple, cuts)))


def _moves(cuts: Cuts, P: int) -> Iterator[Cuts]:
    """Each cut by one to three layers, and by one layer runs of neighbouring cuts, or all between two chunks of a rank: its layers
    stay as many, and the first segment, whose communication little hides, becomes thinner on it."""
    last = len(cuts) - 1
    for step in (1, -1, 2, -2, 3, -3):
        for first in range(1, last):
            stops = range(first + 1, min(last, first + RUN) + 1 if abs(step) == 1 else first + 2)
            if abs(step) == 1:
                stops = sorted({*stops, *range(first + P, last + 1, P)})
            for stop in stops:
                if cuts[first - 1] < cuts[first] + step and cuts[stop - 1] + step < cuts[stop]:
                    yield (*cuts[:first], *(cut + step for cut in cuts[first:stop]), *cuts[stop:])


def check_memory(chain: Chain, cuts: Cuts, recompute: FrozenSet[int]) -> None:
    """Raise PlanError where a rank has too little memory."""
    if not chain.score(cuts, recompute).excess:
        return
    result = chain.simulate(cuts, recompute)
    for r, limit in enumerate(chain.limits):
        peak = max(held for _, held in result.memory(r))
        if peak > limit:
            raise PlanError(f"the best partition still needs {peak / GIB:.4g} GiB on pipeline rank {r}, which has "
                            f"{limit / GIB:.4g} ({(peak - limit) / GIB:.4g} too little) with {len(recompute)} of "
                            f"{len(chain.profile.layers)} layers recomputed; use more pipeline ranks, smaller micro-batches, "
                            f"ds_fold.recompute \"auto\" or ZeRO")

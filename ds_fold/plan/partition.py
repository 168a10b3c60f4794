"""Cuts and recomputed layers that are best for the whole step, as the simulator sees it. Pure Python, and the same on every rank.

Scores are ordered: first what fits into memory, then the objective. A bound that costs a hundredth of a simulation says how good
cuts can be at most; short chains are searched completely below it, long ones from balanced cuts by moving cuts, first by the bound
alone, then by simulation. Work is limited by simulated actions and not by time, so that every rank finds the same.
"""

from itertools import combinations
from math import comb, inf
from typing import Any, Collection, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..partition import partition_balanced, partition_uniform
from ..schedule.actions import B, F, Program
from .costs import GIB, Cluster, Link, PlanError, Profile
from .result import Record, Result
from .simulate import simulate

OBJECTIVES = ("memory_efficiency", "throughput", "memory")
#: chains with at most so many cuts are searched completely
COMPLETE = 500
#: simulated actions (0.003 ms each and step) in a search by moves, for one set of recomputed layers
MOST_ACTIONS = 400_000
#: levels of memory that are tried when layers to recompute are chosen
LEVELS = 12

Cuts = Tuple[int, ...]


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
        self.simulated: Dict[Tuple[Cuts, FrozenSet[int]], Score] = {}
        self._live = [_live_activations(actions, program.v) for actions in program.ranks]
        self._sums: Dict[FrozenSet[int], List[List[float]]] = {}
        self._static = self._static_bytes()
        # seconds on the wire of a trainable byte
        link = cluster.intra_host if 1 < D <= cluster.ranks_per_host else cluster.inter_host
        once = cluster.exchange(1.0, D).bytes / link.rate
        reduced = (2 if zero_stage == 0 or options.get("stock_optimizer") else 1) * once
        self._wire = reduced + (once if zero_stage else 0.0)
        ops = [a.op for a in program.ranks[0]]
        reduce_hidden = "R" in ops and ops.index("R") < ops.index("RT")
        gather_hidden = ops.index("WG") < ops.index(F)
        self._exposed = (0.0 if reduce_hidden else reduced) + (once if zero_stage and not gather_hidden else 0.0)

    @property
    def chunks(self) -> int:
        return self.program.P * self.program.v

    # exact ----------------------------------------------------------------------------------------------------------------

    def score(self, cuts: Sequence[int], recompute: FrozenSet[int]) -> Score:
        """What the simulator says of the step, remembered."""
        key = (tuple(cuts), recompute)
        if key not in self.simulated:
            result = self.simulate(cuts, recompute)
            peaks = [max(held for _, held in result.memory(r)) for r in range(self.program.P)]
            self.simulated[key] = self._score(result.step_s, peaks)
        return self.simulated[key]

    def simulate(self, cuts: Sequence[int], recompute: Collection[int], **more: Any) -> Result:
        costs = self.profile.costs(cuts, self.program.P, recompute)
        return simulate(self.program, costs, self.cluster, self.D, self.zero_stage, **self.options, **more)

    def _score(self, step_s: float, peaks: List[float]) -> Score:
        peak = max(peaks)
        value = {"throughput": step_s, "memory": peak, "memory_efficiency": step_s * peak}[self.objective]
        return Score(max(0.0, *(held - limit for held, limit in zip(peaks, self.limits))), value, step_s, peak)

    # bounds ---------------------------------------------------------------------------------------------------------------

    def bound(self, cuts: Sequence[int], recompute: FrozenSet[int]) -> Score:
        """No simulation of these cuts scores less.

        Rank r computes for all micro-batches what it holds, after the first one has come through the chunks before it and before
        the last one has gone back through them; its transfers share one wire, and those that nothing hides come on top.
        """
        P, M = self.program.P, self.program.M
        forward, backward, kept, parameters, trainable = self._chunk_sums(cuts, recompute)
        step_s, peaks, before = 0.0, [], 0.0
        for r in range(P):
            compute_s = M * (sum(forward[r::P]) + sum(backward[r::P])) + before
            before += forward[r] + backward[r]
            mine = sum(trainable[r::P])
            step_s = max(step_s, compute_s + mine * self._exposed, mine * self._wire)
            peaks.append(self._static_of(r, parameters, trainable) + self._activations(r, kept))
        return self._score(step_s, peaks)

    def _chunk_sums(self, cuts: Sequence[int], recompute: FrozenSet[int]) -> List[List[float]]:
        """By virtual stage: forward_s, backward_s, activation, parameter and trainable bytes."""
        if recompute not in self._sums:
            n = len(self.profile.layers)
            single = self.profile.costs(range(n + 1), 1, recompute)
            overhead = self.profile.overhead_s
            # of all layers before each, and the head by itself: it belongs to the last chunk however that is cut
            columns = (single.forward_s, single.backward_s, single.activation_bytes, single.parameter_bytes, single.trainable_bytes)
            self._sums[recompute] = [_running(column) for column in columns]
            self._overhead = (overhead, overhead, 0.0, 0.0, 0.0)
        spans = list(zip(cuts, cuts[1:]))
        return [[column[b] - column[a] + more for a, b in spans] for column, more in zip(self._sums[recompute], self._overhead)]

    def _activations(self, r: int, kept: List[float]) -> float:
        chunk = kept[r::self.program.P]
        return max(sum(count * size for count, size in zip(counts, chunk)) for counts in self._live[r])

    def _static_bytes(self) -> Tuple[float, float]:
        """Bytes that are always there, per byte of parameters and of trainable parameters: those of a rank that does nothing."""
        found = []
        for parameters, trainable in ((1.0, 0.0), (0.0, 1.0)):
            costs = self.profile.costs((0, len(self.profile.layers)), 1)._replace(
                parameter_bytes=[parameters], trainable_bytes=[trainable], tied_bytes=0.0)
            nothing = Result(Program(1, 1, 1, [[]]), costs, self.D, self.zero_stage, [1.0], [Record([], [], 0.0, {}, [])],
                             *filter(None, [self.options.get("states")]))
            found.append(next(iter(nothing.memory(0)))[1])
        return found[0], found[1]

    def _static_of(self, r: int, parameters: List[float], trainable: List[float]) -> float:
        P, tied = self.program.P, self.profile.tied_bytes if self.program.P == 1 else 0.0
        return (sum(parameters[r::P]) - tied) * self._static[0] + (sum(trainable[r::P]) - tied) * self._static[1]

    # layers to recompute --------------------------------------------------------------------------------------------------

    def recompute_at(self, cuts: Sequence[int], base: List[float]) -> Iterator[FrozenSet[int]]:
        """Sets that bring every rank below levels of memory, from none to all layers that save anything.

        Within a rank, those layers come first that save most memory for their time, counted as often as their activations live at
        once: so the last segment, whose backward follows at once, comes last.

        Args:
            cuts: of the layers.
            base: bytes of each rank besides its activations.
        """
        P, n = self.program.P, len(self.profile.layers)
        every = self.profile.costs(range(n + 1), 1, range(n))
        plain = self.profile.costs(range(n + 1), 1)
        ladders: List[List[Tuple[float, FrozenSet[int]]]] = []
        for r in range(P):
            most = [max(counts[k] for counts in self._live[r]) for k in range(self.program.v)]
            order = []
            for k in range(self.program.v):
                for i in range(cuts[k * P + r], cuts[k * P + r + 1]):
                    saved = most[k] * (plain.activation_bytes[i] - every.activation_bytes[i])
                    if saved > 0:
                        order.append((-saved / max(every.backward_s[i] - plain.backward_s[i], 1e-12), k, i))
            kept = self._chunk_sums(cuts, frozenset())[2]
            ladder, chosen = [(base[r] + self._activations(r, kept), frozenset())], []
            for _, k, i in sorted(order):
                chosen.append(i)
                kept[k * P + r] -= plain.activation_bytes[i] - every.activation_bytes[i]
                ladder.append((base[r] + self._activations(r, kept), frozenset(chosen)))
            ladders.append(ladder)
        high, low = (max(ladder[end][0] for ladder in ladders) for end in (0, -1))
        for level in sorted({high + (low - high) * j / LEVELS for j in range(LEVELS + 1)}, reverse=True):
            yield frozenset().union(*(_first_below(ladder, min(level, limit)) for ladder, limit in zip(ladders, self.limits)))

    def base_bytes(self, cuts: Sequence[int]) -> List[float]:
        """What each rank holds at its peak besides its activations: parameters, states and messages."""
        result = self.simulate(cuts, ())
        kept = self._chunk_sums(cuts, frozenset())[2]
        return [max(held for _, held in result.memory(r)) - self._activations(r, kept) for r in range(self.program.P)]


def _running(values: Sequence[float]) -> List[float]:
    """Entry i: the sum of the first i values."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _first_below(ladder: List[Tuple[float, FrozenSet[int]]], level: float) -> FrozenSet[int]:
    return next((chosen for held, chosen in ladder if held <= level), ladder[-1][1])


def _live_activations(actions, v: int) -> List[Tuple[int, ...]]:
    """How many micro-batches of each segment live at once: all maxima that no other covers."""
    counts, maxima = [0] * v, set()
    for op, k, _ in actions:
        if op == F:
            counts[k] += 1
            maxima.add(tuple(counts))
        elif op == B:
            counts[k] -= 1
    ordered = sorted(maxima, key=sum, reverse=True)
    kept: List[Tuple[int, ...]] = []
    for counts in ordered:
        if not any(all(a <= b for a, b in zip(counts, other)) for other in kept):
            kept.append(counts)
    return kept


# searches -----------------------------------------------------------------------------------------------------------------


def search(chain: Chain, cuts: Optional[Sequence[int]] = None, recompute: Optional[FrozenSet[int]] = None,
           most_actions: int = MOST_ACTIONS) -> Tuple[Cuts, FrozenSet[int], Score]:
    """The best cuts, layers to recompute, or both; what is given stays.

    Raises:
        PlanError: nothing that was found fits into memory; says by how much.
    """
    if cuts is not None and recompute is not None:
        found = tuple(cuts), recompute
    elif cuts is not None:
        found = tuple(cuts), best_recompute(chain, cuts)
    elif recompute is not None:
        found = best_cuts(chain, recompute, (), most_actions), recompute
    else:
        # cuts for each extreme, the layers that suit them, and cuts again for those
        candidates = []
        for extreme in (frozenset(), frozenset(range(len(chain.profile.layers)))):
            begin = climb(chain, extreme, starts(chain, extreme))[0]
            chosen = best_recompute(chain, begin)
            candidates += [(begin, chosen), (best_cuts(chain, chosen, (begin, ), most_actions), chosen)]
        found = min(candidates, key=lambda candidate: chain.score(*candidate))
        again = found[0], best_recompute(chain, found[0])
        found = min(found, again, key=lambda candidate: chain.score(*candidate))
    score = chain.score(*found)
    return found[0], found[1], score


def check_memory(chain: Chain, cuts: Cuts, recompute: FrozenSet[int]) -> None:
    """Raise PlanError where a rank has too little memory."""
    result = chain.simulate(cuts, recompute)
    for r, limit in enumerate(chain.limits):
        peak = max(held for _, held in result.memory(r))
        if peak > limit:
            raise PlanError(f"the best partition still needs {peak / GIB:.4g} GiB on pipeline rank {r}, which has "
                            f"{limit / GIB:.4g} ({(peak - limit) / GIB:.4g} too little) with {len(recompute)} of "
                            f"{len(chain.profile.layers)} layers recomputed; use more pipeline ranks, smaller micro-batches, "
                            f"ds_fold.recompute \"auto\" or ZeRO")


def best_recompute(chain: Chain, cuts: Sequence[int]) -> FrozenSet[int]:
    """The set of layers to recompute that scores best under these cuts."""
    levels = chain.recompute_at(cuts, chain.base_bytes(cuts))
    return min(dict.fromkeys(levels), key=lambda chosen: chain.score(cuts, chosen))


def best_cuts(chain: Chain, recompute: FrozenSet[int], begins: Sequence[Cuts], most_actions: int = MOST_ACTIONS) -> Cuts:
    """The cuts that score best with these layers recomputed; ``begins`` are tried besides balanced ones."""
    n, chunks = len(chain.profile.layers), chain.chunks
    if comb(n - 1, chunks - 1) <= COMPLETE:
        every = [(0, *inner, n) for inner in combinations(range(1, n), chunks - 1)]
        bounds = sorted((chain.bound(cuts, recompute)[:2], cuts) for cuts in every)
        best, score = None, None
        for bound, cuts in bounds:
            if score is not None and bound >= score[:2]:
                break
            found = chain.score(cuts, recompute)
            if score is None or found < score:
                best, score = cuts, found
        return best
    return _search_by_moves(chain, recompute, begins, most_actions)


def _search_by_moves(chain: Chain, recompute: FrozenSet[int], begins: Sequence[Cuts], most_actions: int) -> Cuts:
    candidates = [*begins, *climb(chain, recompute, [*begins, *starts(chain, recompute)])]
    left = most_actions // max(1, chain.program.num_actions)

    def spent() -> int:
        return len(chain.simulated) - before

    before = len(chain.simulated)
    best = min(candidates, key=lambda cuts: chain.score(cuts, recompute))
    score, moved = chain.score(best, recompute), True
    while moved and spent() < left:
        moved = False
        neighbours = sorted((chain.bound(cuts, recompute)[:2], cuts) for cuts in _moves(best))
        for bound, cuts in neighbours:
            if bound >= score[:2] or spent() >= left:
                break
            found = chain.score(cuts, recompute)
            if found < score:
                best, score, moved = cuts, found, True
                break
    return best


def climb(chain: Chain, recompute: FrozenSet[int], begins: Sequence[Cuts]) -> List[Cuts]:
    """Where moves that lower the bound lead from each of ``begins``; best first, each once."""
    ends = {}
    for cuts in begins:
        score, moved = _spread(chain, cuts, recompute), True
        while moved:
            moved = False
            for other in _moves(cuts):
                found = _spread(chain, other, recompute)
                if found < score:
                    cuts, score, moved = other, found, True
        ends[cuts] = score
    return sorted(ends, key=ends.get)


def _spread(chain: Chain, cuts: Cuts, recompute: FrozenSet[int]) -> Tuple[float, ...]:
    """The bound, and on a plateau of it the evenness of the chunks."""
    forward, backward = chain._chunk_sums(cuts, recompute)[:2]
    bound = chain.bound(cuts, recompute)
    return bound.excess, bound.value, sum((f + b)**2 for f, b in zip(forward, backward))


def starts(chain: Chain, recompute: FrozenSet[int]) -> List[Cuts]:
    """Chunks of equal length, of equal time, and of equal memory."""
    n, chunks = len(chain.profile.layers), chain.chunks
    each = chain.profile.costs(range(n + 1), 1, recompute)
    seconds = [f + b for f, b in zip(each.forward_s, each.backward_s)]
    per_parameter, per_trainable = chain._static
    held = [chain.program.M * kept + per_parameter * p + per_trainable * t
            for kept, p, t in zip(each.activation_bytes, each.parameter_bytes, each.trainable_bytes)]
    cuts = [partition_uniform(n, chunks)]
    for weights in (seconds, held):
        unit = max(max(weights), 1e-30) / 1e6  # the weights must be whole numbers
        cuts.append(partition_balanced([round(weight / unit) for weight in weights], chunks))
    return list(dict.fromkeys(map(tuple, cuts)))


def _moves(cuts: Cuts) -> Iterator[Cuts]:
    """Each cut by one or two layers, and runs of neighbouring cuts by one layer."""
    last = len(cuts) - 1
    for step in (1, -1, 2, -2):
        for first in range(1, last):
            for stop in range(first + 1, last + 1 if abs(step) == 1 else first + 2):
                if cuts[first - 1] < cuts[first] + step and cuts[stop - 1] + step < cuts[stop]:
                    yield (*cuts[:first], *(cut + step for cut in cuts[first:stop]), *cuts[stop:])

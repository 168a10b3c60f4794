"""What a plan takes at least, whatever its cuts and recomputed layers: closed forms that need no program. Pure Python.

:mod:`~ds_fold.plan.bounds` is for given cuts and replays a program; this leaves most candidates out before either exists. The
slowest of P ranks takes at least their average, and the fullest holds at least any weighted average of what the ranks hold.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from ..schedule import Overlap
from .costs import Cluster, Profile
from .memory import States
from .space import Candidate, live


class Exchange(NamedTuple):
    """How a candidate's replicas exchange gradients and parameters.

    Attributes:
        states: bytes per byte of trainable parameters.
        reductions: bytes that are reduced per byte of trainable parameters; twice that for an all-reduce.
        reduce_hidden, gathers, gather_hidden: as the program has them.
    """
    states: States
    reductions: float
    reduce_hidden: bool
    gathers: bool
    gather_hidden: bool

    @classmethod
    def of(cls, options: Dict[str, Any], overlap: Overlap) -> "Exchange":
        """Of ``simulate``'s options and a program's overlap."""
        whole = options["zero_stage"] == 0 or options["stock_optimizer"]
        return cls(options["states"], (2 if whole else 1) * options["reduced"], overlap.reduce, options["zero_stage"] > 0,
                   overlap.gather)


class ClosedForms:
    """Of candidates for one batch on one cluster.

    Args:
        cluster: its ranks and links.
        profiles: micro-batch size -> profile, see :meth:`~ds_fold.plan.planner.Planner.profile`.
    """

    def __init__(self, cluster: Cluster, profiles: Callable[[int], Profile]):
        self.cluster, self.profiles = cluster, profiles
        self._layers: Dict[Tuple, List[Tuple[float, ...]]] = {}

    def __call__(self, c: Candidate, exchange: Exchange) -> Tuple[float, float]:
        """(step in s, bytes of the fullest rank) that no simulation goes below."""
        return self._fastest(c, exchange), self._emptiest(c, exchange)

    def _each(self, c: Candidate) -> List[Tuple[float, float, float, float]]:
        """By layer, (seconds, bytes kept, of parameters, trainable), at the least that ``c.recompute`` allows."""
        key = (c.micro_batch_size, c.recompute)
        if key not in self._layers:
            profile = self.profiles(c.micro_batch_size)
            found = []
            for i, layer in enumerate(profile.layers):
                forms = [layer.when_recomputed(profile.layers[i - 1].boundary_bytes if i else profile.input_bytes)]
                forms = [layer] if c.recompute == "none" else forms if c.recompute == "all" else [layer, *forms]
                found.append((layer.forward_s + min(form.backward_s for form in forms),
                              min(form.activation_bytes for form in forms), layer.parameter_bytes, layer.trainable_bytes))
            self._layers[key] = found
        return self._layers[key]

    def _fastest(self, c: Candidate, exchange: Exchange) -> float:
        """Busy ranks, the first micro-batch's way down to each and the last one's way up, and communication that nothing hides.

        With one segment, M L_r + sum(L_s, s < r) <= X for the times L of all ranks adds up to X >= T / (1 - (1 - 1/M)^P), T being
        one micro-batch's time through the model.
        """
        profile, each = self.profiles(c.micro_batch_size), self._each(c)
        P, M, own = c.P, c.M, profile.overhead_s
        seconds = [layer[0] for layer in each]
        wire_s = self._wire_s(c.D, sum(layer[3] for layer in each)) / P
        once = sum(seconds) + profile.head.forward_s + profile.head.backward_s
        messages = 0 if P == 1 else 4 * c.segments * P - 4
        busy = M * (once + (2 * c.segments * P + messages) * own) / P
        # the chunks before rank r's first hold at least r layers
        ways = sum((P - 1 - i) * s for i, s in enumerate(seconds[:P - 1])) / P
        fewest = -(-len(each) // P)
        slowest = max(busy + ways, M * sum(sorted(seconds)[:fewest]))
        if c.segments == 1:
            slowest = max(slowest, once / (1 - (1 - 1 / M)**P))
        if not exchange.reduce_hidden:
            slowest = max(slowest, busy + exchange.reductions * wire_s)
        step_s = profile.step_s_per_byte * sum(layer[3] for layer in each) / (c.D if c.zero_stage else 1) / P
        gather_s = wire_s if exchange.gathers and not exchange.gather_hidden else 0.0
        step = slowest + 2 * self.cluster.agreement_s(P * c.D) + step_s + gather_s
        return max(step, (exchange.reductions + exchange.gathers) * wire_s)

    def _wire_s(self, D: int, size: float) -> float:
        link = self.cluster.intra_host if 1 < D <= self.cluster.ranks_per_host else self.cluster.inter_host
        return self.cluster.exchange(size, D).bytes / link.rate

    def _emptiest(self, c: Candidate, exchange: Exchange) -> float:
        """For any weights y_r of the ranks that add up to 1, the fullest rank holds at least the sum over all layers of what a
        layer weighs where it weighs least: y_r (parameters + states + live micro-batches x activations), at each rank's first
        backward. The same with equal weights when a reduction begins or ends."""
        profile, each, counts = self.profiles(c.micro_batch_size), self._each(c), live(c)
        s, v = exchange.states, c.segments
        first = s.optimizer + (s.gradients if s.lifetime == "always" else 0.0)
        begun = s.gradients if s.lifetime == "reduction" else 0.0  # of the last segment, more
        after = s.optimizer + s.reduced + (s.gradients if s.lifetime != "reduction" else 0.0)
        if s.lifetime == "reduction":  # of the largest segment
            after = max(after, s.optimizer + max(s.gradients, s.reducing) / v)
        tied = profile.tied_bytes if c.P == 1 else 0.0
        static = [p + first * t for _, _, p, t in each]
        kept = [layer[1] for layer in each]
        mean, mean_kept = sum(static) / len(each), sum(kept) / len(each)
        weights = [1 / max(mean + min(mine) * mean_kept, 1e-30) for mine in counts]
        total = sum(weights)
        places = {(weight / total, n, begun * (k == v - 1)) for weight, mine in zip(weights, counts) for k, n in enumerate(mine)}
        unique: Dict[Tuple[float, float, float], int] = {}
        for fixed, (_, a, _, t) in zip(static, each):
            unique[fixed, a, t] = unique.get((fixed, a, t), 0) + 1
        fullest = sum(times * min(y * (fixed + g * t + n * a) for y, n, g in places) for (fixed, a, t), times in unique.items())
        fullest += weights[-1] / total * counts[-1][-1] * profile.head.activation_bytes
        at_end = sum(p + after * t for _, _, p, t in each) / c.P
        return max(fullest - tied * (1 + first), at_end - tied * (1 + after))

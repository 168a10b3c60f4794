"""How good cuts and recomputed layers can be at most, for many candidates at once: one replay of the program on vectors.

Peaks of memory depend on the order of a rank's actions alone, so they are exact. The step is the one of the simulator, but every
transfer has its link to itself and leaves as soon as it is sent: all that contention and late receives could do is delay it.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ..schedule import actions as op
from .costs import Cluster, Costs, Profile
from .memory import States, held

_REPLAYED = frozenset((op.F, op.B, op.SEND_ACT, op.SEND_GRAD, op.WAIT_RECV_ACT, op.WAIT_RECV_GRAD, op.REDUCE, op.WAIT_REDUCE,
                       op.REDUCE_TIED, op.STEP, op.STEP_SEGMENT, op.GATHER, op.WAIT_GATHER))


class Chunks(NamedTuple):
    """Per virtual stage (first axis) and candidate (second axis): what :class:`~ds_fold.plan.costs.Costs` has of each chunk."""
    forward_s: np.ndarray
    backward_s: np.ndarray
    boundary_bytes: np.ndarray
    activation_bytes: np.ndarray
    parameter_bytes: np.ndarray
    trainable_bytes: np.ndarray
    recompute_bytes: np.ndarray


class Bounds:
    """Of one program and profile.

    Args:
        program, profile, cluster, D, zero_stage, options: as :func:`~ds_fold.plan.simulate.simulate` takes them.
    """

    def __init__(self, program: op.Program, profile: Profile, cluster: Cluster, D: int, zero_stage: int,
                 stock_optimizer: bool = False, by_layer: bool = False, data_parallel: bool = True,
                 states: Optional[States] = None, priority: bool = False, reduced: float = 1.0):
        self.program, self.profile, self.cluster, self.D, self.zero_stage = program, profile, cluster, D, zero_stage
        self.by_layer, self.reduced, n = by_layer, reduced, len(profile.layers)
        plain, every = profile.costs(range(n + 1), 1), profile.costs(range(n + 1), 1, range(n))
        #: by layer, the head apart
        head = profile.head
        self.forward_s = np.array([layer.forward_s for layer in profile.layers])
        self.backward_s = np.array([layer.backward_s for layer in profile.layers])
        self.kept = np.array([layer.activation_bytes for layer in profile.layers])
        self.recomputed_s = np.array(every.backward_s) - np.eye(1, n, n - 1)[0] * head.backward_s
        self.recomputed_kept = np.array(every.activation_bytes) - np.eye(1, n, n - 1)[0] * head.activation_bytes
        self.boundary, self.parameters, self.trainable = (np.array(column) for column in (
            plain.boundary_bytes, plain.parameter_bytes, plain.trainable_bytes))
        # a transfer of S bytes among replicas: seconds a byte on the wire, then a delay of fixed_s + S per_byte_s
        one, two = cluster.exchange(1.0, D), cluster.exchange(2.0, D)
        shared = min(D, cluster.ranks_per_host)
        local = 1 < D <= cluster.ranks_per_host
        on_card = one.bytes / (shared if shared < D else 1)
        moves = float(data_parallel and D > 1)
        self.wire = moves * on_card / (cluster.intra_host.rate if local else cluster.inter_host.rate / shared)
        self.per_byte_s = moves * (two.delay_s - one.delay_s)
        self.fixed_s = moves * (2 * one.delay_s - two.delay_s)
        self.times = 2 if zero_stage == 0 or stock_optimizer else 1
        self._forms = self._memory_forms(states)
        self._replayed = self._order()

    def __call__(self, cuts: np.ndarray, recompute: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Lower bounds of the step in s, and peak bytes of each rank (last axis), per candidate.

        Args:
            cuts: candidates x (v*P + 1).
            recompute: candidates x layers, bool.
        """
        chunks, backward = self._chunks(cuts, recompute)
        return self._step(chunks, cuts, backward), self._peaks(chunks)

    def peaks(self, cuts: np.ndarray, recompute: np.ndarray) -> np.ndarray:
        """The second of them alone."""
        return self._peaks(self._chunks(cuts, recompute)[0])

    def most_live(self, r: int) -> List[float]:
        """By segment, how many micro-batches' activations rank r holds at most."""
        S = self.program.P * self.program.v
        return self._forms[r][:, S + r:2 * S:self.program.P].max(axis=0).tolist()

    def _chunks(self, cuts: np.ndarray, recompute: np.ndarray) -> Tuple[Chunks, np.ndarray]:
        """The chunks, and per candidate the running sum of the layers' backwards."""
        kept = _running(np.where(recompute, self.recomputed_kept, self.kept))
        backward = _running(np.where(recompute, self.recomputed_s, self.backward_s))
        rows = np.arange(len(cuts))[:, None]
        first, last = cuts[:, :-1], cuts[:, 1:]

        def sums(running):
            of = running[rows, cuts] if running.ndim == 2 else running[cuts]
            return np.ascontiguousarray((of[:, 1:] - of[:, :-1]).T)

        # most of what lives while a chunk recomputes: what is still kept before a layer, and the whole of it
        n = kept.shape[1] - 1
        whole = (kept[:, :-1] + self.kept).ravel()
        most = np.maximum.reduceat(whole, (rows * n + first).ravel()).reshape(first.shape)
        head, overhead = self.profile.head, self.profile.overhead_s
        chunks = Chunks(sums(_running(self.forward_s)) + overhead, sums(backward) + overhead,
                        np.ascontiguousarray(self.boundary[last - 1].T), sums(kept), sums(_running(self.parameters)),
                        sums(_running(self.trainable)), np.ascontiguousarray((most - kept[rows, last]).T))
        chunks.forward_s[-1] += head.forward_s
        chunks.backward_s[-1] += head.backward_s
        chunks.activation_bytes[-1] += head.activation_bytes
        return chunks, backward

    # memory ---------------------------------------------------------------------------------------------------------------

    def _memory_forms(self, states: Optional[States]) -> List[np.ndarray]:
        """Per rank, coefficients of what it holds at its fullest moments, linear in its chunks' five sizes and the tied weights."""
        P, S = self.program.P, self.program.P * self.program.v
        unit = np.eye(5 * S + 1)
        column = [list(unit[i * S:(i + 1) * S]) for i in range(5)]
        costs = Costs(P, [0.0] * S, [0.0] * S, column[0], column[1], column[2], column[3], [], unit[5 * S],
                      optimizer_bytes_per_byte=self.profile.optimizer_bytes_per_byte, recompute_bytes=column[4])
        states = states or States.usual(costs.optimizer_bytes_per_byte, self.D, self.zero_stage, self.program.shard_params)
        forms = []
        for r, actions in enumerate(self.program.ranks):
            never = [0.0] * len(actions)
            moments = np.array([now.copy() for _, now in held(costs, states, r, actions, never, never)])
            own = np.flatnonzero(moments.any(axis=0))
            moments = np.unique(moments[:, own], axis=0)
            # only those that no other covers, whatever the sizes: all add to them, but for what recomputing and tied weights do
            left = np.concatenate((moments, -moments[:, own >= 4 * S]), axis=1)[np.argsort(-moments.sum(axis=1), kind="stable")]
            fullest: List[np.ndarray] = []
            while len(left):
                fullest.append(left[0, :len(own)])
                left = left[(left > left[0]).any(axis=1)]
            form = np.zeros((len(fullest), 5 * S + 1))
            form[:, own] = fullest
            forms.append(form)
        return forms

    def _peaks(self, chunks: Chunks) -> np.ndarray:
        sizes = np.concatenate((chunks.boundary_bytes, chunks.activation_bytes, chunks.parameter_bytes, chunks.trainable_bytes,
                                chunks.recompute_bytes, np.full((1, chunks.boundary_bytes.shape[1]), self.profile.tied_bytes)))
        return np.stack([(form @ sizes).max(axis=0) for form in self._forms], axis=1)

    # time -----------------------------------------------------------------------------------------------------------------

    def _order(self) -> List[Tuple[str, int, int]]:
        """(op, rank, segment) of all ranks in an order in which nothing waits for what comes later."""
        P, ranks = self.program.P, self.program.ranks
        at, found = [0] * P, []
        sent: Dict[Tuple[int, str], int] = {}
        met = {op.REDUCE_TIED: 0, op.STEP: 0}
        arrived = [set() for _ in range(P)]
        peer = {op.WAIT_RECV_ACT: (op.SEND_ACT, -1), op.WAIT_RECV_GRAD: (op.SEND_GRAD, 1)}
        moved = True
        while moved:
            moved = False
            for r, actions in enumerate(ranks):
                while at[r] < len(actions):
                    kind, k, _ = actions[at[r]]
                    if kind in peer:
                        source, step = peer[kind]
                        channel = ((r + step) % P, source)
                        if not sent.get(channel):
                            break
                        sent[channel] -= 1
                    elif kind in (op.SEND_ACT, op.SEND_GRAD):
                        sent[r, kind] = sent.get((r, kind), 0) + 1
                    elif kind in met:
                        if kind not in arrived[r]:
                            arrived[r].add(kind)
                            met[kind] += 1
                            moved = True
                        if met[kind] < P:
                            break
                    if kind in _REPLAYED:
                        found.append((kind, r, k))
                    at[r] += 1
                    moved = True
        return found

    def _step(self, chunks: Chunks, cuts: np.ndarray, backward: np.ndarray) -> np.ndarray:
        P, profile, overhead = self.program.P, self.profile, self.profile.overhead_s
        count, cluster = len(cuts), self.cluster
        links = {}
        for r in range(P if P > 1 else 0):
            for step in (1, -1):
                same = cluster.host(r, self.D) == cluster.host((r + step) % P, self.D)
                link = cluster.intra_host if same else cluster.inter_host
                shared = 1 if same else min(self.D, cluster.ranks_per_host)
                links[r, step] = shared / link.rate, link.latency_s
        clock = np.zeros((P, count))
        wire, delay = self._transfer(self.reduced * chunks.trainable_bytes)
        gathered_bytes = chunks.trainable_bytes.copy()
        if self.program.shard_params:
            gathered_bytes[[0, -1]] -= profile.tied_bytes
        gather_wire, gather_delay = self._transfer(gathered_bytes)
        step_s = profile.step_s_per_byte * chunks.trainable_bytes / (self.D if self.zero_stage else 1)
        rank_step_s = [step_s[r::P].sum(axis=0) for r in range(P)]
        agreement_s = cluster.agreement_s(P * self.D)
        # gathers of the step before: they were launched when their rank had stepped, and the slowest of all began this step
        gathered: Dict[Tuple[int, int], np.ndarray] = {}
        # (rank, segment) -> when its latest gather has left the wire, and by rank the latest reduction and gather; what is left out
        # of a wire's load leaves a bound a bound
        moved: Dict[Tuple[int, int], np.ndarray] = {}
        reductions, gathers = np.zeros((P, count)), np.zeros((P, count))
        if self.zero_stage:
            late_s = [rank_step_s[r] - sum(step_s[a.segment * P + r] for a in actions if a.op == op.STEP_SEGMENT)
                      for r, actions in enumerate(self.program.ranks)]
            slowest_s = np.max(late_s, axis=0)
            for r, actions in enumerate(self.program.ranks):
                end = late_s[r] - slowest_s - agreement_s
                for k in self._left_gathering(actions):
                    end = end + gather_wire[k * P + r]
                    gathered[r, k] = end + gather_delay[k * P + r]
        free: Dict[Tuple[int, str], Any] = {}
        arrivals: Dict[Tuple[int, str], List[np.ndarray]] = {
            (r, kind): [] for r in range(P) for kind in (op.SEND_ACT, op.SEND_GRAD)}
        taken = dict.fromkeys(arrivals, 0)
        reduced, stepped = {}, [0.0] * P
        backward_end = [None] * P
        agreed: Optional[np.ndarray] = None
        tied: Optional[np.ndarray] = None
        for kind, r, k in self._replayed:
            now, s = clock[r], k * P + r
            if kind == op.F:
                now += chunks.forward_s[s]
            elif kind == op.B:
                now += chunks.backward_s[s]
                backward_end[r] = now.copy() if self.by_layer and k == 0 else None
            elif kind in (op.SEND_ACT, op.SEND_GRAD):
                if overhead:
                    now += overhead
                per_byte, latency_s = links[r, 1 if kind == op.SEND_ACT else -1]
                end = np.maximum(now, free.get((r, kind), 0.0))
                end += chunks.boundary_bytes[s if kind == op.SEND_ACT else s - 1] * per_byte
                free[r, kind] = end
                arrivals[r, kind].append(end + latency_s)
            elif kind in (op.WAIT_RECV_ACT, op.WAIT_RECV_GRAD):
                channel = ((r - 1) % P, op.SEND_ACT) if kind == op.WAIT_RECV_ACT else ((r + 1) % P, op.SEND_GRAD)
                np.maximum(now, arrivals[channel][taken[channel]], out=now)
                taken[channel] += 1
                if overhead:
                    now += overhead
            elif kind == op.REDUCE:
                if self.by_layer and k == 0:
                    end = backward_end[r] + self._last_layer(chunks, cuts, backward, r) * self.times
                    reductions[r] = reduced[r, k] = np.maximum(end, reductions[r] + self.times * wire[s])
                else:  # behind the gathers that this batch waits for
                    ahead = np.maximum(reductions[r], gathers[r]) if self.program.shard_params else reductions[r]
                    reductions[r] = np.maximum(ahead, now) + self.times * wire[s]
                    reduced[r, k] = reductions[r] + self.times * delay[s]
            elif kind == op.WAIT_REDUCE:
                np.maximum(now, reduced[r, k], out=now)
            elif kind == op.REDUCE_TIED:
                if r in (0, P - 1) and P > 1 and profile.tied_bytes:
                    if tied is None:  # both have come here before either goes on
                        per_byte, latency_s = links[0, -1]
                        tied = np.maximum(clock[0], clock[P - 1]) + profile.tied_bytes * per_byte + 2 * latency_s
                    np.maximum(now, tied, out=now)
            elif kind == op.STEP:
                if agreed is None:
                    agreed = clock.max(axis=0) + agreement_s
                clock[r] = agreed + rank_step_s[r] - stepped[r]
            elif kind == op.STEP_SEGMENT:
                now += step_s[s]
                stepped[r] = stepped[r] + step_s[s]
            elif kind == op.GATHER and self.zero_stage:
                if self.program.shard_params:
                    end = gathers[r] = np.maximum(gathers[r], now) + gather_wire[s]
                else:  # behind reductions and the gathers of what is used before
                    ahead = [moved[r, j] for j in range(k) if (r, j) in moved]
                    end = moved[r, k] = np.maximum.reduce([now, reductions[r], *ahead]) + gather_wire[s]
                gathered[r, k] = end + gather_delay[s]
            elif kind == op.WAIT_GATHER and (r, k) in gathered:
                end = gathered[r, k]
                if self.by_layer and k == 0 and agreed is None and not self.program.shard_params:
                    # each layer waits for its own: the last one, late in the forward
                    end = end - gather_delay[s] - chunks.forward_s[s]
                np.maximum(now, end, out=now)
        return clock.max(axis=0) + agreement_s

    def _transfer(self, sizes: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Of a transfer of so many bytes among replicas: s on the wire, and of delay."""
        return sizes * self.wire, np.where(sizes > 0, self.fixed_s + sizes * self.per_byte_s, 0.0)

    @staticmethod
    def _left_gathering(actions) -> List[int]:
        """Segments whose gather is launched after the step and waited for in the next one."""
        after = actions[actions.index((op.STEP, -1, -1)):]
        return [a.segment for a in after if a.op == op.GATHER and (op.WAIT_GATHER, a.segment, -1) not in after]

    def _last_layer(self, chunks: Chunks, cuts: np.ndarray, backward: np.ndarray, r: int) -> np.ndarray:
        """Seconds from the end of segment 0's last backward to the end of its reduction by layers, at least."""
        first, last = cuts[:, r], cuts[:, r + 1]
        rows = np.arange(len(cuts))
        wire = _running(self.trainable) * self.wire * self.reduced
        # a layer leaves when the layers below it have their backwards to do; after it leave those
        latest = np.zeros(len(cuts))
        for i in range(int(first.min()), int(last.max())):
            inside = (first <= i) & (i < last)
            lead = (backward[rows, i] - backward[rows, first]) / self.times
            latest = np.where(inside, np.maximum(latest, wire[i + 1] - wire[first] - lead), latest)
        return latest


def _running(values: np.ndarray) -> np.ndarray:
    """Sums of the first i values along the last axis, from i = 0."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums

"""Runs a program on costs instead of hardware: when every action begins and ends, what is exposed, and how much memory is held.

The simulator interprets the list of actions that the engine interprets, on all pipeline ranks of one replica; the others do the
same at the same time. A rank runs its actions one after the other on a clock of its own, ahead of the network's, until it waits
for a transfer; the network tells when that is over.
"""

from collections import deque
from itertools import accumulate
from typing import Callable, Dict, List, Optional, Tuple

from ..schedule.actions import (
    GATHER,
    LOAD,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    REDUCE_TIED,
    RELEASE,
    SEND_ACT,
    SEND_GRAD,
    STEP,
    STEP_SEGMENT,
    WAIT_GATHER,
    WAIT_RECV_ACT,
    WAIT_RECV_GRAD,
    WAIT_REDUCE,
    WAIT_SEND_ACT,
    WAIT_SEND_GRAD,
    Action,
    B,
    F,
    Program,
)
from ..schedule.sharding import gather_urgency
from .costs import Cluster, Costs, Exchange, LayerCosts, PlanError
from .memory import States
from .network import Bulk, Channel, Network, Port
from .result import Record, Result, Transfer

#: steps after which a steady state must be found, and how alike two steps must be, relative to their time
MOST_STEPS, TOLERANCE = 20, 1e-9


class _Rank:
    """A pipeline rank: its program, its clock and its ends of the channels."""

    def __init__(self, r: int, program: Program, costs: Costs, bulk: Bulk):
        self.r, self.actions = r, program.ranks[r]
        chunks = slice(r, None, program.P)
        self.forward_s = [t + costs.overhead_s for t in costs.forward_s[chunks]]
        self.backward_s = [t + costs.overhead_s for t in costs.backward_s[chunks]]
        self.overhead_s = costs.overhead_s
        # (bytes, delay), by segment
        self.act_sizes = self.grad_sizes = ()
        #: by segment, the parts of its gather: (seconds from the begin of its first forward to its first use, (bytes, delay))
        self.gather_parts: List[List[Tuple[float, Exchange]]] = []
        #: by segment, the parts of its reduction: (seconds before the end of its last backward, (bytes, delay))
        self.reductions: List[List[Tuple[float, Exchange]]] = []
        self.step_s: List[float] = []  # by segment
        self.act_out = self.act_in = self.grad_out = self.grad_in = None
        # to and from the rank with which this one ties weights
        self.tie_out = self.tie_in = None
        self.tie_size = (0.0, 0.0)
        self.bulk = bulk
        self.shards = program.shard_params
        #: segment -> (when it is used in a forward, number in the bulk channel) of the parts of its latest gather, of this step or
        #: of the one before, that have not been waited for
        self.gathers: Dict[int, List[Tuple[float, int]]] = {}
        self.clock = 0.0
        self.released: Optional[float] = None
        self.begin()

    def begin(self) -> None:
        self.at = 0
        self.begun: List[float] = []  # of each action
        self.ended: List[float] = []
        self.waited = dict.fromkeys((WAIT_SEND_ACT, WAIT_RECV_ACT, WAIT_SEND_GRAD, WAIT_RECV_GRAD), 0)
        self.backward_end = self.agreed = 0.0  # of the latest backward, and of the norm
        #: segment -> number of its reduction's last part in the bulk channel
        self.reducing: Dict[int, int] = {}
        self.tie_launched = False
        self.stepped = 0.0  # s of the step that segments had before it


class _Simulation:

    def __init__(self, ranks: List[_Rank], network: Network, agreement_s: float):
        self.ranks, self.network, self.agreement_s = ranks, network, agreement_s
        self.runnable = deque(ranks)
        self.met, self.latest = 0, 0.0

    def step(self) -> float:
        """Run all ranks through their programs and let them agree that they are done. Returns when."""
        runnable, network = self.runnable, self.network
        while True:
            while runnable:
                if self._run(runnable.popleft()):
                    return self.ranks[0].released
            try:
                runnable.extend(network.next())
            except IndexError:
                stuck = ", ".join(f"rank {me.r} at {me.actions[me.at]}" for me in self.ranks if me.at < len(me.actions))
                raise PlanError(f"the program deadlocks: {stuck}") from None

    def _run(self, me: _Rank) -> bool:
        """Run a rank until it waits. True for the last that is through."""
        actions, begun, ended, handlers = me.actions, me.begun, me.ended, HANDLERS
        at, end = me.at, len(me.actions)
        while at < end:
            op, k, _ = actions[at]
            clock = me.clock
            if not handlers[op](self, me, k):
                me.at = at
                return False
            begun.append(clock)
            ended.append(me.clock)
            at += 1
        me.at = at
        return self.meet(me)

    def meet(self, me: _Rank) -> bool:
        """All ranks wait for each other. True once they have, with ``me.released`` the time."""
        if me.released is not None:
            return True
        self.met += 1
        self.latest = max(self.latest, me.clock)
        if self.met < len(self.ranks):
            return False
        for rank in self.ranks:
            rank.released = self.latest + self.agreement_s
        self.met = 0
        self.runnable.extend(rank for rank in self.ranks if rank is not me)
        return True


def _forward(sim: _Simulation, me: _Rank, k: int) -> bool:
    if k in me.gathers:  # by layer, the others than the first's
        late_s = 0.0
        for lead_s, number in me.gathers[k]:
            if number not in me.bulk.ends:
                me.bulk.parked.append(me)
                return False
            late_s = max(late_s, me.bulk.ends[number] - me.clock - lead_s)
        del me.gathers[k]
        me.clock += late_s
    me.clock += me.forward_s[k]
    return True


def _backward(sim: _Simulation, me: _Rank, k: int) -> bool:
    me.clock += me.backward_s[k]
    me.backward_end = me.clock
    return True


def _send(sim: _Simulation, me: _Rank, channel: Channel, size) -> bool:
    me.clock += me.overhead_s
    sim.network.send(channel, me.clock, size)
    return True


def _post(sim: _Simulation, me: _Rank, channel: Channel) -> bool:
    sim.network.post(channel, me.clock)
    return True


def _wait(me: _Rank, channel: Channel, j: int) -> bool:
    ends = channel.ends
    if j >= len(ends):
        channel.parked.append(me)
        return False
    if ends[j] > me.clock:
        me.clock = ends[j]
    return True


def _wait_bulk(me: _Rank, j: int) -> bool:
    end = me.bulk.ends.get(j)
    if end is None:
        me.bulk.parked.append(me)
        return False
    me.clock = max(me.clock, end)
    return True


def _wait_next(me: _Rank, channel: Channel, op: str, overhead_s: float = 0.0) -> bool:
    if not _wait(me, channel, me.waited[op]):
        return False
    me.waited[op] += 1
    me.clock += overhead_s
    return True


def _reduce(sim: _Simulation, me: _Rank, k: int) -> bool:
    # DeepSpeed's wrappers reduce all segments at segment 0's launch and block; the wait comes next, so the time is the same
    for lead_s, size in me.reductions[k]:
        me.reducing[k] = sim.network.launch(me.bulk, me.backward_end - lead_s if lead_s else me.clock, size)
    return True


def _wait_reduce(sim: _Simulation, me: _Rank, k: int) -> bool:
    return k not in me.reducing or _wait_bulk(me, me.reducing[k])


def _reduce_tied(sim: _Simulation, me: _Rank, k: int) -> bool:
    if me.tie_out is None:
        return True
    if not me.tie_launched:
        me.tie_launched = True
        sim.network.post(me.tie_in, me.clock)
        sim.network.send(me.tie_out, me.clock, me.tie_size)
    return _wait(me, me.tie_in, 0)


def _step(sim: _Simulation, me: _Rank, k: int) -> bool:
    if not sim.meet(me):  # the norm of all gradients
        return False
    me.agreed, me.released = me.released, None
    me.clock = me.agreed + sum(me.step_s) - me.stepped
    return True


def _step_segment(sim: _Simulation, me: _Rank, k: int) -> bool:
    me.clock += me.step_s[k]
    me.stepped += me.step_s[k]
    return True


def _gather(sim: _Simulation, me: _Rank, k: int) -> bool:
    if me.gather_parts[k]:
        urgency = gather_urgency(k, me.shards)
        me.gathers[k] = [(lead_s, sim.network.launch(me.bulk, me.clock, size, urgency)) for lead_s, size in me.gather_parts[k]]
    return True


def _wait_gather(sim: _Simulation, me: _Rank, k: int) -> bool:
    while me.gathers.get(k) and me.gathers[k][0][0] == 0.0:
        if not _wait_bulk(me, me.gathers[k][0][1]):
            return False
        me.gathers[k].pop(0)
    return True


def _nothing(sim: _Simulation, me: _Rank, k: int) -> bool:
    return True


#: op -> how it runs; False: the rank waits, and tries again when something has ended.
HANDLERS: Dict[str, Callable[[_Simulation, _Rank, int], bool]] = {
    LOAD: _nothing,
    F: _forward,
    B: _backward,
    SEND_ACT: lambda sim, me, k: _send(sim, me, me.act_out, me.act_sizes[k]),
    WAIT_SEND_ACT: lambda sim, me, k: _wait_next(me, me.act_out, WAIT_SEND_ACT),
    RECV_ACT: lambda sim, me, k: _post(sim, me, me.act_in),
    WAIT_RECV_ACT: lambda sim, me, k: _wait_next(me, me.act_in, WAIT_RECV_ACT, me.overhead_s),
    SEND_GRAD: lambda sim, me, k: _send(sim, me, me.grad_out, me.grad_sizes[k]),
    WAIT_SEND_GRAD: lambda sim, me, k: _wait_next(me, me.grad_out, WAIT_SEND_GRAD),
    RECV_GRAD: lambda sim, me, k: _post(sim, me, me.grad_in),
    WAIT_RECV_GRAD: lambda sim, me, k: _wait_next(me, me.grad_in, WAIT_RECV_GRAD, me.overhead_s),
    REDUCE_TIED: _reduce_tied,
    REDUCE: _reduce,
    WAIT_REDUCE: _wait_reduce,
    STEP: _step,
    STEP_SEGMENT: _step_segment,
    GATHER: _gather,
    WAIT_GATHER: _wait_gather,
    RELEASE: _nothing,
}


def simulate(program: Program, costs: Costs, cluster: Cluster, D: int = 1, zero_stage: int = 1, priority: bool = False,
             stock_optimizer: bool = False, by_layer: bool = False, data_parallel: bool = True,
             states: Optional[States] = None, reduced: float = 1.0) -> Result:
    """Run ``program`` step after step until one leaves the network as an earlier one did: those between repeat from there on.
    Steps that do not repeat in :data:`MOST_STEPS` are averaged over the later half.

    Args:
        program: one that ``verify`` accepts.
        costs: of the same fold.
        cluster: at least P*D ranks.
        D: replicas.
        zero_stage: 0: an all-reduce; 1 and 2: a reduce-scatter, and a gather of what was stepped elsewhere.
        priority: messages of the pipeline go before data-parallel transfers on a network card. Without it, all connections that
            are active share a card equally, as TCP does.
        stock_optimizer: DeepSpeed's wrappers, whose ZeRO-1 all-reduces whole gradients.
        by_layer: each layer of segment 0 is reduced as soon as its last backward is over, and waited for right before its first
            forward. Needs a program whose reductions overlap.
        data_parallel: False leaves out reductions and gathers: what the schedule alone takes.
        states: what memory holds per parameter. Default: gradients as large as parameters, and the profile's optimizer state, a
            D-th of it with ZeRO.
        reduced: bytes of a gradient as it is reduced, per byte of its parameter, as which it is gathered.

    Raises:
        PlanError: program, costs and cluster do not belong together, or the program deadlocks.
    """
    P, v = program.P, program.v
    if (costs.P, len(costs.forward_s)) != (P, v * P):
        raise PlanError(f"the program has {P} pipeline ranks x {v} segments, but the costs are those of {costs.P} ranks and "
                        f"{len(costs.forward_s)} chunks")
    if zero_stage not in (0, 1, 2):
        raise PlanError(f"zero_stage={zero_stage} does not run with a pipeline; use 0, 1 or 2")
    cluster.check(P, D)
    shared = min(D, cluster.ranks_per_host)  # replicas on a host: the one that runs here gets its share of the card
    network = Network(priority)
    ranks = _connect(program, costs, cluster, D, shared)
    whole = zero_stage == 0 or stock_optimizer

    def exchange_of(size: float) -> Exchange:
        exchange = cluster.exchange(size if data_parallel else 0.0, D)
        if shared < D:  # bytes on the host's card: this replica moves its share of them on its share of the card
            exchange = exchange._replace(bytes=exchange.bytes / shared)
        return exchange

    for me in ranks:
        ahead = not program.shard_params and next((a.op for a in me.actions if a.op in (WAIT_GATHER, F)), F) == WAIT_GATHER
        for k, s in enumerate(range(me.r, v * P, P)):
            me.step_s.append(costs.optimizer_s(s, D, zero_stage))
            at_once = [LayerCosts(0.0, 0.0, costs.trainable_bytes[s])]
            layers = costs.layers[s] if by_layer and k == 0 else at_once
            parts = [exchange_of(reduced * layer.trainable_bytes) for layer in layers]
            before_s = accumulate((layer.backward_s for layer in layers), initial=0.0)
            reductions = [(lead_s, part.twice() if whole else part) for lead_s, part in zip(before_s, parts) if part.bytes]
            me.reductions.append(reductions[::-1])  # the last layer's backward is first
            if not ahead:
                gathered = costs.shardable_bytes(s) if program.shard_params else costs.trainable_bytes[s]
                layers = [LayerCosts(0.0, 0.0, gathered)]
            parts = [exchange_of(layer.trainable_bytes) for layer in layers]
            before_s = accumulate((layer.forward_s for layer in layers), initial=0.0)
            me.gather_parts.append([(lead_s, part) for lead_s, part in zip(before_s, parts) if part.bytes and zero_stage])
        before = me.actions[me.actions.index(Action(REDUCE, 0)) - 1].op if by_layer else B
        if before not in (B, SEND_GRAD):
            raise PlanError("by_layer needs a program that launches a segment's reduction right after its last backward")
    simulation = _Simulation(ranks, network, cluster.agreement_s(P * D))
    begin, steps, seen = 0.0, [], [[[] for _ in ranks]]
    while True:
        end = simulation.step()
        steps.append(end - begin)
        left = [_in_flight(me.bulk, end) for me in ranks]
        period = next((i for i, before in enumerate(reversed(seen), 1) if _alike(before, left, TOLERANCE * steps[-1])), None)
        if period or len(steps) == MOST_STEPS:
            return Result(program, costs, D, zero_stage, steps, [_record(me, begin, end) for me in ranks], states,
                          period or MOST_STEPS // 2)
        seen.append(left)
        begin = end
        simulation.runnable.clear()
        for me in ranks:
            me.clock, me.released = end, None
            me.begin()
            for channel in (me.act_out, me.grad_out, me.tie_out):
                if channel is not None:
                    channel.forget()
            simulation.runnable.append(me)


def _in_flight(bulk: Channel, now: float) -> List[float]:
    """What is left at the end of a step, when all messages and reductions have been waited for: when each gather was launched, and
    when the first will end."""
    left = [launch - now for j, launch in enumerate(bulk.ready) if j not in bulk.ends]
    if bulk.flowing:
        left += [bulk.since + bulk.remaining / bulk.rate - now, *(remaining / bulk.out.rate for _, _, remaining in bulk.waiting)]
    return left


def _alike(one: List[List[float]], other: List[List[float]], tolerance: float) -> bool:
    return all(len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b)) for a, b in zip(one, other))


def _connect(program: Program, costs: Costs, cluster: Cluster, D: int, shared: int) -> List[_Rank]:
    """The ranks with their channels; ranks of a host share its card."""
    P = program.P
    cards: Dict[Tuple[int, str], Port] = {}

    def port(r: int, direction: str, local: bool) -> Port:
        key = (r if local else -1 - cluster.host(r, D), direction)
        if key not in cards:
            cards[key] = Port(cluster.intra_host.rate if local else cluster.inter_host.rate / shared)
        return cards[key]

    replicas_local = 1 < D <= cluster.ranks_per_host
    ranks = [
        _Rank(r, program, costs, Bulk(port(r, "out", replicas_local), port(r, "in", replicas_local)))
        for r in range(P)
    ]

    def link(source: _Rank, target: _Rank) -> Tuple[Channel, float]:
        local = cluster.host(source.r, D) == cluster.host(target.r, D)
        latency_s = (cluster.intra_host if local else cluster.inter_host).latency_s
        return Channel(port(source.r, "out", local), port(target.r, "in", local)), latency_s

    edges = 0 if P == 1 else P if program.v > 1 else P - 1  # the last edge is the wrap-around
    for me in ranks[:edges]:
        other = ranks[(me.r + 1) % P]
        me.act_out, latency_s = link(me, other)
        other.grad_out, _ = link(other, me)
        other.act_in, me.grad_in = me.act_out, other.grad_out
        # a message's bytes are those of the boundary behind its lower virtual stage
        me.act_sizes = sizes = [(size, latency_s) for size in costs.boundary_bytes[me.r::P]]
        other.grad_sizes = sizes if other.r else [(0.0, 0.0), *sizes]
    if P > 1 and costs.tied_bytes:
        first, last = ranks[0], ranks[-1]
        for me, other in ((first, last), (last, first)):
            me.tie_out, latency_s = link(me, other)
            other.tie_in = me.tie_out
            me.tie_size = (costs.tied_bytes, 2 * latency_s)  # an all-reduce of two ranks: half of it twice
    return ranks


def _record(me: _Rank, begin: float, end: float) -> Record:
    channels = {SEND_ACT: me.act_out, SEND_GRAD: me.grad_out, RECV_ACT: me.act_in, RECV_GRAD: me.grad_in}
    messages = {op: [(ready - begin, over - begin) for ready, over in zip(channel.ready, channel.ends)]
                for op, channel in channels.items() if channel is not None}
    launches = []
    for a in me.actions:
        if a.op == REDUCE:
            launches += [a] * len(me.reductions[a.segment])
        elif a.op == GATHER:
            launches += [a] * len(me.gather_parts[a.segment])
    transfers = []
    for j, start in enumerate(me.bulk.begun):
        over = min(me.bulk.ends.get(j, end), end)
        if start is not None and begin < over and start < over:
            transfers.append(Transfer(str(launches[j % len(launches)]), max(me.bulk.ready[j], begin) - begin,
                                      max(start, begin) - begin, over - begin, int(me.bulk.sizes[j][0])))
    return Record([t - begin for t in me.begun], [t - begin for t in me.ended], me.agreed - begin, messages, transfers)

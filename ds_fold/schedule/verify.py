"""Proves a program before it runs: complete, paired, in FIFO order, free of deadlock, waits before uses, and how much it holds.

The replay executes all ranks at once under the strictest message semantics that a backend has (rendezvous): a send is over
only when its receive is posted, messages of one channel arrive in the order they were sent, a posted receive takes the next
one. What passes here cannot hang on gloo or NCCL for reasons of order.
"""

from collections import deque
from typing import Callable, Dict, List, NamedTuple

from .actions import (
    BATCH_OPS,
    GATHER,
    LOAD,
    OPS,
    OPTIONAL_OPS,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    REDUCE_TIED,
    RELEASE,
    SEGMENT_OPS,
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
from .order import ScheduleError
from .sharding import WHOLE_SEGMENTS


class Report(NamedTuple):
    """What the proof found, per pipeline rank.

    Attributes:
        peak_live: most forwards of (segment, micro-batch) whose backward had not run (live activations).
        peak_posted: most receives posted and not yet waited for.
        peak_sending: most sends launched and not yet waited for.
        peak_reducing: most segments whose reduction was launched and not yet waited for.
        peak_whole: most segments whose parameters were there, or being gathered, where they are sharded.
    """
    peak_live: List[int]
    peak_posted: List[int]
    peak_sending: List[int]
    peak_reducing: List[int]
    peak_whole: List[int]


class VerificationError(ScheduleError):
    """A program that must not run; names the rank, the action and what it waits for."""


class _Channel:
    """One directed communicator: what was sent and what was posted, as keys (virtual stage of the receiver, micro-batch)."""
    __slots__ = ("sent", "posted", "send_waits", "recv_waits")

    def __init__(self):
        self.sent, self.posted = [], []
        self.send_waits = self.recv_waits = 0


class _Rank:
    """State of one rank in the replay. ``done[op][k*M + m]`` says whether an action has run."""

    def __init__(self, rank: int, program: Program):
        P, v, M = self.P, self.v, self.M = program.P, program.v, program.M
        self.rank, self.actions = rank, program.ranks[rank]
        self.last = v * P - 1
        #: virtual stages that load data
        self.loading = {0} if program.label_transport else {0, self.last}
        self.at = 0
        self.done = {op: bytearray(v * M) for op in OPS}
        self.batch_done = set()  # actions on segments or on the whole batch
        self.reducing = self.peak_reducing = 0
        self.sharded = program.shard_params
        self.whole: Dict[int, bool] = {}  # segments whose parameters are there (True) or being gathered, where they are sharded
        self.peak_whole = 0
        self.live = self.posted = self.sending = 0
        self.peak_live = self.peak_posted = self.peak_sending = 0
        # per direction: [out, in]; filled by _channels
        self.act_out = self.act_in = self.grad_out = self.grad_in = None

    def fail(self, action: Action, why: str) -> None:
        raise VerificationError(f"pipeline rank {self.rank}, action {self.at} ({action}): {why}")

    def once(self, action: Action) -> int:
        op, k, m = action
        if not (0 <= k < self.v and 0 <= m < self.M):
            self.fail(action, f"segment must lie in 0..{self.v - 1} and micro-batch in 0..{self.M - 1}")
        i = k * self.M + m
        if self.done[op][i]:
            self.fail(action, "appears twice")
        self.done[op][i] = 1
        return i

    def need(self, action: Action, op: str, i: int) -> None:
        if not self.done[op][i]:
            self.fail(action, f"runs before {op}{i // self.M}.{i % self.M}")

    def need_parameters(self, action: Action) -> None:
        if self.sharded and not self.whole.get(action.segment):
            self.fail(action, f"runs while the parameters of segment {action.segment} are not whole")


def _load(me: _Rank, a: Action) -> bool:
    me.once(a)
    if a.segment * me.P + me.rank not in me.loading:
        me.fail(a, "only the first and the last virtual stage load data, and the last one only if labels do not travel")
    return True


def _forward(me: _Rank, a: Action) -> bool:
    i = me.once(a)
    me.need_parameters(a)
    s = a.segment * me.P + me.rank
    if s == 0 or (s in me.loading and me.P > 1):
        me.need(a, LOAD, i)
    if s > 0:
        if me.P > 1:
            me.need(a, WAIT_RECV_ACT, i)
        else:
            me.need(a, F, i - me.M)
    me.live += 1
    me.peak_live = max(me.peak_live, me.live)
    return True


def _backward(me: _Rank, a: Action) -> bool:
    i = me.once(a)
    me.need_parameters(a)
    me.need(a, F, i)
    if a.segment * me.P + me.rank < me.last:
        if me.P > 1:
            me.need(a, WAIT_RECV_GRAD, i)
        else:
            me.need(a, B, i + me.M)
    me.live -= 1
    return True


def _launch_send(me: _Rank, a: Action, channel: _Channel, made_by: str, to: int) -> bool:
    i = me.once(a)
    me.need(a, made_by, i)
    if channel is None or not 0 <= to <= me.last:
        me.fail(a, "there is no such neighbour")
    j = len(channel.sent)
    channel.sent.append(to * me.M + a.micro_batch)
    _pair(me, a, channel, j)
    me.sending += 1
    me.peak_sending = max(me.peak_sending, me.sending)
    return True


def _post_receive(me: _Rank, a: Action, channel: _Channel, used_by: str) -> bool:
    i = me.once(a)
    if me.done[used_by][i]:
        me.fail(a, f"posted after its use {used_by}")
    if channel is None:
        me.fail(a, "there is no such neighbour")
    j = len(channel.posted)
    channel.posted.append((a.segment * me.P + me.rank) * me.M + a.micro_batch)
    _pair(me, a, channel, j)
    me.posted += 1
    me.peak_posted = max(me.peak_posted, me.posted)
    return True


def _pair(me: _Rank, a: Action, channel: _Channel, j: int) -> None:
    if j < len(channel.sent) and j < len(channel.posted) and channel.sent[j] != channel.posted[j]:
        sent, posted = divmod(channel.sent[j], me.M), divmod(channel.posted[j], me.M)
        me.fail(a, f"message {j} of this channel carries micro-batch {sent[1]} for virtual stage {sent[0]}, but the receive "
                f"posted for it expects micro-batch {posted[1]} at virtual stage {posted[0]}: both ranks must order their "
                f"computes alike")


def _wait_send(me: _Rank, a: Action, channel: _Channel, launched_by: str) -> bool:
    i = a.segment * me.M + a.micro_batch
    if not (0 <= i < me.v * me.M and me.done[launched_by][i]):
        me.fail(a, f"waits for a send that was not launched ({launched_by})")
    if channel.send_waits >= len(channel.posted):
        return False
    channel.send_waits += 1
    me.once(a)
    me.sending -= 1
    return True


def _wait_receive(me: _Rank, a: Action, channel: _Channel, posted_by: str) -> bool:
    i = a.segment * me.M + a.micro_batch
    if not (0 <= i < me.v * me.M and me.done[posted_by][i]):
        me.fail(a, f"waits for a receive that was not posted ({posted_by})")
    if channel.recv_waits >= len(channel.sent):
        return False
    if channel.posted[channel.recv_waits] != (a.segment * me.P + me.rank) * me.M + a.micro_batch:
        me.fail(a, "receives are not waited for in the order in which they were posted")
    channel.recv_waits += 1
    me.once(a)
    me.posted -= 1
    return True


def _once_per_batch(me: _Rank, a: Action) -> None:
    if a in me.batch_done:
        me.fail(a, "appears twice")
    if a.op in SEGMENT_OPS and not 0 <= a.segment < me.v:
        me.fail(a, f"segment must lie in 0..{me.v - 1}")
    me.batch_done.add(a)


def _reduce_tied(me: _Rank, a: Action) -> bool:
    _once_per_batch(me, a)
    if not all(me.done[B]):
        me.fail(a, "runs before the last backward")
    return True


def _reduce(me: _Rank, a: Action) -> bool:
    _once_per_batch(me, a)
    if not all(me.done[B][a.segment * me.M:(a.segment + 1) * me.M]):
        me.fail(a, f"runs before the last backward of segment {a.segment}")
    me.reducing += 1
    me.peak_reducing = max(me.peak_reducing, me.reducing)
    return True


def _wait_reduce(me: _Rank, a: Action) -> bool:
    _once_per_batch(me, a)
    if Action(REDUCE, a.segment) not in me.batch_done:
        me.fail(a, "waits for a reduction that was not launched")
    me.reducing -= 1
    return True


def _step_segment(me: _Rank, a: Action) -> bool:
    _once_per_batch(me, a)
    if Action(WAIT_REDUCE, a.segment) not in me.batch_done:
        me.fail(a, f"steps before the reduction of segment {a.segment} is over")
    if Action(STEP) in me.batch_done:
        me.fail(a, "comes after the step, which has stepped everything")
    if a.segment in me.whole:
        me.fail(a, f"steps while the parameters of segment {a.segment} are whole: they would stay the old ones")
    return True


def _step(me: _Rank, a: Action) -> bool:
    _once_per_batch(me, a)
    if not all(me.done[B]):
        me.fail(a, "runs before the last backward")
    if Action(REDUCE_TIED) not in me.batch_done:
        me.fail(a, "steps before the tied gradients are summed")
    if not all(Action(WAIT_REDUCE, k) in me.batch_done for k in range(me.v)):
        me.fail(a, "steps before the reductions are over")
    if me.whole:
        me.fail(a, f"steps while the parameters of segment {min(me.whole)} are whole: they would stay the old ones")
    return True


def _gather(me: _Rank, a: Action) -> bool:
    if me.sharded:  # as often as released
        if a.segment in me.whole:
            me.fail(a, f"gathers the parameters of segment {a.segment}, which were not released")
        me.batch_done.add(a)
        me.whole[a.segment] = False
        me.peak_whole = max(me.peak_whole, len(me.whole))
        if me.peak_whole > WHOLE_SEGMENTS:
            me.fail(a, f"makes {me.peak_whole} segments whole at once ({', '.join(map(str, sorted(me.whole)))}); at most "
                    f"{WHOLE_SEGMENTS} may be")
        return True
    _once_per_batch(me, a)
    if not {Action(STEP), Action(STEP_SEGMENT, a.segment)} & me.batch_done:
        me.fail(a, "gathers before the step")
    return True


def _wait_gather(me: _Rank, a: Action) -> bool:
    if me.sharded:
        if me.whole.get(a.segment) is not False:
            me.fail(a, "waits for a gather that was not launched")
        me.batch_done.add(a)
        me.whole[a.segment] = True
        return True
    _once_per_batch(me, a)
    # without a gather in front of it, it waits for the one of the batch before
    if Action(GATHER, a.segment) not in me.batch_done and any(me.done[F][a.segment * me.M:(a.segment + 1) * me.M]):
        me.fail(a, f"waits for the parameters of segment {a.segment} after their first use")
    return True


def _release(me: _Rank, a: Action) -> bool:
    if not me.whole.pop(a.segment, False):
        me.fail(a, f"releases the parameters of segment {a.segment}, which are not whole")
    me.batch_done.add(a)
    return True


#: op -> how the replay executes it; False means: blocked, try again when something arrives.
HANDLERS: Dict[str, Callable[[_Rank, Action], bool]] = {
    LOAD: _load,
    F: _forward,
    B: _backward,
    SEND_ACT: lambda me, a: _launch_send(me, a, me.act_out, F, a.segment * me.P + me.rank + 1),
    WAIT_SEND_ACT: lambda me, a: _wait_send(me, a, me.act_out, SEND_ACT),
    RECV_ACT: lambda me, a: _post_receive(me, a, me.act_in, F),
    WAIT_RECV_ACT: lambda me, a: _wait_receive(me, a, me.act_in, RECV_ACT),
    SEND_GRAD: lambda me, a: _launch_send(me, a, me.grad_out, B, a.segment * me.P + me.rank - 1),
    WAIT_SEND_GRAD: lambda me, a: _wait_send(me, a, me.grad_out, SEND_GRAD),
    RECV_GRAD: lambda me, a: _post_receive(me, a, me.grad_in, B),
    WAIT_RECV_GRAD: lambda me, a: _wait_receive(me, a, me.grad_in, RECV_GRAD),
    REDUCE_TIED: _reduce_tied,
    REDUCE: _reduce,
    WAIT_REDUCE: _wait_reduce,
    STEP_SEGMENT: _step_segment,
    STEP: _step,
    GATHER: _gather,
    WAIT_GATHER: _wait_gather,
    RELEASE: _release,
}


def verify(program: Program) -> Report:
    """Prove ``program`` or raise.

    Returns:
        Report: peaks per rank.

    Raises:
        VerificationError: an action is missing, doubled, out of order, unpaired, or the ranks wait for each other.
    """
    P = program.P
    ranks = [_Rank(r, program) for r in range(P)]
    if P > 1:
        for r, me in enumerate(ranks):
            following = ranks[(r + 1) % P]
            if r < P - 1 or program.v > 1:
                me.act_out = following.act_in = _Channel()
                following.grad_out = me.grad_in = _Channel()
    _replay(ranks)
    for me in ranks:
        _check_complete(me, program.forward_only)
    return Report([me.peak_live for me in ranks], [me.peak_posted for me in ranks], [me.peak_sending for me in ranks],
                  [me.peak_reducing for me in ranks], [me.peak_whole for me in ranks])


def _replay(ranks: List[_Rank]) -> None:
    ready = deque(ranks)
    queued = [True] * len(ranks)
    while ready:
        me = ready.popleft()
        queued[me.rank] = False
        start, end, actions = me.at, len(me.actions), me.actions
        while me.at < end:
            action = actions[me.at]
            handler = HANDLERS.get(action.op)
            if handler is None:
                me.fail(action, "is not understood")
            if not handler(me, action):
                break
            me.at += 1
        if me.at > start:
            for other in (me.rank - 1, (me.rank + 1) % len(ranks)):
                if not queued[other]:
                    queued[other] = True
                    ready.append(ranks[other])
    stuck = [f"  rank {me.rank} at action {me.at} of {len(me.actions)}: {me.actions[me.at]}"
             for me in ranks if me.at < len(me.actions)]
    if stuck:
        raise VerificationError("deadlock: these ranks wait for each other\n" + "\n".join(stuck))


def _check_complete(me: _Rank, forward_only: bool) -> None:
    missing = []
    for k in range(me.v):
        s = k * me.P + me.rank
        expected = {F}
        if s == 0 or (s in me.loading and me.P > 1):
            expected.add(LOAD)
        if me.P > 1 and s > 0:
            expected |= {RECV_ACT, WAIT_RECV_ACT}
        if me.P > 1 and s < me.last:
            expected |= {SEND_ACT, WAIT_SEND_ACT}
        if not forward_only:
            expected.add(B)
            if me.P > 1 and s < me.last:
                expected |= {RECV_GRAD, WAIT_RECV_GRAD}
            if me.P > 1 and s > 0:
                expected |= {SEND_GRAD, WAIT_SEND_GRAD}
        for op, done in me.done.items():
            row = done[k * me.M:(k + 1) * me.M]
            if op in expected and not all(row):
                missing.append(f"{op}{k}.{row.index(0)}")
            elif op not in expected and any(row):
                raise VerificationError(f"pipeline rank {me.rank}: {op}{k}.{row.index(1)} does not belong here")
    of_batch = {Action(op) for op in BATCH_OPS} | {Action(op, k) for op in SEGMENT_OPS - OPTIONAL_OPS for k in range(me.v)}
    if me.whole:
        raise VerificationError(f"pipeline rank {me.rank}: the parameters of segment {min(me.whole)} are not released")
    if forward_only and me.batch_done:
        raise VerificationError(f"pipeline rank {me.rank}: {min(me.batch_done)} does not belong into an evaluation")
    missing += [] if forward_only else [str(a) for a in sorted(of_batch - me.batch_done)]
    if missing:
        raise VerificationError(f"pipeline rank {me.rank}: missing {', '.join(missing[:8])}")


class Span(NamedTuple):
    """When a rank computes an action, in the unit of the times given."""
    rank: int
    action: Action
    start: float
    end: float


def compute_times(program: Program, forward: float = 1.0, backward: float = 2.0) -> List[Span]:
    """When every forward and backward runs if messages and reductions are free.

    Args:
        program: one that :func:`verify` accepts.
        forward, backward: time of one micro-batch through one chunk.
    """
    P, last = program.P, program.v * program.P - 1
    finish = {F: {}, B: {}}
    queues = [[a for a in actions if a.op in (F, B)] for actions in program.ranks]
    clock, at = [0.0] * P, [0] * P
    spans = []
    moved = True
    while moved:
        moved = False
        for r in range(P):
            while at[r] < len(queues[r]):
                op, k, m = action = queues[r][at[r]]
                s = k * P + r
                if op == F:
                    ready = finish[F].get((s - 1, m)) if s else 0.0
                else:
                    ready = finish[B].get((s + 1, m)) if s < last else finish[F].get((s, m))
                if ready is None:
                    break
                start = max(clock[r], ready)
                clock[r] = finish[op][s, m] = start + (forward if op == F else backward)
                spans.append(Span(r, action, start, clock[r]))
                at[r] += 1
                moved = True
    return spans


def makespan(program: Program, forward: float = 1.0, backward: float = 2.0) -> float:
    """Length of the batch with free communication."""
    return max(span.end for span in compute_times(program, forward, backward))


def bubble_fraction(program: Program, forward: float = 1.0, backward: float = 2.0) -> float:
    """Share of the batch in which an average rank computes nothing, with free communication."""
    busy = program.v * program.M * (forward + (0.0 if program.forward_only else backward))
    return 1.0 - busy / makespan(program, forward, backward)

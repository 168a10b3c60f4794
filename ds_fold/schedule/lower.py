"""Turns a compute order into a program: adds loads, sends, receives, waits, the gradient reduction and the step.

Where a wait is put decides whether it costs time. A receive is waited for right before its use. A send is waited for at the
first point at which something that has already arrived proves that the peer took it, so that the wait never blocks:

    send of an activation (k, m)    its gradient has come back              -> right before B(k, m)
    send of a gradient (k, m)       segment k-1's gradient has come round   -> right before B(k-1, m), or
                                    the peer's later forward has arrived    -> right before that F
                                    neither                                 -> after the last compute

The gradients of a segment are complete with its last backward; their reduction may be launched there, and the gather of what the
step made of them may be waited for as late as the segment's first forward in the next batch:

    off                 ... B B B  RT R1 R0 WR1 WR0 STEP G0 G1 WG0 WG1
    overlapped   WG0 F F F  WG1 F F F  B B B R1  B B B R0  RT WR1 WR0 STEP G0 G1
    early step   WG0 F F F  WG1 F F F  B B B R1  B B B R0 WR1 S1 G1  RT WR0 STEP G0
    aligned, r=1 WG0 F F F  WG1 F F F  B B B B R1  B B R0  RT WR1 WR0 STEP G0 G1

Where parameters are sharded, all gathers stand within the batch instead: see :mod:`~ds_fold.schedule.sharding`.

``Rk`` is where the launch is complete: by layer, most of it happened within the B before, where a program cannot look.
"""

from typing import FrozenSet, List, NamedTuple, Optional, Tuple

from .actions import (
    GATHER,
    LOAD,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    REDUCE_TIED,
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
    action_table,
)
from .order import Orders
from .sharding import gathers_and_releases

DEFAULT_RECEIVE_AHEAD = 4


class Overlap(NamedTuple):
    """Where data-parallel communication stands in a program.

    Attributes:
        reduce: launch a segment's reduction right after its last backward, instead of all after the last compute.
        gather: wait for a segment's gather before its first forward in the next batch, instead of right after the step.
        in_flight: with ``reduce``, most segments whose reduction is launched and not waited for when another segment's backward
            begins (None: any number). Under AIAO this bounds the full gradients that exist to one segment more.
        early: with ``reduce``, segments (not 0) that are stepped and whose gathers are launched once the next segment's reduction
            is launched.
        align: with ``reduce``, pipeline rank r holds a launch back for r more of its backwards. A folded backward reaches rank 0
            P-1 backwards after rank P-1, so that all ranks launch together; what is held when backwards end, or when ``in_flight``
            has no room for it, is launched there. The idea is Megatron-Core's ``align_grad_reduce``.
        shard: gather a segment's parameters for its sweeps and release them afterwards, with ``gather`` one segment ahead.
    """
    reduce: bool = False
    gather: bool = False
    in_flight: Optional[int] = None
    early: FrozenSet[int] = frozenset()
    align: bool = False
    shard: bool = False


NO_OVERLAP = Overlap()


def lower(orders: Orders, v: int, M: int, receive_ahead: int = DEFAULT_RECEIVE_AHEAD, forward_only: bool = False,
          ranks: Optional[List[int]] = None, label_transport: bool = False, overlap: Overlap = NO_OVERLAP) -> Program:
    """The program of every rank.

    Args:
        orders: ``orders[r]`` is rank r's compute order (:func:`~ds_fold.schedule.order.compute_order`).
        v, M: segments and micro-batches.
        receive_ahead: most receives that a rank has posted and not yet waited for (>= 1). Rendezvous transports such as gloo
            move a message only once its receive is posted; each posted receive holds its buffer.
        forward_only: an evaluation program.
        ranks: lower only these ranks and leave the others' programs empty (an engine needs its own only).
        label_transport: only the first pipeline rank loads; labels travel in the messages of activations.
        overlap: where reductions and gathers stand.
    """
    P = len(orders)
    wanted = range(P) if ranks is None else ranks
    programs = [_lower_rank(orders, r, P, v, M, max(1, receive_ahead), forward_only, label_transport,
                            overlap) if r in wanted else []
                for r in range(P)]
    return Program(P, v, M, programs, forward_only, label_transport, overlap.shard and not forward_only)


def _lower_rank(orders: Orders, r: int, P: int, v: int, M: int, ahead: int, forward_only: bool,
                label_transport: bool, overlap: Overlap) -> List[Action]:
    table = {op: action_table(op, v, M) for op in _PER_MICRO_BATCH}
    last = v * P - 1
    order = orders[r]

    # what each compute action needs from another rank, in order of need
    receives = []
    if P > 1:
        for a in order:
            s = a.segment * P + r
            if a.op == F and s > 0:
                receives.append(table[RECV_ACT][a.segment][a.micro_batch])
            elif a.op == B and s < last:
                receives.append(table[RECV_GRAD][a.segment][a.micro_batch])

    proofs = [] if forward_only or P == 1 else _grads_taken_before_forward(orders, r, P, v)
    program: List[Action] = []
    emit = program.append
    posted = waited = 0
    grad_sends: List[Action] = []  # in order of launch; the first `grads_waited` have been waited for
    grad_send_at = {}  # (k, m) -> its place in grad_sends
    grads_waited = forwards_received = 0
    tail_sends: List[Action] = []  # forward-only: sends of the last segment, waited for through a window
    backwards, forwards_begun, reducing = [0] * v, set(), []
    held: List[Tuple[int, int]] = []  # segments whose reduction is to be launched, and after how many backwards
    reduced: List[int] = []  # segments in the order in which their reductions are launched
    gathered = set()  # segments that were stepped early
    sharded = overlap.shard and not forward_only
    moves, after = gathers_and_releases(order, v, overlap.gather) if sharded else (None, [])

    def post() -> None:
        nonlocal posted
        while posted < len(receives) and posted - waited < ahead:
            emit(receives[posted])
            posted += 1

    def wait_grad_sends(upto: int) -> None:
        nonlocal grads_waited
        while grads_waited < min(upto, len(grad_sends)):
            a = grad_sends[grads_waited]
            emit(table[WAIT_SEND_GRAD][a.segment][a.micro_batch])
            grads_waited += 1

    def launch_held() -> None:
        k, _ = held.pop(0)
        emit(Action(REDUCE, k))
        for early in [s for s in reducing if s in overlap.early]:
            reducing.remove(early)
            program.extend((Action(WAIT_REDUCE, early), Action(STEP_SEGMENT, early)))
            if not sharded:
                emit(Action(GATHER, early))
            gathered.add(early)
        reduced.append(k)
        reducing.append(k)

    for i, a in enumerate(order):
        op, k, m = a
        s = k * P + r
        if sharded:
            program += moves[i]
        if op == F:
            if overlap.gather and not forward_only and not sharded and k not in forwards_begun:
                forwards_begun.add(k)
                emit(Action(WAIT_GATHER, k))
            if s == 0 or (s == last and P > 1 and not label_transport):
                # pulled before anything of this micro-batch travels; with one rank, inputs and labels come at once
                emit(table[LOAD][k][m])
            if s > 0 and P > 1:
                post()
                emit(table[WAIT_RECV_ACT][k][m])
                waited += 1
                if proofs:
                    wait_grad_sends(proofs[forwards_received])
                    forwards_received += 1
            if forward_only and P > 1 and k > 0 and s - P < last:
                emit(table[WAIT_SEND_ACT][k - 1][m])
            post()
            emit(a)
            if s < last and P > 1:
                emit(table[SEND_ACT][k][m])
                if forward_only and k == v - 1:
                    tail_sends.append(table[WAIT_SEND_ACT][k][m])
                    if len(tail_sends) > ahead:
                        emit(tail_sends.pop(0))
        else:
            if overlap.in_flight is not None and backwards[k] == 0:
                while len(held) > overlap.in_flight:
                    launch_held()
                while reducing and len(reducing) + len(held) > overlap.in_flight:
                    emit(Action(WAIT_REDUCE, reducing.pop(0)))
            if s < last and P > 1:
                post()
                emit(table[WAIT_RECV_GRAD][k][m])
                waited += 1
                emit(table[WAIT_SEND_ACT][k][m])
                if k + 1 < v and (k + 1, m) in grad_send_at:
                    wait_grad_sends(grad_send_at[k + 1, m] + 1)
            post()
            emit(a)
            if s > 0 and P > 1:
                send = table[SEND_GRAD][k][m]
                grad_send_at[k, m] = len(grad_sends)
                grad_sends.append(send)
                emit(send)
            backwards[k] += 1
            if overlap.reduce and backwards[k] == M:
                held.append((k, min(sum(backwards) + r * overlap.align, v * M)))
            while held and sum(backwards) >= held[0][1]:
                launch_held()
    program += after
    program += tail_sends
    wait_grad_sends(len(grad_sends))
    if not forward_only:
        emit(Action(REDUCE_TIED))
        for k in reversed(range(v)):
            if k not in reduced:
                emit(Action(REDUCE, k))
                reducing.append(k)
        program += [Action(WAIT_REDUCE, k) for k in reducing]
        emit(Action(STEP))
        if not sharded:
            program += [Action(GATHER, k) for k in range(v) if k not in gathered]
            if not overlap.gather:
                program += [Action(WAIT_GATHER, k) for k in range(v)]
    return program


_PER_MICRO_BATCH = (LOAD, SEND_ACT, WAIT_SEND_ACT, RECV_ACT, WAIT_RECV_ACT, SEND_GRAD, WAIT_SEND_GRAD, RECV_GRAD, WAIT_RECV_GRAD)


def _grads_taken_before_forward(orders: Orders, r: int, P: int, v: int) -> List[int]:
    """Entry j: how many of rank r's gradient sends its peer r-1 has certainly taken once r's j-th activation has arrived,
    because r-1 consumed them before the forward that made that activation."""
    peer = (r - 1) % P
    last = v * P - 1
    taken, counts = 0, []
    for a in orders[peer]:
        s = a.segment * P + peer
        if s < last:
            if a.op == B:
                taken += 1
            else:
                counts.append(taken)
    return counts

"""The compute order of every schedule: which forward and backward runs when on each pipeline rank, from one generator.

Words: P pipeline ranks, v segments, M micro-batches; virtual stage ``s = k*P + r`` is segment k on rank r (looped placement).
A schedule is a ``group`` (how many micro-batches pass a segment together) and a warm-up length per rank; then forwards and
backwards alternate until the forwards are used up. All pictures below are for P=2, M=4; ``1.3`` is segment 1, micro-batch 3,
forwards plain, backwards in brackets.

==================  ===========================================================================  =========
schedule            rank 0's order                                                               source
==================  ===========================================================================  =========
gpipe (v=1)         0.0 0.1 0.2 0.3 [0.0] [0.1] [0.2] [0.3]                                      GPipe, 2019
1f1b (v=1)          0.0 0.1 [0.0] 0.2 [0.1] 0.3 [0.2] [0.3]                                      PipeDream-Flush, 2021
interleaved_1f1b    0.0 0.1 1.0 1.1 0.2 [1.0] 0.3 [1.1] 1.2 [0.0] 1.3 [0.1] [1.2] ...            Megatron-LM, 2021
aiao, 1f1b          0.0 0.1 0.2 0.3 1.0 1.1 1.2 [1.0] 1.3 [1.1] [1.2] [1.3] [0.0] ...            Fold3D, bounded
aiao, all_forward   0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3 [1.0] [1.1] [1.2] [1.3] [0.0] [0.1] ...      Fold3D, 2023
==================  ===========================================================================  =========

Makespan for M >= P and tB = 2 tF, in units of a rank's forward of one micro-batch: ``3M + 3(P-1)/v``; bubble fraction
``(P-1) / (v*M + P - 1)``. Backward is FIFO over micro-batches within a segment, so gradients are summed in the same order as
in DeepSpeed's 1F1B.
"""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

from .actions import Action, B, F, action_table

Orders = List[List[Action]]  # orders[r]: the forwards and backwards of pipeline rank r


class ScheduleError(ValueError):
    """A schedule that cannot run as asked; the message names the key, the computed values and the remedy."""


class Preset(NamedTuple):
    """What tells one named schedule from another.

    Attributes:
        looped: may have more than one segment.
        group: ``(P, M) -> N``, micro-batches that pass a segment together when the user does not say.
        warm_up: ``(P, v, N, r) -> w``, forwards of rank r before its first backward (cut to ``v*M``).
        summary: one line for people.
    """
    looped: bool
    group: Callable[[int, int], int]
    warm_up: Callable[[int, int, int, int], int]
    summary: str


def _warm_up_1f1b(P: int, v: int, N: int, r: int) -> int:
    # v == 1 needs only the distance to the last rank; a loop needs the way back, too (Megatron-LM, SC'21)
    return P - r - 1 if v == 1 else 2 * (P - r - 1) + (v - 1) * N


def _warm_up_all(P: int, v: int, N: int, r: int) -> int:
    return 1 << 62


#: Adding a schedule is one entry here. ``aiao`` has two forms, chosen by ``last_segment``.
PRESETS: Dict[str, Preset] = {
    "gpipe": Preset(False, lambda P, M: M, _warm_up_all, "all forwards, then all backwards"),
    "1f1b": Preset(False, lambda P, M: M, _warm_up_1f1b, "one forward, one backward; one chunk per rank"),
    "hippie": Preset(False, lambda P, M: M, _warm_up_1f1b, "1f1b; a ds_config's other keys follow HIPPIE, see FoldConfig"),
    "interleaved_1f1b": Preset(True, lambda P, M: P, _warm_up_1f1b, "P micro-batches per segment in turn"),
    "aiao": Preset(True, lambda P, M: M, _warm_up_1f1b, "all micro-batches per segment; 1F1B in the last segment"),
    "aiao_all_forward": Preset(True, lambda P, M: M, _warm_up_all, "all micro-batches per segment; all forwards first"),
}


#: what a ds_config may say; the second form of aiao is chosen by ``last_segment``
SCHEDULE_NAMES = tuple(name for name in PRESETS if name != "aiao_all_forward")


def split_groups(M: int, P: int, group: int) -> List[int]:
    """Sizes of the groups in which M micro-batches pass the segments: ``floor(M / group)`` of nearly equal size, larger ones
    first. No group is smaller than ``group``, so none is smaller than P: a last group shorter than P would deadlock."""
    count = max(1, M // max(1, group))
    base, extra = divmod(M, count)
    return [base + 1] * extra + [base] * (count - extra)


def compute_order(schedule: str,
                  P: int,
                  v: int,
                  M: int,
                  group: Optional[int] = None,
                  head_backward: str = "scheduled") -> Orders:
    """The compute order of every rank under a named schedule.

    Args:
        schedule: a key of :data:`PRESETS`.
        P, v, M: pipeline ranks, segments, micro-batches; all >= 1.
        group: micro-batches that pass a segment together, ``P <= group <= M``; None for the schedule's own.
        head_backward: ``"immediate"`` runs the last virtual stage's backward right after its forward (HIPPIE's last-stage
            scheduling), so that the logits of only one micro-batch exist at a time.

    Raises:
        ScheduleError: the combination cannot run; says what to change.
    """
    preset = _check(schedule, P, v, M, group)
    sizes = split_groups(M, P, group or preset.group(P, M))
    forwards, backwards = _sweeps(v, sizes)
    # fewer micro-batches than ranks leave no steady state to interleave in a loop: the ring would wait for itself
    starved = v > 1 and M < P
    orders = []
    for r in range(P):
        w = v * M if starved else min(v * M, preset.warm_up(P, v, sizes[0], r))
        order = forwards[:w]
        for f, b in zip(forwards[w:], backwards):
            order += (f, b)
        orders.append(order + backwards[v * M - w:])
    if head_backward == "immediate":
        orders[-1] = _head_first(orders[-1], v - 1)
        if [a for a in orders[-1] if a.op == B] != backwards:
            # gradients of a later group would overtake those of an earlier one on the way to rank P-2
            raise ScheduleError(f"ds_fold.head_backward='immediate' cannot be combined with schedule {schedule!r} when "
                                f"{M} micro-batches pass in groups of {sizes}; use head_backward='scheduled', or "
                                f"schedule 'aiao' with micro_batch_group={M}")
    return orders


def forward_order(P: int, v: int, M: int) -> Orders:
    """Forward-only order for evaluation: groups of P keep few activations alive, at the bubble of any other order."""
    forwards, _ = _sweeps(v, split_groups(M, P, P))
    return [list(forwards) for _ in range(P)]


def _check(schedule: str, P: int, v: int, M: int, group: Optional[int]) -> Preset:
    for name, value in (("num_stages", P), ("segments", v), ("micro-batches", M)):
        if value < 1:
            raise ScheduleError(f"{name}={value}: must be at least 1")
    if schedule not in PRESETS:
        raise ScheduleError(f"ds_fold.schedule={schedule!r} is not a schedule; use one of {', '.join(SCHEDULE_NAMES)}")
    preset = PRESETS[schedule]
    if v > 1 and not preset.looped:
        looped = [name for name in SCHEDULE_NAMES if PRESETS[name].looped]
        raise ScheduleError(f"ds_fold.schedule={schedule!r} has one chunk per pipeline rank, but ds_fold.segments={v}; use "
                            f"segments=1 or one of the schedules {', '.join(looped)}")
    if group is not None:
        if not preset.looped:
            raise ScheduleError(f"ds_fold.micro_batch_group={group} has no meaning for schedule {schedule!r}; remove it")
        if not min(P, M) <= group <= M:
            raise ScheduleError(f"ds_fold.micro_batch_group={group} must lie between the pipeline ranks ({P}) and the "
                                f"micro-batches ({M}): a smaller group would wait for itself around the ring; use a value in "
                                f"{min(P, M)}..{M}")
    return preset


def _sweeps(v: int, sizes: Sequence[int]):
    forward_table, backward_table = action_table(F, v, sum(sizes)), action_table(B, v, sum(sizes))
    forwards, backwards, first = [], [], 0
    for size in sizes:
        for k in range(v):
            forwards += forward_table[k][first:first + size]
            backwards += backward_table[v - 1 - k][first:first + size]
        first += size
    return forwards, backwards


def _head_first(order: List[Action], last: int) -> List[Action]:
    head_backward = {a.micro_batch: a for a in order if a.op == B and a.segment == last}
    result = []
    for action in order:
        if action.segment == last:
            if action.op == B:
                continue
            result += (action, head_backward[action.micro_batch])
        else:
            result.append(action)
    return result

"""Where the parameters of segments are gathered and released within a batch, so that few segments are whole at a time.

As optimal paging (Belady, 1966) over a rank's compute order: what has no further use is released; what is used next takes the place
of what is used last. With two places, under AIAO (3 segments; each ``Fk``, ``Bk`` a sweep of all micro-batches)::

    G0 G1 WG0 F0  XG0 G2 WG1 F1  WG2 F2 B2  XG2 G0 B1  XG1 WG0 B0  XG0

Each segment is gathered twice, for its forwards and for its backwards, but for the last two, whose sweeps adjoin; how many
micro-batches there are makes no difference. Schedules whose segments alternate gather more often.
"""

from typing import List, Sequence, Tuple

from .actions import GATHER, RELEASE, WAIT_GATHER, Action

#: most segments of a rank that are whole at once, those being gathered included
WHOLE_SEGMENTS = 2


def gather_urgency(segment: int, within: bool) -> int:
    """Whose turn on the wire it is, lower first; a reduction's is 0. ``within``: the batch that launches the gather waits for it,
    as where parameters are sharded; else it stands behind the reductions, in the order of first use."""
    return -1 if within else 1 + segment


def gathers_and_releases(order: Sequence[Action], v: int, ahead: bool) -> Tuple[List[List[Action]], List[Action]]:
    """For a rank's compute order: the actions before each of its entries, and those after the last.

    Args:
        order: forwards and backwards.
        v: segments.
        ahead: launch a gather as soon as there is a place, behind the compute of another segment; else right before its wait.
    """
    uses: List[List[int]] = [[] for _ in range(v)]
    for i in range(len(order) - 1, -1, -1):
        uses[order[i].segment].append(i)
    never = len(order)

    def next_use(k: int) -> int:
        return uses[k][-1] if uses[k] else never

    before: List[List[Action]] = [[] for _ in order]
    whole: List[int] = []
    launched = set()  # and not waited for
    for i, (_, k, _) in enumerate(order):
        if i == 0 or order[i - 1].segment != k:
            actions = before[i]
            for done in [s for s in whole if next_use(s) == never]:
                whole.remove(done)
                actions.append(Action(RELEASE, done))
            while len(whole) < v:
                wanted = min((s for s in range(v) if s not in whole), key=next_use)
                if next_use(wanted) == never or not ahead and wanted != k:
                    break
                if len(whole) == WHOLE_SEGMENTS:
                    last_used = max(whole, key=next_use)
                    if next_use(last_used) < next_use(wanted):
                        break
                    whole.remove(last_used)
                    actions.append(Action(RELEASE, last_used))
                whole.append(wanted)
                launched.add(wanted)
                actions.append(Action(GATHER, wanted))
            if k in launched:
                launched.remove(k)
                actions.append(Action(WAIT_GATHER, k))
        uses[k].pop()
    return before, [Action(RELEASE, k) for k in whole]


__all__ = ["WHOLE_SEGMENTS", "gathers_and_releases"]

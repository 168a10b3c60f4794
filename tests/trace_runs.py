"""Recordings with known times."""

from ds_fold.schedule import Overlap, compute_order, lower
from ds_fold.trace.files import RankTrace, Step


def recording(rank=0, P=2, D=1, v=1, M=2, run="a", offset=0.0, ended=0.0, steps=2, **more):
    """A rank's trace in which every action lasts one second, and a step begins every 100 s."""
    program = lower(compute_order("aiao" if v > 1 else "1f1b", P, v, M), v, M, overlap=Overlap(v > 1, v > 1))
    actions = program.ranks[rank // D]
    marks = [[100.0 * step + i - offset for i in range(len(actions) + 1)] for step in range(steps)]
    return RankTrace(run, "what ran", P, D, v, M, rank, offset, ended, **{"blocking_reduce": False, "bytes": {}, **more},
                     actions=actions, steps=[Step(3 + n, 8 * n, m) for n, m in enumerate(marks)])

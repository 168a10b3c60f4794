"""Pictures of programs: one row per pipeline rank, one box per forward and backward, several programs on one time axis."""

from typing import List, Tuple

from .schedule import Program, bubble_fraction, compute_times
from .schedule.actions import F

# Okabe-Ito colours: told apart by colour-blind readers; forwards light, backwards dark
_FORWARD = ("#56B4E9", "#F0E442", "#E69F00", "#CC79A7")
_BACKWARD = ("#0072B2", "#9A8F00", "#D55E00", "#882255")


def draw(programs: List[Tuple[str, Program]], path: str, backward: float = 2.0) -> None:
    """Draw programs one above the other with free communication, and write a PNG (or what the suffix says).

    Args:
        programs: (title, program). A chunk's forward lasts 1/v, so that pictures of different v compare.
        path: where to write.
        backward: time of a backward in units of a forward.

    Raises:
        ImportError: matplotlib (the ``plot`` extra) is missing.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = sum(program.P for _, program in programs)
    figure, axes = pyplot.subplots(len(programs), 1, sharex=True, squeeze=False,
                                   figsize=(13, 0.42 * rows + 1.05 * len(programs)))
    for axis, (title, program) in zip(axes[:, 0], programs):
        spans = compute_times(program, 1 / program.v, backward / program.v)
        for rank, action, start, end in spans:
            colours = _FORWARD if action.op == F else _BACKWARD
            axis.barh(rank, end - start, left=start, height=0.86, color=colours[action.segment % len(colours)], edgecolor="white",
                      linewidth=0.6)
            if end - start > 0.2:
                axis.text((start + end) / 2, rank, str(action.micro_batch), ha="center", va="center", fontsize=7,
                          color="black" if action.op == F else "white")
        length = max(span.end for span in spans)
        axis.set_title(f"{title}: {length:g} units of a forward, bubble {bubble_fraction(program, 1, backward):.1%}", loc="left",
                       fontsize=10)
        axis.set_yticks(range(program.P), [f"rank {r}" for r in range(program.P)])
        axis.invert_yaxis()
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("time, in forwards of one micro-batch through a rank")
    segments = max(program.v for _, program in programs)
    legend = [Patch(color=_FORWARD[k % len(_FORWARD)], label=f"forward, segment {k}") for k in range(segments)]
    legend += [Patch(color=_BACKWARD[k % len(_BACKWARD)], label=f"backward, segment {k}") for k in range(segments)]
    figure.legend(handles=legend, ncol=min(segments, 4) if segments > 1 else 2, loc="lower center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.02 + 0.06 * -(-segments // 4), 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

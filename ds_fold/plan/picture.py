"""A picture of plans (matplotlib): throughput against memory, those that no other plan beats in both on a line, the best named."""

from typing import List

from ..trace.style import BACKWARD, FORWARD

_SIZE_IN, _DPI = (9, 6), 150


def draw(found: List, objective: str, path: str) -> None:
    """Draw :class:`~ds_fold.plan.planner.Found` plans, the best first. Raises ImportError without matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=_SIZE_IN)
    axis.scatter([f.peak_gib for f in found], [f.throughput for f in found], s=14, color=FORWARD[0],
                 label=f"{len(found)} simulated plans")
    front = pareto(found)
    axis.plot([f.peak_gib for f in front], [f.throughput for f in front], color=BACKWARD[0], marker="o", markersize=4,
              label="no plan is faster with less memory")
    best = found[0]
    axis.scatter([best.peak_gib], [best.throughput], s=120, marker="*", color=BACKWARD[2], zorder=3, label=f"best {objective}")
    axis.annotate("best", (best.peak_gib, best.throughput), xytext=(8, 6), textcoords="offset points", color=BACKWARD[2])
    axis.set_title(f"best {objective}: {best.candidate}", loc="left", fontsize=8, color=BACKWARD[2])
    axis.set_xlabel("memory of the fullest rank, GiB")
    axis.set_ylabel("samples/s")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def pareto(found: List) -> List:
    """The plans that no other one beats in memory and in throughput, from the smallest to the fastest."""
    front: List = []
    for f in sorted(found, key=lambda f: (f.peak_gib, -f.throughput)):
        if not front or f.throughput > front[-1].throughput:
            front.append(f)
    return front

"""A picture of timelines (matplotlib): one row per rank, several timelines one above the other on one time axis."""

from typing import Dict, List, Tuple

from ..events import Timeline
from ..schedule.actions import B, F
from .report import summary
from .style import boxes, legend, unit

_WIDTH_IN, _ROW_IN, _DPI = 13, 0.5, 150


def write(timelines: List[Timeline], path: str) -> None:
    """Draw ``timelines`` and write what the suffix of ``path`` says. Raises ImportError without matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    scale, name = unit(timelines)
    longest = max(timeline.steps[-1] for timeline in timelines) * scale
    rows = [timeline.P * timeline.D for timeline in timelines]
    figure, axes = pyplot.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=rows,
                                   figsize=(_WIDTH_IN, _ROW_IN * sum(rows) + 0.6 * len(timelines) + 1))
    drawn = []
    for axis, timeline, count in zip(axes[:, 0], timelines, rows):
        strips: Dict[Tuple, List[Tuple[float, float]]] = {}
        for box in boxes(timeline):
            drawn.append(box)
            start, length = box.event.start * scale, (box.event.end - box.event.start) * scale
            strips.setdefault((box.look, box.top, box.height), []).append((start, length))
            if box.action.op in (F, B) and length > longest / 100:
                axis.text(start + length / 2, box.top + box.height / 2, str(box.action.micro_batch), ha="center", va="center",
                          fontsize=7, color=box.look.text)
        for (how, top, height), spans in strips.items():
            axis.broken_barh(spans, (top, height), facecolors=how.colour, edgecolor="white", linewidth=0.3)
        for begin in timeline.steps[1:-1]:
            axis.axvline(begin * scale, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(f"{timeline.title}: {summary(timeline, scale, name)}", loc="left", fontsize=10)
        axis.set_yticks([rank + 0.5 for rank in range(count)], [f"rank {rank}" for rank in range(count)])
        axis.set_ylim(count, 0)
        axis.set_xlim(0, longest)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel(f"time, {name}")
    entries = [Patch(color=how.colour, label=how.label) for how in legend(drawn)]
    lines = -(-len(entries) // 6)
    figure.legend(handles=entries, ncol=min(len(entries), 6), loc="lower center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.25 * lines / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)

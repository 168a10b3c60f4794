"""Timelines as one HTML page that needs nothing else: wheel zooms, dragging pans, hovering tells, double click shows all."""

import json
import os
from typing import List

from ..events import Timeline
from .report import summary
from .style import boxes, legend, unit

_PAGE = os.path.join(os.path.dirname(__file__), "page.html")


def write(timelines: List[Timeline], path: str) -> None:
    """Write the page with all timelines one above the other on one time axis."""
    scale, name = unit(timelines)
    drawn = [boxes(timeline) for timeline in timelines]
    looks = legend([box for part in drawn for box in part])
    index = {look: i for i, look in enumerate(looks)}
    data = {
        "unit": name,
        "looks": looks,
        "timelines": [{
            "title": timeline.title,
            "summary": summary(timeline, scale, name),
            "ranks": timeline.P * timeline.D,
            "steps": [round(scale * t, 6) for t in timeline.steps],
            # row top, row height, start, end, look, action, bytes
            "boxes": [[round(b.top, 3), round(b.height, 3), round(scale * b.event.start, 6), round(scale * b.event.end, 6),
                       index[b.look], b.event.action, b.event.bytes] for b in part],
        } for timeline, part in zip(timelines, drawn)],
    }
    with open(_PAGE) as file:
        page = file.read()
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # titles cannot end the script
    with open(path, "w") as file:
        file.write(page.replace("__DATA__", text))

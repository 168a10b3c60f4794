"""Recorded steps and pictures of timelines, recorded or simulated."""

import os
from typing import List

from ..events import Timeline
from .files import TraceError, read

FORMATS = (".html", ".png", ".json")


def write(timelines: List[Timeline], path: str) -> None:
    """Draw timelines one above the other on one time axis, each from its own begin. The suffix of ``path`` picks the form.

    Args:
        timelines: at least one.
        path: ``.html``, a page to zoom into, without any request to elsewhere; ``.png``, a picture (needs matplotlib); ``.json``,
            trace events for Perfetto and chrome://tracing.

    Raises:
        TraceError: another suffix, or no timeline.
        ImportError: matplotlib (the ``plot`` extra) is missing.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in FORMATS:
        raise TraceError(f"{path!r} ends with {suffix or 'no suffix'!r}; use one of {', '.join(FORMATS)}")
    if not timelines:
        raise TraceError("there is no timeline to draw")
    if suffix == ".png":
        from . import png as form
    elif suffix == ".html":
        from . import html as form
    else:
        from . import chrome as form
    form.write(timelines, path)


__all__ = ["FORMATS", "TraceError", "read", "write"]

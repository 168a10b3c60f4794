"""Programs as timelines and as text: when each forward and backward would run with free communication."""

from typing import List, Tuple

from .events import COMPUTE, Event, Timeline
from .schedule import Program, compute_times
from .schedule.actions import F

# 256-colour codes of a terminal, by segment: forwards light, backwards dark
_FORWARD, _BACKWARD = (117, 227, 214, 218), (25, 94, 130, 89)


def of_program(title: str, program: Program, backward: float = 2.0) -> Timeline:
    """A program's compute as a timeline.

    Args:
        title, program: what is drawn. A chunk's forward lasts 1/v, so that pictures of different v compare.
        backward: time of a backward in units of a forward.
    """
    spans = compute_times(program, 1 / program.v, backward / program.v)
    events = [Event(span.rank, COMPUTE, str(span.action), span.start, span.end) for span in spans]
    return Timeline(title, program.P, 1, program.v, program.M, events, [0.0, max(event.end for event in events)],
                    {"unit": "forwards of one micro-batch through a rank"})


def draw(programs: List[Tuple[str, Program]], path: str) -> None:
    """Draw (title, program) one above the other in the form that the suffix of ``path`` names, see :func:`ds_fold.trace.write`."""
    from .trace import write
    write([of_program(title, program) for title, program in programs], path)


def staircase(program: Program, colour: bool = False) -> List[str]:
    """A line per rank: a cell for each forward, two in brackets for each backward, dots where the rank idles.

    A cell holds the micro-batch; with more than one segment, the segment's letter (a, b, ...) stands before it::

        rank 0  0 1 . [0 ]. [1 ]
        rank 1  . 0 [0 ]1 [1 ]. .

    Args:
        colour: paint segments by the escape codes of terminals.
    """
    digits = len(str(program.M - 1))
    letters = [chr(ord("a") + k % 26) for k in range(program.v)] if program.v > 1 else [""]
    width = len(letters[0]) + digits + 1
    spans = [[] for _ in range(program.P)]
    for span in compute_times(program, 1, 2):
        spans[span.rank].append(span)
    length = round(max(row[-1].end for row in spans))
    lines = []
    for rank, row in enumerate(spans):
        line, at = f"rank {rank:<3}", 0
        for span in row:
            _, k, m = span.action
            forward = span.action.op == F
            text = f"{letters[k]}{m:>{digits}}"
            text = text.ljust(width) if forward else f"[{text:^{2 * width - 2}}]"
            if colour:
                code = (_FORWARD if forward else _BACKWARD)[k % len(_FORWARD)]
                text = f"\033[48;5;{code};38;5;{16 if forward else 231}m{text}\033[0m"
            line += ".".ljust(width) * round(span.start - at) + text
            at = span.end
        lines.append(line + ".".ljust(width) * round(length - at))
    return lines

"""Custom schedules: a CSV file with one row per pipeline rank and one compute action per cell."""

import csv
from typing import List

from .actions import Action, B, F
from .order import Orders, ScheduleError


def read_csv(path: str, P: int, v: int, M: int) -> Orders:
    """The compute order in ``path``: row r is rank r, cells such as ``F0.3`` and ``B1.0``, empty cells (bubbles) skipped.

    Raises:
        ScheduleError: the file cannot be read, has another number of ranks, or a cell is no forward or backward of a segment
            in 0..v-1 and a micro-batch in 0..M-1. Whether the order can run is what ``verify`` says.
    """
    try:
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"ds_fold.schedule.file={path!r} cannot be read: {error}") from None
    if len(rows) != P:
        raise ScheduleError(f"ds_fold.schedule.file={path!r} has {len(rows)} rows, but there are {P} pipeline ranks; "
                            f"write one row per rank")
    return [[_cell(path, r, c, cell.strip(), v, M) for c, cell in enumerate(row) if cell.strip()]
            for r, row in enumerate(rows)]


def _cell(path: str, row: int, column: int, text: str, v: int, M: int) -> Action:
    where = f"ds_fold.schedule.file={path!r}, row {row + 1}, column {column + 1}"
    try:
        action = Action.parse(text)
    except ValueError as error:
        raise ScheduleError(f"{where}: {error}") from None
    if action.op not in (F, B):
        raise ScheduleError(f"{where}: {text!r} is not a compute action; only {F}<segment>.<micro_batch> and "
                            f"{B}<segment>.<micro_batch> belong in the file, the rest is added")
    if action.segment >= v or action.micro_batch >= M:
        raise ScheduleError(f"{where}: {text!r} lies outside segments=0..{v - 1}, micro-batches=0..{M - 1}; set "
                            f"ds_fold.segments and gradient_accumulation_steps to what the file was written for")
    return action


def write_csv(path: str, orders: Orders) -> None:
    """Write ``orders`` in the form that :func:`read_csv` reads."""
    rows: List[List[str]] = [[str(action) for action in order] for order in orders]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)

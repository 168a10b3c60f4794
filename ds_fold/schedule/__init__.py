"""Schedules as data: actions, compute orders, lowering and proof. Pure Python; nothing here imports torch."""

from .actions import OPS, Action, Program
from .csv_order import read_csv, write_csv
from .lower import DEFAULT_RECEIVE_AHEAD, Overlap, lower
from .order import PRESETS, SCHEDULE_NAMES, Orders, ScheduleError, compute_order, forward_order, split_groups
from .verify import Report, Span, VerificationError, bubble_fraction, compute_times, makespan, verify

__all__ = [
    "DEFAULT_RECEIVE_AHEAD", "OPS", "PRESETS", "SCHEDULE_NAMES", "Action", "Orders", "Overlap", "Program", "Report",
    "ScheduleError", "Span", "VerificationError", "bubble_fraction", "compute_order", "compute_times", "forward_order", "lower",
    "makespan", "read_csv", "split_groups", "verify", "write_csv"
]

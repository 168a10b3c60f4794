"""The end of a job that fails: every rank ends, and the first error, with the rank and the action it struck, is shown last.

The rank on which something fails first writes it into the store that the ranks met in. Who fails after it, mostly because a
connection broke, finds it there and shows it after its own error. With ``ds_fold.run`` or ``watchdog_s`` a thread on each rank
looks there, too, so that nobody waits for a rank that failed:

    rank 1   F0.2 raises -> writes "rank 1 ..., ForwardPass, segment 0, micro-batch 2: ValueError: ..." -> traceback, exit code 1
    rank 0   waits for rank 1's output  ...  its thread reads that -> shows it, exit code 1
"""

import faulthandler
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Callable, List, Optional

import torch.distributed as dist

from .leftovers import remove_shared_memory

#: seconds between two looks at the store and at what this rank does
POLL_S = 1.0
#: seconds that a rank has to end by itself once another has failed
GRACE_S = 3.0
#: seconds that a failing process has to end by itself
EXIT_S = 15.0

#: whether threads look out although no config says watchdog_s, see :func:`look_from_the_start`
always_look = False
_built = 0  # engines in this process, the same number on all ranks
_latest: Optional["Watchdog"] = None
_outside: Optional["Watchdog"] = None  # of this process where it has no engine
_hook: Optional[Callable] = None  # the latest that this module has made


class Watchdog:
    """One engine's part in the end of its job, or that of a process without one.

    Args:
        name: the same on all ranks, and no other's.
        rank: global rank.
        ranks: in the job.
        doing: describes this rank and its current action.
        action: something that changes with each action; None outside of a batch.
        limit_s: seconds after which an action that is not over ends the job; None: any time.
    """

    def __init__(self, name: str, rank: int, ranks: int, doing: Callable[[], str], action: Callable[[], object],
                 limit_s: Optional[float]):
        self.rank, self.ranks, self.limit_s = rank, ranks, limit_s
        self._doing, self._action = weakref.WeakMethod(doing), weakref.WeakMethod(action)
        self._prefix = f"ds_fold/{name}/"
        self._store = dist.distributed_c10d._get_default_store() if ranks > 1 else None
        self._closed = threading.Event()
        self._first: Optional[str] = None
        show_first_errors()
        if ranks > 1 and (limit_s is not None or always_look):
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            threading.Thread(target=self._look, args=(store, ), name="ds_fold watchdog", daemon=True).start()

    def close(self) -> None:
        """The engine is done; what happens to the process from here on is not its batch's matter."""
        global _latest
        self._closed.set()
        if _latest is self:
            _latest = None

    def doing(self) -> str:
        doing = self._doing()
        return f"rank {self.rank}" if doing is None else doing()

    def record(self, error: BaseException) -> None:
        """``error`` struck this rank: it is the job's first, unless there is one already."""
        if not getattr(error, "ds_fold_recorded", False):
            error.ds_fold_recorded = True
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"on {self.doing()}")
            self._write(f"{self.doing()}: {type(error).__name__}: {_first_line(error)}")

    def first_error(self) -> Optional[str]:
        """What failed first in the job, as far as this rank can know."""
        if self._first is None and self._store is not None:
            self._first = _read(self._store, self._prefix + "error")
        return self._first

    def _write(self, text: str, store=None) -> None:
        if self._first is None:
            try:
                store = store or self._store
                self._first = text if store is None else store.compare_set(self._prefix + "error", "", text).decode()
            except RuntimeError:  # the store went with the rank that held it
                self._first = text

    # the thread -------------------------------------------------------------------------------------------------------------

    def _look(self, store) -> None:
        action, since, detected = None, time.monotonic(), False
        while not self._closed.wait(POLL_S):
            find = self._action()
            if find is None:
                return
            now = find()
            if now is None or now != action:
                action, since = now, time.monotonic()
            elif self.limit_s is not None and time.monotonic() - since > self.limit_s:
                mine = f"{self.doing()}: not over after {self.limit_s:g} s (ds_fold.watchdog_s)"
                self._write(mine, store)
                detected = self._first == mine
            self._first = self._first or _read(store, self._prefix + "error")
            if self._first is not None:
                return self._end(store, detected)

    def _end(self, store, detected: bool) -> None:
        """Say what this rank does, give it time to end by itself, and end it."""
        if "ds_fold.watchdog_s" in self._first:
            faulthandler.dump_traceback(all_threads=True)
        with suppress(RuntimeError):
            store.set(f"{self._prefix}doing/{self.rank}", self.doing())
        # the rank that detected it reads what all do; rank 0 may hold the store, and ends after it
        if self._closed.wait(GRACE_S if detected else GRACE_S + 2 * POLL_S):
            return
        lines = []
        if detected:
            lines = [_read(store, f"{self._prefix}doing/{rank}") or f"rank {rank}: no answer" for rank in range(self.ranks)]
        _print(*lines, f"first error of the job: {self._first}")
        remove_shared_memory()
        os._exit(1)


class _Process:
    """What a process does that has no engine, not yet or no longer."""

    def doing(self) -> str:
        return f"rank {dist.get_rank()}, outside of an engine"

    def action(self) -> None:
        return None


_process = _Process()


def of_engine(*args) -> Watchdog:
    """A Watchdog for this process's next engine; ``args`` are its own but for the name."""
    global _built, _latest
    _latest = Watchdog(str(_built), *args)
    _built += 1
    return _latest


def look_from_the_start() -> None:
    """With ds_fold.run: look out from when the ranks have met to the end, with an engine or without."""
    global always_look
    always_look = True
    threading.Thread(target=_wait_for_ranks, name="ds_fold start", daemon=True).start()


def _wait_for_ranks() -> None:
    while _outside_of_engines() is None:
        time.sleep(POLL_S)


def _outside_of_engines() -> Optional[Watchdog]:
    """The Watchdog of this process, made once the ranks have met."""
    global _outside
    if _outside is None and always_look and dist.is_available() and dist.is_initialized():
        _outside = Watchdog("outside", dist.get_rank(), dist.get_world_size(), _process.doing, _process.action, None)
    return _outside


def ends_with(error: BaseException) -> None:
    """Show the job's first error after ``error``, which ends this process, and see to it that it ends."""
    watchdog = _latest or _outside_of_engines()
    if watchdog is None or watchdog.ranks == 1:
        return
    watchdog.record(error)
    if always_look:
        faulthandler.dump_traceback_later(EXIT_S, exit=True, file=open(os.devnull, "w"))
        if watchdog.rank == 0:
            time.sleep(GRACE_S)  # which holds the store: the others read there what happened
        if _built or watchdog.rank == 0:  # else ranks may just be opening it, who wait for it for ever: they remove it
            remove_shared_memory()
    _print(f"first error of the job: {watchdog.first_error()}")


def stop() -> None:
    """This process has done its part of the job."""
    for watchdog in (_latest, _outside):
        if watchdog is not None:
            watchdog.close()
    if _built:  # so all ranks have met
        remove_shared_memory()


def show_first_errors() -> None:
    """Let an error that ends this process be followed by the job's first, after all else that shows it."""
    global _hook
    shown = sys.excepthook
    if shown is _hook:
        return

    def excepthook(kind, error, traceback):
        shown(kind, error, traceback)
        if isinstance(error, Exception) and _hook is excepthook:
            ends_with(error)

    sys.excepthook = _hook = excepthook


def _read(store, key: str) -> Optional[str]:
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None


def _first_line(error: BaseException) -> str:
    lines: List[str] = str(error).strip().splitlines()
    return lines[0] if lines else "without a message"


def _print(*lines: str) -> None:
    sys.stdout.flush()
    print("\n".join(f"ds_fold: {line}" for line in lines), file=sys.stderr, flush=True)


__all__ = ["Watchdog", "of_engine"]

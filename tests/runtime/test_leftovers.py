"""Locks of interrupted builds. That no shared memory is left shows where real jobs run: tests/test_run.py."""

import os
import threading
import time

import pytest
from torch.utils.file_baton import FileBaton

from ds_fold.runtime import leftovers


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # put back afterwards
    leftovers.report_stale_locks()
    path = tmp_path / "lock"
    path.write_text("")
    return path


def grow_old(path):
    long_ago = time.time() - 2 * leftovers.STALE_S
    os.utime(path, (long_ago, long_ago))


def test_an_old_lock_that_nobody_holds_is_an_error_with_the_remedy(lock):
    grow_old(lock)
    with pytest.raises(RuntimeError, match=rf"{lock} is the lock of a build that began 1200 s ago, .*: rm {lock}$"):
        FileBaton(str(lock)).wait()


@pytest.mark.parametrize("held", [True, False])
def test_a_lock_that_is_held_or_young_is_waited_for(lock, held, capsys):
    holder = open(lock) if held else None
    if held:
        grow_old(lock)
    threading.Timer(0.5, lock.unlink).start()
    begin = time.monotonic()
    FileBaton(str(lock)).wait()
    assert 0.4 < time.monotonic() - begin < 30
    assert ("interrupted" in capsys.readouterr().err) == (not held), "a young lock that nobody here holds is reported at once"
    if held:
        holder.close()

"""What the builds and ops of DeepSpeed leave behind on a host: locks of builds that were interrupted, and shared memory."""

import glob
import os
import sys
import time
from contextlib import suppress

from torch.utils.file_baton import FileBaton

#: age of a lock, in s, after which no build that nobody here works on is believed in
STALE_S = 600.0
#: seconds between two looks for the process that holds a lock
LOOK_S = 2.0
SHARED_MEMORY = "/dev/shm/deepspeed_allreduce_buffer_"


def report_stale_locks() -> None:
    """From here on, waiting for the lock of a C++ extension's build ends when nobody builds: torch waits for ever."""
    FileBaton.wait = _wait


def _wait(baton: FileBaton) -> None:
    """Wait until the lock is gone.

    Raises:
        RuntimeError: no process of this host has it open, and it is older than ``STALE_S``.
    """
    path, reported = baton.lock_file_path, False
    next_look = 0.0
    while os.path.exists(path):
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_S
            with suppress(FileNotFoundError):
                age = time.time() - os.stat(path).st_mtime
                if not _is_open_here(path):
                    what = (f"{path} is the lock of a build that began {age:.0f} s ago, but no process of this host has it open: "
                            f"unless another host builds there, the build was interrupted. Remove it: rm {path}")
                    if age > STALE_S:
                        raise RuntimeError(what)
                    if not reported:
                        print(f"ds_fold: {what}", file=sys.stderr, flush=True)
                        reported = True
        time.sleep(baton.wait_seconds)


def _is_open_here(path: str) -> bool:
    """Whether a process of this host holds the file, as far as this user may look. A build keeps its lock open."""
    real = os.path.realpath(path)
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(descriptor) == real:
                return True
    return False


def remove_shared_memory() -> None:
    """Remove the names of the buffers through which DeepSpeed's op for reductions on one host sends, 66 MB a rank.

    To be called when all ranks have opened them: what is mapped stays until its processes end. Only what this process has mapped is
    removed, so no other job's."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(SHARED_MEMORY):
                path = fields[5].rstrip("\n")
                with suppress(OSError):
                    if os.stat(path).st_ino == int(fields[4]):
                        os.unlink(path)


__all__ = ["remove_shared_memory", "report_stale_locks"]

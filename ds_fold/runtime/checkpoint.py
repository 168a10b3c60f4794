"""A checkpoint is complete or absent: it is written beside its final place and moved there when every rank is done."""

import os
import shutil

UNFINISHED = ".unfinished"
_REPLACED = ".replaced"


def begin(save_dir: str, tag: str) -> None:
    """Remove what a save of this tag that was killed has left, and finish one that was killed while it replaced another."""
    place = os.path.join(save_dir, tag)
    shutil.rmtree(place + UNFINISHED, ignore_errors=True)
    if os.path.isdir(place + _REPLACED) and not os.path.exists(place):
        os.rename(place + _REPLACED, place)


def commit(save_dir: str, tag: str, latest: bool) -> None:
    """Move the finished files of ``tag`` to their place; then, if asked, let ``latest`` name it. Each is one rename."""
    place = os.path.join(save_dir, tag)
    shutil.rmtree(place + _REPLACED, ignore_errors=True)
    if os.path.exists(place):
        os.rename(place, place + _REPLACED)
    os.rename(place + UNFINISHED, place)
    shutil.rmtree(place + _REPLACED, ignore_errors=True)
    if latest:
        pointer = os.path.join(save_dir, "latest")
        with open(pointer + UNFINISHED, "w") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        os.replace(pointer + UNFINISHED, pointer)

"""Environment for every test, jobs beside the tests, and the end of both and of the rank pools."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
# the launcher's processes find the interpreter's own tools first (ninja, deepspeed)
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
sys.path[:0] = [str(TESTS), str(TESTS.parent)]


def pytest_sessionstart():
    from multiprocessing import forkserver

    import pool  # noqa: F401, says what the server imports
    forkserver.ensure_running()  # while tests are collected, before any of them changes the environment


def pytest_collection_modifyitems(items):
    from beside import asked_for
    items.sort(key=lambda item: bool(asked_for(item)))  # those last that wait for what runs beside the others


def pytest_runtest_setup(item):
    from beside import asked_for, start
    if asked_for(item) or not {"benchmarks", "plan"} & set(item.path.parts):  # whose figures are times
        start(item.session.items)


def pytest_sessionfinish(session):
    from beside import stop
    from pool import RankPool
    stop()
    RankPool.close_all()

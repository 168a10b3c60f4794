"""Environment for every test, and the end of the rank pools."""

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


def pytest_sessionfinish(session):
    from pool import RankPool
    RankPool.close_all()

"""What takes long in processes of its own runs beside other tests, until the test comes that asks for it.

A job runs in one process apart, with the environment and the folder that the session began with: no test's changes reach it.
"""

import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Callable, Dict, Optional

import cloudpickle
import pytest
from pool import FORKED

_worker: Optional[ProcessPoolExecutor] = None
_jobs: Dict[str, Callable] = {}
_results: Dict[str, Future] = {}


def beside(job: Callable[[Path], object]):
    """A fixture by the name of ``job``: what it returns, given a folder of its own, which is gone by then; it raises what ``job``
    raised. A job has to end by itself: its launches have time limits."""
    assert job.__name__ not in _jobs, "one job of a name"
    _jobs[job.__name__] = job
    return pytest.fixture(scope="session", name=job.__name__)(lambda: _results[job.__name__].result())


def asked_for(item) -> list:
    """Names of the jobs that a test asks for."""
    return [name for name in getattr(item, "fixturenames", ()) if name in _jobs]


def start(items) -> None:
    """Let what these tests ask for run in the order in which they do, one at a time: a launch keeps several processes busy."""
    global _worker
    for name in (name for item in items for name in asked_for(item)):
        if name not in _results:
            if _worker is None:
                _worker = ProcessPoolExecutor(1, FORKED)
            _results[name] = _worker.submit(_in_a_folder, cloudpickle.dumps(_jobs[name]))


def stop() -> None:
    """Start no further one."""
    if _worker is not None:
        _worker.shutdown(wait=False, cancel_futures=True)


def _in_a_folder(job: bytes):
    with tempfile.TemporaryDirectory() as folder:
        return cloudpickle.loads(job)(Path(folder))

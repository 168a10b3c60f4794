"""A pool of ranks that stays up: real processes joined by real gloo, started once per world size, fed with functions.

    pool = RankPool.of(4)
    results = pool.run(function, argument)      # function(argument) on every rank; results by rank

A function may be a closure (it travels by cloudpickle). If a rank raises, its traceback is raised here; if ranks hang, the
pool is killed, started anew for the next test, and the ranks' stacks are in the message.
"""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback

import cloudpickle

TIMEOUT_S = 120
#: forked from a server that has one thread, has imported what takes a process seconds, and has the session's first environment
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["models", "ds_fold.runtime.engine", "torch._dynamo"])
#: for one rank of four: what is forked iterates over sets of strings in the same order everywhere, ranks that are launched do not
SPAWNED = multiprocessing.get_context("spawn")


class RankPool:
    _pools = {}

    @classmethod
    def of(cls, world_size: int) -> "RankPool":
        if world_size not in cls._pools:
            cls._pools[world_size] = cls(world_size)
        return cls._pools[world_size]

    @classmethod
    def close_all(cls) -> None:
        for pool in cls._pools.values():
            pool.close()
        cls._pools.clear()

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.ranks = []
        self.known = {}

    def start(self) -> None:
        port = free_port()
        self.logs = [tempfile.NamedTemporaryFile("r", prefix=f"rank{rank}-", suffix=".log") for rank in range(self.world_size)]
        for rank in range(self.world_size):
            context = SPAWNED if self.world_size == 4 and rank == 1 else FORKED
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.world_size, port, self.logs[rank].name))
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def run(self, function, *args, timeout: float = TIMEOUT_S, **kwargs):
        if not self.ranks:
            self.start()
        results, errors = self._everywhere(cloudpickle.dumps((function, args, kwargs)), timeout)
        if self.ranks:  # only now: a rank that closes its groups early resets the connections of those that still use them
            errors.update(self._everywhere(cloudpickle.dumps((_leave_nothing_behind, (), {})), timeout)[1])
        if errors:
            raise RankError(errors)
        return results

    def once(self, function, *args):
        """``run`` for what many cases are compared with: results of the same function and arguments are computed once. Each
        caller gets a copy."""
        task = cloudpickle.dumps((function, args))
        if task not in self.known:
            self.known[task] = cloudpickle.dumps(self.run(function, *args))
        return cloudpickle.loads(self.known[task])

    def _everywhere(self, task: bytes, timeout: float):
        """Results by rank, and the errors of those that failed. Without ranks afterwards if one did not finish."""
        for _, connection in self.ranks:
            connection.send_bytes(task)
        results, errors, died = [None] * self.world_size, {}, False
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self.ranks))
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait([c for _, c in waiting.values()], timeout=0.5)
            for rank, (_, connection) in list(waiting.items()):
                if connection not in ready:
                    continue
                del waiting[rank]
                try:
                    ok, value = cloudpickle.loads(connection.recv_bytes())
                except EOFError:
                    ok, value, died = False, "the process died", True
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + 5)  # its peers may wait for it for ever
        if waiting:
            stacks = self._stacks(waiting)
            self.close()
            if not errors:
                raise TimeoutError(f"ranks {sorted(waiting)} of {self.world_size} did not finish in {timeout} s\n{stacks}")
        if died:
            self.close()
        return results, errors

    def _stacks(self, waiting) -> str:
        for process, _ in waiting.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- rank {rank}\n{self.logs[rank].read()[-3000:]}" for rank in waiting)

    def close(self) -> None:
        for process, connection in self.ranks:
            connection.close()
            process.kill()
            process.join()
        self.ranks = []


class RankError(AssertionError):
    """What ranks raised. ``errors[rank]`` is the traceback's text."""

    def __init__(self, errors):
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items())))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(connection, rank: int, world_size: int, port: int, log: str) -> None:
    file = open(log, "w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    import torch
    torch.set_num_threads(1)
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an op for inference whose build takes a minute
    import deepspeed.runtime.bf16_optimizer
    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None  # collects garbage a dozen times per optimizer
    # torch computes in fp16 on every CPU; DeepSpeed refuses those without instructions for it
    from deepspeed.accelerator import get_accelerator
    get_accelerator().is_fp16_supported = lambda: True
    from deepspeed.utils import logger
    logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            break
        try:
            answer = True, _run(task)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send_bytes(cloudpickle.dumps(answer))


def _run(task: bytes):
    function, args, kwargs = cloudpickle.loads(task)
    return function(*args, **kwargs)  # in a frame that has ended when what the task made is let go of


def _leave_nothing_behind() -> None:
    """Destroy the process groups that the task made: each gloo group holds sockets and threads.

    DeepSpeed's own engine is never collected, and with it its groups' threads, which spin as soon as the other end has closed."""
    import gc

    import torch.distributed as dist
    from deepspeed.utils import groups
    _destroy_engines()
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    groups._WORLD_GROUP = None
    gc.freeze()  # what is left stays: looking through it after each task took longer than most tasks


def _destroy_engines() -> None:
    import gc

    from deepspeed.runtime.engine import DeepSpeedEngine
    for engine in [o for o in gc.get_objects() if issubclass(type(o), DeepSpeedEngine)]:  # isinstance asks what weak proxies hold
        engine.destroy()
        vars(engine).clear()  # hooks on the tensors of its last loss hold DeepSpeed's engine, where no collector sees them

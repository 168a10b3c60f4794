"""What every rank of a comparison runs: build all contenders, let them take turns, write what was measured (rank 0)."""

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TextIO

import deepspeed
import torch
import torch.distributed as dist
from contenders import build
from lab_cpu import timed
from setting import Setting


def seconds(contender, on: bool, steps: int) -> float:
    """Of a step of the slowest rank, over ``steps`` steps without a barrier between. One more step runs before them, so that what
    it leaves in flight is paid for within the time, like what the last one leaves is not."""
    contender.communicate(on)
    dist.barrier()
    contender.step()
    start = time.perf_counter()
    for _ in range(steps):
        contender.step()
    mine = torch.tensor((time.perf_counter() - start) / steps)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return float(mine)


def all_reduce_seconds(setting: Setting, repeats: int) -> float:
    """Of an all-reduce of a rank's gradients among its replicas, all pipeline ranks at once."""
    if setting.D == 1:
        return 0.0
    groups = [dist.new_group([p * setting.D + d for d in range(setting.D)]) for p in range(setting.P)]
    group = groups[dist.get_rank() // setting.D]
    flat = torch.zeros(setting.parameter_bytes // 4)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat, group=group)
        mine = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        times.append(float(mine))
    return statistics.median(times[1:])


def calibrated(setting: Setting, share: float) -> Setting:
    """The setting with parameters of such a size that DeepSpeed's 1F1B spends ``share`` of its step in exposed data-parallel
    communication.

    Raises:
        ValueError: that takes more than 16 times the parameters, as where replicas share a host.
    """
    most = 16 * setting.parameter_bytes
    for _ in range(2):
        contender = build("deepspeed", setting, {})
        free, whole = seconds(contender, False, 2), seconds(contender, True, 2)
        contender.close()
        exposed = whole - free
        wanted = setting.parameter_bytes * share / (1 - share) * free / exposed
        if not 0 < wanted <= most:
            raise ValueError(f"{setting.parameter_bytes / 1e6:.1f} MB of parameters a rank expose {1e3 * exposed:.1f} ms of "
                             f"communication in a step of {1e3 * whole:.0f} ms; no size up to {most / 1e6:.0f} MB exposes "
                             f"{100 * share:.0f} %: put replicas on different hosts")
        setting = setting._replace(parameter_bytes=int(wanted) // 4096 * 4096)
        if abs(exposed / whole - share) < 0.02:
            break
    return setting


def start() -> TextIO:
    """Let this rank meet the others. Returns where rank 0 writes its progress; what engines say of themselves is not shown."""
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an op for inference whose build takes a minute
    deepspeed.init_distributed("gloo", verbose=False)
    progress = sys.stdout if dist.get_rank() == 0 else open(os.devnull, "w")
    sys.stdout = open(os.devnull, "w")
    return progress


def main() -> None:
    # the launcher puts --local_rank first
    plan = json.loads(Path(sys.argv[-2]).read_text())
    progress = start()
    setting = Setting(**plan["setting"])
    if plan["share"]:
        setting = calibrated(setting, plan["share"])
    contenders = {}
    for name, (kind, options) in plan["contenders"].items():
        contenders[name] = build(kind, setting, options)
        seconds(contenders[name], True, 1)
        print(f"built {name}", file=progress, flush=True)
    times = {name: {"on": [], "off": []} for name in contenders}
    gc.collect()
    gc.freeze()  # what one contender holds is not searched for garbage in another's step
    with timed():
        for repeat in range(plan["repeats"]):
            for name, contender in contenders.items():
                for mode in ("on", "off"):
                    # what a schedule would cost without communication varies less: half the repeats will do
                    if mode == "on" or repeat % 2 == 0:
                        times[name][mode].append(seconds(contender, mode == "on", plan["steps"]))
            print(f"repeat {repeat + 1} of {plan['repeats']}", file=progress, flush=True)
        alone = all_reduce_seconds(setting, 3)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {name: (c.checksums(), c.live.peak) for name, c in contenders.items()})
    if dist.get_rank() == 0:
        result = {"setting": setting._asdict(), "all_reduce_s": alone, "contenders": {}}
        for name in contenders:
            sums, agree = {}, True
            for part in gathered:
                for layer, values in part[name][0].items():
                    agree &= sums.setdefault(str(layer), values) == values
            result["contenders"][name] = {"times": times[name], "checksums": sums, "replicas_agree": agree,
                                          "peak_live_layers": max(part[name][1] for part in gathered)}
        Path(sys.argv[-1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

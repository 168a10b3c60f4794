"""What the engine itself costs: ds_fold's 1f1b against DeepSpeed's engine, on layers so small that nothing else shows.

    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 benchmarks/engine_overhead.py --stages 2

Both engines live in the same processes and take turns, so that a busy machine slows both alike. Prints the median time of a
step and the ratio pair by pair. With --stages 1 on one rank, a bare loop over the same layers takes turns with them, and what
ds_fold's step takes beyond it, divided by its actions, is the engine's own time per action.
"""

import argparse
import statistics
import time

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_fold


def build(stock, args):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": args.micro_batches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": args.zero, "reduce_bucket_size": 1000000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    layers = [ds_fold.LayerSpec(nn.Linear, args.hidden, args.hidden) for _ in range(args.layers)]
    kwargs = dict(num_stages=args.stages, loss_fn=nn.MSELoss(), partition_method="uniform")
    if stock:
        module = deepspeed.pipe.PipelineModule(layers, **kwargs)
        return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
    config["ds_fold"] = {"schedule": args.schedule, "segments": args.segments}
    module = ds_fold.PipelineModule(layers, config=config, **kwargs)
    return ds_fold.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]


def batches(args):
    x = torch.randn(2, args.hidden)
    while True:
        yield x, x


class Bare:
    """The same layers, loss, micro-batches and optimizer in a plain loop."""

    def __init__(self, engine, args):
        self.layers, self.M = list(engine.module.forward_funcs), args.micro_batches
        self.optimizer = torch.optim.AdamW([p for layer in self.layers for p in layer.parameters()], lr=1e-3)
        self.loss_fn = nn.MSELoss()

    def train_batch(self, data):
        for _ in range(self.M):
            x, y = next(data)
            for layer in self.layers:
                x = layer(x)
            (self.loss_fn(x, y) / self.M).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--segments", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps per repeat")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(verbose=False)
    engines = {"stock": build(True, args), "ds_fold": build(False, args)}
    if dist.get_world_size() == 1:
        engines["bare"] = Bare(build(False, args), args)
    data = batches(args)
    times = {name: [] for name in engines}
    for repeat in range(args.repeats + 1):
        for name, engine in engines.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.steps):
                engine.train_batch(data)
            dist.barrier()
            if repeat:  # the first is the warm-up
                times[name].append((time.perf_counter() - start) / args.steps)
    if dist.get_rank() == 0:
        ratios = [s / f for s, f in zip(times["stock"], times["ds_fold"])]
        for name, values in times.items():
            print(f"{name:8s} step {1e3 * statistics.median(values):7.2f} ms  (min {1e3 * min(values):.2f}, "
                  f"max {1e3 * max(values):.2f})")
        actions = len(engines["ds_fold"].train_schedule().instructions)
        print(f"throughput of ds_fold {args.schedule} v={args.segments} over stock: median {statistics.median(ratios):.2f}x "
              f"(min {min(ratios):.2f}, max {max(ratios):.2f}, {len(ratios)} pairs)")
        print(f"rank 0: {actions} actions, {1e6 * statistics.median(times['ds_fold']) / actions:.0f} us each, layers and messages "
              f"included")
        if "bare" in times:
            own = statistics.median(f - b for f, b in zip(times["ds_fold"], times["bare"]))
            print(f"beyond the bare loop: {1e6 * own / actions:.0f} us per action")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Real compute, nothing emulated: the GPT of examples/train_gpt.py on two ranks of this machine, ds_fold against DeepSpeed's 1F1B.

    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 benchmarks/real_compute.py

All engines live in the same processes and take turns, so that a busy machine slows all alike. Messages pass over the loopback,
unshaped: nothing is to be hidden here, and what is compared is the cost of the engines and of their schedules' bubbles.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import ds_fold

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from train_gpt import VOCABULARY, gpt_layers, loss_fn

BLOCKS = {
    "DeepSpeed 1F1B": None,
    "ds_fold 1f1b": {"schedule": "1f1b"},
    "ds_fold gpipe": {"schedule": "gpipe"},
    "ds_fold interleaved_1f1b v=2": {"schedule": "interleaved_1f1b", "segments": 2},
    "ds_fold aiao v=2": {"schedule": "aiao", "segments": 2},
    "ds_fold aiao v=3": {"schedule": "aiao", "segments": 3},
    "ds_fold aiao v=3, all forward": {"schedule": "aiao", "segments": 3, "last_segment": "all_forward"},
}


def build(block, args):
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    kwargs = dict(num_stages=args.stages, loss_fn=loss_fn, partition_method="uniform", seed_layers=True,
                  seed_fn=lambda seed: torch.default_generator.manual_seed(seed))
    if block is None:
        net = deepspeed.pipe.PipelineModule(gpt_layers(args), **kwargs)
        return deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)[0]
    net = ds_fold.PipelineModule(gpt_layers(args), config={**config, "ds_fold": block}, **kwargs)
    return ds_fold.initialize(model=net, model_parameters=list(net.parameters()))[0]


def batches(args):
    generator = torch.Generator().manual_seed(dist.get_rank() % max(1, dist.get_world_size() // args.stages))
    while True:
        tokens = torch.randint(VOCABULARY, (args.micro_batch, args.sequence + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:].contiguous()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(verbose=False)
    engines = {name: build(block, args) for name, block in BLOCKS.items()}
    times = {name: [] for name in engines}
    data = {name: batches(args) for name in engines}
    losses = {}
    for repeat in range(args.repeats + 1):
        for name, engine in engines.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name] = float(engine.train_batch(data[name]))
            dist.barrier()
            if repeat:  # the first is the warm-up
                times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        tokens = args.micro_batch * args.micro_batches * args.sequence * (dist.get_world_size() // args.stages)
        base = times["DeepSpeed 1F1B"]
        rows = {name: {"tokens_per_s": tokens / statistics.median(t), "ratio": statistics.median(b / x for b, x in zip(base, t)),
                       "lowest": min(b / x for b, x in zip(base, t)), "highest": max(b / x for b, x in zip(base, t)),
                       "loss": losses[name]} for name, t in times.items()}
        print("| | tokens/s | throughput, pair by pair (min-max) | loss of the last step |\n|---|---|---|---|")
        for name, row in rows.items():
            print(f"| {name} | {row['tokens_per_s']:.0f} | {row['ratio']:.2f}x ({row['lowest']:.2f}-{row['highest']:.2f}) | "
                  f"{row['loss']:.6f} |")
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

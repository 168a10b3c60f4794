"""Records real steps of 1F1B and of AIAO with overlap, in layers that sleep in place of computing.

    DS_ACCELERATOR=cpu deepspeed --num_accelerators 4 benchmarks/record_timeline.py --out traces
    python -m ds_fold trace traces/1f1b traces/aiao -o docs/timeline_1f1b_aiao.png --steps 3:4

The ranks, their messages, reductions and gathers are real; gloo moves them over the loopback.
"""

import argparse
import itertools
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from emulated import EmulatedLayer, Live, batch_of
from torch import nn

import ds_fold

RUNS = {
    "1f1b": {"schedule": "1f1b"},
    "aiao": {"schedule": "aiao", "segments": 4, "overlap_grad_reduce": "segment", "overlap_param_gather": True},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    parser.add_argument("--out", type=Path, default=Path("traces"), help="folder for the recordings")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--forward-ms", type=float, default=15.0, help="of one layer; a backward takes twice as long")
    parser.add_argument("--weights", type=int, default=3_000_000, help="of one layer, fp32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    for name, block in RUNS.items():
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": args.micro_batches,
            "steps_per_print": 10**9,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "ds_fold": {**block, "trace": {"enabled": True, "steps": [3, 6], "path": str(args.out / name)}},
        }
        layers = [LayerSpec(EmulatedLayer, i, 64, args.weights, 1e-3 * args.forward_ms, args.micro_batches, Live())
                  for i in range(args.layers)]
        net = ds_fold.PipelineModule(layers, num_stages=args.stages, loss_fn=nn.MSELoss(), partition_method="uniform",
                                     config=config)
        engine, *_ = ds_fold.initialize(model=net, model_parameters=list(net.parameters()))
        batches = itertools.cycle(batch_of(engine.grid.get_data_parallel_rank(), args.micro_batches, 64))
        for _ in range(6):
            engine.train_batch(batches)
        engine.destroy()


if __name__ == "__main__":
    main()

"""Train a byte-level GPT with a (folded) pipeline:

    deepspeed --num_accelerators 4 examples/train_gpt.py --deepspeed_config configs/aiao.json --stages 4

Reads real text: the sources of the Python that runs it, or any file given with --text.
"""

import argparse
import json
import statistics
import sysconfig
import time
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import ds_fold
from ds_fold import LayerSpec, TiedLayerSpec

VOCABULARY = 256
TEXT_LIMIT = 4_000_000  # bytes


class Embedding(nn.Module):
    """Bytes [batch, sequence] to vectors [batch, sequence, hidden]. Its token weight is the head, too."""

    def __init__(self, sequence, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, hidden) * 0.02)
        self.position = nn.Parameter(torch.randn(sequence, hidden) * 0.02)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight) + self.position


def head(embedding, x):
    """Vectors to logits, with the transposed embedding."""
    return F.linear(x, embedding.weight)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.mlp(self.norm_mlp(x))


def loss_fn(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def gpt_layers(args):
    """The model as the list of layers that the pipeline cuts."""
    return [
        TiedLayerSpec("embedding", Embedding, args.sequence, args.hidden),
        *[LayerSpec(Block, args.hidden, args.heads) for _ in range(args.layers)],
        LayerSpec(nn.LayerNorm, args.hidden),
        TiedLayerSpec("embedding", Embedding, args.sequence, args.hidden, forward_fn=head),
    ]


def load_text(path, sequence):
    """(training bytes, held-out bytes) as int64 tensors; the last 5 % are held out."""
    if path:
        text = Path(path).read_bytes()[:TEXT_LIMIT]
    else:
        text = b""
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += source.read_bytes()
            if len(text) >= TEXT_LIMIT:
                break
    data = torch.frombuffer(bytearray(text[:TEXT_LIMIT]), dtype=torch.uint8).long()
    cut = int(0.95 * len(data))
    if len(data) - cut < sequence + 2:
        raise SystemExit(f"{path or 'the standard library'} has {len(data)} bytes of text; --sequence {sequence} needs at least "
                         f"{20 * (sequence + 2)} to hold out 5 %: give a longer --text or a shorter --sequence")
    return data[:cut], data[cut:]


def micro_batches(data, args, batch, replica, size, count):
    """The micro-batches of one batch for one replica: a pure function of its arguments, so that the first and the last pipeline
    rank see the same ones and a resumed run sees what it would have seen."""
    for index in range(count):
        generator = torch.Generator().manual_seed(hash((args.seed, batch, replica, index)))
        starts = torch.randint(len(data) - args.sequence - 1, (size, ), generator=generator)
        rows = torch.stack([data[s:s + args.sequence + 1] for s in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def seed_cpu(seed):
    """Layers start alike however they are folded. DeepSpeed's own seeding asks every kind of device, which takes long."""
    torch.default_generator.manual_seed(seed)


def common_parser(description):
    """What the examples have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--stages", type=int, default=4, help="pipeline ranks; the other ranks are data-parallel")
    parser.add_argument("--layers", type=int, default=12, help="transformer blocks")
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", help="file to train on; default: the sources of Python's standard library")
    parser.add_argument("--seed", type=int, default=0)
    return deepspeed.add_config_arguments(parser)


def parsed(parser):
    """The arguments, with a config."""
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config is required, for example configs/aiao.json")
    return args


def parse_args():
    parser = common_parser(__doc__)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--save", metavar="DIR", help="save checkpoints here")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --save")
    parser.add_argument("--report", metavar="FILE", help="write losses and tokens/s as JSON")
    args = parsed(parser)
    if args.resume and not args.save:
        parser.error("--resume needs --save DIR to know where from")
    return args


def main():
    args = parse_args()
    deepspeed.init_distributed()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    torch.manual_seed(args.seed)
    net = ds_fold.PipelineModule(gpt_layers(args), num_stages=args.stages, loss_fn=loss_fn, config=args.deepspeed_config,
                                 partition_method="uniform", seed_layers=True, base_seed=args.seed,
                                 seed_fn=seed_cpu)
    engine, *_ = ds_fold.initialize(args=args, model=net, model_parameters=list(net.parameters()))
    if args.resume:
        engine.load_checkpoint(args.save)

    train_data, held_out = load_text(args.text, args.sequence)
    replica, size, count = engine.grid.get_data_parallel_rank(), engine.train_micro_batch_size_per_gpu(), engine.micro_batches
    tokens = engine.train_batch_size() * args.sequence
    shown = torch.distributed.get_rank() == 0

    def evaluate():
        return float(engine.eval_batch(micro_batches(held_out, args, 0, replica, size, count)))

    losses, seconds, evaluated = [], [], {}
    with tqdm(total=args.steps, initial=engine.global_steps, disable=not shown, unit="step") as progress:
        while engine.global_steps < args.steps:
            start = time.perf_counter()
            batch = micro_batches(train_data, args, 1 + engine.global_steps, replica, size, count)
            losses.append(float(engine.train_batch(batch)))
            seconds.append(time.perf_counter() - start)
            step = engine.global_steps
            if step % args.evaluate_every == 0 or step == args.steps:
                evaluated[step] = evaluate()
            if args.save and (step % args.save_every == 0 or step == args.steps):
                engine.save_checkpoint(args.save)
            progress.set_postfix(loss=f"{losses[-1]:.4f}", tokens_per_s=f"{tokens / statistics.median(seconds[-20:]):.0f}",
                                 **({"eval": f"{evaluated[max(evaluated)]:.4f}"} if evaluated else {}))
            progress.update()

    report = {"steps": engine.global_steps, "losses": losses, "evaluated": evaluated,
              "tokens_per_s": tokens / statistics.median(seconds[2:] or seconds or [float("inf")])}
    if shown and losses:
        print(f"step {report['steps']}: loss {losses[-1]:.4f}, held-out loss {evaluated[max(evaluated)]:.4f}, "
              f"{report['tokens_per_s']:.0f} tokens/s")
    if shown and args.report:
        Path(args.report).write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

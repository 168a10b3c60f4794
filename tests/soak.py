"""Soak: random schedules on random models. Many are proved, some of them run for real and compared with one plain process.

    python tests/soak.py --prove 1000 --run 150 --seed 0

Every case is a function of its seed alone, which is printed with each failure: ``--only SEED`` repeats it.
"""

import argparse
import random
import sys
import time
from typing import Any, Dict, List, NamedTuple

import torch
from models import HIDDEN, LayerSpec, TiedLayerSpec, build, ds_config, largest_difference, train_alone, whole_model
from pool import RankPool
from torch import nn
from tqdm import tqdm

STEPS = 3
#: of the largest weight; fp32, where nothing but the order of a few sums differs
TOLERANCE = 1e-5


class Case(NamedTuple):
    seed: int
    P: int
    D: int
    M: int
    fold: Dict[str, Any]
    config: Dict[str, Any]
    layers: List[Dict[str, Any]]
    dynamic_shape: bool

    def __str__(self) -> str:
        return f"seed {self.seed}: P={self.P} D={self.D} M={self.M} fold={self.fold} config={self.config} layers={self.layers}"


def draw(seed: int) -> Case:
    """The case of ``seed``; it may be one that is refused."""
    r = random.Random(seed)
    P = r.randint(1, 4)
    D = r.randint(1, 4 // P)
    M = r.randint(1, 8)
    schedule = r.choice(["gpipe", "1f1b", "interleaved_1f1b", "aiao", "aiao"])
    v = 1 if schedule in ("gpipe", "1f1b") else r.randint(1, 4)
    fold = {"schedule": schedule, "segments": v, "receive_ahead": r.randint(1, 6), "label_transport": r.random() < 0.3}
    if schedule == "aiao" and r.random() < 0.4:
        fold["last_segment"] = "all_forward"
    if schedule in ("aiao", "interleaved_1f1b") and M >= P and r.random() < 0.4:
        fold["micro_batch_group"] = r.randint(P, M)
    if r.random() < 0.2:
        fold["head_backward"] = "immediate"
    fold["overlap_grad_reduce"] = r.choice(["off", "segment", "layer"])
    fold["align_grad_reduce"] = fold["overlap_grad_reduce"] == "segment" and r.random() < 0.3
    fold["overlap_param_gather"] = r.random() < 0.5
    config = {"zero": r.randint(0, 2), "clip": r.choice([0.0, 0.5])}
    fold["shard_params"] = config["zero"] > 0 and fold["segments"] > 1 and r.random() < 0.3
    if r.random() < 0.3:
        config["pipeline"] = {"activation_checkpoint_interval": r.randint(1, 3), "use_reentrant": r.random() < 0.5}
    layers = _draw_layers(r, v * P + r.randint(0, 4))
    return Case(seed, P, D, M, fold, config, layers, r.random() < 0.3)


def _draw_layers(r: random.Random, count: int) -> List[Dict[str, Any]]:
    """Descriptions of ``count`` layers: the first takes and the last returns HIDDEN values per item."""
    layers, width, tie_width = [], HIDDEN, {}
    for index in range(count):
        kind = r.choice(["block", "block", "linear", "open", "close", "mask", "tied", "function"])
        if kind == "tied" and (index == count - 1 or tie_width.setdefault(key := r.choice("ab"), width) != width):
            kind = "block"
        layer = {"kind": kind, "width": width, "out": width, "frozen": r.random() < 0.15, "delay_ms": r.choice([0, 0, 0, 1, 4])}
        if kind == "tied":
            layer["key"], layer["frozen"] = key, False
        elif kind == "linear" or index == count - 1:
            layer["kind"], layer["out"] = "linear", HIDDEN if index == count - 1 else r.randint(5, 16)
        layers.append(layer)
        width = layer["out"]
    return layers


class Piece(nn.Module):
    """A layer after its description; takes and returns a tensor or a tuple (x, ids, mask, scale, side)."""

    def __init__(self, kind, width, out, frozen, delay_ms, last=False, **_):
        super().__init__()
        self.kind, self.delay_ms, self.last = kind, delay_ms, last
        if kind in ("block", "mask", "close", "open", "tied"):
            self.a = nn.Linear(width, width + 3)
            self.b = nn.Linear(width + 3, width)
        elif kind == "linear":
            self.a = nn.Linear(width, out)
        self.requires_grad_(not frozen)

    def forward(self, inputs):
        x, *rest = inputs if isinstance(inputs, tuple) else (inputs, )
        self._sleep()
        if self.delay_ms and x.requires_grad and torch.is_grad_enabled():
            x = x * 1.0
            x.register_hook(lambda grad: self._sleep())
        if self.kind == "linear":
            x = self.a(x)
        elif self.kind == "function":
            x = torch.tanh(x) + 0.5 * x
        else:
            x = x + self.b(torch.tanh(self.a(x)))
        if self.kind == "open" and not rest:
            size = x.shape[0]
            rest = [torch.arange(size), x.detach() > 0.3, torch.full((), 0.5), x[:, :2].mean(1)]
        elif self.kind == "mask" and rest:
            ids, mask, scale, side = rest
            x = x + scale * side.unsqueeze(1) * mask.any(1, keepdim=True) + 0.01 * ids.unsqueeze(1)
        elif self.kind == "close" and rest or self.last:
            x = x + sum(0.1 * side.unsqueeze(1) for side in rest[3:])
            rest = []
        return (x, *rest) if rest else x

    def _sleep(self) -> None:
        if self.delay_ms:
            time.sleep(random.random() * self.delay_ms / 1000)


def tied_again(module, inputs):
    """The other use of a tied layer."""
    return module(tuple(t * 0.5 if t.is_floating_point() and i == 0 else t for i, t in enumerate(inputs))
                  if isinstance(inputs, tuple) else inputs * 0.5)


def specs(case: Case) -> list:
    result, seen = [], set()
    for index, layer in enumerate(case.layers):
        if layer["kind"] == "tied":
            result.append(TiedLayerSpec(layer["key"], Piece, forward_fn=tied_again if layer["key"] in seen else None,
                                        tied_weight_attr=["a.weight", "a.bias", "b.weight", "b.bias"], **_without_key(layer)))
            seen.add(layer["key"])
        else:
            result.append(LayerSpec(Piece, **layer, last=index == len(case.layers) - 1))
    return result


def _without_key(layer):
    # two users of one tie differ in nothing that matters; the first one's description builds the module
    return {name: value for name, value in layer.items() if name != "key"}


def items(case: Case, replica: int):
    """Pairs of inputs and labels; with dynamic shapes each micro-batch has a size of its own."""
    generator = torch.Generator().manual_seed(1000 * case.seed + replica)
    while True:
        size = int(torch.randint(1, 4, (), generator=generator)) if case.dynamic_shape else 2
        x = torch.randn(size, HIDDEN, generator=generator)
        yield x, 0.5 * x


def prove(case: Case) -> None:
    """Raises where the case's programs are wrong, ConfigError or ScheduleError where it is refused."""
    from ds_fold.config import fold_config
    fold = fold_config({"ds_fold": case.fold})
    fold.check(case.P, case.M, len(case.layers))
    fold.train_program(case.P, case.M, case.config["zero"])
    fold.eval_program(case.P, case.M)


def on_ranks(seed: int):
    """Train the case of ``seed`` on every rank: (weights of the whole model, losses)."""
    case = draw(seed)
    config = ds_config(case.M, fold=case.fold, **case.config)
    engine = build(False, config, case.P, len(case.layers), layers=specs(case), dynamic_shape=case.dynamic_shape)
    batches = items(case, engine.grid.get_data_parallel_rank())
    losses = []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(batches)))
        engine.eval_batch(items(case, 9), num_micro_batches=1 + case.seed % 5)
    weights = whole_model(engine.module)
    engine.destroy()
    return weights, losses


def compare(case: Case) -> float:
    """Run for real and alone. Returns the largest difference of a weight, relative to the largest weight; raises if too large."""
    weights, losses = RankPool.of(case.P * case.D).run(on_ranks, case.seed)[0]
    expected, alone = train_alone(len(case.layers), case.M, case.D, STEPS, clip=case.config["clip"], layers=specs(case),
                                  batches=[items(case, d) for d in range(case.D)])
    weights = {name: w for name, w in weights.items() if name in expected}  # not a rank's placeholder
    difference, size = largest_difference(weights, expected)
    gap = max(abs(a - b) / abs(b) for a, b in zip(losses, alone))
    if difference > TOLERANCE * size or gap > TOLERANCE:
        raise AssertionError(f"weights differ by {difference} of {size}, losses by {gap} (relative)\n{case}")
    return difference / size


def soak(prove_count: int, run_count: int, seed: int, show: bool = True) -> Dict[str, Any]:
    """Prove ``prove_count`` cases that are not refused, run each so-manieth of them for real.

    Returns:
        counts, the largest relative difference, and the failures as (seed, message).
    """
    from ds_fold.config import ConfigError
    from ds_fold.schedule import ScheduleError, VerificationError
    proved, refused, ran, largest, failures = 0, 0, 0, 0.0, []
    with tqdm(total=prove_count, disable=not show, unit="case") as progress:
        while proved < prove_count:
            case = draw(seed)
            seed += 1
            try:
                prove(case)
            except VerificationError as error:
                failures.append((case.seed, f"{error}\n{case}"))
            except (ConfigError, ScheduleError):
                refused += 1
                continue
            proved += 1
            progress.update()
            if proved * run_count // prove_count > ran:
                ran += 1
                try:
                    largest = max(largest, compare(case))
                except Exception as error:
                    failures.append((case.seed, f"{type(error).__name__}: {error}\n{case}"))
                    progress.write(f"FAILED {failures[-1][1]}")
            progress.set_postfix(ran=ran, failed=len(failures), refused=refused)
    return {"proved": proved, "refused": refused, "ran": ran, "largest_difference": largest, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prove", type=int, default=1000, help="cases to prove")
    parser.add_argument("--run", type=int, default=150, help="how many of them run for real")
    parser.add_argument("--seed", type=int, default=0, help="the first case's seed")
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat one case")
    args = parser.parse_args()
    start = time.monotonic()
    try:
        if args.only is not None:
            case = draw(args.only)
            print(case)
            prove(case)
            print(f"largest relative difference {compare(case):.2e}")
            return 0
        result = soak(args.prove, args.run, args.seed)
    finally:
        RankPool.close_all()
    print(f"{result['proved']} cases proved ({result['refused']} more refused), {result['ran']} run against one process in "
          f"{time.monotonic() - start:.0f} s: largest relative difference {result['largest_difference']:.1e}, "
          f"failed: {[seed for seed, _ in result['failures']]}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""The simulator against steps that compare.py measured on the emulated network: errors, and whether it orders contenders alike.

    python benchmarks/simulator_error.py docs/benchmarks/*.json

Per launch, one number is fitted: the overhead of a compute or message, to the steps without data-parallel communication of the
ds_fold contenders. Contenders of other packages but DeepSpeed's 1F1B have no program and are left out.
"""

import json
import statistics
import sys
from itertools import combinations
from pathlib import Path
from typing import Any, Dict, Optional

from compare import ALL
from setting import Setting

from ds_fold.config import FoldConfig
from ds_fold.partition import partition_uniform
from ds_fold.plan import Cluster, Link, Profile, simulate
from ds_fold.plan.memory import reduced_bytes

#: share of the rate that headers leave, and the latency of a message (lab_check.py measures both)
PAYLOAD, LATENCY_S = 0.956, 3e-4


def step_s(measured: Dict[str, Any], name: str, overhead_s: float, communicates: bool) -> Optional[float]:
    """Predicted seconds of a step; None for a contender without a program."""
    kind, options = ALL[name]
    if kind not in ("ds_fold", "deepspeed"):
        return None
    options = dict(options)
    zero, config = options.pop("zero", 0), options.pop("config", {})
    fold, s, lab = FoldConfig(**options), Setting(**measured["setting"]), measured["lab"]
    cluster = Cluster(hosts=lab["hosts"], ranks_per_host=lab["ranks_per_host"], collective="pairwise",
                      inter_host=Link(gbit_per_s=PAYLOAD * lab["rate_mbit"] / 1000, latency_s=LATENCY_S),
                      intra_host=Link(gbit_per_s=30, latency_s=5e-5))
    profile = Profile.uniform(s.layers, s.forward_s, parameter_bytes=s.parameter_bytes * s.P / s.layers,
                              activation_bytes=s.activation_bytes, overhead_s=overhead_s)
    cuts = fold.partition if isinstance(fold.partition, list) else partition_uniform(s.layers, fold.segments * s.P)
    return simulate(fold.train_program(s.P, s.M, zero), profile.costs(cuts, s.P), cluster, D=s.D, zero_stage=zero,
                    by_layer=fold.overlap_grad_reduce == "layer", data_parallel=communicates,
                    reduced=reduced_bytes(config)).step_s


def fitted(measured: Dict[str, Any]) -> float:
    """The overhead with which the steps without communication are right in the mean, by bisection."""
    rows = [row for row in measured["rows"] if row["name"].startswith("ds_fold")]
    low, high = 0.0, 0.02
    for _ in range(20):
        middle = (low + high) / 2
        error = statistics.mean(step_s(measured, row["name"], middle, False) / row["free_s"] - 1 for row in rows)
        low, high = (middle, high) if error < 0 else (low, middle)
    return low


def main() -> None:
    errors, wrong, ordered = [], [], 0
    for path in sys.argv[1:]:
        for measured in json.loads(Path(path).read_text()):
            overhead, pairs = fitted(measured), []
            name = Path(path).stem + ("" if measured["value"] is None else f" {measured['value']}")
            print(f"\n**{name}**: overhead {1000 * overhead:.2f} ms, fitted\n\n"
                  "| | measured ms | predicted ms | error | no overhead |\n|---|---|---|---|---|")
            for row in measured["rows"]:
                bare = step_s(measured, row["name"], 0.0, True)
                if bare is None:
                    continue
                real, predicted = row["step_s"][0], step_s(measured, row["name"], overhead, True)
                errors.append(predicted / real - 1)
                pairs.append((row["name"], real, predicted))
                print(f"| {row['name']} | {1000 * real:.0f} | {1000 * predicted:.0f} | {100 * errors[-1]:+.1f} % | "
                      f"{100 * (bare / real - 1):+.1f} % |")
            for (a, real_a, sim_a), (b, real_b, sim_b) in combinations(pairs, 2):
                if abs(real_a / real_b - 1) > 0.03:
                    ordered += 1
                    if (real_a < real_b) != (sim_a < sim_b):
                        wrong.append(f"{a} and {b} ({Path(path).stem})")
    print(f"\nMedian of the absolute error: {100 * statistics.median(map(abs, errors)):.1f} %, largest "
          f"{100 * max(map(abs, errors)):.1f} %, of {len(errors)} steps. Of {ordered} pairs that are more than 3 % apart, "
          f"{len(wrong)} are ordered differently{': ' if wrong else ''}{'; '.join(wrong)}.")


if __name__ == "__main__":
    main()

"""HIPPIE's claim on an emulated slow network: throughput, peak memory and memory efficiency of a planned pipeline, against GPipe
with data parallelism and DeepSpeed's 1F1B partitioned by parameters, on models whose layers are unequal.

    python benchmarks/hippie.py                     both models, P=4, D=2, one rank a host, 200 Mbit/s; about 5 minutes
    python benchmarks/hippie.py --model cnn         one of them
    python benchmarks/hippie.py --weights 3 --dp 4 --slow-motion 3      three times the parameters, 16 ranks; see compare.py

Models: "transformer", 30 blocks between an embedding and a head that are 5 times heavier in time and parameters; "cnn", 16 layers
whose activations shrink and whose parameters grow. Rank 0 measures a profile of the layers; the planned contenders take their
partition and recomputed layers from it when they are built, and every ds_fold contender's step and peak are predicted from it.
Compute is a sleep of set length; parameters, optimizer states, activations and network traffic are real, and memory is measured
(ds_fold.runtime.memory). A layer's gradients come in the last micro-batch's backward: where no flat buffer waits for them, peaks
are lower than they would be. A contender whose plan is refused is in the table with the reason. One more launch with one replica
gives the scaling efficiency. Needs root and iproute2 (see lab.py). Writes <out>/hippie*.json and .md.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from lab import Lab, LabError, timed
from simulator_error import LATENCY_S, PAYLOAD

M, PIPELINE, BLOCK_S, BLOCK_BYTES, BOUNDARY = 8, 4, 0.005, 1_100_000, 32768
#: of a launch
LONGEST_S = 1500
#: of DeepSpeed's own engine memory is not measured: it holds what the same schedule and partition hold in ds_fold
DEEPSPEED, SAME_MEMORY = "DeepSpeed 1F1B, by parameters", "ds_fold 1f1b, by parameters"
GPIPE, HIPPIE = "GPipe, by layers", "ds_fold hippie, planned"
SEARCHED = {"partition": {"method": "memory_efficiency"}, "recompute": "auto"}
FAST = {"partition": {"method": "throughput"}, "recompute": "auto"}
AIAO = {"schedule": "aiao", "overlap_grad_reduce": "layer", "overlap_param_gather": True}


class Contender(NamedTuple):
    """A ds_fold block, or None for DeepSpeed's engine; the ZeRO stage; and the share of GPipe's measured memory that it is planned
    in, if not in any."""
    block: Optional[Dict[str, Any]]
    zero: int
    share: Optional[float] = None


#: the paper has 43 % of GPipe's memory; predictions have been up to 2 % below what was measured
CONTENDERS = {
    GPIPE: Contender({"schedule": "gpipe", "partition": "uniform"}, 0),
    "GPipe, by layers, all recomputed": Contender({"schedule": "gpipe", "partition": "uniform", "recompute": "all"}, 0),
    DEEPSPEED: Contender(None, 0),
    SAME_MEMORY: Contender({"schedule": "1f1b", "partition": "parameters"}, 0),
    HIPPIE: Contender({"schedule": "hippie", **SEARCHED}, 1),
    "ds_fold aiao v=2, planned": Contender({**AIAO, **SEARCHED, "segments": 2}, 1),
    "ds_fold aiao v=2, planned for throughput": Contender({**AIAO, **FAST, "segments": 2}, 1),
    "ds_fold aiao v=3, planned for throughput": Contender({**AIAO, **FAST, "segments": 3}, 1),
    "ds_fold aiao v=2, planned for throughput in 43 % of GPipe's memory": Contender({**AIAO, **FAST, "segments": 2}, 1, 0.43),
    "ds_fold aiao v=3, planned for throughput in 45 % of GPipe's memory": Contender({**AIAO, **FAST, "segments": 3}, 1, 0.45),
}
#: with one replica
ALONE = [name for name, contender in CONTENDERS.items() if contender.zero and contender.share is None]


def layers_of(model: str, weights: float = 1.0, slow: float = 1.0) -> List[Dict[str, Any]]:
    """Keyword arguments of each :class:`~emulated.EmulatedLayer` of a model, with ``weights`` times the parameters and ``slow``
    times the seconds."""
    features, kept, block = BOUNDARY // 4, 16 * BOUNDARY * 4, int(weights * BLOCK_BYTES) // 4
    block_s = slow * BLOCK_S
    if model == "transformer":
        return [{"features": features, "weights": heavy * block, "forward_s": heavy * block_s, "kept_bytes": kept}
                for heavy in (5, *[1] * 30, 5)]
    widths = [features * 4 >> i // 3 for i in range(17)]
    return [{"features": widths[i], "out_features": widths[i + 1], "weights": int(block * 0.8 * 1.18**i) + widths[i],
             "forward_s": 3 * block_s * 0.97**i, "kept_bytes": 16 * 4 * widths[i]} for i in range(16)]


# in the ranks -------------------------------------------------------------------------------------------------------------


def rank_program(plan: Dict[str, Any], folder: Path) -> None:
    """What each rank runs: one contender after the other, each built, timed, and its memory measured. Rank 0 writes the results."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from compare_ranks import seconds, start
    from contenders import EngineContender
    from emulated import EmulatedLayer, Live
    from setting import Setting

    import ds_fold
    from ds_fold.config import ConfigError, fold_config
    from ds_fold.plan import Cluster, Profile, simulate
    from ds_fold.plan.placement import simulation_options
    from ds_fold.plan.profile import profile_layers
    from ds_fold.runtime.memory import MeasuredMemory

    layers, D = layers_of(plan["model"], plan["weights"], plan["slow_motion"]), plan["D"]

    class Unequal(EngineContender):
        def __init__(self, block: Optional[Dict[str, Any]], zero: int, cluster: str):
            setting = Setting(PIPELINE, D, M, len(layers), BLOCK_S, BOUNDARY, 0)
            optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
            if block is None:
                super().__init__(setting, deepspeed.pipe.PipelineModule, deepspeed.initialize, zero, "parameters",
                                 optimizer=optimizer)
            else:
                block = {**block, "profile": str(folder / "profile.json"), "cluster": cluster}
                super().__init__(setting, ds_fold.PipelineModule, ds_fold.initialize, zero, ds_fold=block, optimizer=optimizer)

        def layer_specs(self):
            return [deepspeed.pipe.LayerSpec(EmulatedLayer, index, micro_batches=M, live=self.live, **layer)
                    for index, layer in enumerate(layers)]

        def batch(self):
            generator = torch.Generator().manual_seed(1000 + self.replica)
            last = layers[-1].get("out_features", layers[-1]["features"])
            return [(torch.randn(1, layers[0]["features"], generator=generator), torch.zeros(1, last)) for _ in range(M)]

        def planned(self) -> Dict[str, Any]:
            """Where the layers are, and what was predicted of it."""
            module, fold, zero = self.engine.module, fold_config(self.config), self.engine.zero_optimization_stage()
            profile, cluster = Profile.load(folder / "profile.json"), Cluster.load(folder / "cluster.json")
            costs = profile.costs(module.parts, PIPELINE, module.recomputed)
            result = simulate(fold.train_program(PIPELINE, M, zero), costs, cluster,
                              **simulation_options(self.config, fold, zero, D))
            return {"cuts": list(module.parts), "recomputed": sorted(module.recomputed), "predicted_s": result.step_s,
                    "predicted_bytes": result.peak_bytes}

    def cluster_with(memory_bytes: Optional[float]) -> str:
        """The cluster's file, its devices with so much memory."""
        path = folder / ("cluster.json" if memory_bytes is None else "limited.json")
        if memory_bytes is not None and dist.get_rank() == 0:
            path.write_text(json.dumps({**json.loads((folder / "cluster.json").read_text()), "device_memory_bytes": memory_bytes}))
        dist.barrier()
        return str(path)

    progress = start()
    if dist.get_rank() == 0:
        plain = Unequal.__new__(Unequal)
        plain.live, plain.replica = Live(), 0
        inputs, target = plain.batch()[0]
        profile_layers(plain.layer_specs(), inputs, target, torch.nn.MSELoss(), name=plan["model"]).save(folder / "profile.json")
    dist.barrier()
    results: Dict[str, Any] = {}
    for name in plan["contenders"]:
        block, zero, share = CONTENDERS[name]
        memory_bytes = None if share is None else share * results[GPIPE]["peak_bytes"]
        try:
            contender = Unequal(block, zero, cluster_with(memory_bytes))
        except ConfigError as error:  # on all ranks alike
            results[name] = {"refused": str(error)}
            continue
        with timed():
            results[name] = {"step_s": [seconds(contender, True, 2) for _ in range(plan["repeats"])]}
        if block is not None:
            with MeasuredMemory(contender.engine) as memory:
                contender.step()
            peaks: List[int] = [0] * dist.get_world_size()
            dist.all_gather_object(peaks, memory.peak_bytes)
            results[name].update(peak_bytes=max(peaks), **contender.planned())
        contender.close()
        del contender
        gc.collect()
        print(f"ran {name}", file=progress, flush=True)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


# the report ---------------------------------------------------------------------------------------------------------------


def measure(case: Dict[str, Any], D: int, contenders: Sequence[str], rate_mbit: float, repeats: int) -> Dict[str, Any]:
    """One launch on D * 4 hosts; ``case`` says which model. Raises LabError."""
    with tempfile.TemporaryDirectory(prefix="hippie-") as path, Lab(
            PIPELINE * D, rate_mbit / case["slow_motion"], granule_ms=0.4 * case["slow_motion"]) as lab:
        folder = Path(path)
        (folder / "cluster.json").write_text(json.dumps({
            "hosts": PIPELINE * D, "ranks_per_host": 1, "collective": "pairwise",
            "inter_host": {"gbit_per_s": PAYLOAD * rate_mbit / case["slow_motion"] / 1000, "latency_s": LATENCY_S}}))
        plan = {**case, "D": D, "contenders": list(contenders), "repeats": repeats}
        run = lab.run([sys.executable, os.path.abspath(__file__), "--ranks", json.dumps(plan), path], timeout=LONGEST_S, echo=True,
                      env={"TORCH_CPP_LOG_LEVEL": "ERROR", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"})
        if not run.ok:
            raise LabError(f"{run}\n{run.outputs[run.first_failure or 0][-3000:]}")
        results = json.loads((folder / "result.json").read_text())
    if DEEPSPEED in results:
        results[DEEPSPEED]["peak_bytes"] = results[SAME_MEMORY]["peak_bytes"]
    return {**case, "D": D, "rate_mbit": rate_mbit, "contenders": results,
            "date": time.strftime("%Y-%m-%d"), "flags": run.flags, "cpu": run.cpu._asdict()}


def table(measured: Dict[str, Any], alone: Optional[Dict[str, Any]] = None) -> str:
    """Markdown: each contender beside GPipe, and beside itself with one replica."""
    alone_s = {name: statistics.median(row["step_s"]) for name, row in (alone or {"contenders": {}})["contenders"].items()
               if "step_s" in row}
    heavier = f" with {measured['weights']:g} times the parameters" if measured["weights"] != 1 else ""
    slow = f", slow motion {measured['slow_motion']:g}" if measured["slow_motion"] != 1 else ""
    lines = [f"**{measured['model']}**{heavier}: P={PIPELINE}, D={measured['D']}, M={M}, {measured['rate_mbit']:g} Mbit/s{slow} "
             f"({measured['date']})", "",
             "| | step ms | throughput | peak MB | memory | ME | predicted | scaling | layers of the chunks | recomputed |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    base_s, base_bytes = (statistics.median(measured["contenders"][GPIPE]["step_s"]), measured["contenders"][GPIPE]["peak_bytes"])
    for name, row in measured["contenders"].items():
        if "refused" in row:
            lines.append(f"| {name} | refused: {row['refused']} |" + " |" * 8)
            continue
        step_s = statistics.median(row["step_s"])
        faster, less = base_s / step_s, row["peak_bytes"] / base_bytes
        predicted, scaling = "", ""
        if "predicted_s" in row:
            off = row["predicted_s"] / step_s - 1, row["predicted_bytes"] / row["peak_bytes"] - 1
            predicted = ", ".join(f"{100 * error:+.1f} %" for error in off)
        if name in alone_s:
            scaling = f"{100 * alone_s[name] / step_s:.0f} %"
        sizes = ", ".join(str(b - a) for a, b in zip(row["cuts"], row["cuts"][1:])) if "cuts" in row else ""
        lines.append(f"| {name} | {1e3 * step_s:.0f} | {faster:.2f}x | {row['peak_bytes'] / 1e6:.1f} | {100 * (less - 1):+.0f} % | "
                     f"{faster / less:.2f}x | {predicted} | {scaling} | {sizes} | {len(row.get('recomputed', []))} |")
    cpu = measured["cpu"]
    lines += ["", f"CPU: the ranks' own {100 * cpu['own']:.0f} %, busy {100 * cpu['busy']:.0f} %."]
    lines += [f"Not to be trusted: {flag}." for flag in measured["flags"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=("transformer", "cnn"), help="default: both")
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s of each host's network card")
    parser.add_argument("--weights", type=float, default=1.0, help="times the models' parameters (default 1)")
    parser.add_argument("--dp", type=int, default=2, help="replicas (default 2)")
    parser.add_argument("--slow-motion", type=float, default=1.0, help="times the layers' seconds, at as much less of the rate")
    parser.add_argument("--only", action="append", help="contenders with this in their name, besides GPipe; can be repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--ranks", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        rank_program(json.loads(args.ranks[0]), Path(args.ranks[1]))
        return 0
    names = [name for name in CONTENDERS if name == GPIPE or not args.only or any(word in name for word in args.only)]
    if DEEPSPEED in names and SAME_MEMORY not in names:
        parser.error(f"{DEEPSPEED} needs {SAME_MEMORY}, too")
    results, tables = [], []
    try:
        for model in args.model or ("transformer", "cnn"):
            case = {"model": model, "weights": args.weights, "slow_motion": args.slow_motion}
            pair = [measure(case, D, chosen, args.rate, args.repeats)
                    for D, chosen in ((args.dp, names), (1, [name for name in ALONE if name in names])) if chosen]
            results += pair
            tables.append(table(*pair))
            print(tables[-1], flush=True)
    except LabError as error:
        print(f"hippie: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"hippie-{PIPELINE * args.dp}ranks-weights{args.weights:g}"
    path.with_suffix(".json").write_text(json.dumps(results, indent=1))
    path.with_suffix(".md").write_text("\n".join(tables))
    print(f"wrote {path}.json and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())

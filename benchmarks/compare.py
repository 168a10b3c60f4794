"""DeepSpeed, torch.distributed.pipelining and ds_fold side by side on an emulated slow network, in one launch, taking turns.

    python benchmarks/compare.py                     the default case: P=4, D=2, one rank a host, 200 Mbit/s; about 4 minutes
    python benchmarks/compare.py --case smoke        P=2, D=2; under a minute
    python benchmarks/compare.py --case full         every contender, in two launches; about 8 minutes
    python benchmarks/compare.py --case hide         what each option of the overlap adds, at v=4, with 32 layers: two a chunk
    python benchmarks/compare.py --case v8           the same at v=8, with 64 layers
    python benchmarks/compare.py --slow-motion 2     the same case at half the rate with layers twice as long: steadier, see below
    python benchmarks/compare.py --sweep share       one axis: micro_batches, segments, share, activation or ranks_per_host

Real ranks, real TCP over shaped network cards, real parameters, gradients and optimizers; compute is a sleep of set length. The
parameters are sized so that DeepSpeed's 1F1B spends ``--share`` of its step in exposed data-parallel communication. Needs root
and iproute2 (see lab.py). Writes <out>/<case>.json, .md and .png.

The ranks share this machine's processors, and what a step costs them is real. Where their share is flagged, slow motion halves it:
every ratio of the emulated cluster stays the same (compute, bytes and rate), only the processors' own work weighs half.
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any, Dict, List

from compare_report import chart, rows_of, table
from lab import Lab, LabError
from lab_check import check

REFERENCE = "DeepSpeed 1F1B"

OVERLAP = {"zero": 1, "overlap_grad_reduce": "segment", "overlap_param_gather": True}
#: name -> (kind, options); see contenders.build
OTHERS: Dict[str, Any] = {
    REFERENCE: ("deepspeed", {}),
    "DeepSpeed DualPipeV": ("dualpipev", {}),
    "torch 1F1B, DDP": ("torch", {"schedule": "1f1b"}),
    "torch 1F1B": ("torch", {"schedule": "1f1b", "ddp": False}),
    "torch Interleaved1F1B v=2": ("torch", {"schedule": "interleaved_1f1b", "segments": 2, "ddp": False}),
    "torch Interleaved1F1B v=4": ("torch", {"schedule": "interleaved_1f1b", "segments": 4, "ddp": False}),
    "torch LoopedBFS v=4": ("torch", {"schedule": "looped_bfs", "segments": 4, "ddp": False}),
}
OURS: Dict[str, Any] = {
    REFERENCE: ("deepspeed", {}),
    "ds_fold 1f1b": ("ds_fold", {"schedule": "1f1b"}),
    "ds_fold interleaved_1f1b v=2": ("ds_fold", {"schedule": "interleaved_1f1b", "segments": 2}),
    "ds_fold interleaved_1f1b v=4": ("ds_fold", {"schedule": "interleaved_1f1b", "segments": 4}),
    "ds_fold aiao v=2": ("ds_fold", {"schedule": "aiao", "segments": 2}),
    "ds_fold aiao v=4": ("ds_fold", {"schedule": "aiao", "segments": 4}),
    "ds_fold 1f1b, overlapped": ("ds_fold", {"schedule": "1f1b", **OVERLAP}),
    "ds_fold interleaved_1f1b v=4, overlapped": ("ds_fold", {"schedule": "interleaved_1f1b", "segments": 4, **OVERLAP}),
    "ds_fold aiao v=2, overlapped": ("ds_fold", {"schedule": "aiao", "segments": 2, **OVERLAP}),
    "ds_fold aiao v=4, overlapped": ("ds_fold", {"schedule": "aiao", "segments": 4, **OVERLAP}),
}
#: a norm far above that of the gradients: clipping is on and never triggers
LOOSE_CLIP = {"gradient_clipping": 1e6}
BY_LAYER, BF16 = {**OVERLAP, "overlap_grad_reduce": "layer"}, {"communication_data_type": "bf16"}
EARLY = {**BY_LAYER, "optimizer_step": "post_validated"}
OPTIONS = {
    "overlapped": OVERLAP,
    "by layer": BY_LAYER,
    "by layer, post-validated": {**EARLY, "config": LOOSE_CLIP},
    "gradients in bf16": {**OVERLAP, "config": BF16},
    "by layer, post-validated, gradients in bf16": {**EARLY, "config": {**BF16, **LOOSE_CLIP}},
}
#: what each option of the overlap adds
HIDE = {f"ds_fold {schedule} v={v}, {words}": ("ds_fold", {"schedule": schedule, "segments": v, **options})
        for schedule in ("interleaved_1f1b", "aiao") for v in (4, 8) for words, options in OPTIONS.items()
        if schedule == "aiao" or words in ("overlapped", "by layer, post-validated")}


def planned(name: str, first: List[int], last: List[int]) -> Dict[str, Any]:
    """With two layers a chunk but in the first and the last segment: what partition {"method": "throughput"} finds for the case."""
    kind, options = HIDE[name]
    sizes = first + [2] * 4 * (options["segments"] - 2) + last
    return {f"{name}, planned": (kind, {**options, "partition": [0, *accumulate(sizes)]})}


PLANNED = {
    **planned("ds_fold aiao v=4, by layer, post-validated", [2, 2, 3, 3], [2, 2, 1, 1]),
    **planned("ds_fold aiao v=4, by layer, post-validated, gradients in bf16", [1, 2, 2, 2], [3, 2, 2, 2]),
    **planned("ds_fold aiao v=8, by layer", [1, 1, 2, 2], [3, 3, 2, 2]),
}
V8 = {
    "torch Interleaved1F1B v=8": ("torch", {"schedule": "interleaved_1f1b", "segments": 8, "ddp": False}),
    "ds_fold aiao v=8": ("ds_fold", {"schedule": "aiao", "segments": 8}),
}
ALL = {**OTHERS, **OURS, **V8, **HIDE, **PLANNED, "ds_fold aiao v=1, overlapped": ("ds_fold", {"schedule": "aiao", **OVERLAP})}


def _named(*names: str) -> Dict[str, Any]:
    return {name: ALL[name] for name in names}


DEFAULT = {"P": 4, "D": 2, "M": 8, "layers": 16, "forward_s": 0.005, "activation_bytes": 32768, "parameter_bytes": 12_900_000}
#: setting and contenders; one launch for each group, since many engines in one process slow each other down
CASES = {
    "default": (DEFAULT, [_named(REFERENCE, "DeepSpeed DualPipeV", "torch 1F1B", "torch Interleaved1F1B v=4", "ds_fold 1f1b",
                                 "ds_fold interleaved_1f1b v=4, overlapped", "ds_fold aiao v=4, overlapped")]),
    "full": (DEFAULT, [OURS, OTHERS]),
    "smoke": ({**DEFAULT, "P": 2, "M": 4, "layers": 8, "parameter_bytes": 6_200_000},
              [_named(REFERENCE, "DeepSpeed DualPipeV", "ds_fold 1f1b", "ds_fold aiao v=4, overlapped")]),
    "hide": ({**DEFAULT, "layers": 32}, [
        _named(REFERENCE, *(n for n in HIDE if "v=4" in n and "bf16" not in n)),
        _named(REFERENCE, *(n for n in (*HIDE, *PLANNED) if "v=4" in n and ("bf16" in n or "planned" in n)))]),
    "v8": ({**DEFAULT, "layers": 64}, [
        _named(REFERENCE, *V8, "ds_fold interleaved_1f1b v=8, overlapped",
               *(n for n in (*HIDE, *PLANNED) if "aiao v=8, by layer" in n))]),
}
FEW = _named(REFERENCE, "ds_fold interleaved_1f1b v=4, overlapped", "ds_fold aiao v=4, overlapped")
#: axis -> (values, what a value changes: (setting, share, ranks per host, contenders) -> the same)
SWEEPS = {
    "micro_batches": ([8, 16, 32], lambda value, s, share, rph, c: ({**s, "M": value}, share, rph, c)),
    "segments": ([1, 2, 4, 8], lambda v, s, share, rph, c: (
        {**s, "layers": 32}, share, rph,
        _named(REFERENCE, f"ds_fold aiao v={v}, overlapped"))),
    "share": ([0.25, 0.44, 0.6], lambda value, s, share, rph, c: (s, value, rph, c)),
    "activation": ([8192, 32768, 131072], lambda value, s, share, rph, c: ({**s, "activation_bytes": value}, share, rph, c)),
    # 4 replicas, so that they reach over hosts, whose ranks share a card
    "ranks_per_host": ([1, 2], lambda value, s, share, rph, c: ({**s, "P": 2, "D": 4, "layers": 8}, share, value, c)),
}


def measure(lab: Lab, setting: Dict[str, Any], share: float, contenders: Dict[str, Any], ranks_per_host: int, repeats: int,
            steps: int, launcher: bool = False) -> Dict[str, Any]:
    """One launch in which all contenders take turns.

    Returns:
        what compare_ranks.py wrote, with the machine's share in it.

    Raises:
        LabError: a rank failed; the message ends with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        plan, result = Path(folder) / "plan.json", Path(folder) / "result.json"
        plan.write_text(json.dumps({"setting": setting, "share": share, "contenders": contenders, "repeats": repeats,
                                    "steps": steps}))
        script = str(Path(__file__).parent / "compare_ranks.py")
        options = {"timeout": 900, "echo": True,
                   "env": {"TORCH_CPP_LOG_LEVEL": "ERROR", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}}
        if launcher:
            run = lab.launch_deepspeed(script, [str(plan), str(result)], ranks_per_host, **options)
        else:
            run = lab.run([sys.executable, script, str(plan), str(result)], ranks_per_host, **options)
        if not run.ok:
            raise LabError(f"{run}\n{run.outputs[run.first_failure or 0][-3000:]}")
        measured = json.loads(result.read_text())
    measured["lab"] = {"hosts": lab.hosts, "rate_mbit": lab.rate_mbit, "ranks_per_host": ranks_per_host, "cpu": run.cpu._asdict(),
                       "drops": run.drops, "sent_bytes": run.sent_bytes, "flags": run.flags, "wall_s": run.wall_s}
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="default")
    parser.add_argument("--sweep", choices=SWEEPS, help="vary one axis of the case, a few contenders")
    parser.add_argument("--only", action="append", metavar="WORD", help="contenders whose name has this word; may be repeated")
    parser.add_argument("--share", type=float, default=0.44, help="of DeepSpeed 1F1B's step in exposed data-parallel communication")
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s of each host's network card")
    parser.add_argument("--slow-motion", type=float, default=1.0, metavar="K", help="K times slower layers and network")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per repeat")
    parser.add_argument("--launcher", action="store_true", help="start the ranks by DeepSpeed's launcher; slower start")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    setting, groups = CASES[args.case]
    if args.only:
        groups = [{n: c for n, c in ALL.items() if n == REFERENCE or any(word in n for word in args.only)}]
    points = [(None, setting, args.share, 1, group) for group in groups]
    if args.sweep:
        values, change = SWEEPS[args.sweep]
        points = [(value, *change(value, setting, args.share, 1, FEW)) for value in values]
    name = (args.sweep or args.case) + (f"-{args.rate:g}mbit" if args.rate != 200 else "") + (
        f"-slow{args.slow_motion:g}" if args.slow_motion != 1 else "")
    results: List[Dict[str, Any]] = []
    start = time.monotonic()
    try:
        for value, point, share, ranks_per_host, chosen in points:
            ranks = point["P"] * point["D"]
            point = {**point, "forward_s": point["forward_s"] * args.slow_motion}
            with Lab(ranks // ranks_per_host, args.rate / args.slow_motion, granule_ms=0.4 * args.slow_motion) as lab:
                if lab.hosts > 1:
                    print(check(lab), flush=True)
                measured = measure(lab, point, share, chosen, ranks_per_host, args.repeats, args.steps, args.launcher)
            measured.update(value=value, axis=args.sweep, date=time.strftime("%Y-%m-%d"), share=share)
            measured["rows"] = rows_of(measured, REFERENCE)
            results.append(measured)
            print(table(measured), flush=True)
    except LabError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(results, indent=1))
    (args.out / f"{name}.md").write_text("\n".join(table(result) for result in results))
    chart(results, args.out / f"{name}.png")
    print(f"wrote {args.out / name}.json, .md and .png after {time.monotonic() - start:.0f} s")
    return 0 if all(row["right"] for result in results for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""``python -m ds_fold plan``: the ds_config that is best for a batch, a model and a cluster, without starting anything."""

import json
import os
from typing import Any, Dict, List

from tqdm import tqdm

from .costs import Cluster, PlanError, Profile
from .partition import OBJECTIVES

HELP = "search layout, schedule, cuts, recomputation, overlap and ZeRO stage for a batch on a cluster; write the best ds_config"
#: plans in the table
ROWS = 10
_PICTURES = (".png", ".svg", ".pdf")


def add_arguments(parser) -> None:
    parser.add_argument("config", help="ds_config (JSON or HJSON) with train_batch_size; what a plan does not decide stays")
    parser.add_argument("--profile", required=True, nargs="+", metavar="FILE",
                        help="profile.json of the model; several: of other micro-batch sizes")
    parser.add_argument("--cluster", required=True, metavar="FILE", help="cluster.json; all its ranks are used")
    parser.add_argument("--tp", type=int, default=1, metavar="T", help="tensor-parallel size; the profile is of one slice, and T "
                        "neighbouring ranks count as one (default 1)")
    parser.add_argument("--objective", choices=OBJECTIVES, default=OBJECTIVES[0], help=f"default: {OBJECTIVES[0]}")
    parser.add_argument("-o", "--output", metavar="FILE", default="planned.json", help="default: planned.json")
    parser.add_argument("--explain", metavar="FILE", help="draw throughput against memory of all plans (needs matplotlib)")


def run(args) -> int:
    """Print the table, write the ds_config. Raises ConfigError or PlanError."""
    from ..config import describe_layout, load_config  # slow: loads DeepSpeed
    from .planner import Planner
    if args.explain and os.path.splitext(args.explain)[1].lower() not in _PICTURES:
        raise PlanError(f"--explain {args.explain}: use one of the suffixes {', '.join(_PICTURES)}")
    folder = os.path.dirname(args.output)
    if folder and not os.path.isdir(folder):
        raise PlanError(f"--output {args.output}: there is no folder {folder}")
    config = load_config(args.config)
    planner = Planner(config, [Profile.load(path) for path in args.profile], Cluster.load(args.cluster).sliced(args.tp),
                      args.objective)
    with tqdm(leave=False, disable=None) as bar:  # no bar where nobody looks
        def progress(done: int, total: int, what: str) -> None:
            if done < bar.n or bar.total is None:
                bar.reset(total)
            bar.set_description_str(what, refresh=False)
            bar.update(done - bar.n)

        answer = planner.plan(progress)
    best = answer.found[0]
    planned = planned_config(config, planner, best, args.tp)
    with open(args.output, "w") as file:
        json.dump(planned, file, indent=1)
        file.write("\n")
    _print(planner, answer)
    c = best.candidate
    print(f"\nwritten to {args.output}; it has to be launched on {c.P * c.D * args.tp} ranks with num_stages={c.P} "
          f"({describe_layout(c.P, c.D, args.tp)})")
    if args.explain:
        from .picture import draw
        draw(answer.found, args.objective, args.explain)
        print(f"drawn to {args.explain}")
    return 0


def planned_config(config: Dict[str, Any], planner, found, T: int = 1) -> Dict[str, Any]:
    """The ds_config of a plan for T tensor-parallel slices: ``config`` with what was planned in place of its own."""
    c = found.candidate
    recompute = sorted(found.recompute)
    names = {0: "none", planner.layers: "all"}
    block = {**planner.kept, **c.block(), "partition": list(found.cuts), "recompute": names.get(len(recompute), recompute),
             "plan": {"objective": planner.objective, "P": c.P, "D": c.D, "T": T, "step_s": found.score.step_s,
                      "throughput": found.throughput, "peak_gib": found.peak_gib, "memory_efficiency": found.efficiency}}
    planned = {**config, "train_micro_batch_size_per_gpu": c.micro_batch_size, "gradient_accumulation_steps": c.M,
               "zero_optimization": {**(config.get("zero_optimization") or {}), "stage": c.zero_stage}, "ds_fold": block}
    if "activation_checkpoint_interval" in (config.get("pipeline") or {}):  # what is recomputed is planned
        planned["pipeline"] = {**config["pipeline"], "activation_checkpoint_interval": 0}
    return planned


def _print(planner, answer) -> None:
    head = ("", "P", "D", "schedule", "v", "group", "micro-batch", "M", "ZeRO", "reduce", "gather", "recompute", "step ms",
            "samples/s", "GiB", "ME", "")
    rows: List[tuple] = [head]
    best = answer.found[0]
    for i, found in enumerate(answer.found[:ROWS], 1):
        c = found.candidate
        schedule = c.schedule + ", head immediate" * (c.head_backward != "scheduled")
        recompute = {0: "none", planner.layers: "all"}.get(len(found.recompute), f"{len(found.recompute)} layers")
        worse = "" if found.score.value == best.score.value else planner.worse(found.score, best.score)
        me = "-" if found.efficiency is None else f"{found.efficiency:.4g}"
        rows.append((i, c.P, c.D, schedule, c.segments, c.group or "-", c.micro_batch_size, c.M, c.zero_stage, c.reduce,
                     "hidden" if c.gather else "-", recompute, f"{1e3 * found.score.step_s:.1f}", f"{found.throughput:.4g}",
                     f"{found.peak_gib:.3g}", me, worse))
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(head))]
    for row in rows:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths)).rstrip())
    print("\nother layouts:")
    for (P, D), reason in sorted(answer.layouts.items()):
        print(f"  P={P} D={D}: {reason}")
    counts = answer.counts
    print(f"\n{counts['candidates']} candidates: {counts['memory']} need more memory than a device has, {counts['bounds']} more "
          f"cannot be better by their bounds, {counts['simulated']} were simulated, and {counts['searched']} of these searched for "
          f"better cuts")
    if answer.gap:
        print(f"not proved: bounds leave room for {answer.gap:.1%} less {_VALUES[planner.objective]} with other cuts")
    else:
        print("proved: no candidate is better with any cuts and all or no layers recomputed")


_VALUES = {"throughput": "time", "memory": "memory", "memory_efficiency": "time x memory"}

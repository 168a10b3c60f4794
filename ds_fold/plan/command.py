"""``python -m ds_fold simulate``: what a ds_config would take on a cluster, as a table and as a timeline."""

import re
from typing import List

from ..partition import PartitionError, cut_layers
from .costs import Cluster, PlanError, Profile
from .memory import describe_efficiency
from .placement import load_profile, place, simulation_options
from .result import Result
from .simulate import simulate

HELP = "predict step time, bubble, exposed communication and memory of a ds_config on a cluster, without starting anything"
_LAYERS = ("layers", "forward_ms", "backward_ms", "parameter_mb", "activation_kb", "overhead_ms")


def add_arguments(parser) -> None:
    parser.add_argument("config", help="ds_config (JSON or HJSON)")
    parser.add_argument("--cluster", required=True, help="cluster.json, see ds_fold.plan.Cluster")
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks (num_stages)")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--micro-batches", type=int, help="overrides the config's gradient_accumulation_steps")
    parser.add_argument("--profile", help="profile.json, see ds_fold.plan.Profile; or equal layers by the next options")
    parser.add_argument("--layers", type=int, help="number of equal layers")
    parser.add_argument("--forward-ms", type=float, help="of a layer and a micro-batch")
    parser.add_argument("--backward-ms", type=float, help="default: two forwards")
    parser.add_argument("--parameter-mb", type=float, help="of a layer, 1e6 bytes (default 0)")
    parser.add_argument("--activation-kb", type=float, help="kept by a layer and passed on, 1024 bytes (default 0)")
    parser.add_argument("--overhead-ms", type=float, help="a rank's own time per compute and message (default 0)")
    parser.add_argument("--recompute", action="store_true", help="all layers recompute their activations in the backward")
    parser.add_argument("--priority", action="store_true", help="pipeline messages go before data-parallel transfers on a card")
    parser.add_argument("--tokens-per-sample", type=int, help="counts throughput and memory efficiency in tokens, too")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the step's timeline; the suffix says in which form")


def run(args) -> int:
    """Print the table. Raises ConfigError, ScheduleError or PlanError."""
    from ..config import fold_config, load_config, micro_batches_of, zero_stage_of  # slow: loads DeepSpeed
    config = load_config(args.config)
    fold, zero = fold_config(config), zero_stage_of(config)
    cluster, profile = Cluster.load(args.cluster), _profile(args, fold)
    P, D, M = args.pp, args.dp, args.micro_batches or micro_batches_of(config, args.dp)
    fold.check(P, M, len(profile.layers), D)
    n = len(profile.layers)
    options = {**simulation_options(config, fold, zero, D), "priority": args.priority}
    cuts, recompute = None if fold.objective else _cuts(fold, profile, P), fold.recomputed(n)
    if fold.searches:
        cuts, recompute, summary = place(fold, profile, cluster, P, M, zero, options, cuts, args.recompute)
        print(f"placement {cuts} {summary}\n")
    costs = profile.costs(cuts, P, range(n) if args.recompute else recompute)
    program = fold.train_program(P, M, zero)
    result = simulate(program, costs, cluster, **options)
    alone = simulate(program, costs, cluster, **options, data_parallel=False) if D > 1 else result
    title = f"{fold.schedule if fold.preset else fold.schedule.file}, P={P} v={fold.segments} M={M} D={D} ZeRO-{zero}"
    _print(title, result, alone, cluster)
    print(describe_efficiency(profile.micro_batch_size * M * D / result.step_s, result.peak_bytes, args.tokens_per_sample))
    if args.output:
        from ..trace import write
        write([result.timeline(title)], args.output)
        print(f"timeline written to {args.output}")
    return 0


def _profile(args, fold) -> Profile:
    given = {name: getattr(args, name) for name in _LAYERS if getattr(args, name) is not None}
    if args.profile:
        if given:
            raise PlanError(f"--{next(iter(given)).replace('_', '-')} cannot be combined with --profile; change the profile")
        return Profile.load(args.profile)
    if not given and fold.profile_path:
        return load_profile(fold)
    if args.layers is None or args.forward_ms is None:
        raise PlanError("give --profile, or equal layers by --layers and --forward-ms")
    negative = [name for name, value in given.items() if value < 0]
    if negative:
        raise PlanError(f"--{negative[0].replace('_', '-')} {given[negative[0]]}: must not be negative")
    backward_s = None if args.backward_ms is None else args.backward_ms / 1e3
    return Profile.uniform(args.layers, args.forward_ms / 1e3, backward_s, 1e6 * (args.parameter_mb or 0),
                           1024 * (args.activation_kb or 0), overhead_s=(args.overhead_ms or 0) / 1e3)


def _cuts(fold, profile: Profile, P: int) -> List[int]:
    def matching(regex: str) -> List[bool]:
        pattern = re.compile(regex, re.IGNORECASE)
        return [pattern.search(layer.name) is not None for layer in profile.layers]

    try:
        return cut_layers(fold.partition or "uniform", len(profile.layers), fold.segments * P,
                          lambda: [int(layer.parameter_bytes) for layer in profile.layers], matching)
    except PartitionError as error:
        raise PlanError(f"ds_fold.{error}") from None


def _print(title: str, result: Result, alone: Result, cluster: Cluster) -> None:
    print(f"{title}\n\nrank  compute ms  on the wire ms  exposed ms  hidden  peak slots     peak MB")
    for r, rank in enumerate(result.ranks):
        hidden = f"{1 - rank.exposed_s / rank.transfer_s:.0%}" if rank.transfer_s else "-"
        device = cluster.memory_bytes(r, result.D)
        over = device is not None and rank.peak_bytes > device
        print(f"{r:4d}  {1e3 * rank.compute_s:10.1f}  {1e3 * rank.transfer_s:14.1f}  {1e3 * rank.exposed_s:10.1f}  {hidden:>6}  "
              f"{rank.peak_slots:10.2f}  {rank.peak_bytes / 1e6:10.1f}{'  more than the device has' * over}")
    print(f"\nstep {1e3 * result.step_s:.1f} ms, bubble {result.bubble_fraction:.1%}; without data-parallel communication "
          f"{1e3 * alone.step_s:.1f} ms, so {1e3 * (result.step_s - alone.step_s):.1f} ms of it are exposed")

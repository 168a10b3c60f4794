"""``python -m ds_fold check`` and ``simulate``: what a ds_config would run and how long it takes, without starting anything;
``plan``: which ds_config would be best on a cluster; ``profile`` and ``netcheck``: what the layers and the network take; ``trace``:
what a run has recorded."""

import argparse
import os
import shutil
import sys
from typing import List, Optional, Tuple

from .plan import PlanError, command, measure_commands, plan_command

#: characters of a line of the timeline as text, where it goes to a file
TEXT_WIDTH = 400
#: arguments of the commands that count something
COUNTS = ("layers", "pp", "dp", "micro_batches", "repeats", "tokens_per_sample")

CHECK_HELP = "print placement, programs, live activations and bubble of a ds_config, without starting anything"

TRACE_HELP = "draw recorded steps: each folder's timeline, one above the other on one time axis"


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line. Returns the exit code: 0, or 2 for bad input with one message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m ds_fold", description="Folded pipelines for DeepSpeed.")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # set by the launcher
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help=CHECK_HELP, description=CHECK_HELP)
    check.add_argument("config", help="ds_config (JSON or HJSON)")
    check.add_argument("--layers", type=int, required=True, help="number of layers of the PipelineModule")
    check.add_argument("--pp", type=int, required=True, help="pipeline ranks (num_stages)")
    check.add_argument("--dp", type=int, help="data-parallel ranks, where the config derives the micro-batches from them")
    check.add_argument("--micro-batches", type=int, help="overrides the config's gradient_accumulation_steps")
    check.add_argument("--eval", action="store_true", help="show the evaluation programs instead")
    check.add_argument("--timeline", action="store_true", help="print the schedule as a staircase")
    check.add_argument("--png", metavar="FILE", help="draw the schedule (needs matplotlib)")
    check.set_defaults(run=_check)
    simulate = commands.add_parser("simulate", help=command.HELP, description=command.HELP)
    command.add_arguments(simulate)
    simulate.set_defaults(run=command.run)
    plan = commands.add_parser("plan", help=plan_command.HELP, description=plan_command.HELP)
    plan_command.add_arguments(plan)
    plan.set_defaults(run=plan_command.run)
    profile = commands.add_parser("profile", help=measure_commands.PROFILE_HELP, description=measure_commands.PROFILE_HELP)
    measure_commands.add_profile_arguments(profile)
    profile.set_defaults(run=measure_commands.run_profile)
    netcheck = commands.add_parser("netcheck", help=measure_commands.NETCHECK_HELP, description=measure_commands.NETCHECK_HELP)
    measure_commands.add_netcheck_arguments(netcheck)
    netcheck.set_defaults(run=measure_commands.run_netcheck)
    trace = commands.add_parser("trace", help=TRACE_HELP, description=TRACE_HELP)
    trace.add_argument("folders", nargs="+", metavar="FOLDER", help="what ds_fold.trace.path named")
    trace.add_argument("-o", "--output", metavar="FILE", default="timeline.html",
                       help=".html, .png, or .json for Perfetto (default: timeline.html)")
    trace.add_argument("--steps", metavar="A:B", help="global steps to draw, from A to before B (default: all)")
    trace.add_argument("--tokens-per-sample", type=int, help="counts throughput and memory efficiency in tokens, too")
    trace.set_defaults(run=_trace)
    args = parser.parse_args(argv)
    if args.command not in ("profile", "netcheck"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # no other command needs a device

    from .config import ConfigError
    from .schedule import ScheduleError
    from .trace import TraceError
    try:
        for name in COUNTS:
            value = getattr(args, name, None)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        return args.run(args)
    except (ConfigError, ScheduleError, PlanError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(args) -> int:
    from .config import ConfigError, fold_config, load_config, micro_batches_of, zero_stage_of
    from .partition import partition_uniform
    from .schedule import bubble_fraction, verify

    config = load_config(args.config)
    fold = fold_config(config)
    M = args.micro_batches or micro_batches_of(config, args.dp)
    if M is None:
        raise ConfigError("the config gives train_batch_size and train_micro_batch_size_per_gpu; add --dp to know the "
                          "micro-batches, or --micro-batches")
    P, v = args.pp, fold.segments
    fold.check(P, M, args.layers, args.dp)
    program = fold.eval_program(P, M) if args.eval else fold.train_program(P, M, zero_stage_of(config))
    report = verify(program)

    name = fold.schedule if isinstance(fold.schedule, str) else fold.schedule.file
    if fold.schedule == "aiao":
        name += f" (last_segment: {fold.last_segment})"
    print(f"schedule {name}: {P} pipeline ranks, {v} segments, {M} micro-batches")
    if fold.objective and args.dp is None:
        cuts, how = None, f"decided at launch for {fold.objective!r}; add --dp to search for it here"
    elif fold.objective:
        cuts, how = _searched(args, config, fold, M)
    elif isinstance(fold.partition, list):
        cuts, how = fold.partition, "as listed"
    else:
        cuts, how = partition_uniform(args.layers, v * P), "uniform"
        if fold.partition not in (None, "uniform"):
            how = f"uniform here; {fold.partition!r} needs the model"
    print(f"\nplacement ({how}):")
    for r in range(P if cuts else 0):
        chunks = "  ".join(f"segment {k}: layers [{cuts[k * P + r]}, {cuts[k * P + r + 1]})" for k in range(v))
        print(f"  rank {r}  {chunks}")
    print("\nprograms:")
    for r in range(P):
        print(program.format(r))
    print("\nlive activations, in chunks of 1/v of a rank:")
    for r in range(P):
        whole = f", whole segments at most {report.peak_whole[r]} of {v}" if program.shard_params else ""
        print(f"  rank {r}  peak {report.peak_live[r]} of {v * M}, receives posted ahead at most {report.peak_posted[r]}, "
              f"reductions in flight at most {report.peak_reducing[r]}{whole}")
    print(f"\nbubble fraction {bubble_fraction(program):.1%} (free communication, backward = 2 forwards)")
    if args.timeline:
        _print_staircase(program)
    if args.png:
        from .timeline import draw
        draw([(name, program)], args.png)
        print(f"drawn to {args.png}")
    return 0


def _searched(args, config, fold, M: int) -> Tuple[List[int], str]:
    """The cuts that a launch would search for, and what they are best for. Raises PlanError."""
    from .config import micro_batch_size_of, zero_stage_of
    from .plan.placement import load_cluster, load_profile, place, simulation_options

    zero, D = zero_stage_of(config), args.dp
    profile = load_profile(fold, lambda profile: profile.check_layers(args.layers), micro_batch_size_of(config, D))
    recompute_all = bool((config.get("pipeline") or {}).get("activation_checkpoint_interval"))
    cuts, _, summary = place(fold, profile, load_cluster(fold, args.pp * D), args.pp, M, zero,
                             simulation_options(config, fold, zero, D), recompute_all=recompute_all)
    return cuts, summary


def _print_staircase(program) -> None:
    from .timeline import staircase

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else TEXT_WIDTH
    plain = staircase(program)
    if len(plain[0]) > width:
        print(f"\nthe timeline needs {len(plain[0])} columns and there are {width}: draw it with --png schedule.png")
        return
    print("\ntimeline (a backward in brackets, twice as long as a forward; dots: idle):")
    print("\n".join(staircase(program, colour=True) if terminal and "NO_COLOR" not in os.environ else plain))


def _trace(args) -> int:
    from .trace import TraceError, read, write
    from .trace.report import table

    steps = None
    if args.steps is not None:
        first, _, last = args.steps.partition(":")
        if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
            raise TraceError(f"--steps {args.steps}: expected A:B with A < B, such as 3:6")
        steps = int(first), int(last)
    timelines = [read(folder, steps, lambda message: print(f"warning: {message}", file=sys.stderr)) for folder in args.folders]
    write(timelines, args.output)
    for folder, timeline in zip(args.folders, timelines):
        print(f"{folder}: {timeline.title}\n{table(timeline, args.tokens_per_sample)}")
    print(f"drawn to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

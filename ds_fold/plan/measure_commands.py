"""``python -m ds_fold profile`` and ``netcheck``: what the planner and the simulator read, measured where training will run."""

import argparse
import os
import sys
from importlib import import_module
from typing import Any, Tuple

from .costs import PlanError, Profile

PROFILE_HELP = "measure the layers of a training script or a function, on one rank"
NETCHECK_HELP = "measure the network between the ranks it is launched on, and their memory"
PROFILE_USAGE = """
  deepspeed --num_accelerators 1 --module ds_fold profile train.py -- --deepspeed_config ds_config.json ...
  python -m ds_fold profile --function my_model:profiled

The script runs until its first batch, on a module without its layers; what it would train is measured in its place. A function
returns (layers, inputs, labels, loss_fn): one micro-batch, and layers as PipelineModule takes them."""


def add_profile_arguments(parser) -> None:
    parser.usage, parser.formatter_class = PROFILE_USAGE, argparse.RawDescriptionHelpFormatter
    parser.add_argument("-o", "--output", metavar="FILE", default="profile.json", help="default: profile.json")
    parser.add_argument("--function", metavar="MODULE:FUNCTION", help="instead of a script")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="with --function; a script's is its ds_config's")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks of the training, for the micro-batch's size where "
                        "the ds_config gives train_batch_size (default 1)")
    parser.add_argument("--repeats", type=int, default=5, help="of each layer; the median counts (default 5)")
    parser.add_argument("--warm-up", type=int, default=2, help="before them (default 2)")
    parser.add_argument("--name", help="of the model (default: the script's or the function's)")
    parser.add_argument("--check", metavar="FILE", help="measure nothing: is this profile one of this model?")
    parser.add_argument("script", nargs="?", help="training script that uses ds_fold.PipelineModule and ds_fold.initialize")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script, after --")


def run_profile(args) -> int:
    """Write the profile. Raises ConfigError or PlanError."""
    if (args.script is None) == (args.function is None):
        raise PlanError("give either a training script or --function MODULE:FUNCTION")
    if args.script is not None and args.dtype is not None:
        raise PlanError("--dtype goes with --function; a script's precision is what its ds_config says")
    if "--" in args.arguments[1:]:
        between = " ".join(args.arguments[:args.arguments.index("--")])
        raise PlanError(f"{between!r} stands between the script and --: options of profile go before {args.script}, the script's "
                        f"own behind --")
    known = Profile.load(args.check) if args.check else None

    from .capture import capture_script
    from .profile import describe_layers, profile_layers
    if args.script is not None:
        arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
        if args.local_rank >= 0:
            arguments = [f"--local_rank={args.local_rank}", *arguments]
        found = capture_script(args.script, arguments, args.dp)
        layers, given = found.layers, (found.inputs, found.labels, found.loss_fn)
        options = {"dtype": found.dtype, "micro_batch_size": found.micro_batch_size, "autocast": found.autocast}
    else:
        layers, *given = _call(args.function)
        options = {"dtype": _dtype(args.dtype)}
    if known is not None:
        known.check_model(*describe_layers(layers))
        print(f"{args.check} is a profile of this model of {len(layers)} layers")
        return 0
    name = args.name or args.function or os.path.basename(args.script)
    profile = profile_layers(layers, *given, name=name, repeats=args.repeats, warm_up=args.warm_up, progress=True, **options)
    profile.save(args.output)
    print(_table(profile))
    print(f"profile of {len(layers)} layers, micro-batches of {profile.micro_batch_size}, written to {args.output}; nothing was "
          f"trained")
    return 0


def _dtype(name):
    import torch
    return {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _call(name: str) -> Tuple[Any, Any, Any, Any]:
    """What the function ``module:function`` returns. Raises PlanError."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"--function {name}: {error}; expected MODULE:FUNCTION, such as my_model:profiled") from None
    finally:
        sys.path.pop(0)
    result = found()
    if not isinstance(result, tuple) or len(result) != 4:
        form = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise PlanError(f"--function {name} must return (layers, inputs, labels, loss_fn), but returned {form}")
    return result


def _table(profile: Profile) -> str:
    lines = ["layers  forward ms  backward ms  parameters MB  kept MB  passed on MB  name"]
    first = 0
    for i, layer in enumerate(profile.layers):
        if i + 1 < len(profile.layers) and profile.layers[i + 1] == layer:
            continue
        span = f"{first}" if first == i else f"{first}-{i}"
        lines.append(f"{span:>6}  {1e3 * layer.forward_s:10.3f}  {1e3 * layer.backward_s:11.3f}  "
                     f"{layer.parameter_bytes / 1e6:13.3f}  {layer.activation_bytes / 1e6:7.3f}  "
                     f"{layer.boundary_bytes / 1e6:12.3f}  {layer.name}")
        first = i + 1
    head = profile.head
    lines.append(f"  loss  {1e3 * head.forward_s:10.3f}  {1e3 * head.backward_s:11.3f}  {'':13}  "
                 f"{head.activation_bytes / 1e6:7.3f}")
    return "\n".join(lines)


def add_netcheck_arguments(parser) -> None:
    parser.usage = "\n  deepspeed --module ds_fold netcheck -o cluster.json"
    parser.add_argument("-o", "--output", metavar="FILE", default="cluster.json", help="default: cluster.json")
    parser.add_argument("--megabytes", type=float, help="size of the large messages (default: 4 on gloo, 64 elsewhere)")


def run_netcheck(args) -> int:
    """Write the cluster file on rank 0. Raises PlanError."""
    if "WORLD_SIZE" not in os.environ:
        raise PlanError("netcheck needs a launcher: deepspeed --module ds_fold netcheck -o cluster.json")
    if args.megabytes is not None and not args.megabytes >= 0.01:
        raise PlanError(f"--megabytes {args.megabytes}: must be at least 0.01")
    import deepspeed
    import torch.distributed as dist

    from .netcheck import measure
    deepspeed.init_distributed(verbose=False)
    try:
        found = measure(None if args.megabytes is None else int(args.megabytes * 1e6))
        if dist.get_rank() == 0:
            found.cluster.save(args.output)
            print("\n".join(map(str, [*found.pairs, found.exchange])))
            if found.cluster.hosts == 1:
                print("one host: the link inside it is written for the one between hosts, too")
            print(f"cluster of {found.cluster.hosts} hosts x {found.cluster.ranks_per_host} ranks written to {args.output}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0

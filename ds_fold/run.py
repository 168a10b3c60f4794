"""Run a training script that was written for DeepSpeed's pipelines, unchanged, under the ``ds_fold`` block of its config.

    deepspeed --num_gpus 8 --module ds_fold.run train.py --deepspeed_config ds_config.json ...
    torchrun --nproc_per_node 8 -m ds_fold.run train.py --deepspeed_config ds_config.json ...
    mpirun -np 8 python -m ds_fold.run -m package.train --deepspeed_config ds_config.json ...
"""

import builtins
import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Dict, List, Optional, Tuple

USAGE = "usage: [deepspeed --module | torchrun -m | mpirun python -m] ds_fold.run (SCRIPT | -m MODULE) [ARGUMENTS ...]"
#: variable of torch.distributed -> what MPI's launchers call it
LAUNCHERS = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
DEFAULT_PORT = "29500"


def main(argv: Optional[List[str]] = None) -> int:
    """Run what the words name. Returns 2 for wrong use; what the script raises, SystemExit too, passes through."""
    try:
        module, arguments = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"{error}\n{USAGE}", file=sys.stderr)
        return 2
    os.environ.update(launcher_environment(os.environ))

    from .dropin import install
    from .runtime import leftovers, watchdog
    install()
    leftovers.report_stale_locks()
    watchdog.look_from_the_start()
    try:
        run_as_main(module, arguments)
    except SystemExit as end:
        _leave(good=end.code in (None, 0))
        raise
    except Exception:
        watchdog.show_first_errors()  # around what torch shows errors with since the ranks have met
        raise
    _leave(good=True)
    return 0


def parse(words: List[str]) -> Tuple[Optional[str], List[str]]:
    """(module or None, sys.argv of the script; of a module without its first word). Raises ValueError.

    DeepSpeed's launcher writes ``--local_rank=N`` in front of what it runs; it goes where the script expects it.
    """
    words, launcher = list(words), []
    while words and words[0].partition("=")[0] in ("--local_rank", "--local-rank"):
        launcher.append(words.pop(0))
        if "=" not in launcher[-1] and words:
            launcher.append(words.pop(0))
    if words[:1] == ["-m"]:
        if len(words) < 2:
            raise ValueError("-m needs the name of a module")
        return words[1], [*launcher, *words[2:]]
    if not words or words[0].startswith("-"):
        raise ValueError(f"expected a script, found {words[0]!r}" if words else "no script to run")
    if not os.path.isfile(words[0]):
        raise ValueError(f"there is no script {words[0]!r}")
    return None, [words[0], *launcher, *words[1:]]


def run_as_main(module: Optional[str], arguments: List[str]) -> None:
    """What ``python SCRIPT ...`` or ``python -m MODULE ...`` does, with what :func:`parse` returns. Unlike runpy's, ``__main__``
    stays until the process ends: threads that still run and functions at exit pickle its classes. Raises ImportError."""
    main = ModuleType("__main__")
    if module is None:
        path = os.path.join(os.getcwd(), arguments[0])
        sys.argv[:], sys.path[0] = arguments, os.path.dirname(os.path.realpath(path))
        loader = SourceFileLoader("__main__", path)
        code, main.__package__ = loader.source_to_code(loader.get_data(path), path), None
    else:
        sys.argv[:] = ["-m", *arguments]  # what packages see that are imported to find it
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{module}.__main__")
        if spec is None:
            raise ImportError(f"no module named {module}, or a package without __main__")
        path, loader, code = spec.origin, spec.loader, spec.loader.get_code(spec.name)
        sys.argv[0] = path
        main.__spec__, main.__package__ = spec, spec.parent
    vars(main).update(__file__=path, __cached__=getattr(main.__spec__, "cached", None), __loader__=loader, __builtins__=builtins,
                      __annotations__={})
    sys.modules["__main__"] = main
    exec(code, vars(main))


def launcher_environment(environment: Dict[str, str]) -> Dict[str, str]:
    """Variables of torch.distributed that are missing, as an MPI launcher says them; none under other launchers."""
    found = {name: value for name, theirs in LAUNCHERS.items()
             for value in [next((environment[v] for v in theirs if v in environment), None)]
             if value is not None and name not in environment}
    if "RANK" not in found or "WORLD_SIZE" not in {**environment, **found}:
        return {}
    if "MASTER_ADDR" not in environment and found.get("LOCAL_SIZE") == found["WORLD_SIZE"]:
        found["MASTER_ADDR"] = "127.0.0.1"  # one host; over several DeepSpeed asks MPI
    if "MASTER_ADDR" in {**environment, **found}:
        found.setdefault("MASTER_PORT", environment.get("MASTER_PORT", DEFAULT_PORT))
    return found


def _leave(good: bool) -> None:
    """End what the script has left open, so that no rank's exit waits or complains; groups only where all ranks end well."""
    import torch.distributed as dist

    from .runtime import watchdog
    watchdog.stop()
    if good and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

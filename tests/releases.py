"""``make compat``: the core tests under the newest release of several minor versions of DeepSpeed, each in a virtual environment of
its own in .compat/, with torch and all else as in constraints.txt. A release that ds_fold does not support must be refused.

    python tests/releases.py                # all of MINORS
    python tests/releases.py 0.19 --keep    # one, in the environment of the last time
"""

import argparse
import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINORS = ("0.16", "0.17", "0.18", "0.19")
#: files that together touch what ds_fold.compat touches of DeepSpeed: module, engine, optimizer, checkpoints
CORE = ("tests/test_compat.py", "tests/test_config.py", "tests/runtime/test_module.py", "tests/runtime/test_channels.py",
        "tests/runtime/test_parameters.py", "tests/runtime/test_training.py", "tests/runtime/test_checkpoints.py")


def install(folder: Path, minor: str) -> None:
    """A virtual environment with DeepSpeed ``minor``.* and what ds_fold and its tests need, but not ds_fold."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("deepspeed==")]
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*pins, f"deepspeed=={minor}.*"]) + "\n")
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = (setup["options"]["install_requires"] + setup["options.extras_require"]["test"]).strip().splitlines()
    needed = [name for name in needed if re.match(r"[\w-]+", name)[0] not in ("deepspeed", "torch", "ruff", "transformers")]
    for packages in (["torch"], ["deepspeed", *needed]):
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", "-c", constraints, *packages], check=True)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
                   "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions")}
    return subprocess.run([folder / "bin/python", *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)


def try_release(minor: str, keep: bool):
    """(whether all is as it should be, one line that says how it went)."""
    folder = ROOT / ".compat" / minor
    if not (keep and folder.exists()):
        install(folder, minor)
    version = run(folder, "-c", "from importlib.metadata import version; print(version('deepspeed'))").stdout.strip()
    imported = run(folder, "-c", "import ds_fold; ds_fold.PipelineModule")
    if imported.returncode:
        last = imported.stdout.strip().splitlines()[-1]
        return f"but {version} is installed: pip install" in last, f"{version}: refused: {last}"
    tested = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE)
    lines = tested.stdout.strip().splitlines()
    return tested.returncode == 0, "\n".join([f"{version}: {lines[-1]}", *(line for line in lines if line.startswith("FAILED"))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minors", nargs="*", default=MINORS, help="such as 0.18")
    parser.add_argument("--keep", action="store_true", help="use environments that are there, as they are")
    args = parser.parse_args()
    results = []
    for minor in args.minors:
        results.append(try_release(minor, args.keep))
        print(f"DeepSpeed {results[-1][1]}", flush=True)
    return 0 if all(good for good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())

"""``make demo``: train the same GPT with AIAO and with 1F1B on four CPU ranks of this machine, and compare.

Both runs go through the real ``deepspeed`` launcher. Four ranks share this machine's cores and its memory bus, so the table
shows that the folded pipeline computes the same and what it costs; what it gains on a slow network is another benchmark.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = {"aiao": "aiao.json", "1f1b": "1f1b.json"}


def launch(config, steps, ranks, report):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    tools = Path(sys.executable).parent
    command = [str(tools / "deepspeed"), "--num_accelerators", str(ranks), "--master_port", str(port), str(HERE / "train_gpt.py"),
               "--deepspeed_config", str(HERE.parent / "configs" / config), "--stages", str(ranks), "--steps", str(steps),
               "--evaluate-every", str(steps), "--report", report]
    environment = {**os.environ, "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
                   "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with exit code {done.returncode}; its output is above")
    return json.loads(Path(report).read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in RUNS.items():
            print(f"\n=== {name} (configs/{config}), {args.ranks} pipeline ranks, {args.steps} steps", flush=True)
            results[name] = launch(config, args.steps, args.ranks, os.path.join(folder, f"{name}.json"))
    base = results["1f1b"]["tokens_per_s"]
    print(f"\n{'schedule':<10}{'first loss':>12}{'last loss':>12}{'held-out':>12}{'tokens/s':>12}{'against 1f1b':>14}")
    for name, result in results.items():
        held_out = list(result["evaluated"].values())[-1]
        print(f"{name:<10}{result['losses'][0]:>12.4f}{result['losses'][-1]:>12.4f}{held_out:>12.4f}"
              f"{result['tokens_per_s']:>12.0f}{result['tokens_per_s'] / base:>13.2f}x")
    largest = max(abs(a - b) for a, b in zip(*(r["losses"] for r in results.values())))
    print(f"\nlargest difference of a step's loss between the two: {largest:.2e}")
    print(f"{args.ranks} ranks share {os.cpu_count()} cores here: the table shows equal results and the engine's cost, not the "
          f"gain on a network.")


if __name__ == "__main__":
    main()

"""The real thing, end to end: the `deepspeed` launcher, the example, its configs. Few, because a launch costs seconds; they run
beside other tests."""

import json
import subprocess
import sys
from pathlib import Path

from beside import beside
from pool import free_port

ROOT = Path(__file__).parent.parent
SMALL = ["--layers", "6", "--hidden", "16", "--heads", "2", "--sequence", "16", "--text", str(ROOT / "README.md")]


def launch(ranks, script, *arguments):
    command = ["deepspeed", "--num_accelerators", str(ranks), "--master_port", str(free_port()), str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def train(folder, script, config, *arguments):
    """The report of ``script`` on two pipeline ranks."""
    report = folder / "report.json"
    done = launch(2, ROOT / "examples" / script, "--deepspeed_config", ROOT / "configs" / config, "--report", report,
                  "--stages", 2, *SMALL, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(report.read_text())


@beside
def saved_and_resumed(folder):
    """Six steps that save every two; the last two again, from the checkpoint before them; the last checkpoint's name."""
    saved = folder / "checkpoints"
    whole = train(folder, "train_gpt.py", "aiao.json", "--steps", 6, "--evaluate-every", 3, "--save", saved, "--save-every", 2)
    (saved / "latest").write_text("global_step4")
    rest = train(folder, "train_gpt.py", "aiao.json", "--steps", 6, "--save", saved, "--resume")
    return whole, rest, (saved / "latest").read_text()


def test_the_example_trains_evaluates_saves_and_resumes(saved_and_resumed):
    whole, rest, latest = saved_and_resumed
    assert whole["steps"] == 6 and whole["losses"][-1] < whole["losses"][0] and sorted(whole["evaluated"]) == ["3", "6"]
    assert latest == "global_step6" and len(rest["losses"]) == 2 and rest["losses"] == whole["losses"][4:]


@beside
def model_of_transformers(folder):
    return train(folder, "train_hf.py", "aiao.json", "--model", "llama", "--tied", "--steps", 3)


def test_the_example_with_a_model_of_transformers_trains(model_of_transformers):
    result = model_of_transformers
    assert len(result["losses"]) == 3 and result["evaluated"] < result["losses"][0]


@beside
def bad_input(folder):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
              "ds_fold": {"segments": 40, "schedule": "aiao"}}
    (folder / "bad.json").write_text(json.dumps(config))
    return launch(2, ROOT / "examples/train_gpt.py", "--deepspeed_config", folder / "bad.json", "--stages", 2, *SMALL)


def test_bad_input_ends_every_rank_with_one_clear_message(bad_input):
    assert bad_input.returncode != 0
    message = "ConfigError: 9 layers cannot fill ds_fold.segments=40 x 2 pipeline ranks = 80 chunks; use segments <= 4"
    assert (bad_input.stdout + bad_input.stderr).count(message) == 2, "once per rank"


@beside
def dying_rank(folder):
    script = folder / "dies.py"
    script.write_text("""
import os, sys, deepspeed, ds_fold, torch
from torch import nn
deepspeed.init_distributed(verbose=False)
def layer(x):
    if int(os.environ["RANK"]) == 1:
        os._exit(7)
    return x
config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "ds_fold": {"schedule": "aiao", "segments": 2},
          "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
net = ds_fold.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), layer],
                             num_stages=2, loss_fn=nn.MSELoss(), config=config, partition_method="uniform")
engine, *_ = ds_fold.initialize(model=net, model_parameters=list(net.parameters()))
x = torch.zeros(2, 4)
engine.train_batch(iter([(x, x)] * 4))
""")
    return launch(2, script)


def test_a_rank_that_dies_ends_the_job(dying_rank):
    assert dying_rank.returncode != 0


@beside
def demo(folder):
    command = [sys.executable, ROOT / "examples/demo.py", "--steps", "3", "--ranks", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_the_demo_runs(demo):
    assert demo.returncode == 0, demo.stdout[-2000:] + demo.stderr[-2000:]
    assert "difference of a step's loss between the two: 0.00e+00" in demo.stdout

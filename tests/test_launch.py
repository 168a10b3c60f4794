"""The real thing, end to end: the `deepspeed` launcher, the example, its configs. Few, because a launch costs seconds."""

import json
import subprocess
import sys
from pathlib import Path

from pool import free_port

ROOT = Path(__file__).parent.parent
SMALL = ["--layers", "6", "--hidden", "16", "--heads", "2", "--sequence", "16", "--text", str(ROOT / "README.md")]


def launch(ranks, script, *arguments):
    command = ["deepspeed", "--num_accelerators", str(ranks), "--master_port", str(free_port()), str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def train(tmp_path, ranks, config, *arguments):
    report = tmp_path / "report.json"
    done = launch(ranks, ROOT / "examples/train_gpt.py", "--deepspeed_config", ROOT / "configs" / config, "--report", report,
                  *SMALL, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(report.read_text())


def test_the_example_trains_evaluates_saves_and_resumes(tmp_path):
    whole = train(tmp_path, 2, "aiao.json", "--stages", 2, "--steps", 6, "--evaluate-every", 3)
    assert whole["steps"] == 6 and whole["losses"][-1] < whole["losses"][0] and sorted(whole["evaluated"]) == ["3", "6"]
    saved = tmp_path / "checkpoints"
    first = train(tmp_path, 2, "aiao.json", "--stages", 2, "--steps", 4, "--save", saved, "--save-every", 2)
    rest = train(tmp_path, 2, "aiao.json", "--stages", 2, "--steps", 6, "--save", saved, "--resume")
    assert (saved / "latest").read_text() == "global_step6"
    assert first["losses"] + rest["losses"] == whole["losses"]


def test_the_example_with_a_model_of_transformers_trains(tmp_path):
    report = tmp_path / "report.json"
    done = launch(2, ROOT / "examples/train_hf.py", "--deepspeed_config", ROOT / "configs/aiao.json", "--report", report,
                  "--stages", 2, "--model", "llama", "--tied", "--steps", 3, *SMALL)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(report.read_text())
    assert len(result["losses"]) == 3 and result["evaluated"] < result["losses"][0]


def test_bad_input_ends_every_rank_with_one_clear_message(tmp_path):
    config = json.loads('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "ds_fold": {"segments": 40, '
                        '"schedule": "aiao"}}')
    (tmp_path / "bad.json").write_text(json.dumps(config))
    done = launch(2, ROOT / "examples/train_gpt.py", "--deepspeed_config", tmp_path / "bad.json", "--stages", 2, *SMALL)
    assert done.returncode != 0
    message = "ConfigError: 9 layers cannot fill ds_fold.segments=40 x 2 pipeline ranks = 80 chunks; use segments <= 4"
    assert (done.stdout + done.stderr).count(message) == 2, "once per rank"


def test_a_rank_that_dies_ends_the_job(tmp_path):
    script = tmp_path / "dies.py"
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
    done = launch(2, script)
    assert done.returncode != 0


def test_the_demo_runs(tmp_path):
    command = [sys.executable, ROOT / "examples/demo.py", "--steps", "3", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "difference of a step's loss between the two: 0.00e+00" in done.stdout

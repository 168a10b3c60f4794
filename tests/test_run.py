"""``ds_fold.run``: a script that knows DeepSpeed only, under real launchers; how words and environments are read."""

import json
import os
import subprocess
import sys

import pytest
from pool import RankPool, free_port

from ds_fold.run import launcher_environment, parse

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 1000,
          "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.01}}}
FOLD = {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "segment"}

SCRIPT = '''
"""Written for DeepSpeed alone."""
import argparse, json, os, sys
import deepspeed, torch
from deepspeed.pipe import LayerSpec, PipelineModule
from helper import MESSAGE
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--report")
parser.add_argument("--exit", type=int, default=0)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed("gloo", verbose=False)
torch.manual_seed(0)
net = PipelineModule([LayerSpec(torch.nn.Linear, 8, 8) for _ in range(4)], num_stages=2, loss_fn=torch.nn.MSELoss(),
                     partition_method="uniform", seed_layers=True, seed_fn=torch.manual_seed)
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad])
x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
losses = [float(engine.train_batch(iter([(x, x)] * 4))) for _ in range(3)]
if torch.distributed.get_rank() == 0:
    with open(args.report, "w") as file:
        json.dump({"losses": losses, "engine": type(engine).__module__, "words": sys.argv, "message": MESSAGE,
                   "main": sys.modules["__main__"].__file__, "name": __name__}, file)
sys.exit(args.exit)
'''


@pytest.fixture
def project(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("MESSAGE = 'beside the script'\n")
    (tmp_path / "plain.json").write_text(json.dumps(CONFIG))
    (tmp_path / "fold.json").write_text(json.dumps({**CONFIG, "ds_fold": FOLD}))
    return tmp_path


def launch(*command, **environment):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment})


def test_a_script_for_deepspeed_runs_folded_under_deepspeeds_launcher_with_the_same_losses(project):
    done = launch("deepspeed", "--num_accelerators", 2, "--master_port", free_port(), "--module", "ds_fold.run",
                  project / "train.py", "--deepspeed_config", project / "fold.json", "--report", project / "report.json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((project / "report.json").read_text())
    assert report["engine"] == "ds_fold.runtime.engine"
    assert report["message"] == "beside the script" and report["name"] == "__main__"
    assert report["main"] == report["words"][0] == str(project / "train.py") and report["words"][1] == "--local_rank=0"

    def stock(folder):  # the same words, without ds_fold.run
        import runpy
        sys.argv = ["train.py", "--deepspeed_config", f"{folder}/plain.json", "--report", f"{folder}/stock.json"]
        sys.path.insert(0, folder)
        with pytest.raises(SystemExit):
            runpy.run_path(f"{folder}/train.py", run_name="__main__")

    RankPool.of(2).run(stock, str(project))
    expected = json.loads((project / "stock.json").read_text())
    assert expected["engine"] == "deepspeed.runtime.pipe.engine" and report["losses"] == expected["losses"]
    assert expected["losses"][-1] < expected["losses"][0]


def test_under_mpi_a_module_runs_and_its_exit_code_is_the_jobs(project):
    ranks = []
    for rank in range(2):
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "DS_FOLD_CONFIG": str(project / "fold.json")}
        environment["MASTER_PORT"] = ranks[0][1] if ranks else str(free_port())
        command = [sys.executable, "-m", "ds_fold.run", "-m", "train", "--deepspeed_config", "plain.json", "--report",
                   "report.json", "--exit", "3"]
        ranks.append((subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True), environment["MASTER_PORT"]))
    texts = [process.communicate(timeout=120)[0] for process, _ in ranks]
    assert [process.returncode for process, _ in ranks] == [3, 3], texts
    assert json.loads((project / "report.json").read_text())["engine"] == "ds_fold.runtime.engine"
    assert f"ds_fold block of DS_FOLD_CONFIG={project / 'fold.json'}" in texts[0]


def test_words_go_where_the_script_expects_them(tmp_path):
    script = str(tmp_path / "train.py")
    (tmp_path / "train.py").write_text("")
    assert parse([script, "-m", "x"]) == (None, [script, "-m", "x"])
    assert parse(["--local_rank=1", script, "--lr", "2"]) == (None, [script, "--local_rank=1", "--lr", "2"])
    assert parse(["--local-rank", "1", "-m", "a.b", "c"]) == ("a.b", ["--local-rank", "1", "c"])


@pytest.mark.parametrize("words,message", [([], "no script to run"), (["--local_rank=0"], "no script to run"),
                                           (["--lr", "1"], "expected a script, found '--lr'"), (["-m"], "-m needs the name"),
                                           (["nowhere.py"], "there is no script 'nowhere.py'")])
def test_wrong_use_is_one_message_and_exit_code_2(words, message, capsys):
    from ds_fold.run import main
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and "usage: " in error


def test_environments_of_launchers():
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert launcher_environment(mpi) == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4",
                                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    two_hosts = launcher_environment({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert "MASTER_ADDR" not in two_hosts and two_hosts["RANK"] == "3"
    assert launcher_environment({**mpi, "MASTER_ADDR": "host", "MASTER_PORT": "7"})["MASTER_PORT"] == "7"
    assert launcher_environment({**mpi, "RANK": "0", "WORLD_SIZE": "1"}) == {}, "torchrun or deepspeed has said it"
    assert launcher_environment({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"})["LOCAL_RANK"] == "0"

"""``ds_fold.run``: a script that knows DeepSpeed only, under real launchers; how words and environments are read."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from beside import beside
from pool import RankPool, free_port

from ds_fold.run import launcher_environment, parse

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 1000,
          "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.01}}}
FOLD = {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "segment"}

SCRIPT = '''
"""Written for DeepSpeed alone."""
import argparse, json, os, signal, sys, time
import deepspeed, torch
from deepspeed.pipe import LayerSpec, PipelineModule
from helper import MESSAGE
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--report")
parser.add_argument("--dict", help="a config that only initialize() sees")
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("--fault", default="")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed("gloo", verbose=False)
if args.fault == "early" and torch.distributed.get_rank() == 1:
    raise ValueError("no such luck")
torch.manual_seed(0)

class Layer(torch.nn.Linear):
    def __init__(self, size, fault=""):
        super().__init__(size, size)
        self.fault, self.calls = fault, 0
    def forward(self, x):
        self.calls += 1
        if self.fault and self.calls == 7:  # micro-batch 2 of the second step
            print("now", self.fault, flush=True)
            if self.fault == "raise":
                raise ValueError("no such luck")
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return super().forward(x)

layers = [LayerSpec(Layer, 8, args.fault if i == 1 else "") for i in range(4)]
net = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.MSELoss(),
                     partition_method="uniform", seed_layers=True, seed_fn=torch.manual_seed)
config = json.load(open(args.dict)) if args.dict else None
engine, *_ = deepspeed.initialize(args=args, model=net, config=config,
                                  model_parameters=[p for p in net.parameters() if p.requires_grad])
x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
losses = [float(engine.train_batch(iter([(x, x)] * 4))) for _ in range(3)]
if torch.distributed.get_rank() == 0:
    with open(args.report, "w") as file:
        json.dump({"losses": losses, "engine": type(engine).__module__, "parts": net.parts,
                   "words": sys.argv, "message": MESSAGE,
                   "main": sys.modules["__main__"].__file__, "name": __name__}, file)
sys.exit(args.exit)
'''


def write_project(folder, **fold):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("MESSAGE = 'beside the script'\n")
    (folder / "plain.json").write_text(json.dumps(CONFIG))
    (folder / "fold.json").write_text(json.dumps({**CONFIG, "ds_fold": {**FOLD, **fold}}))


@beside
def under_deepspeeds_launcher(project):
    write_project(project)
    port, script = free_port(), str(project / "train.py")
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", str(port), "--module", "ds_fold.run", script,
               "--dict", project / "fold.json", "--report", project / "report.json", "--exit", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stdout[-3000:] + done.stderr[-3000:]
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
    return script, json.loads((project / "report.json").read_text())


def test_a_script_for_deepspeed_runs_folded_under_its_launcher_with_the_same_losses_and_exit_code(
        under_deepspeeds_launcher, tmp_path):
    script, report = under_deepspeeds_launcher
    assert report["engine"] == "ds_fold.runtime.engine" and report["parts"] == [0, 1, 2, 3, 4]
    assert report["message"] == "beside the script" and report["name"] == "__main__"
    assert report["main"] == report["words"][0] == script and report["words"][1] == "--local_rank=0"

    def stock(folder):  # the same words, without ds_fold.run
        import runpy
        sys.argv = ["train.py", "--deepspeed_config", f"{folder}/plain.json", "--report", f"{folder}/stock.json"]
        sys.path.insert(0, folder)
        with pytest.raises(SystemExit):
            runpy.run_path(f"{folder}/train.py", run_name="__main__")

    write_project(tmp_path)
    RankPool.of(2).run(stock, str(tmp_path))
    expected = json.loads((tmp_path / "stock.json").read_text())
    assert expected["engine"] == "deepspeed.runtime.pipe.engine" and report["losses"] == expected["losses"]
    assert expected["losses"][-1] < expected["losses"][0]


def without_launcher(project, fault, **fold):
    """Two ranks of ``-m train`` in the environment of MPI's launcher, with nobody to end one when the other has failed: seconds
    from the first rank's end to the last's, exit codes, and what each wrote."""
    write_project(project, **fold)
    ranks, port, ends = [], str(free_port()), {}
    for rank in range(2):
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment.update(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                           OMPI_COMM_WORLD_LOCAL_SIZE="2", MASTER_PORT=port, DS_FOLD_CONFIG=str(project / "fold.json"))
        command = [sys.executable, "-m", "ds_fold.run", "-m", "train", "--deepspeed_config", "plain.json", "--report", "report",
                   "--fault", fault]
        with open(project / f"rank{rank}.log", "w") as log:
            ranks.append(subprocess.Popen(command, cwd=project, env=environment, stdout=log, stderr=log))
    deadline = time.monotonic() + 120
    try:
        while len(ends) < 2 and time.monotonic() < deadline:
            ends.update({rank: time.monotonic() for rank, process in enumerate(ranks)
                         if rank not in ends and process.poll() is not None})
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
    texts = [(project / f"rank{rank}.log").read_text() for rank in range(2)]
    assert len(ends) == 2, texts
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
    return abs(ends[0] - ends[1]), [process.returncode for process in ranks], texts


def last_lines(texts):
    return [text.strip().splitlines()[-1] for text in texts]


@beside
def raising(project):
    return str(project / "fold.json"), *without_launcher(project, "raise")


def test_a_rank_that_raises_ends_the_job_and_its_error_is_the_last_line_of_each_rank(raising):
    config, apart, codes, texts = raising
    assert codes == [1, 1] and apart < 30
    assert last_lines(texts) == ["ds_fold: first error of the job: rank 1 (pipeline rank 1, replica 0), step 1, ForwardPass, "
                                 "segment 0, micro-batch 2: ValueError: no such luck"] * 2, texts
    assert "Traceback" in texts[1]
    assert f"ds_fold block of DS_FOLD_CONFIG={config}" in texts[0]


@beside
def raising_early(project):
    return without_launcher(project, "early")


def test_a_rank_that_raises_before_it_has_an_engine_ends_the_job_too(raising_early):
    """The other one waits for it in the construction of its module."""
    apart, codes, texts = raising_early
    assert codes == [1, 1] and apart < 30
    assert last_lines(texts) == ["ds_fold: first error of the job: rank 1, outside of an engine: ValueError: "
                                 "no such luck"] * 2, texts


@beside
def killed(project):
    return without_launcher(project, "kill")


def test_a_rank_that_is_killed_ends_the_job_and_the_other_says_what_it_waited_in(killed):
    apart, codes, texts = killed
    assert codes == [1, -9] and apart < 30
    line = last_lines(texts)[0]
    assert line.startswith("ds_fold: first error of the job: rank 0 (pipeline rank 0, replica 0), step 1, Wait"), texts
    assert "(other end: rank 1), segment " in line


@beside
def hanging(project):
    return without_launcher(project, "hang", watchdog_s=3)


def test_the_watchdog_shows_what_each_rank_waits_in_and_ends_the_job(hanging):
    apart, codes, texts = hanging
    assert codes == [1, 1] and apart < 30
    assert all("not over after 3 s (ds_fold.watchdog_s)" in line for line in last_lines(texts)), texts
    table = [line for line in "\n".join(texts).splitlines() if line.startswith("ds_fold: rank")]
    for mine in ("rank 0 (pipeline rank 0, replica 0), step 1, Wait",
                 "rank 1 (pipeline rank 1, replica 0), step 1, ForwardPass, segment 0, micro-batch 2"):
        assert any(mine in line for line in table), texts
    assert "in exec_forward" in texts[1], "Python's stack"


LOOKS_AROUND = '''
"""What a script sees of itself."""
import atexit, inspect, os, pickle, sys

class Mine:
    pass

def leaves():
    print("at exit", type(pickle.loads(pickle.dumps(Mine()))) is Mine, sys.modules["__main__"].__dict__ is globals())

atexit.register(leaves)
os.chdir("/")
print(__file__, __name__, __package__, __spec__ and __spec__.name, __doc__, type(__builtins__), sys.argv, sys.path[0])
print(inspect.getsource(Mine), os.path.exists(__file__))
'''


@pytest.mark.parametrize("words", [["pkg/sub/look.py", "--local_rank", "1"], ["-m", "pkg.sub", "-m", "x"]],
                         ids=["script", "module"])
def test_a_script_sees_of_itself_what_python_shows_it(words, tmp_path):
    (tmp_path / "pkg/sub").mkdir(parents=True)
    for name in ("look.py", "__main__.py"):
        (tmp_path / "pkg/sub" / name).write_text(LOOKS_AROUND)
    root = str(Path(__file__).parent.parent)
    mine, plain = (subprocess.run([sys.executable, *under, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                                  env={**os.environ, "PYTHONPATH": root}) for under in (["-m", "ds_fold.run"], []))
    assert plain.returncode == 0 and "at exit True True" in plain.stdout
    assert (mine.stdout, mine.returncode) == (plain.stdout, 0), mine.stderr


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

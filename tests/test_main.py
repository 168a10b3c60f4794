import json
import subprocess
import sys

import pytest

from ds_fold.__main__ import main
from ds_fold.schedule import Program, verify


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 8, "ds_fold": {"schedule": "aiao", "segments": 3}}))
    return str(path)


def test_check_prints_what_would_run(config, capsys):
    assert main(["check", config, "--layers", "24", "--pp", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 pipeline ranks, 3 segments, 8 micro-batches" in out
    assert "rank 1  segment 0: layers [2, 4)  segment 1: layers [10, 12)  segment 2: layers [18, 20)" in out
    assert "rank 3  peak 17 of 24" in out
    assert "bubble fraction 11.1%" in out
    lines = [line for line in out.splitlines() if line.startswith("rank ")]
    program = Program.parse("program pipeline_ranks=4 segments=3 micro_batches=8\n" + "\n".join(lines))
    verify(program)


def test_check_shows_where_communication_overlaps(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2},
                                "ds_fold": {"schedule": "aiao", "segments": 3, "overlap_param_gather": True}}))
    assert main(["check", str(path), "--layers", "3", "--pp", "1"]) == 0
    out = capsys.readouterr().out
    assert "rank 0: WG0 L0.0 F0.0" in out and "B2.1 R2 B1.0 B1.1 R1 WR2 B0.0 B0.1 R0 RT WR1 WR0 STEP G0 G1 G2\n" in out
    assert "reductions in flight at most 2" in out


def test_check_searches_where_a_launch_would(tmp_path, capsys):
    layer = {"backward_s": 0, "parameter_bytes": 0, "trainable_bytes": 0, "activation_bytes": 0, "boundary_bytes": 0}
    (tmp_path / "profile.json").write_text(json.dumps({"schema": 1, "layers": [{**layer, "forward_s": s} for s in (3, 1, 1, 1)]}))
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 4, "ds_fold": {
        "partition": {"method": "throughput"}, "profile": str(tmp_path / "profile.json")}}))
    assert main(["check", str(path), "--layers", "4", "--pp", "2", "--dp", "1"]) == 0
    out = capsys.readouterr().out
    assert "placement (for throughput: step 15000.0 ms" in out
    assert "  rank 0  segment 0: layers [0, 1)\n  rank 1  segment 0: layers [1, 4)\n" in out
    assert main(["check", str(path), "--layers", "4", "--pp", "2"]) == 0
    out = capsys.readouterr().out
    assert "placement (decided at launch for 'throughput'; add --dp to search for it here)" in out and "layers [" not in out
    assert main(["check", str(path), "--layers", "5", "--pp", "2", "--dp", "1"]) == 2
    assert "was measured on another model: it has 4 layers, the model 5" in capsys.readouterr().err


def test_check_prints_a_staircase(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 4}))
    assert main(["check", str(path), "--layers", "2", "--pp", "2", "--timeline"]) == 0
    assert capsys.readouterr().out.endswith("rank 0  0 1 . . [0 ]2 [1 ]3 [2 ]. [3 ]\n"
                                            "rank 1  . 0 [0 ]1 [1 ]2 [2 ]3 [3 ]. . \n")
    assert main(["check", str(path), "--layers", "2", "--pp", "2", "--timeline", "--micro-batches", "99"]) == 0
    assert capsys.readouterr().out.endswith("columns and there are 400: draw it with --png schedule.png\n")


def test_check_draws(config, tmp_path, capsys):
    assert main(["check", config, "--layers", "24", "--pp", "2", "--png", str(tmp_path / "s.png")]) == 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments,message", [
    (["--layers", "8", "--pp", "4"], "8 layers cannot fill"),
    (["--layers", "0", "--pp", "4"], "--layers 0: must be at least 1"),
    (["--layers", "24", "--pp", "4", "--micro-batches", "0"], "must be at least 1"),
])
def test_check_refuses_with_one_message(config, capsys, arguments, message):
    assert main(["check", config, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and message in captured.err


def test_as_a_command(config):
    done = subprocess.run([sys.executable, "-m", "ds_fold", "check", config, "--layers", "12", "--pp", "2", "--eval"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rank 0: L0.0" in done.stdout and "STEP" not in done.stdout

import json

import pytest

from ds_fold.__main__ import main
from ds_fold.plan import Cluster, Link, Profile

EQUAL = ["--layers", "8", "--forward-ms", "10", "--parameter-mb", "3", "--activation-kb", "32"]


@pytest.fixture
def files(tmp_path):
    config, cluster = tmp_path / "ds_config.json", tmp_path / "cluster.json"
    config.write_text(json.dumps({"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}, "ds_fold": {
        "schedule": "aiao", "segments": 2, "overlap_grad_reduce": "segment", "overlap_param_gather": True}}))
    Cluster(hosts=4, inter_host=Link(gbit_per_s=0.1), device_memory_bytes=50e6).save(str(cluster))
    return [str(config), "--cluster", str(cluster), "--pp", "2"]


def test_simulate_prints_a_table(files, capsys):
    assert main(["simulate", *files, "--dp", "2", *EQUAL]) == 0
    out = capsys.readouterr().out
    assert out.startswith("aiao, P=2 v=2 M=4 D=2 ZeRO-1\n")
    rows = [line.split() for line in out.splitlines() if line[:4].strip().isdigit()]
    assert [row[:2] for row in rows] == [["0", "480.0"], ["1", "480.0"]]
    assert all(float(row[3]) < float(row[2]) and row[4] not in ("-", "0%") for row in rows)
    # parameters and gradients of 12 MB, Adam's two states of half of them, and before the step averages of half of them
    assert all(42 <= float(row[6]) < 42.5 for row in rows) and "more than" not in out
    assert "without data-parallel communication" in out


def test_throughput_and_memory_efficiency_are_printed(files, tmp_path, capsys):
    profile = str(tmp_path / "profile.json")
    Profile.uniform(2, 0.5, parameter_bytes=2**28, micro_batch_size=3).save(profile)
    (tmp_path / "ds_config.json").write_text('{"gradient_accumulation_steps": 4}')
    (tmp_path / "cluster.json").write_text('{"schema": 1, "hosts": 1, "inter_host": {"gbit_per_s": 1e9}, "memory_gib": 0.9}')
    assert main(["simulate", files[0], "--cluster", files[2], "--pp", "1", "--profile", profile, "--tokens-per-sample", "10"]) == 0
    out = capsys.readouterr().out
    # 12 samples in 4 micro-batches of 2 layers of 0.5 and 1 s; 0.5 GiB of parameters, as much of gradients, and twice of Adam's
    assert ("throughput 1 samples/s, 10 tokens/s; fullest rank 2 GiB; memory efficiency 0.5 samples/s per GiB, 5 tokens/s per GiB"
            in out)
    assert out.count("more than the device has") == 1


def test_a_profile_gives_the_same_as_the_options_it_stands_for(files, tmp_path, capsys):
    path = str(tmp_path / "profile.json")
    Profile.uniform(8, 0.01, parameter_bytes=3e6, activation_bytes=32 * 1024).save(path)
    assert main(["simulate", *files, *EQUAL]) == 0
    equal = capsys.readouterr().out
    assert main(["simulate", *files, "--profile", path]) == 0
    assert capsys.readouterr().out == equal


def test_more_memory_than_the_device_has_is_marked(files, capsys):
    assert main(["simulate", *files, "--layers", "8", "--forward-ms", "10", "--parameter-mb", "30"]) == 0
    assert capsys.readouterr().out.count("more than the device has") == 2


@pytest.mark.parametrize("partition,layers,expected", [
    ("parameters", [("a", 9), ("b", 1), ("b", 1), ("b", 1), ("b", 1)], [1.0, 4.0]),
    ("type:b", [("a", 1), ("a", 1), ("b", 1), ("a", 1), ("b", 1)], [3.0, 2.0]),
    ([0, 4, 5], [("a", 1)] * 5, [4.0, 1.0]),
])
def test_the_partition_of_the_config_is_used(files, tmp_path, capsys, partition, layers, expected):
    path, config = str(tmp_path / "profile.json"), tmp_path / "ds_config.json"
    size = {"trainable_bytes": 0, "activation_bytes": 0, "boundary_bytes": 0}
    Profile(layers=[{"name": name, "forward_s": 0.001, "backward_s": 0, "parameter_bytes": weight, **size}
                    for name, weight in layers]).save(path)
    config.write_text(json.dumps({"ds_fold": {"partition": partition}}))
    assert main(["simulate", *files, "--profile", path]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:4].strip().isdigit()]
    assert [float(row[1]) for row in rows] == expected


@pytest.mark.parametrize("arguments,message", [
    ([], "give --profile, or equal layers by --layers and --forward-ms"),
    (["--layers", "8"], "give --profile, or equal layers"),
    (["--layers", "8", "--forward-ms", "-1"], "--forward-ms -1.0: must not be negative"),
    (["--profile", "p.json", "--layers", "8"], "--layers cannot be combined with --profile"),
    (["--profile", "nowhere.json"], "nowhere.json: cannot be read"),
    ([*EQUAL, "--dp", "3"], "2 pipeline ranks x 3 replicas need 6 ranks"),
    ([*EQUAL, "--dp", "0"], "--dp 0: must be at least 1"),
    (["--layers", "3", "--forward-ms", "1"], "3 layers cannot fill"),
])
def test_bad_input_is_one_message(files, capsys, arguments, message):
    assert main(["simulate", *files, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and message in captured.err

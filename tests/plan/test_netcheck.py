"""The network between the pool's ranks, some of which say that they are on another host."""

import subprocess

import pytest
from beside import beside
from pool import RankError, RankPool, free_port

from ds_fold.__main__ import main
from ds_fold.plan import Cluster


def measured(hosts, size=1 << 20):
    import torch.distributed as dist

    from ds_fold.plan import netcheck
    return netcheck.measure(size, hosts[dist.get_rank()])


def test_pairs_within_and_between_hosts():
    networks = RankPool.of(4).run(measured, ["a", "a", "b", "b"])
    cluster, pairs, exchange = networks[0]
    assert all(network == networks[0] for network in networks)
    assert [(pair.ranks, pair.same_host) for pair in pairs] == [((0, 1), True), ((2, 3), True), ((0, 2), False)]
    assert (cluster.hosts, cluster.ranks_per_host, cluster.collective) == (2, 2, "pairwise")
    assert cluster.inter_host.rate == pairs[2].bytes_per_s and cluster.inter_host.latency_s == pairs[2].latency_s
    assert cluster.intra_host.latency_s == (pairs[0].latency_s + pairs[1].latency_s) / 2
    # loopback, whatever the machine does: between 0.1 and 1000 Gbit/s, below 20 ms
    assert all(1e-6 < pair.latency_s < 2e-2 and 1e7 < pair.bytes_per_s < 1e11 for pair in pairs)
    assert exchange.measured_s > 0 and 0.1 < 2 * cluster.memory_gib < 1e5


def test_three_hosts_are_a_ring_and_one_host_has_one_link():
    cluster, pairs, _ = RankPool.of(3).run(measured, ["a", "b", "c"])[0]
    assert [pair.ranks for pair in pairs] == [(0, 1), (1, 2), (2, 0)] and cluster.intra_host is None
    cluster, pairs, _ = RankPool.of(2).run(measured, ["a", "a"])[0]
    assert (cluster.hosts, cluster.ranks_per_host) == (1, 2) and cluster.inter_host == cluster.intra_host
    assert Cluster(**cluster.model_dump()) == cluster


@pytest.mark.parametrize("hosts,message", [
    (["a", "a", "b"], "hosts differ in their number of ranks: a has 2, b has 1; launch equally many"),
    (["a"], "there is one rank and nothing between ranks to measure"),
    (["a", "b", "a", "b"], "ranks of one host do not follow each other: a, b, a, b; launch them host by host"),
])
def test_what_no_cluster_file_describes_is_refused_on_every_rank(hosts, message):
    with pytest.raises(RankError) as caught:
        RankPool.of(len(hosts)).run(measured, hosts)
    assert [message in error for error in caught.value.errors.values()] == [True] * len(hosts)


@beside
def netcheck_command(folder):
    path = folder / "cluster.json"
    done = subprocess.run(["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()), "--module", "ds_fold",
                           "netcheck", "-o", path, "--megabytes", "0.5"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, Cluster.load(str(path))


def test_the_command_writes_a_cluster(netcheck_command):
    out, cluster = netcheck_command
    assert out.count("ranks   0 and   1 within a host") == 1 and "cluster of 1 hosts x 2 ranks written" in out
    assert cluster.ranks_per_host == 2


@pytest.mark.parametrize("environment,arguments,message", [
    ({}, [], "netcheck needs a launcher: deepspeed --module ds_fold netcheck"),
    ({"WORLD_SIZE": "2"}, ["--megabytes", "0"], "--megabytes 0.0: must be at least 0.01"),
])
def test_bad_input_is_one_message(monkeypatch, capsys, environment, arguments, message):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["netcheck", *arguments]) == 2
    assert message in capsys.readouterr().err

import json

import pytest

from ds_fold.plan import Cluster, Costs, Link, PlanError, Profile

LAYER = {"forward_s": 1, "backward_s": 2, "parameter_bytes": 100, "trainable_bytes": 80, "activation_bytes": 30,
         "boundary_bytes": 10}
CLUSTER = {"schema": 1, "hosts": 4, "inter_host": {"gbit_per_s": 8}}


def written(tmp_path, data):
    path = tmp_path / "data.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


def test_files_come_back_as_written(tmp_path):
    path = str(tmp_path / "x.json")
    cluster = Cluster(hosts=4, ranks_per_host=2, inter_host=Link(gbit_per_s=10, latency_s=1e-5), intra_host=Link(bytes_per_s=1e11))
    cluster.save(path)
    assert Cluster.load(path) == cluster and json.load(open(path))["schema"] == 1
    profile = Profile.uniform(3, 0.5, parameter_bytes=7, overhead_s=0.1)
    profile.save(path)
    assert Profile.load(path) == profile


def test_a_rate_is_given_in_either_unit():
    assert Link(gbit_per_s=8).rate == Link(bytes_per_s=1e9).rate == 1e9


@pytest.mark.parametrize("data,message", [
    ("{", "cannot be read as JSON"),
    ("[]", "must hold one JSON object, found list"),
    ({**CLUSTER, "schema": 2}, r"schema: .*1, got 2"),
    ({**CLUSTER, "hosts": 0}, r"hosts: .*greater than 0, got 0"),
    ({**CLUSTER, "host": 1}, r"host: .*not permitted"),
    ({"hosts": 1}, r"inter_host: Field required"),
    ({**CLUSTER, "inter_host": {"gbit_per_s": 1, "bytes_per_s": 1}}, r"inter_host: give either bytes_per_s or gbit_per_s"),
    ({**CLUSTER, "ranks_per_host": 2}, r"intra_host is missing, but ranks_per_host=2"),
    ({**CLUSTER, "inter_host": {"latency_s": 0}}, r"inter_host: give either bytes_per_s or gbit_per_s"),
    ({**CLUSTER, "inter_host": {"gbit_per_s": -1}}, r"inter_host.gbit_per_s: .*greater than 0, got -1"),
    ({**CLUSTER, "memory_gib": [80, 80]}, r"memory_gib lists 2 ranks, but 4 hosts x 1 are 4"),
    ({**CLUSTER, "memory_gib": 80, "device_memory_bytes": 1}, r"give either device_memory_bytes or memory_gib"),
    ('{"schema": 1, "hosts": 4, "inter_host": {"gbit_per_s": NaN}}', r"inter_host.gbit_per_s: .*finite"),
])
def test_a_wrong_cluster_is_refused_by_its_key(tmp_path, data, message):
    with pytest.raises(PlanError, match="data.json: " + message):
        Cluster.load(written(tmp_path, data))


@pytest.mark.parametrize("data,message", [
    ({"layers": []}, r"layers: .*at least 1 item"),
    ({"layers": [LAYER, {**LAYER, "forward_s": -1}]}, r"layers.1.forward_s: .*greater than or equal to 0, got -1"),
    ({"layers": [{**LAYER, "recompute_activation_bytes": 3, "recomputed": {"backward_s": 3, "activation_bytes": 4}}]},
     r"layers.0: recompute_activation_bytes=3 and recomputed.activation_bytes=4 are the same thing"),
    ({"layers": [{k: x for k, x in LAYER.items() if k != "boundary_bytes"}]}, "layers.0.boundary_bytes: Field required"),
])
def test_a_wrong_profile_is_refused_by_its_key(tmp_path, data, message):
    with pytest.raises(PlanError, match="data.json: " + message):
        Profile.load(written(tmp_path, data))


def test_a_missing_file_is_one_message(tmp_path):
    with pytest.raises(PlanError, match="nowhere.json: cannot be read"):
        Profile.load(str(tmp_path / "nowhere.json"))


def test_ranks_must_fit_and_replicas_be_placed_alike():
    cluster = Cluster(hosts=2, ranks_per_host=4, inter_host=Link(gbit_per_s=1), intra_host=Link(gbit_per_s=10))
    cluster.check(4, 2)
    with pytest.raises(PlanError, match="4 pipeline ranks x 3 replicas need 12 ranks, but the cluster has 2 hosts x 4"):
        cluster.check(4, 3)
    with pytest.raises(PlanError, match="not placed alike"):
        cluster.check(2, 3)
    assert [cluster.host(r, 2) for r in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("collective,D,per_host,wire_bytes,delay_s", [
    ("ring", 1, 1, 0, 0),
    ("ring", 4, 1, 600, 3 * 2),  # (D-1)/D S, D-1 hops
    ("pairwise", 4, 1, 600, 2),
    ("hierarchical", 4, 1, 600, 3 * 2),
    ("ring", 4, 2, 600, 3 * 2),
    ("hierarchical", 4, 2, 400, 1 * 2 + 400 / 8 + 1),  # (H-1)/H S, after (h-1)/h S inside at 8 bytes/s and 1 s of latency
    ("pairwise", 4, 2, 800, 2),  # each of the 2 ranks sends a part to each of the 2 others elsewhere
    ("ring", 4, 4, 600, 3 * 1),  # all inside
    ("pairwise", 4, 8, 600, 1),
])
def test_collectives_cost_what_the_formulas_say(collective, D, per_host, wire_bytes, delay_s):
    cluster = Cluster(hosts=8, ranks_per_host=per_host, collective=collective, inter_host=Link(bytes_per_s=1, latency_s=2),
                      intra_host=Link(bytes_per_s=8, latency_s=1))
    assert cluster.exchange(800, D) == (pytest.approx(wire_bytes), pytest.approx(delay_s))
    assert cluster.exchange(800, D).twice() == (pytest.approx(2 * wire_bytes), pytest.approx(2 * delay_s))


def test_an_agreement_goes_up_and_down_a_tree():
    cluster = Cluster(hosts=8, ranks_per_host=2, inter_host=Link(bytes_per_s=1, latency_s=5),
                      intra_host=Link(bytes_per_s=1, latency_s=1))
    assert [cluster.agreement_s(n) for n in (1, 2, 3, 4, 5, 8)] == [0, 2, 20, 20, 30, 30]


def test_chunks_add_up_their_layers():
    layers = [{**LAYER, "forward_s": i + 1, "boundary_bytes": 10 * (i + 1)} for i in range(5)]
    profile = Profile(layers=layers, head={"forward_s": 0.5, "backward_s": 0.25, "activation_bytes": 1000}, overhead_s=0.01,
                      step_s_per_byte=0.1)
    costs = profile.costs([0, 1, 2, 3, 5], 2)
    assert costs.forward_s == [1, 2, 3, 9.5] and costs.backward_s == [2, 2, 2, 4.25]
    assert costs.boundary_bytes == [10, 20, 30, 50] and costs.activation_bytes == [30, 30, 30, 1060]
    assert costs.parameter_bytes == [100, 100, 100, 200] and costs.trainable_bytes == [80, 80, 80, 160]
    assert costs.of_rank(costs.trainable_bytes, 1) == 240 and costs.overhead_s == 0.01
    assert costs.optimizer_s(3, 2, 0) == pytest.approx(16) and costs.optimizer_s(3, 2, 1) == pytest.approx(8)
    assert costs.layers == [[(1, 2, 80)], [(2, 2, 80)], [(3, 2, 80)], [(4, 2, 80), (5, 2, 80)]]


def test_recomputed_layers_keep_their_input_and_repeat_their_forward():
    layers = [{**LAYER, "boundary_bytes": 10 * (i + 1)} for i in range(3)]
    layers[2]["recomputed"] = {"backward_s": 2.5, "activation_bytes": 4}
    costs = Profile(layers=layers, input_bytes=5).costs([0, 1, 2, 3], 1, recompute=(0, 1, 2))
    assert costs.backward_s == [3, 3, 2.5] and costs.activation_bytes == [5, 10, 4]
    assert Profile(layers=layers).costs([0, 1, 2, 3], 1, recompute=(1,)).backward_s == [2, 3, 2]


def test_a_recomputing_backward_holds_one_layer_whole():
    """Kept: 5, 10 and 4; the last layer's backward adds the 26 that it recomputes, the second's 20 when the last's 4 are gone."""
    layers = [{**LAYER, "boundary_bytes": 10 * (i + 1)} for i in range(3)]
    layers[2]["recompute_activation_bytes"] = 4
    profile = Profile(layers=layers, input_bytes=5)
    costs = profile.costs([0, 3], 1, recompute=(0, 1, 2))
    assert costs.activation_bytes == [19] and costs.recompute_bytes == [26] and costs.backward_s == [9]
    assert profile.costs([0, 3], 1).recompute_bytes == ()


def test_memory_of_devices():
    cluster = Cluster(hosts=4, inter_host=Link(gbit_per_s=1), memory_gib=[3, 2, 1, 4])
    assert [cluster.memory_bytes(r, 2) for r in range(2)] == [2 * 2**30, 2**30]
    assert Cluster(hosts=4, inter_host=Link(gbit_per_s=1), memory_gib=2).memory_bytes(1, 1) == 2**31
    assert Cluster(hosts=4, inter_host=Link(gbit_per_s=1), device_memory_bytes=7).memory_bytes(1, 1) == 7


@pytest.mark.parametrize("cuts", [[0, 2], [0, 1, 2, 3], [0, 3, 2, 4], [1, 2, 4], [0, 2, 2, 3, 4]])
def test_cuts_that_are_none_are_refused(cuts):
    with pytest.raises(PlanError, match="must ascend from 0 to the profile's 4 layers, in a multiple of 2 chunks"):
        Profile.uniform(4, 1.0).costs(cuts, 2)


def test_equal_chunks():
    costs = Costs.uniform(2, 3, 1.0, boundary_bytes=4, trainable_bytes=8)
    assert costs == Profile.uniform(6, 1.0, parameter_bytes=8, activation_bytes=4).costs(range(7), 2)

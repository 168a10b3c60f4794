import json
import random
import time
from itertools import combinations, product

import pytest
from beside import beside
from models import ADAM, largest_difference, train, train_alone
from pool import RankPool

from ds_fold.__main__ import main
from ds_fold.config import ConfigError, FoldConfig, fold_config, load_config
from ds_fold.plan import Cluster, Link, Profile, simulate
from ds_fold.plan.memory import States
from ds_fold.plan.picture import pareto
from ds_fold.plan.planner import Planner
from ds_fold.plan.space import candidates
from ds_fold.schedule import ScheduleError

OBJECTIVES = ("throughput", "memory", "memory_efficiency")
OPTIMIZER = {"type": "AdamW", "params": {**ADAM, "torch_adam": True}}


def model(layers, seed=0, **more):
    g = random.Random(seed)
    made = []
    for _ in range(layers):
        forward, size = g.uniform(1e-3, 2e-2), g.choice([1e5, 1e6, 4e6])
        layer = {"forward_s": forward, "backward_s": g.uniform(1.5, 3) * forward, "parameter_bytes": size,
                 "trainable_bytes": g.choice([1, 1, 1, 0]) * size, "activation_bytes": g.choice([1e5, 1e6]),
                 "boundary_bytes": g.choice([1e4, 1e5])}
        if g.random() < 0.4:
            layer["recomputed"] = {"backward_s": layer["backward_s"] + g.uniform(0.5, 1.2) * forward,
                                   "activation_bytes": g.random() * layer["activation_bytes"]}
        made.append(layer)
    return Profile(layers=made, input_bytes=1e4, **more)


def simulated(block, config, zero, P, D, M, size, profile, cluster, cuts, recompute):
    """(step_s, peak bytes of each rank) of a block; the profile is of one sample."""
    fold = FoldConfig(**block)
    precision = "bf16" if "bf16" in config else "fp32"
    own = fold.owns_optimizer(zero, precision == "bf16")
    result = simulate(fold.train_program(P, M, zero), profile.scaled(size).costs(cuts, P, recompute), cluster, D, zero,
                      stock_optimizer=not own, by_layer=fold.overlap_grad_reduce == "layer",
                      states=States.of_config(config, zero, D, own),
                      reduced={"fp32": 4, "bf16": 2}[config.get("communication_data_type", precision)]
                      / {"fp32": 4, "bf16": 2}[precision])
    return result.step_s, [max(held for _, held in result.memory(r)) for r in range(P)]


def every_plan(profile, cluster, config):
    """Step and memory of all plans that fit, with all cuts, from the words of the config alone."""
    n, ranks, found = len(profile.layers), cluster.hosts * cluster.ranks_per_host, []
    for P, size, v, schedule, zero, reduce, gather, recompute, head in product(
            range(1, ranks + 1), range(1, config["train_batch_size"] + 1), range(1, n + 1),
            ("1f1b", "gpipe", "interleaved_1f1b", "aiao"), (0, 1, 2), ("off", "segment", "layer"), (False, True), (False, True),
            ("scheduled", "immediate")):
        D = ranks // P
        M = config["train_batch_size"] // (D * size)
        if ranks != P * D or D * size * M != config["train_batch_size"] or v * P > n or (gather and not zero):
            continue
        if schedule in ("interleaved_1f1b", "aiao") and v == 1:
            continue  # 1f1b
        block = {"schedule": schedule, "segments": v, "overlap_grad_reduce": reduce, "overlap_param_gather": gather,
                 "head_backward": head}
        for inner in combinations(range(1, n), v * P - 1):
            try:
                step_s, peaks = simulated(block, config, zero, P, D, M, size, profile, cluster, [0, *inner, n],
                                          range(n) if recompute else ())
            except ScheduleError:
                break
            if all(peak <= cluster.memory_bytes(r, D) for r, peak in enumerate(peaks)):
                found.append((step_s, max(peaks)))
    return found


def test_the_plan_is_the_best_of_all(tmp_path):
    profile, config = model(4, seed=3, overhead_s=2e-4), {"train_batch_size": 8, "optimizer": OPTIMIZER}
    cluster = Cluster(hosts=4, inter_host=Link(bytes_per_s=1e8, latency_s=1e-3), device_memory_bytes=23e6)
    every = every_plan(profile, cluster, config)
    values = {"throughput": lambda plan: plan[0], "memory": lambda plan: plan[1],
              "memory_efficiency": lambda plan: plan[0] * plan[1]}
    best = {objective: min(map(value, every)) for objective, value in values.items()}
    assert len(every) > 500 and best["throughput"] * best["memory"] < 0.999 * best["memory_efficiency"], "nothing to choose"
    for objective, value in values.items():
        answer = Planner(config, [profile], cluster, objective).plan()
        found = answer.found[0]
        # recompute "auto" may find sets that the loop above does not know
        assert value((found.score.step_s, found.score.peak_bytes)) <= best[objective] * (1 + 1e-9)
        assert all(answer.found[0].score <= other.score for other in answer.found) and answer.gap == 0
        if len(found.recompute) in (0, 4):
            assert value((found.score.step_s, found.score.peak_bytes)) == pytest.approx(best[objective])


def test_bounds_are_never_above_the_simulation():
    checked = 0
    for seed in range(40):
        g = random.Random(seed)
        n = g.randint(2, 9)
        profile = model(n, seed, overhead_s=g.choice([0, 1e-3]), step_s_per_byte=g.choice([0, 1e-9]),
                        head={"forward_s": g.choice([0, 1e-2]), "activation_bytes": g.choice([0, 1e6])})
        cluster = Cluster(hosts=g.randint(1, 4), ranks_per_host=g.choice([1, 2, 4]),
                          intra_host=Link(bytes_per_s=1e9, latency_s=1e-5), inter_host=Link(bytes_per_s=g.choice([1e7, 1e8, 1e10]),
                                                                                                  latency_s=g.choice([0, 1e-3])),
                          collective=g.choice(["ring", "hierarchical", "pairwise"]))
        config = {"train_batch_size": g.choice([12, 24]), "optimizer": {"type": g.choice(["Adam", "SGD"])},
                  **g.choice([{}, {"bf16": {"enabled": True}}]), **g.choice([{}, {"communication_data_type": "bf16"}])}
        planner = Planner(config, [profile], cluster, "throughput")
        every, _ = candidates(cluster, n, config["train_batch_size"], True)
        for c in g.sample(every, min(8, len(every))):
            cuts = [0, *sorted(g.sample(range(1, n), c.P * c.segments - 1)), n]
            recompute = {"none": [], "all": range(n), "auto": [i for i in range(n) if g.random() < 0.5]}[c.recompute]
            step_s, peaks = simulated(c.block(), config, c.zero_stage, c.P, c.D, c.M, c.micro_batch_size, profile, cluster, cuts,
                                      recompute)
            bound = planner.bounds(c, planner.exchange(c)[1])
            assert 0 < bound[0] <= step_s * (1 + 1e-9) and 0 <= bound[1] <= max(peaks) * (1 + 1e-9), (seed, c)
            checked += 1
    assert checked > 200


@pytest.fixture
def files(tmp_path):
    """Arguments of a plan of six equal layers on two ranks."""
    (tmp_path / "ds_config.json").write_text(json.dumps({"train_batch_size": 4, "steps_per_print": 10**9, "optimizer": OPTIMIZER,
                                                         "gradient_clipping": 0.0,
                                                         "pipeline": {"activation_checkpoint_interval": 2},
                                                         "ds_fold": {"deterministic_rng": True, "partition": "parameters"}}))
    Profile.uniform(6, 0.01, parameter_bytes=4e6, activation_bytes=2e6, micro_batch_size=2).save(str(tmp_path / "profile.json"))
    cluster = Cluster(hosts=2, inter_host=Link(bytes_per_s=1e8, latency_s=1e-4), device_memory_bytes=70e6)
    cluster.save(str(tmp_path / "cluster.json"))
    return tmp_path


def plan(files, *more):
    return main(["plan", *(str(files / "ds_config.json"), "--profile", str(files / "profile.json"), "--cluster",
                           str(files / "cluster.json"), "-o", str(files / "planned.json"), *more)])


def test_the_command_writes_prints_and_draws(files, capsys):
    assert plan(files, "--objective", "throughput", "--explain", str(files / "plan.png")) == 0
    out = capsys.readouterr().out
    planned = load_config(str(files / "planned.json"))
    fold = fold_config(planned)
    assert f"launched on 2 ranks with num_stages={fold.plan.P}" in out and "\nother layouts:\n  P=" in out
    assert (files / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert planned["train_batch_size"] == 4 and fold.deterministic_rng and planned["optimizer"] == OPTIMIZER
    assert planned["pipeline"]["activation_checkpoint_interval"] == 0
    P, D, M = fold.plan.P, fold.plan.D, planned["gradient_accumulation_steps"]
    assert P * D == 2 and M * D * planned["train_micro_batch_size_per_gpu"] == 4
    assert main(["check", str(files / "planned.json"), "--layers", "6", "--pp", str(P), "--dp", str(D)]) == 0
    # simulate says the same of the file as the plan does
    (files / "scaled.json").write_text(Profile.load(str(files / "profile.json")).scaled(
        planned["train_micro_batch_size_per_gpu"]).model_dump_json(by_alias=True, exclude_none=True))
    capsys.readouterr()
    assert main(["simulate", str(files / "planned.json"), "--cluster", str(files / "cluster.json"), "--pp", str(P), "--dp", str(D),
                 "--profile", str(files / "scaled.json")]) == 0
    out = capsys.readouterr().out
    assert f"step {1e3 * fold.plan.step_s:.1f} ms" in out and f"fullest rank {fold.plan.peak_gib:.4g} GiB" in out


def test_the_front_is_what_no_other_plan_beats():
    cluster = Cluster(hosts=2, inter_host=Link(bytes_per_s=1e8))
    answer = Planner({"train_batch_size": 8}, [model(4, seed=5)], cluster, "memory").plan()
    front = pareto(answer.found)
    points = {(f.peak_gib, f.throughput) for f in answer.found}
    assert {(f.peak_gib, f.throughput) for f in front} == {
        (m, t) for m, t in points if not any(a <= m and b >= t and (a, b) != (m, t) for a, b in points)}
    assert len(front) > 1


def test_profiles_of_several_sizes_are_used_where_they_are_nearest():
    profile = Profile.uniform(2, 0.01, activation_bytes=1e3, micro_batch_size=2)
    cluster = Cluster(hosts=1, inter_host=Link(bytes_per_s=1e9))
    # eight samples at once take as long as four of the two that were measured
    planner = Planner({"train_batch_size": 16}, [profile, profile.scaled(4).model_copy(update={"micro_batch_size": 8})], cluster,
                      "throughput")
    assert planner.plan().found[0].candidate[2:4] == (8, 2)
    assert [planner.profile(m).layers[0].forward_s for m in (1, 2, 8, 16)] == pytest.approx([0.005, 0.01, 0.02, 0.04])


def test_a_planned_config_trains_exactly_where_it_was_planned_for_and_nowhere_else(files):
    assert plan(files, "--objective", "memory_efficiency") == 0
    planned = load_config(str(files / "planned.json"))
    P, D, M = planned["ds_fold"]["plan"]["P"], planned["ds_fold"]["plan"]["D"], planned["gradient_accumulation_steps"]
    assert P == 2

    def job():
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
        from models import make_layers

        import ds_fold
        refused = []
        for layout in ({"num_stages": 1}, {"topology": PipeDataParallelTopology(num_pp=1, num_dp=2)},
                       {"topology": PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)}):
            try:
                ds_fold.PipelineModule(make_layers(6), config=planned, **layout)
            except ds_fold.ConfigError as error:
                refused.append(str(error))
        return train(False, planned, P, 6, steps=3), train_alone(6, M, D, steps=3), refused

    for ours, alone, refused in RankPool.of(2).run(job):
        assert ours[1] == pytest.approx(alone[1], rel=1e-6)
        difference, size = largest_difference(ours[0], alone[0])
        assert difference <= 1e-6 * size
        assert len(refused) == 3 and all("ds_fold.plan was made for P=2 pipeline ranks x D=1 replicas, but there are P=1" in message
                                         and "launch 2 ranks with num_stages=2" in message for message in refused)
        assert "P=1 pipeline ranks x D=1 replicas x T=2 tensor-parallel" in refused[2]
    with pytest.raises(ConfigError, match="x D=1 replicas, but there are P=2 pipeline ranks x D=3 replicas"):
        fold_config(planned).check(P, D=3)
    with pytest.raises(ConfigError, match="x D=1 replicas, but there are P=2 pipeline ranks x D=1 replicas x T=2 tensor-parallel"):
        fold_config(planned).check(P, D=1, T=2)


def test_slices_share_a_card_and_the_smallest_device_of_a_group_counts(files, capsys):
    assert plan(files) == 0
    alone = load_config(str(files / "planned.json"))
    GiB = 2**30
    Cluster(hosts=2, ranks_per_host=2, inter_host=Link(gbit_per_s=1.6, latency_s=1e-4), intra_host=Link(gbit_per_s=10),
            memory_gib=[70e6 / GiB, 90e6 / GiB, 80e6 / GiB, 70e6 / GiB]).save(str(files / "cluster.json"))
    assert plan(files, "--tp", "2") == 0
    sliced = load_config(str(files / "planned.json"))
    assert alone["ds_fold"]["plan"].pop("T") == 1 and sliced["ds_fold"]["plan"].pop("T") == 2
    assert sliced == alone
    assert "launched on 4 ranks" in capsys.readouterr().out
    assert plan(files, "--tp", "3") == 2 and "3 does not divide ranks_per_host=2" in capsys.readouterr().err


@beside
def plan_for_a_thousand_devices(folder):
    """The answer's best candidate and counts, and the seconds of processor time."""
    layer = {"forward_s": 4e-3, "backward_s": 8e-3, "parameter_bytes": 4e8, "trainable_bytes": 4e8, "activation_bytes": 3e7,
             "boundary_bytes": 8e6}
    profile = Profile(layers=[layer] * 96, input_bytes=1e4)
    cluster = Cluster(hosts=128, ranks_per_host=8, inter_host=Link(gbit_per_s=100, latency_s=2e-5),
                      intra_host=Link(gbit_per_s=2000, latency_s=5e-6), memory_gib=40)
    start = time.process_time()
    answer = Planner({"train_batch_size": 2048, "bf16": {"enabled": True}}, [profile], cluster, "memory_efficiency").plan()
    return answer.found[0], answer.counts, time.process_time() - start


def test_a_thousand_devices_take_less_than_a_minute(plan_for_a_thousand_devices):
    best, counts, seconds = plan_for_a_thousand_devices
    assert best.candidate.P * best.candidate.D == 1024 and best.peak_gib <= 40 and counts["candidates"] > 10_000
    assert seconds < 60, f"{counts} took {seconds:.1f} s"


def change(path, **more):
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


@pytest.mark.parametrize("name,keys,message", [
    ("ds_config", {"train_batch_size": None}, "train_batch_size=None: a plan keeps the batch, so the ds_config has to give"),
    ("ds_config", {"train_batch_size": "many"}, "train_batch_size='many'"),
    ("ds_config", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer or offload_param"),
    ("ds_config", {"ds_fold": {"partition": [0, 4, 9]}}, "the profile has 6 layers, but the ds_config's ds_fold.partition"),
    ("ds_config", {"ds_fold": {"recompute": [6]}}, "is that of another model, whose last layer is 6"),
    ("cluster", {"device_memory_bytes": 20e6}, "no plan fits into the devices' memory: the nearest, P=2 D=1"),
    ("cluster", {"inter_host": {"gbit_per_s": -1}}, "inter_host.gbit_per_s: Input should be greater than 0, got -1"),
    ("cluster", {"inter_host": {"latency_s": 0}}, "inter_host: give either bytes_per_s or gbit_per_s"),
    ("cluster", {"hosts": 7}, "no layout of the cluster's 7 ranks can train batches of 4 samples with 6 layers: P=1 D=7: "
                              "train_batch_size=4 is no multiple of 7 replicas; P=7 D=1: 6 layers cannot fill 7 pipeline ranks"),
    ("profile", {"layers": [{"forward_s": 1}]}, "layers.0.backward_s: Field required"),
])
def test_bad_input_is_one_message(files, capsys, name, keys, message):
    change(files / f"{name}.json", **keys)
    assert plan(files) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("error: ") == 1 and message in captured.err
    assert not (files / "planned.json").exists()


def test_what_lacks_memory_says_how_much(files, capsys):
    change(files / "cluster.json", device_memory_bytes=2**20)
    assert plan(files) == 2
    needs, has, lacks = [float(word.strip("()")) for word in capsys.readouterr().err.replace(",", "").split()
                         if word.strip("()").replace(".", "").isdigit() and "." in word]
    assert has == pytest.approx(2**-10, abs=1e-3) and needs - has == pytest.approx(lacks, abs=2e-3)
    # 12 MB of parameters, gradients and two states at least, on each of two pipeline ranks
    assert needs > 12e6 * 2 / 2**30


def test_profiles_of_two_models_are_refused(files, capsys):
    Profile.uniform(5, 0.01).save(str(files / "other.json"))
    assert plan(files, "--profile", str(files / "profile.json"), str(files / "other.json")) == 2
    assert "measured on another model: it has 5 layers, the model 6" in capsys.readouterr().err

"""Scripts written for DeepSpeed's pipelines, under a ds_fold block: installed classes, config sources, subclasses and habits."""

import json
import os

import pytest
import torch
from models import Block, data, ds_config, installed, largest_difference, make_layers, seed_cpu, whole_model
from pool import RankPool
from torch import nn

AIAO = {"schedule": "aiao", "segments": 2}
OVERLAP = {**AIAO, "overlap_grad_reduce": "segment", "overlap_param_gather": True}


def script(config, P=2, layers=None, cls=None, steps=3, initialize_with=None, **kwargs):
    """What a user's script does, by DeepSpeed's names only: its losses, the whole model's weights, and the engine."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    torch.manual_seed(0)
    net = (cls or PipelineModule)(layers=make_layers(8) if layers is None else layers, num_stages=P, loss_fn=nn.MSELoss(),
                                  partition_method="uniform", seed_layers=True, seed_fn=seed_cpu, **kwargs)
    params = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=params, config=config, **(initialize_with or {}))
    batches = data(engine.grid.get_data_parallel_rank())
    losses = [float(engine.train_batch(data_iter=batches)) for _ in range(steps)]
    return losses, whole_model(engine.module), engine


def folded(engine):
    """Whose classes the engine and its module have: (engine's, module's)."""
    import ds_fold
    return isinstance(engine, ds_fold.PipelineEngine), isinstance(engine.module, ds_fold.PipelineModule)


def stock_run(P=2, **kwargs):
    return RankPool.of(P).once(lambda P, kwargs: script(ds_config(4), P, **kwargs)[:2], P, kwargs)[0]


# where the block comes from ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["argv", "argv=", "base64", "variable", "variable and argv", "install", "install path"])
def test_each_source_of_the_block_folds_the_same_script(source, tmp_path):
    """The same weights as stock DeepSpeed, bit by bit, whatever names the block."""
    whole, without = ds_config(4, fold=OVERLAP, zero=1), ds_config(4, zero=1)
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    (tmp_path / "without.json").write_text(json.dumps(without))

    def job(source, folder):
        import base64
        path = f"{folder}/whole.json"
        encoded = base64.urlsafe_b64encode(json.dumps(whole).encode()).decode()
        how = {"argv": {"argv": ["--deepspeed_config", path]}, "argv=": {"argv": ["--steps", "3", f"--deepspeed_config={path}"]},
               "base64": {"argv": ["--deepspeed_config", encoded]}, "variable": {"variable": path},
               "variable and argv": {"variable": path, "argv": ["--deepspeed_config", f"{folder}/without.json"]},
               "install": {"config": whole}, "install path": {"config": path}}[source]
        with installed(**how):
            losses, weights, engine = script(whole if source in ("argv", "base64") else without)
            return losses, weights, folded(engine), engine.fold.schedule, engine.module.num_segments, engine.shards_optimizer

    losses, weights, *found = RankPool.of(2).run(job, source, str(tmp_path))[0]
    assert found == [(True, True), "aiao", 2, True]
    stock = RankPool.of(2).once(lambda: script(ds_config(4, zero=1))[:2])[0]
    assert losses == stock[0] and largest_difference(weights, stock[1])[0] == 0


def test_without_a_block_the_script_runs_on_deepspeeds_own_classes():
    def job():
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.engine import PipelineEngine
        with installed():
            losses, weights, engine = script(ds_config(4))
            return losses, weights, type(engine) is PipelineEngine and type(engine.module) is PipelineModule

    losses, weights, stock_classes = RankPool.of(2).run(job)[0]
    stock = stock_run()
    assert stock_classes and losses == stock[0] and largest_difference(weights, stock[1])[0] == 0


def test_uninstall_takes_it_back():
    def job():
        import ds_fold
        with installed(ds_config(4, fold=AIAO)):
            ds_fold.install(ds_config(4, fold=AIAO))  # twice is once
        return folded(script(ds_config(4), steps=1)[2])

    assert RankPool.of(2).run(job) == [(False, False)] * 2


@pytest.mark.parametrize("fold", [{"schedule": "1f1b", "overlap_grad_reduce": "layer"}, {"schedule": "gpipe"}])
def test_a_block_that_only_initialize_sees_takes_a_module_over_where_its_placement_stands(fold):
    def job(fold):
        with installed():
            losses, weights, engine = script(ds_config(4, fold=fold))
            return losses, weights, folded(engine), engine.fold.schedule

    losses, weights, classes, schedule = RankPool.of(2).run(job, fold)[0]
    stock = stock_run()
    assert classes == (True, True) and schedule == fold["schedule"]
    assert losses == stock[0] and largest_difference(weights, stock[1])[0] == 0


@pytest.mark.parametrize("fold", [{"overlap_grad_reduce": "segment"}, OVERLAP])
def test_a_module_with_tied_layers_is_taken_over(fold):
    def job(fold):
        with installed():
            return script(ds_config(4, 1, fold=fold), layers=make_layers(8, tied=True))[:2]

    losses, weights = RankPool.of(2).run(job, fold)[0]
    stock = RankPool.of(2).run(lambda: script(ds_config(4, 1), layers=make_layers(8, tied=True))[:2])[0]
    difference, size = largest_difference(weights, stock[1])
    assert losses == pytest.approx(stock[0], rel=1e-6) and difference <= 1e-6 * size


def test_a_search_that_knows_the_block_only_is_refused(tmp_path):
    (tmp_path / "fold.json").write_text(json.dumps({"ds_fold": {"recompute": "auto", "profile": "p.json"}}))

    def job(path):
        import ds_fold
        with installed(variable=path):
            try:
                script(ds_config(4))
            except ds_fold.ConfigError as error:
                return str(error)

    assert all("name the whole ds_config" in text for text in RankPool.of(2).run(job, str(tmp_path / "fold.json")))


def test_dual_pipe_is_refused_under_a_block():
    def job(early):
        import deepspeed
        from deepspeed.pipe import DualPipeVModule

        import ds_fold
        config = ds_config(4, fold={"schedule": "gpipe"})
        with installed(config if early else None):
            try:
                net = DualPipeVModule(make_layers(8), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
                deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)
            except ds_fold.ConfigError as error:
                return early, str(error)

    for early in (True, False):
        for built, text in RankPool.of(2).run(job, early):
            assert built == early and "DualPipeVModule has a schedule of its own" in text


def test_an_engine_that_only_evaluates_needs_no_optimizer(tmp_path):
    def job(folder):
        config = ds_config(4, 1, fold=AIAO)
        del config["optimizer"]
        with installed(config):
            engine = script(config, steps=0)[2]
            loss = float(engine.eval_batch(data(3)))
            engine.save_checkpoint(folder, tag="weights")
            return loss

    expected = RankPool.of(2).run(lambda: float(script(ds_config(4), steps=0)[2].eval_batch(data(3))))
    assert RankPool.of(2).run(job, str(tmp_path)) == expected
    assert len(list((tmp_path / "weights").glob("layer_*"))) == 8


def late(config, P, early, ready=False, change=None):
    """A script whose config is a dict, known to initialize() only, or ``early``: losses, weights, its next random numbers."""
    import random

    import deepspeed
    import numpy
    from deepspeed.pipe import PipelineModule
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    layers = [Block() for _ in range(8)] if ready else iter(make_layers(8))
    with installed(config if early else None):
        net = PipelineModule(layers, num_stages=P, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=not ready)
        net.title = "mine"
        more = change(net) if change else {}
        arguments = {"model_parameters": (p for p in net.parameters() if p.requires_grad), **(more or {})}
        engine, *_ = deepspeed.initialize(model=net, config=config, **arguments)
        later = torch.rand(2).tolist(), random.random(), numpy.random.rand()
        batches = data(engine.grid.get_data_parallel_rank())
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        return losses, whole_model(engine.module), later, engine.module.parts, net.title


@pytest.mark.parametrize("fold,ready", [(OVERLAP, False), ({**AIAO, "partition": [0, 1, 3, 5, 8]}, False), (AIAO, True)])
def test_other_cuts_that_only_initialize_sees_build_the_module_again(fold, ready):
    def job(fold, ready):
        config = ds_config(4, 1, fold=fold)
        return late(config, 2, False, ready), late(config, 2, True, ready), late(ds_config(4, 1), 2, False, ready)

    for found, early, stock in RankPool.of(2).run(job, fold, ready):
        assert found[0] == early[0] == stock[0] and len(found[3]) == 5 and found[4] == "mine"
        assert largest_difference(found[1], early[1])[0] == largest_difference(found[1], stock[1])[0] == 0
        assert found[2] == stock[2], "the script's random numbers go on as under DeepSpeed"


@pytest.mark.parametrize("early", [True, False])
def test_parameters_with_names_train_as_without(early):
    def job(early):
        def named(net):
            return {"model_parameters": net.named_parameters()}

        return late(ds_config(4, 1, fold=OVERLAP), 2, early, change=named), late(ds_config(4, 1), 2, False)

    for found, stock in RankPool.of(2).run(job, early):
        assert found[0] == stock[0] and largest_difference(found[1], stock[1])[0] == 0 and len(found[3]) == 5


def test_groups_of_single_tensors_and_of_names_are_lists_of_parameters():
    from ds_fold.initialization import listed
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    groups = listed(group for group in ({"params": a, "lr": 1.0}, {"params": iter([("b", b)])}))
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(a)], [id(b)]] and groups[0]["lr"] == 1.0


def test_the_last_config_of_the_command_line_counts_and_a_script_may_leave_its_folder(tmp_path):
    for name, segments in (("first", 1), ("last", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps(ds_config(4, fold={"schedule": "aiao", "segments": segments})))

    def job(folder):
        before, config = os.getcwd(), ds_config(4, fold=AIAO)
        try:
            found = []
            for how in ({"argv": ["--deepspeed_config", "first.json", "--deepspeed_config=last.json"]}, {"variable": "last.json"}):
                os.chdir(folder)
                with installed(**how):
                    os.chdir("/")
                    found.append(script(config if "argv" in how else ds_config(4), steps=1)[2].module.parts)
            return found
        finally:
            os.chdir(before)

    assert RankPool.of(2).run(job, str(tmp_path)) == [[[0, 2, 4, 6, 8]] * 2] * 2


def change_weights(net):
    if net.global_rank == 1:
        net.forward_funcs[0].a.weight.data.mul_(2)


def give_optimizer(net):
    return {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "model_parameters": None}


def give_groups(net):
    return {"model_parameters": [{"params": list(net.parameters())}]}


def keep_layer(net):
    net.first = [net.forward_funcs[0]]


def freeze(net):
    net.forward_funcs[0].requires_grad_(False)


@pytest.mark.parametrize("change,reason", [
    (change_weights, "a.weight was changed since"), (give_optimizer, "optimizer= holds its parameters"),
    (give_groups, "model_parameters= are not"), (keep_layer, "first of the module was set since"), (freeze, "was changed since"),
])
def test_what_a_module_built_again_would_lose_is_one_error_with_the_remedy_on_every_rank(change, reason):
    def job(change):
        import ds_fold
        try:
            late(ds_config(4, fold=AIAO), 2, False, change=change)
        except ds_fold.ConfigError as error:
            return str(error)

    texts = RankPool.of(2).run(job, change)
    assert texts[0] == texts[1] and reason in texts[0] and "ds_fold.install(config=...)" in texts[0]


@pytest.mark.parametrize("before,reason", [(False, "Net, a subclass, may hold"), (True, "built before ds_fold.install()")])
def test_a_module_of_which_nothing_was_remembered_is_not_built_again(before, reason):
    def job(before):
        import deepspeed
        from deepspeed.pipe import PipelineModule

        import ds_fold
        cls = PipelineModule if before else type("Net", (PipelineModule, ), {})
        net = cls(make_layers(8), num_stages=2, loss_fn=nn.MSELoss()) if before else None
        with installed():
            net = net or cls(make_layers(8), num_stages=2, loss_fn=nn.MSELoss())
            try:
                deepspeed.initialize(model=net, config=ds_config(4, fold=AIAO))
            except ds_fold.ConfigError as error:
                return str(error)

    assert all(reason in text for text in RankPool.of(2).run(job, before))


def test_the_scripts_own_block_wins_over_the_variables_and_a_variable_without_a_block_is_refused(tmp_path):
    (tmp_path / "own.json").write_text(json.dumps(ds_config(4, fold=AIAO)))
    (tmp_path / "other.json").write_text(json.dumps({"ds_fold": {"schedule": "gpipe"}}))
    (tmp_path / "none.json").write_text("{}")

    def job(folder):
        import ds_fold
        with installed(argv=["--deepspeed_config", f"{folder}/own.json"], variable=f"{folder}/other.json"):
            schedule = script(ds_config(4, fold=AIAO), steps=1)[2].fold.schedule
        with installed(variable=f"{folder}/none.json"):
            try:
                script(ds_config(4))
            except ds_fold.ConfigError as error:
                return schedule, str(error)

    for schedule, text in RankPool.of(2).run(job, str(tmp_path)):
        assert schedule == "aiao" and text.endswith("none.json has no ds_fold block; add one, or unset the variable")

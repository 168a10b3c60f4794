"""What users do with a pipeline beyond plain training: data that end, frozen parts, randomness, precision, batch size, steps."""

import os
import subprocess
import sys

import pytest
import torch
from beside import beside
from models import (
    HIDDEN,
    MICRO_BATCH,
    Block,
    LayerSpec,
    build,
    data,
    ds_config,
    largest_difference,
    make_layers,
    train,
    train_alone,
    whole_model,
)
from pool import RankError, RankPool, free_port
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

AIAO = {"schedule": "aiao", "segments": 2}
SCHEDULES = [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "segments": 2}, AIAO,
             {"schedule": "aiao", "segments": 2, "last_segment": "all_forward"}, {"schedule": "gpipe"},
             {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "segment", "overlap_param_gather": True}]
schedules = pytest.mark.parametrize("fold", SCHEDULES, ids=lambda f: "-".join(map(str, f.values())))


# data ---------------------------------------------------------------------------------------------------------------------


@schedules
def test_data_that_end_raise_the_same_on_all_ranks_before_the_step(fold):
    def job(fold):
        engine = build(False, ds_config(4, fold=fold), 3, 12)
        source = data(0)
        items = iter([next(source) for _ in range(6)])
        engine.train_batch(items)
        before = whole_model(engine.module)
        try:
            engine.train_batch(items)
        except StopIteration as error:
            assert largest_difference(before, whole_model(engine.module))[0] == 0 and engine.global_steps == 1
            engine.train_batch(data(0))  # and it can go on
            return type(error).__name__

    assert RankPool.of(3).run(job, fold) == ["StopIteration"] * 3


def test_an_error_in_one_ranks_data_ends_the_batch_everywhere_and_names_the_rank():
    def job():
        import torch.distributed as dist

        def source():
            yield from (next(data(0)) for _ in range(3))
            if dist.get_rank() == 2:
                raise OSError("disk on fire")
            yield next(data(0))

        engine = build(False, ds_config(4, fold=AIAO), 3, 12)
        engine.train_batch(source())

    with pytest.raises(RankError) as error:
        RankPool.of(3).run(job)
    assert "OSError: disk on fire" in error.value.errors[2]
    assert all("data iterator of rank 2 raised an error" in error.value.errors[r] for r in (0, 1))


def test_exactly_m_items_are_pulled_per_loading_rank_and_step():
    def job():
        pulled = [0]

        def source():
            for item in data(0):
                pulled[0] += 1
                yield item

        engine = build(False, ds_config(4, fold=AIAO), 3, 12)
        items = source()
        for _ in range(3):
            engine.train_batch(items)
        return pulled[0]

    assert RankPool.of(3).run(job) == [12, 0, 12]


def test_training_data_and_batch_fn():
    def job():
        import ds_fold
        x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(0))
        config = ds_config(4, fold={**AIAO, "data_workers": 0})
        net = ds_fold.PipelineModule(make_layers(8), num_stages=2, loss_fn=nn.MSELoss(), config=config)
        engine, _, loader, _ = ds_fold.initialize(model=net, model_parameters=net.parameters(), config=config,
                                                  training_data=torch.utils.data.TensorDataset(x, x))
        engine.set_batch_fn(lambda batch: (batch[0] * 0, batch[1] * 0 + 1))
        constant = float(engine.train_batch())
        engine.set_batch_fn(None)
        return constant, float(engine.train_batch()), loader is not None

    results = RankPool.of(2).run(job)
    assert results[0] == results[1] and results[0][0] != results[0][1] and results[0][2]


# frozen and empty parts ---------------------------------------------------------------------------------------------------


class FrozenBlock(Block):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("where", ["first", "last", "adapters", "functions"])
def test_frozen_and_parameterless_parts_train_as_on_one_rank(where, zero):
    def job(P, fold, where, zero):
        layers = make_layers(8)
        if where in ("first", "adapters"):
            layers[0:2] = [LayerSpec(FrozenBlock), LayerSpec(FrozenBlock)]
        if where in ("last", "adapters"):
            layers[6:8] = [LayerSpec(FrozenBlock), LayerSpec(FrozenBlock)]
        if where == "adapters":
            layers[2:4] = [LayerSpec(FrozenBlock), LayerSpec(FrozenBlock)]
        if where == "functions":
            layers[4:8] = [torch.tanh, lambda x: x * 2, torch.relu, lambda x: x + 1]
        weights, losses, norms = train(False, ds_config(4, zero, clip=0.3, fold=fold), P, 8, steps=3, layers=layers)
        weights.pop("placeholder", None)
        return weights, losses, norms

    alone = RankPool.of(1).once(job, 1, {"schedule": "1f1b"}, where, zero)[0]
    for fold in ({"schedule": "1f1b"}, AIAO):
        weights, losses, norms = RankPool.of(2).run(job, 2, fold, where, zero)[0]
        difference, size = largest_difference(weights, alone[0])
        assert difference <= 1e-6 * size and losses == pytest.approx(alone[1], rel=1e-6) and losses[-1] < losses[0]
        assert norms == pytest.approx(alone[2], rel=1e-5), "the norm is the whole model's, agreed by all ranks"


class Sometimes(nn.Module):
    """Uses its second layer only for inputs with a positive sum: unused on some replicas and in some steps."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        y = x + self.always(x)
        return y + self.sometimes(y) if float(x.detach().sum()) > 0 else y


@pytest.mark.parametrize("zero", [0, 1])
def test_a_parameter_unused_on_some_replicas_counts_as_zero(zero):
    def job(P, zero, fold):
        layers = [LayerSpec(Sometimes) for _ in range(4)]
        return train(False, ds_config(1, zero, fold=fold), P, 4, steps=6, layers=layers)[:2]

    two = RankPool.of(4).run(job, 2, zero, {**AIAO, "segments": 2})[0]
    one = RankPool.of(2).run(job, 1, zero, {"schedule": "1f1b"})[0]
    assert two[1] == one[1] and largest_difference(two[0], one[0])[0] == 0


def test_groups_that_differ_between_ranks():
    """A rank without biases has one optimizer group less: nobody waits for it."""
    def job(P, fold):
        import ds_fold
        layers = [LayerSpec(Block) for _ in range(4)] + [LayerSpec(nn.Linear, HIDDEN, HIDDEN, bias=False) for _ in range(4)]
        config = ds_config(4, 1, clip=0.2, fold=fold)
        net = ds_fold.PipelineModule(layers, num_stages=P, loss_fn=nn.MSELoss(), config=config, partition_method="uniform",
                                     seed_layers=True)
        groups = [{"params": [p for n, p in net.named_parameters() if n.endswith("weight")], "weight_decay": 0.1},
                  {"params": [p for n, p in net.named_parameters() if n.endswith("bias")], "weight_decay": 0.0}]
        engine, *_ = ds_fold.initialize(model=net, model_parameters=groups, config=config)
        batches = data(0)
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        return losses, whole_model(engine.module), len(engine.optimizer.param_groups)

    two = RankPool.of(2).run(job, 2, {"schedule": "1f1b"})
    assert [rank[2] for rank in two] == [2, 1]
    one = RankPool.of(1).run(job, 1, {"schedule": "1f1b"})[0]
    difference, size = largest_difference(two[0][1], one[1])
    assert difference <= 1e-6 * size and two[0][0] == pytest.approx(one[0], rel=1e-6)


# randomness ---------------------------------------------------------------------------------------------------------------


class Dropped(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(super().forward(x))


@pytest.mark.parametrize("checkpoint", [0, 1])
def test_dropout_is_the_same_under_every_schedule_and_fold_and_when_recomputed(checkpoint):
    def job(P, fold, checkpoint):
        torch.manual_seed(99)
        config = ds_config(4, checkpoint=checkpoint, fold={**fold, "deterministic_rng": True})
        layers = [LayerSpec(Dropped) for _ in range(8)]
        engine = build(False, config, P, 8, layers=layers)
        batches, state = data(0), torch.get_rng_state()
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        assert torch.equal(state, torch.get_rng_state()), "the user's random state was touched"
        evaluated = [float(engine.eval_batch(data(1))) for _ in range(2)]
        assert evaluated[0] == evaluated[1], "dropout is off while evaluating"
        assert engine.module.training
        return losses

    expected = RankPool.of(1).once(job, 1, {"schedule": "1f1b"}, 0)[0]
    assert len(set(expected)) == 3
    for P, fold in [(1, {**AIAO, "segments": 3}), *((2, fold) for fold in SCHEDULES), (4, AIAO)]:
        assert RankPool.of(P).run(job, P, fold, checkpoint)[0] == expected, (P, fold)


def test_seed_layers_gives_the_dropout_of_deepspeed():
    def job(stock, fold):
        engine = build(stock, ds_config(4, fold=fold), 2, 8, layers=[LayerSpec(Dropped) for _ in range(8)])
        batches = data(0)
        return [float(engine.train_batch(batches)) for _ in range(3)]

    stock = RankPool.of(2).run(job, True, None)[0]
    for fold in SCHEDULES:
        assert RankPool.of(2).run(job, False, fold)[0] == stock


# recompute ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("interval", [1, 2])
def test_an_embedding_of_integers_first_gets_its_gradient_when_checkpointed(interval, reentrant):
    def job(P, fold, pipeline):
        layers = [LayerSpec(nn.Embedding, 10, HIDDEN), *make_layers(7)]
        engine = build(False, ds_config(4, fold=fold, pipeline=pipeline), P, 8, layers=layers)
        tokens = torch.arange(2 * 4).view(4, 2)
        for _ in range(2):
            engine.train_batch(iter([(t, torch.ones(2, HIDDEN)) for t in tokens]))
        return whole_model(engine.module)

    pipeline = {"activation_checkpoint_interval": interval, "use_reentrant": reentrant}
    plain = RankPool.of(1).once(job, 1, {"schedule": "1f1b"}, {})[0]
    for P, fold in [(1, {"schedule": "1f1b"}), (2, AIAO), (2, {"schedule": "1f1b"})]:
        assert largest_difference(RankPool.of(P).run(job, P, fold, pipeline)[0], plain)[0] == 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("fold", [AIAO, {"schedule": "1f1b"}], ids=["aiao", "1f1b"])
def test_recomputed_layers_repeat_their_dropout_and_keep_only_their_inputs(fold, reentrant):
    """Without seeds of their own: masks come from the global random state, which each recomputation restores."""
    def job(fold):
        layers = [LayerSpec(nn.Embedding, 10, HIDDEN), *(LayerSpec(Dropped) for _ in range(7))]
        engine = build(False, ds_config(4, fold=fold, pipeline={"use_reentrant": reentrant}), 2, 8, layers=layers)
        engine.module.seed_layers = False
        torch.manual_seed(3)
        forwards = [0] * 8
        for local, index in enumerate(engine.module.global_layer_indices):
            def count(*_, index=index):
                forwards[index] += 1
            engine.module.forward_funcs[local].register_forward_pre_hook(count)
        items, masks = [(t, torch.ones(2, HIDDEN)) for t in torch.arange(8).view(4, 2)], []
        for _ in range(3):
            masks.append(float(engine.train_batch(iter(items))))
        return whole_model(engine.module), masks, forwards

    plain = RankPool.of(2).run(job, fold)
    some = RankPool.of(2).run(job, {**fold, "recompute": [0, 2, 5, 7]})
    assert some[0][1] == plain[0][1] and largest_difference(some[0][0], plain[0][0])[0] == 0
    assert [sum(counts) for counts in zip(*(result[2] for result in some))] == [24, 12, 24, 12, 12, 24, 12, 24]
    with pytest.raises(AssertionError, match="names the layers that are recomputed, but so does activation_checkpoint_interval=2"):
        RankPool.of(2).run(lambda: build(False, ds_config(4, checkpoint=2, fold={**fold, "recompute": "all"}), 2, 8))


# precision ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1])
def test_fp16_with_dynamic_scaling_skips_everywhere_and_trains(zero):
    """A loss scale that overflows at first: every rank skips the same steps, the scale halves once a step, the scheduler waits."""
    def job(P, zero, fold):
        warm_up = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}
        config = ds_config(4, zero, "fp16", fold=fold, scheduler={"type": "WarmupLR", "params": warm_up})
        config["fp16"] = {"enabled": True, "initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 100}
        engine = build(False, config, P, 8)
        batches, losses, applied = data(0, "fp16"), [], []
        for _ in range(12):
            losses.append(float(engine.train_batch(batches)))
            applied.append(engine.was_step_applied())
        return losses, applied, engine.skipped_steps, engine.get_lr(), engine.optimizer.loss_scale, whole_model(engine.module)

    ranks = RankPool.of(2).run(job, 2, zero, AIAO)
    losses, applied, skipped, lr, scale, weights = ranks[0]
    assert ranks[1][1:5] == ranks[0][1:5]
    assert 0 < skipped < 12 and applied == [False] * skipped + [True] * (12 - skipped)
    assert scale == 2.0**(22 - skipped) and losses[-1] < losses[0]
    one = RankPool.of(1).once(job, 1, 1, {"schedule": "1f1b"})[0]
    assert one[2:5] == (skipped, lr, scale)
    assert largest_difference(weights, one[5])[0] <= 2e-3


# steps --------------------------------------------------------------------------------------------------------------------


@schedules
def test_the_number_of_micro_batches_may_change_between_steps(fold):
    def job(P, fold):
        engine = build(False, ds_config(2, fold=fold), P, 8)
        batches, losses = data(0), []
        for M in (2, 4, 1, 3):
            engine.set_train_batch_size(M * MICRO_BATCH)
            losses.append(float(engine.train_batch(batches)))
        return losses, engine.global_steps, engine.global_samples, whole_model(engine.module)

    two, one = RankPool.of(2).run(job, 2, fold)[0], RankPool.of(1).once(job, 1, {"schedule": "1f1b"})[0]
    assert two[:3] == one[:3] and two[1:3] == (4, 20) and largest_difference(two[3], one[3])[0] == 0


@schedules
@pytest.mark.parametrize("P", [1, 2, 3])
def test_evaluation_with_its_own_size_count_and_losses(fold, P):
    def job(P, fold):
        engine = build(False, ds_config(4, fold=fold), P, 12, loss_fn=lambda y, t: nn.functional.mse_loss(y, t).view(1))
        x = torch.randn(7, 8, HIDDEN, generator=torch.Generator().manual_seed(1))
        first, logits = engine.eval_batch(iter([(t, t) for t in x]), return_logits=True, num_micro_batches=7)
        trained = float(engine.train_batch(data(0)))
        apart = engine.eval_batch(iter([(t, t) for t in x[:2]]), reduce_output=None, num_micro_batches=2)
        outputs = engine.eval_batch(iter([(t, t) for t in x[:1]]), compute_loss=False, num_micro_batches=1, reduce_output=None)
        engine.module.loss_fn = lambda y, t: [nn.functional.mse_loss(y, t), y.abs().mean()]
        several = engine.eval_batch(iter([(t, t) for t in x[:3]]), num_micro_batches=3)
        return (first.shape, first.tolist(), None if logits is None else torch.stack(logits).tolist(), trained,
                [o.tolist() for o in apart or []], [o.tolist() for o in outputs or []], [v.item() for v in several])

    ranks = RankPool.of(P).run(job, P, fold)
    first, last = ranks[0], ranks[-1]
    assert first[:2] == last[:2] and first[6] == last[6] and last[0] == (1, )
    one = RankPool.of(1).once(job, 1, {"schedule": "1f1b"})[0]
    assert last == one and len(last[2]) == 7 and len(last[4]) == 2


@pytest.mark.parametrize("fold", [AIAO, SCHEDULES[-1]], ids=["aiao", "overlapped"])
def test_nothing_grows_over_fifty_steps(fold):
    def job(fold):
        import gc
        import threading
        engine = build(False, ds_config(4, 1, fold=fold, checkpoint=1), 2, 8)
        batches, seen = data(0), []
        for step in range(50):
            engine.train_batch(batches)
            if step % 10 == 0:
                engine.eval_batch(data(1))
            if step in (9, 29, 49):
                gc.collect()
                hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in engine.module.parameters())
                tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
                counts = (threading.active_count(), hooks, len(engine._slots), len(engine._schedules),
                          getattr(engine.optimizer, "_backward_active_depth", 0))
                seen.append((counts, tensors))
        return seen

    for seen in RankPool.of(4).run(job, fold):
        counts, tensors = zip(*seen)
        assert counts[0] == counts[1] == counts[2]
        assert max(tensors) - min(tensors) <= 2, tensors  # the last message may or may not have gone


def test_a_destroyed_engine_leaves_no_process_group_of_its_own():
    def job():
        import gc

        def threads():
            gc.collect()
            return len(os.listdir("/proc/self/task"))

        engine = build(False, ds_config(4, fold=AIAO), 2, 8)
        engine.train_batch(data(0))
        full, groups = threads(), list(engine._groups)
        engine.destroy()
        known = torch.distributed.distributed_c10d._world.pg_map
        counts = len(groups), sum(group in known for group in groups)
        del groups
        return counts, full - threads()

    # four directed uses of the two edges between two ranks, and one group for agreements; each has threads
    for (groups, alive), freed in RankPool.of(2).run(job):
        assert groups == 5 and alive == 0 and freed >= groups


@beside
def forgetful_ranks(folder):
    script = folder / "forgetful.py"
    script.write_text("""
import deepspeed, torch, ds_fold
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo", verbose=False)
config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "ds_fold": {"schedule": "aiao", "segments": 2},
          "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
net = ds_fold.PipelineModule([torch.nn.Linear(4, 4) for _ in range(4)], num_stages=2, loss_fn=torch.nn.MSELoss(), config=config)
engine, *_ = ds_fold.initialize(model=net, model_parameters=list(net.parameters()))
x = torch.zeros(2, 4)
engine.train_batch(iter([(x, x)] * 4))
print("trained")
""")
    port = str(free_port())
    ranks = [subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port,
                                       MASTER_ADDR="127.0.0.1"))
             for rank in range(2)]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], outputs


def test_ranks_that_destroy_nothing_exit_without_an_abort(forgetful_ranks):
    codes, outputs = forgetful_ranks
    assert codes == [0, 0] and all("trained" in output for output in outputs), outputs


def test_two_engines_with_different_topologies_in_one_program():
    def job():
        first, second = build(False, ds_config(4, fold=AIAO), 2, 8), build(False, ds_config(4, fold=AIAO), 4, 8)
        a, b = data(first.grid.get_data_parallel_rank()), data(second.grid.get_data_parallel_rank())
        losses = [(float(first.train_batch(a)), float(second.train_batch(b))) for _ in range(2)]
        return losses, whole_model(first.module), whole_model(second.module)

    losses, first, second = RankPool.of(4).run(job)[0]
    for D, weights, mine in ((2, first, [x for x, _ in losses]), (1, second, [x for _, x in losses])):
        alone, alone_losses = train_alone(8, 4, D, steps=2)
        difference, size = largest_difference(weights, alone)
        assert difference <= 1e-5 * size and mine == pytest.approx(alone_losses, rel=1e-5)


@pytest.mark.parametrize("P", [1, 2])
def test_timers_monitors_and_reports_of_deepspeed(tmp_path, P):
    def job(P, folder):
        more = {"wall_clock_breakdown": True, "steps_per_print": 1,
                "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
                "tensorboard": {"enabled": True, "output_path": folder, "job_name": "board"},
                "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False}}
        engine = build(False, ds_config(4, fold=AIAO, **more), P, 8)
        batches, losses = data(0), []
        for _ in range(3):
            losses.append(float(engine.train_batch(batches)))
            engine.eval_batch(data(1))
            engine.eval_batch(data(1), compute_loss=False, reduce_output=None)
        for monitor in ([engine.monitor.tb_monitor.summary_writer] if engine.global_rank == 0 else []):
            monitor.close()
        return losses

    losses = RankPool.of(P).run(job, P, str(tmp_path))[0]
    rows = (tmp_path / "run" / "Train_Samples_train_loss.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(losses, rel=1e-6)
    assert len((tmp_path / "run" / "Train_Samples_eval_loss.csv").read_text().splitlines()) == 4
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.value for event in board.Scalars("Train/Samples/train_loss")] == pytest.approx(losses, rel=1e-6)
    assert len(board.Scalars("Train/Samples/eval_loss")) == 3


@pytest.mark.parametrize("whose", ["engine", "module"])
def test_compile_runs_once_per_shape_not_per_micro_batch(whose):
    def job(whose):
        engine = build(False, ds_config(4, fold=AIAO), 2, 8)
        compiled = []

        def backend(graph, inputs):
            compiled.append(1)
            return graph.forward

        (engine if whose == "engine" else engine.module).compile(backend=backend)
        batches = data(0)
        first = [float(engine.train_batch(batches)), len(compiled)]
        return first, [float(engine.train_batch(batches)), len(compiled)]

    def plain():
        engine, batches = build(False, ds_config(4, fold=AIAO), 2, 8), data(0)
        return [float(engine.train_batch(batches)) for _ in range(2)]

    first, second = RankPool.of(2).run(job, whose)[0]
    assert [first[0], second[0]] == pytest.approx(RankPool.of(2).once(plain)[0], rel=1e-6)
    assert 0 < first[1] == second[1] <= 8


@pytest.mark.parametrize("client", ["object", "callable"])
def test_client_optimizers_and_schedulers(client):
    def job(P, fold, client):
        import ds_fold
        config = ds_config(4, 1, fold=fold, zero_allow_untested_optimizer=True)
        del config["optimizer"]
        net = ds_fold.PipelineModule(make_layers(8), num_stages=P, loss_fn=nn.MSELoss(), config=config, partition_method="uniform",
                                     seed_layers=True)

        def optimizer(parameters):
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

        def scheduler(optimizer):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

        if client == "object":
            optimizer = optimizer(list(net.parameters()))
            scheduler = scheduler(optimizer)
        engine, _, _, returned = ds_fold.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config,
                                                    model_parameters=list(net.parameters()))
        batches = data(0)
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        return losses, engine.get_lr(), returned is not None

    two = RankPool.of(2).run(job, 2, AIAO, client)[0]
    assert two == RankPool.of(1).run(job, 1, {"schedule": "1f1b"}, client)[0] and two[1] == [0.1 / 8] and two[0][2] < two[0][0]

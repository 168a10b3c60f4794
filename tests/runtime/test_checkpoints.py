"""Checkpoints between folds, topologies and stock DeepSpeed: layer files for the weights, universal checkpoints for everything."""

import os

import pytest
import torch
from models import Block, LayerSpec, build, data, ds_config, largest_difference, share, to_universal, whole_model
from pool import RankError, RankPool

AIAO = {"schedule": "aiao", "segments": 2}
OVERLAPPED = {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "segment", "overlap_param_gather": True}
BY_LAYER = {**OVERLAPPED, "overlap_grad_reduce": "layer"}
SHARDED = {**OVERLAPPED, "segments": 3, "shard_params": True}
LAYERS = 8
BATCH = 8  # micro-batches of one step, over all replicas


def engine_of(P, fold, dtype="fp32", accumulate=None, zero=1, universal=False):
    """An engine with P pipeline ranks that takes BATCH micro-batches a step; ``fold`` None is stock DeepSpeed."""
    import torch.distributed as dist
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    config = ds_config(BATCH * P // dist.get_world_size(), zero, dtype, accumulate=accumulate, fold=fold, scheduler=scheduler)
    config["checkpoint"] = {"load_universal": universal}
    return build(fold is None, config, P, LAYERS, tied=True)


def save_after_three_steps(folder, P, fold, *precision):
    """Train 3 steps, save, train 2 more: (their losses, weights at the save, learning rate at the save)."""
    engine = engine_of(P, fold, *precision)
    batches = share(engine, BATCH, precision[0])
    for _ in range(3):
        engine.train_batch(batches)
    engine.save_checkpoint(folder, tag="saved")
    saved, lr = whole_model(engine.module), engine.get_lr()
    return [float(engine.train_batch(batches)) for _ in range(2)], saved, lr


def resume_universal(folder, P, fold, *precision):
    """The same from a universal checkpoint."""
    engine = engine_of(P, fold, *precision, universal=True)
    engine.load_checkpoint(folder)
    loaded, lr, steps = whole_model(engine.module), engine.get_lr(), engine.global_steps
    batches = share(engine, BATCH, precision[0], skip_steps=steps)
    return [float(engine.train_batch(batches)) for _ in range(2)], loaded, lr, steps


STOCK = None
SAVERS = {"aiao": (2, AIAO), "stock": (2, STOCK), "overlapped": (2, OVERLAPPED), "by_layer": (2, BY_LAYER), "sharded": (2, SHARDED)}


@pytest.mark.parametrize("saver, precision", [("aiao", ("fp32", None)), ("stock", ("fp32", None)), ("stock", ("bf16", "fp32")),
                                              ("overlapped", ("bf16", None)), ("by_layer", ("bf16", "fp32")),
                                              ("sharded", ("fp32", None))])
def test_universal_checkpoints_go_both_ways_between_folds_topologies_and_stock(tmp_path, saver, precision):
    W, saver = 4, SAVERS[saver]
    folder = str(tmp_path)
    losses, weights, lr = RankPool.of(W).run(save_after_three_steps, folder, *saver, *precision)[0]
    to_universal(os.path.join(folder, "saved"), os.path.join(folder, "universal"))
    (tmp_path / "latest_universal").write_text("universal")
    loaders = [(2, (2, OVERLAPPED)), (2, (1, {**BY_LAYER, "segments": 4})), (4, (4, {"schedule": "1f1b"})),
               (2, (1, SHARDED))]
    if saver[1] is not STOCK:
        loaders = [(1, (1, STOCK)), (4, (2, STOCK)), (2, (1, {"schedule": "aiao", "segments": 4})), *loaders]
    for world, loader in loaders:
        resumed, loaded, its_lr, steps = RankPool.of(world).run(resume_universal, folder, *loader, *precision)[0]
        assert largest_difference(weights, loaded)[0] == 0 and steps == 3 and its_lr == lr
        assert resumed == pytest.approx(losses, rel=1e-6 if precision[0] == "fp32" else 1e-2), loader


@pytest.mark.parametrize("zero", [0, 1])
def test_weights_go_both_ways_by_the_layer_files(tmp_path, zero):
    def job(folder, zero):
        results = []
        for saver in (AIAO, STOCK):
            first = build(saver is STOCK, ds_config(4, zero, fold=saver), 2, 8, tied=True)
            batches = data(0)
            for _ in range(2):
                first.train_batch(batches)
            first.save_checkpoint(folder, tag="of stock" if saver is STOCK else "of aiao")
            kept = whole_model(first.module)
            expected = float(first.eval_batch(data(5)))
            for fold in (AIAO, {"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "segments": 4}, STOCK):
                engine = build(fold is STOCK, ds_config(4, zero, fold=fold), 2, 8, tied=True)
                engine.load_checkpoint(folder, load_module_only=fold != saver)
                results.append((largest_difference(kept, whole_model(engine.module))[0],
                                float(engine.eval_batch(data(5))) - expected))
                if fold == saver:  # with its optimizer: goes on as if it had never stopped
                    results.append((float(engine.train_batch(data(7))) - float(first.train_batch(data(7))),
                                    largest_difference(whole_model(engine.module), whole_model(first.module))[0]))
        return results

    assert all(pair == (0, 0) for pair in RankPool.of(2).run(job, str(tmp_path), zero)[0])


@pytest.mark.parametrize("zero, folds, numel", [(0, (OVERLAPPED, OVERLAPPED), 10**5), (1, (OVERLAPPED, OVERLAPPED), 10**5),
                                                (2, (OVERLAPPED, BY_LAYER), 50), (0, (BY_LAYER, OVERLAPPED), 10**5),
                                                (1, (BY_LAYER, BY_LAYER), 50)])
def test_an_overlapped_run_resumes_as_if_it_had_never_stopped(tmp_path, zero, folds, numel):
    """With buckets as they were or others: saved with 100,000 elements at most, resumed with ``numel``."""
    def job(folder, zero, folds, numel):
        def fresh(fold, numel):
            config = ds_config(4, zero, "fp16", fold=fold)
            config["zero_optimization"]["reduce_bucket_size"] = numel
            return build(False, config, 2, 8, tied=True)

        first = fresh(folds[0], 10**5)
        batches = data(first.grid.get_data_parallel_rank(), "fp16")
        for _ in range(2):
            first.train_batch(batches)
        first.save_checkpoint(folder)  # while gathers are in flight
        again = fresh(folds[1], numel)
        again.load_checkpoint(folder)
        kept = largest_difference(whole_model(first.module), whole_model(again.module))[0]
        more = [float(first.train_batch(data(3, "fp16"))) - float(again.train_batch(data(3, "fp16"))) for _ in range(2)]
        return kept, more, largest_difference(whole_model(first.module), whole_model(again.module))[0]

    assert RankPool.of(4).run(job, str(tmp_path), zero, folds, numel)[0] == (0, [0, 0], 0)


@pytest.mark.parametrize("zero", [0, 1])
def test_load_module_only_takes_weights_and_nothing_else(tmp_path, zero):
    """Training on from loaded weights is what a fresh optimizer would do from there."""
    def job(folder, zero):
        def fresh():
            return build(False, ds_config(4, zero, fold=AIAO), 2, 8)

        first = fresh()
        first.train_batch(data(0))
        first.save_checkpoint(folder)
        kept = {name: p.detach().clone() for name, p in first.module.named_parameters()}
        loaded = fresh()
        loaded.load_checkpoint(folder, load_module_only=True)
        by_hand = fresh()
        with torch.no_grad():
            for name, p in by_hand.module.named_parameters():
                p.copy_(kept[name])
        if zero:
            by_hand.optimizer.refresh_fp32_params()
        return [largest_difference(whole_model(loaded.module), whole_model(by_hand.module))[0],
                float(loaded.train_batch(data(1))) - float(by_hand.train_batch(data(1))),
                largest_difference(whole_model(loaded.module), whole_model(by_hand.module))[0]]

    assert RankPool.of(2).run(job, str(tmp_path), zero)[0] == [0, 0, 0]


class FrozenBlock(Block):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


def test_frozen_parameters_may_be_left_out_of_a_checkpoint(tmp_path):
    def job(folder):
        def adapters():
            layers = [LayerSpec(FrozenBlock if i % 2 == 0 else Block) for i in range(8)]
            return build(False, ds_config(4, 1, fold=AIAO), 2, 8, layers=layers)

        engine = adapters()
        engine.train_batch(data(0))
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
        again = adapters()  # the frozen base comes from elsewhere: here from the same seeds
        again.load_checkpoint(folder, load_module_strict=False)
        return (largest_difference(whole_model(engine.module), whole_model(again.module))[0],
                float(engine.train_batch(data(1))) - float(again.train_batch(data(1))))

    assert RankPool.of(2).run(job, str(tmp_path))[0] == (0, 0)
    keys = {int(path.name[6:8]): set(torch.load(path)) for path in (tmp_path / "global_step1").glob("layer_*-model_states.pt")}
    everything = {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert keys == {i: everything if i % 2 else set() for i in range(8)}


def test_a_save_that_dies_half_way_leaves_the_one_before(tmp_path):
    def job(folder):
        engine = build(False, ds_config(4, 1, fold=AIAO), 2, 8)
        engine.train_batch(data(0))
        engine.save_checkpoint(folder, tag="kept")
        engine.train_batch(data(0))
        save, saved = engine.checkpoint_engine.save, []

        def dying(state_dict, path):
            saved.append(path)
            if len(saved) == 3:  # on every rank, before any of them has written all of its files
                raise OSError("no space left")
            save(state_dict, path)

        engine.checkpoint_engine.save = dying
        engine.save_checkpoint(folder, tag="next")

    with pytest.raises(RankError, match="no space left"):
        RankPool.of(2).run(job, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "kept" and not (tmp_path / "next").exists()

    def resume(folder):
        engine = build(False, ds_config(4, 1, fold=AIAO), 2, 8)
        engine.load_checkpoint(folder)
        steps = engine.global_steps
        engine.train_batch(data(0))
        engine.save_checkpoint(folder, tag="next")
        engine.save_checkpoint(folder, tag="next")  # again, over itself
        return steps

    assert RankPool.of(2).run(resume, str(tmp_path)) == [1, 1]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["kept", "next"]
    assert (tmp_path / "latest").read_text() == "next"

"""Checkpoints of the sharded optimizer by itself: its state, universal checkpoints both ways with stock, DeepSpeed's accessors."""

import os
from contextlib import nullcontext
from copy import deepcopy
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from models import build, ds_config, largest_difference, share, to_universal, whole_model
from pool import RankPool
from sharded import LAYERS, Model, batches_of

from ds_fold.runtime.sharded_optimizer import ShardedOptimizer

BATCH = 4  # micro-batches of one step, over all replicas


@pytest.mark.parametrize("D, dtype, accumulate, stage", [(2, "fp32", None, 1), (2, "bf16", "fp32", 2), (2, "fp16", None, 1),
                                                        (2, "bf16", None, 0), (1, "bf16", None, 1)])
def test_a_state_dict_continues_bit_for_bit(D, dtype, accumulate, stage, tmp_path):
    def job(folder):
        options = dict(dtype=dtype, stage=stage, **({"accumulate_dtype": torch.float32} if accumulate else {}))
        first = Model(2, **options)
        stream = batches_of(2, dtype)
        for _ in range(3):
            first.step(next(stream))
        first.optimizer.checkpoint_event_prologue()
        path = os.path.join(folder, f"{dist.get_rank()}.pt")
        torch.save({"model": [layer.state_dict() for layer in first.layers], "optimizer": first.optimizer.state_dict()}, path)
        saved = torch.load(path, weights_only=False)
        again = Model(2, **options)
        for layer, state in zip(again.layers, saved["model"]):
            layer.load_state_dict(state)
        states = [None] * D
        states[dist.get_rank()] = saved["optimizer"]
        again.optimizer.load_state_dict(saved["optimizer"] if stage == 0 else states)
        for _ in range(3):
            items = next(stream)
            first.step(items)
            again.step(items)
        return largest_difference(first.weights(), again.weights())[0], first.optimizer.loss_scale == again.optimizer.loss_scale

    assert RankPool.of(D).run(job, str(tmp_path)) == [(0.0, True)] * D


@pytest.mark.parametrize("D, dtype, stage", [(1, "fp32", 1), (2, "fp32", 1), (2, "bf16", 2), (2, "fp16", 0)])
@pytest.mark.parametrize("saver, loader", [((2, {}), (2, {"by_layer": True, "bucket_numel": 30})),
                                           ((2, {"by_layer": True, "bucket_numel": 1}), (4, {})),
                                           ((2, {"by_layer": True}), (1, {"by_layer": True, "bucket_numel": 500}))])
def test_a_state_saved_with_other_buckets_continues_bit_for_bit(D, dtype, stage, saver, loader):
    def job():
        def groups(params):
            return [{"params": [p for p in params if p.dim() > 1], "lr": 5e-3}, {"params": [p for p in params if p.dim() == 1]}]

        def model(v, options):
            return Model(v, dtype=dtype, stage=stage, groups=groups, **options)

        first, again, stream = model(*saver), model(*loader), batches_of(2, dtype)
        for _ in range(3):
            first.step_by_segments(next(stream))
        first.optimizer.flush()
        first.inner.param_groups[1]["lr"] = 1e-3
        saved = deepcopy(first.optimizer.state_dict())
        for mine, theirs in zip(again.layers, first.layers):
            mine.load_state_dict(theirs.state_dict())
        again.optimizer.load_state_dict(saved)
        for _ in range(3):
            items = next(stream)
            first.step_by_segments(items)
            again.step_by_segments(items)
        with pytest.raises(ValueError, match="other chunks, parameter groups or replicas.*ds_to_universal"):
            Model(2, dtype=dtype, stage=stage).optimizer.load_state_dict(saved)  # has one parameter group
        if D > 1 and stage > 0:
            saved["partition_count"] = [1] * len(saved["partition_count"])  # as if the other replica's part did not exist
            with pytest.raises(ValueError, match="other chunks, parameter groups or replicas"):
                model(4, {"by_layer": True}).optimizer.load_state_dict(saved)
        assert [group["lr"] for group in again.optimizer.param_groups] == [5e-3, 1e-3]
        return largest_difference(first.weights(), again.weights())[0], first.optimizer.loss_scale == again.optimizer.loss_scale

    assert RankPool.of(D).run(job) == [(0.0, True)] * D


def engine_of(v, dtype, zero=1, universal=False):
    """Stock DeepSpeed's engine on one pipeline rank, which runs the sharded optimizer in v segments (None: its own)."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    class Engine(PipelineEngine):

        def _configure_zero_optimizer(self, optimizer):
            layers = self.module.forward_funcs
            cuts = [len(layers) * k // v for k in range(v + 1)]
            segments = [[p for layer in layers[i:j] for p in layer.parameters()] for i, j in zip(cuts, cuts[1:])]
            return ShardedOptimizer(optimizer, segments, param_names=self.param_names, stage=zero, mpu=self.mpu,
                                    data_parallel_group=self.mpu.get_data_parallel_group())

        def train_batch(self, data_iter=None):
            self.optimizer.flush()
            for k in reversed(range(v)):
                self.optimizer.begin_backward(k)
            return super().train_batch(data_iter)

        def allreduce_gradients(self, bucket_size=None):
            for k in reversed(range(v)):
                self.optimizer.launch_reduce(k)

    config = ds_config(BATCH // dist.get_world_size(), 1, dtype)
    config["checkpoint"] = {"load_universal": universal}
    with mock.patch.object(deepspeed, "PipelineEngine", Engine) if v else nullcontext():
        return build(True, config, 1, LAYERS)


def save_and_go_on(folder, v, dtype, zero):
    engine = engine_of(v, dtype, zero)
    stream = share(engine, BATCH, dtype)
    for _ in range(3):
        engine.train_batch(stream)
    engine.save_checkpoint(folder, tag="saved")
    saved = whole_model(engine.module)
    losses = [float(engine.train_batch(stream)) for _ in range(3)]
    engine.destroy()
    return losses, saved


def load_and_go_on(folder, v, dtype, zero, universal):
    engine = engine_of(v, dtype, zero, universal)
    engine.load_checkpoint(folder, tag="universal" if universal else "saved")
    loaded, stream = whole_model(engine.module), share(engine, BATCH, dtype, engine.global_steps)
    losses = [float(engine.train_batch(stream)) for _ in range(3)]
    engine.destroy()
    return losses, loaded


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("saver, loaders", [
    ((2, 2, 2), [(2, 2, 2, False), (1, 4, 1, True), (2, 1, 2, True), (1, None, 1, True), (2, None, 1, True)]),
    ((2, None, 1), [(1, 2, 1, True), (2, 4, 2, True)]),
], ids=["ours", "stock"])
def test_checkpoints_of_deepspeeds_engine_and_universal_ones_go_both_ways(tmp_path, saver, loaders, dtype):
    """Saver: (replicas, segments or None for stock, ZeRO stage); loaders: the same and whether by a universal checkpoint."""
    D, v, zero = saver
    losses, saved = RankPool.of(D).run(save_and_go_on, str(tmp_path), v, dtype, zero)[0]
    to_universal(str(tmp_path / "saved"), str(tmp_path / "universal"))
    (tmp_path / "latest_universal").write_text("universal")
    for D, v, zero, universal in loaders:
        resumed, loaded = RankPool.of(D).run(load_and_go_on, str(tmp_path), v, dtype, zero, universal)[0]
        assert largest_difference(saved, loaded)[0] == 0
        exact = saver[0] == D  # else sums over micro-batches and over replicas change places
        assert resumed == (losses if exact else pytest.approx(losses, rel=1e-6 if dtype == "fp32" else 1e-2)), (D, v, universal)


def test_deepspeeds_accessors_see_whole_fp32_parameters_and_state():
    def job():
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
        model = Model(2, dtype="bf16")
        model.step(next(batches_of(2, "bf16")))
        model.optimizer.flush()
        worst, shapes = 0.0, True
        for p in model.names:
            whole = safe_get_full_fp32_param(p)
            worst = max(worst, float((whole.bfloat16() - p.detach()).abs().max()))
            shapes = shapes and safe_get_full_optimizer_state(p, "exp_avg").shape == p.shape
        return worst, shapes

    assert RankPool.of(2).run(job) == [(0.0, True)] * 2

"""``shard_params``: parameters gathered for a segment's sweeps and released in between, and whole for whoever else reads them."""

import pytest
import torch
from models import (
    HIDDEN,
    Block,
    LayerSpec,
    build,
    data,
    ds_config,
    largest_difference,
    train,
    whole_model,
)
from pool import RankError, RankPool
from torch import nn

from ds_fold.runtime import gathers

OVERLAP = {"overlap_grad_reduce": "segment", "overlap_param_gather": True}
AIAO = {"schedule": "aiao", "segments": 4, **OVERLAP}
SHARDED = {**AIAO, "shard_params": True}


class Noisy(Block):
    """A block with dropout."""

    def forward(self, x):
        return x + nn.functional.dropout(self.b(torch.tanh(self.a(x))), 0.3, self.training)


class Queries(nn.Module):
    """Returns its parameter itself: what passes to the next segment is used when the parameter has been released."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, HIDDEN))

    def forward(self, x):
        return x, self.queries


class Mix(Block):

    def forward(self, inputs):
        x, queries = inputs
        return super().forward(x + torch.tanh(queries))


@pytest.mark.parametrize("segments, micro_batches, ahead", [(4, 2, True), (8, 1, True), (8, 4, True), (8, 4, False)])
def test_two_segments_are_whole_at_a_time_and_each_is_gathered_twice_a_step(segments, micro_batches, ahead):
    def job():
        fold = {**SHARDED, "segments": segments, "overlap_param_gather": ahead}
        engine = build(False, ds_config(micro_batches, 2, fold=fold), 1, 16)
        optimizer, gathered = engine.optimizer, []
        real = optimizer.replicas.all_gather
        optimizer.replicas.all_gather = lambda flat, urgency: gathered.append(flat) or real(flat, urgency)
        batches = data(engine.grid.get_data_parallel_rank())
        engine.train_batch(batches)
        optimizer.peak_full_parameter_bytes = 0
        gathered.clear()
        engine.train_batch(batches)
        counts = [sum(flat is bucket.flat for flat in gathered) for bucket in optimizer.buckets]
        model = sum(p.numel() * p.element_size() for parameters in engine.module.segment_parameters() for p in parameters)
        return counts, optimizer.peak_full_parameter_bytes / model, optimizer.peak_full_gradient_bytes / model

    for counts, parameters, gradients in RankPool.of(2).run(job):
        # the sweeps of the last segment adjoin, and nothing has to make room for it in between
        assert counts == [2] * (segments - 2) + [1, 1]
        assert 1 / segments < parameters <= 2 / segments + 0.01 and gradients <= 2 / segments + 0.01


@pytest.mark.parametrize("zero, dtype, options, more", [
    (2, "fp32", {}, {}),
    (1, "bf16", {"accumulate": "fp32"}, {"overlap_grad_reduce": "layer"}),
    (2, "fp16", {"clip": 0.5}, {"overlap_grad_reduce": "layer", "optimizer_step": "post_validated"}),
    (2, "bf16", {"checkpoint": 1}, {"last_segment": "all_forward"}),
    (1, "fp32", {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}, {"overlap_param_gather": False}),
    (2, "fp32", {"clip": 0.5}, {"schedule": "interleaved_1f1b"}),
], ids=str)
def test_same_bits_as_without(zero, dtype, options, more):
    """Also with dropout, and with a parameter that passes between segments as it is."""
    def layers():
        specs = [LayerSpec(Noisy) for _ in range(8)]
        if "checkpoint" not in options:  # DeepSpeed's reentrant checkpoint recurses for ever on a layer that returns its input
            specs[2:4] = [LayerSpec(Queries), LayerSpec(Mix)]
        return specs

    def job(sharded):
        fold = {**AIAO, **more, "deterministic_rng": True, "shard_params": sharded, "partition": list(range(9))}
        config = ds_config(4, zero, dtype, fold=fold, **options)
        return train(False, config, 2, 8, dtype=dtype, layers=layers())

    (weights, losses, norms), (expected, *rest) = (RankPool.of(4).run(job, sharded)[0] for sharded in (True, False))
    assert largest_difference(weights, expected)[0] == 0 and [losses, norms] == rest
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_whoever_reads_or_writes_parameters_between_steps_has_them_whole(dtype):
    def job(fold):
        engine = build(False, ds_config(4, 2, dtype, fold=fold), 2, 8, tied=True)
        batches, seen = data(engine.grid.get_data_parallel_rank(), dtype), []
        for _ in range(2):
            seen.append(float(engine.train_batch(batches)))
            seen.append(float(engine.eval_batch(data(7, dtype))))
            seen.append(float(engine.train_batch(batches)))
            seen += [float(w.double().sum()) for w in engine.module.state_dict().values()]
            with torch.no_grad():
                for _, p in engine.module.named_parameters():
                    p.mul_(0.75)
                    if dtype == "fp32":
                        seen.append(float(p.numpy().sum()))  # memory that cannot be freed from here on
        seen += [float(w.double().sum()) for w in whole_model(engine.module).values()]
        engine.train_batch(batches)
        held = [p for parameters in engine.module.segment_parameters() for p in parameters]  # behind the engine's back
        return seen, [bool(p.isnan().all()) for p in held], [p.numel() for p in held]

    sharded, plain = (RankPool.of(4).run(job, fold) for fold in (SHARDED, AIAO))
    for (mine, released, sizes), (theirs, there, same_sizes) in zip(sharded, plain):
        assert mine == theirs and sizes == same_sizes and not any(there)
        # the tied weight stays, in the first or the last segment of its rank
        assert released.count(False) == 1 and len(released) > 8


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("saved, loaded", [(SHARDED, SHARDED), (SHARDED, AIAO), (AIAO, SHARDED)], ids=["with", "off", "on"])
def test_training_resumes_with_and_without_it(saved, loaded, dtype, tmp_path):
    def job(folder):
        def run(fold, steps, skip=0, load=None, save=None):
            engine = build(False, ds_config(2, 1, dtype, fold=fold), 2, 8)
            batches = data(engine.grid.get_data_parallel_rank(), dtype)
            for _ in range(2 * skip):
                next(batches)
            if load:
                engine.train_batch(data(5, dtype))  # something to be overwritten
                engine.load_checkpoint(load)
            for _ in range(steps):
                engine.train_batch(batches)
            if save:
                engine.save_checkpoint(save)
                engine.train_batch(batches)
            weights = whole_model(engine.module)
            engine.destroy()
            return weights

        run(saved, 2, save=folder)
        return largest_difference(run(loaded, 2, skip=2, load=folder), run(AIAO, 4))[0]

    assert RankPool.of(4).run(job, str(tmp_path))[0] == 0


def test_one_replica_has_nothing_to_release():
    def job(fold):
        engine = build(False, ds_config(2, 1, fold=fold), 2, 8)
        batches = data(0)
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        return losses, engine.optimizer.full_parameter_bytes

    assert RankPool.of(2).run(job, SHARDED) == RankPool.of(2).run(job, AIAO)


@pytest.mark.parametrize("zero, fold, message", [
    (0, SHARDED, r"ds_fold\.shard_params .*zero_optimization\.stage=0 shards nothing; set the stage to 1 or 2"),
    (1, {"schedule": "1f1b", "shard_params": True}, r"ds_fold\.shard_params: .*segments=1.*set segments to 3 or more"),
])
def test_what_has_no_shards_is_refused_on_every_rank(zero, fold, message):
    def job():
        build(False, ds_config(2, zero, fold=fold), 2, 8)

    with pytest.raises(RankError, match=message) as error:
        RankPool.of(2).run(job)
    assert all("ConfigError" in text for text in error.value.errors.values()) and len(error.value.errors) == 2


def test_a_replica_that_reads_alone_is_told_so():
    def job():
        gathers.READ_TIMEOUT_S = 1
        try:
            engine = build(False, ds_config(2, 1, fold=SHARDED), 1, 8)
            engine.train_batch(data(0))
            if engine.grid.get_data_parallel_rank() == 0:
                engine.module.state_dict()
        finally:
            gathers.READ_TIMEOUT_S = 300

    with pytest.raises(RankError, match=r"reading them, by state_dict\(\).* gathers them and is for all replicas to do, but ranks "
                                        r"\[0, 1\] did not all come within 1 s"):
        RankPool.of(2).run(job)


def test_sharded_parameters_cannot_be_read_after_destroy():
    def job():
        engine = build(False, ds_config(2, 1, fold=SHARDED), 1, 8)
        engine.train_batch(data(0))
        engine.destroy()
        engine.module.state_dict()

    with pytest.raises(RankError, match=r"RuntimeError: parameters are sharded and their optimizer is destroyed"):
        RankPool.of(2).run(job)

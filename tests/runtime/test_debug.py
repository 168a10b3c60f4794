"""Debug mode finds a real fault of each kind; that it changes no number is part of test_exactness."""

import re

import pytest
import torch
import torch.distributed as dist
from models import build, data, ds_config
from pool import RankError, RankPool

OVERLAP = {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "segment", "overlap_param_gather": True, "debug": True}


def messages_of(fault, ranks, P, zero=1, **more):
    """What each rank raises in the batch after a good one, with ``fault(engine)`` in between; None where it raises nothing."""
    def job():
        engine = build(False, ds_config(4, zero, fold={**OVERLAP, **more}), P, 8)
        batches = data(engine.grid.get_data_parallel_rank())
        engine.train_batch(batches)
        fault(engine)
        try:
            engine.train_batch(batches)
        except RuntimeError as error:
            return str(error)

    return RankPool.of(ranks).run(job)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("D", [1, 2])
def test_a_gradient_written_while_it_is_reduced(D, zero):
    def fault(engine):
        launch, bucket = engine.optimizer._launch, engine.optimizer.buckets[-1]
        engine.optimizer._launch = lambda b: (launch(b), bucket.full.add_(1.0) if b is bucket else None)

    for message in messages_of(fault, D, 1, zero):
        assert "was written while in flight" in message and "bucket 1 of segment 1 (4.a.weight .. 7.b.bias)" in message


def test_a_message_written_while_it_is_sent():
    def job():
        engine = build(False, ds_config(4, 1, fold=OVERLAP), 2, 8)
        if engine.stage_id == 0:
            send = engine._act_out.send
            engine._act_out.send = lambda edge, t: (send(edge, t), t.data.add_(1.0))
        engine.train_batch(data(0))  # rank 1 waits for rank 0, until that has gone

    with pytest.raises(RankError) as error:
        RankPool.of(2).run(job)
    assert "the message virtual stage 0 -> 1 (layer 1 (Block)) was written while in flight" in error.value.errors[0]


def test_a_replica_that_launches_in_another_order():
    def fault(engine):
        if dist.get_rank() == 1:
            engine.optimizer._launch_order[1] = engine.optimizer._launch_order[0]
            engine.optimizer.begin_backward(0)

    first, second = messages_of(fault, 2, 1)
    assert first == second and "They agreed on " in first
    assert "rank 0 launches the reduce-scatter of bucket 1 of segment 1" in first
    assert "rank 1 launches the reduce-scatter of bucket 0 of segment 0" in first


def test_a_layer_that_runs_before_its_parameters_have_arrived():
    def fault(engine):
        engine.optimizer.wait_params = lambda k, **_: None

    for message in messages_of(fault, 2, 1):
        assert re.search(r"Linear runs with its weight \(0.a.weight\) while bucket 0 of segment 0 .* is being gathered", message)


def test_a_layer_that_runs_with_released_parameters():
    def fault(engine):
        engine.optimizer.gather_params = lambda k: None

    for message in messages_of(fault, 2, 1, shard_params=True):
        assert re.search(r"Linear runs with its weight \(0.a.weight\) while bucket 0 of segment 0 \(.*\) is released", message)


def test_parameters_read_past_their_layer_are_nan_until_waited_for():
    def job():
        engine = build(False, ds_config(4, 1, fold=OVERLAP), 1, 8)
        engine.train_batch(data(engine.grid.get_data_parallel_rank()))
        dist.barrier()
        flats = [bucket.flat for bucket in engine.optimizer.buckets]
        early = [int(flat.isnan().sum()) / flat.numel() for flat in flats]
        engine.optimizer.flush()
        full = all(bool(bucket.full.isnan().all()) for bucket in engine.optimizer.buckets)
        return early, [int(flat.isnan().sum()) for flat in flats], full

    assert RankPool.of(2).run(job) == [([0.5, 0.5], [0, 0], True)] * 2


def test_what_a_batch_leaves_behind_is_named_on_all_ranks():
    def fault(engine):
        if dist.get_rank() == 1:
            step = engine.optimizer.step

            def leave(*args):
                step(*args)
                engine.optimizer.buckets[0].reduced = torch.zeros(1)
                engine._slot(1, 3)

            engine.optimizer.step = leave

    first, second = messages_of(fault, 2, 2)
    assert first == second
    assert "on rank 1: slot of segment 1, micro-batch 3, reduced of bucket 0 of segment 0" in first and "rank 0" not in first

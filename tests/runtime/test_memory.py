"""What ranks hold at their peak, counted while they train, against what the simulator predicts from a profile."""

import pytest
import torch
from models import TORCH_DTYPE, Block, build, ds_config
from pool import RankPool
from torch import nn

from ds_fold.config import fold_config
from ds_fold.partition import partition_uniform
from ds_fold.plan import Cluster, Link, simulate
from ds_fold.plan.memory import States, half_precision

HIDDEN, INNER, LAYERS = 64, 160, 8
BATCH, SMALL_BATCH = 48, 2  # activations weigh as much as states; hardly anything
OVERLAP = {"overlap_grad_reduce": "segment", "overlap_param_gather": True}
LOOPED = {"schedule": "interleaved_1f1b", "segments": 2}
AIAO = {"schedule": "aiao", "segments": 2}


def batches(dtype, batch):
    generator = torch.Generator().manual_seed(5)
    while True:
        x = torch.randn(batch, HIDDEN, generator=generator).to(TORCH_DTYPE[dtype])
        yield x, x


def layers():
    from deepspeed.pipe import LayerSpec
    return [LayerSpec(Block, HIDDEN, INNER) for _ in range(LAYERS)]


def measured(config, P, dtype, batch):
    """(peak bytes, by kind) of this rank in the third step, and rank 0's profile of the layers."""
    import torch.distributed as dist

    from ds_fold.plan.profile import profile_layers
    from ds_fold.runtime.memory import MeasuredMemory
    engine = build(False, config, P, LAYERS, layers=layers())
    data = batches(dtype, batch)
    for _ in range(2):
        engine.train_batch(data)
    with MeasuredMemory(engine) as memory:
        engine.train_batch(data)
    engine.destroy()
    profile = None
    if dist.get_rank() == 0:
        profile = profile_layers(layers(), *next(data), nn.MSELoss(), dtype=TORCH_DTYPE[dtype], repeats=1, warm_up=0)
    return memory.peak_bytes, memory.peak, profile


def predicted(config, P, D, profile):
    """Peak bytes of each pipeline rank."""
    fold, zero, M = fold_config(config), config["zero_optimization"]["stage"], config["gradient_accumulation_steps"]
    recompute = range(LAYERS) if config["pipeline"]["activation_checkpoint_interval"] else ()
    costs = profile.costs(partition_uniform(LAYERS, fold.segments * P), P, recompute)
    owned = fold.owns_optimizer(zero, half_precision(config) is not None)
    states = States.of_config(config, zero, D, owned)
    cluster = Cluster(hosts=8, inter_host=Link(gbit_per_s=10))
    result = simulate(fold.train_program(P, M, zero), costs, cluster, D=D, zero_stage=zero, states=states,
                      stock_optimizer=not owned)
    return [rank.peak_bytes for rank in result.ranks]


GRID = [
    # P, D, M, zero, dtype, accumulate, checkpoint, fold
    (1, 1, 4, 0, "fp32", None, 0, {}),
    (2, 1, 4, 0, "fp32", None, 0, {}),
    (4, 1, 8, 1, "fp32", None, 0, {"schedule": "1f1b"}),
    (2, 2, 4, 1, "fp32", None, 0, {"schedule": "gpipe"}),
    (2, 2, 4, 1, "bf16", None, 0, LOOPED),
    (2, 2, 4, 0, "bf16", None, 0, AIAO),
    (2, 2, 4, 1, "bf16", "fp32", 0, LOOPED),
    (2, 1, 4, 0, "fp16", None, 0, AIAO),
    (2, 2, 4, 0, "fp32", None, 0, {**AIAO, **OVERLAP, "overlap_param_gather": False}),
    (2, 2, 4, 1, "fp32", None, 0, {**AIAO, **OVERLAP}),
    (2, 2, 4, 2, "fp32", None, 0, {**AIAO, **OVERLAP, "segments": 4}),
    (2, 2, 6, 2, "bf16", "fp32", 0, {**AIAO, "last_segment": "all_forward", **OVERLAP, "segments": 4}),
    (1, 2, 4, 2, "bf16", None, 0, {**AIAO, **OVERLAP, "segments": 4}),
    (2, 2, 4, 1, "fp32", None, 0, {**AIAO, **OVERLAP, "optimizer_step": "post_validated"}),
    (1, 2, 4, 2, "fp32", None, 0, {**AIAO, **OVERLAP, "segments": 4, "shard_params": True}),
    (2, 2, 4, 1, "bf16", None, 0, {**AIAO, **OVERLAP, "segments": 4, "shard_params": True}),
    (1, 1, 4, 1, "fp32", None, 1, {**AIAO, **OVERLAP}),
    (2, 2, 8, 1, "bf16", None, 1, LOOPED),
    (4, 1, 8, 0, "fp32", None, 1, {**AIAO, "last_segment": "all_forward"}),
]


#: P, D, M, zero, dtype, accumulate, checkpoint, fold: what the step itself holds
STEPS = [
    (2, 2, 2, 1, "fp32", None, 0, {}),
    (2, 2, 2, 1, "bf16", "fp32", 0, {**AIAO, **OVERLAP}),
    (2, 2, 2, 0, "bf16", None, 0, {**AIAO, **OVERLAP, "overlap_param_gather": False}),
    (2, 2, 2, 1, "fp32", None, 0, {**AIAO, **OVERLAP}),
    (1, 2, 2, 2, "bf16", "fp32", 0, {**AIAO, **OVERLAP}),
    (1, 2, 2, 2, "fp32", None, 0, {**AIAO, **OVERLAP, "segments": 8, "shard_params": True}),
    (2, 2, 2, 2, "bf16", None, 1, {**AIAO, "segments": 4, "shard_params": True}),
    (2, 2, 2, 1, "bf16", None, 0, {**AIAO, **OVERLAP, "optimizer_step": "post_validated", "segments": 4}),
]


@pytest.mark.parametrize("batch,P,D,M,zero,dtype,accumulate,checkpoint,fold",
                         [(BATCH, *case) for case in GRID] + [(SMALL_BATCH, *case) for case in STEPS],
                         ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x))
def test_the_predicted_peak_is_the_measured_one(batch, P, D, M, zero, dtype, accumulate, checkpoint, fold):
    config = ds_config(M, zero=zero, dtype=dtype, accumulate=accumulate, checkpoint=checkpoint, fold=fold,
                       train_micro_batch_size_per_gpu=batch)
    found = RankPool.of(P * D).run(measured, config, P, dtype, batch)
    expected = predicted(config, P, D, found[0][2])
    ratios = [expected[rank // D] / peak for rank, (peak, _, _) in enumerate(found)]
    assert ratios == [pytest.approx(1, abs=0.1)] * (P * D), [kinds for _, kinds, _ in found]
    assert all(sum(kinds.values()) == peak for peak, kinds, _ in found)

"""Pipeline, data and tensor parallelism together: pairs of column- and row-parallel layers train what one process trains."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from models import HIDDEN, Block, build, data, ds_config, train_alone
from pool import RankError, RankPool
from torch import nn

INNER = 24
OVERLAP = {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "layer", "overlap_param_gather": True}


class Shared:
    """This rank's tensor-parallel group, which layers find when they are built."""
    group = None


class Spread(torch.autograd.Function):
    """The same input for all slices: the sum of their gradients goes back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=Shared.group)
        return grad


class Collect(torch.autograd.Function):
    """The sum of all slices' outputs."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=Shared.group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelBlock(nn.Module):
    """This rank's half of a Block."""

    def __init__(self):
        super().__init__()
        whole, mine = Block(HIDDEN, INNER), slices(dist.get_rank(Shared.group))
        for name, p in whole.named_parameters():
            own = nn.Parameter(p.detach()[mine[name]].clone())
            own.model_parallel = name != "b.bias"  # which is on all, and counts once in the norm
            self.register_parameter(name.replace(".", "_"), own)

    def forward(self, x):
        h = torch.tanh(nn.functional.linear(Spread.apply(x), self.a_weight, self.a_bias))
        return x + Collect.apply(nn.functional.linear(h, self.b_weight)) + self.b_bias


def slices(rank):
    half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    return {"a.weight": (half, ), "a.bias": (half, ), "b.weight": (slice(None), half), "b.bias": (slice(None), )}


@pytest.mark.parametrize("P, D, fold, zero, clip", [
    (2, 1, {"schedule": "1f1b"}, 0, 0.0),
    (2, 1, OVERLAP, 1, 0.2),
    (1, 2, OVERLAP, 2, 0.2),
    (1, 2, {**OVERLAP, "shard_params": True}, 1, 0.0),
])
def test_slices_train_what_one_process_trains(P, D, fold, zero, clip):
    def job():
        topology = PipeModelDataParallelTopology(num_pp=P, num_mp=2, num_dp=D)
        for ranks in topology.get_axis_comm_lists("model"):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                Shared.group = group
        config, layers = ds_config(4, zero, clip=clip, fold=fold), [LayerSpec(ParallelBlock)] * 4
        engine = build(False, config, P, 4, layers=layers, topology=topology)
        batches = data(engine.grid.get_data_parallel_rank())
        losses = [float(engine.train_batch(batches)) for _ in range(4)]
        rank, norm = dist.get_rank(Shared.group), engine.get_global_grad_norm()
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        engine.destroy()
        dist.destroy_process_group(Shared.group)
        return rank, losses, norm, weights

    expected, losses = train_alone(4, 4, D, steps=4, clip=clip, layers=[LayerSpec(Block, HIDDEN, INNER)] * 4)
    for rank, mine, norm, weights in RankPool.of(4).run(job):
        assert mine == pytest.approx(losses, rel=1e-6) and len(weights) == 16 // P
        assert not clip or norm > clip
        for name, w in weights.items():
            layer, name = name.split(".", 1)
            name = name.replace("_", ".", 1)
            assert torch.allclose(w, expected[f"{layer}.{name}"][slices(rank)[name]], rtol=1e-5, atol=1e-6), name


def test_partitioned_messages_are_refused_by_name():
    def job():
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        config = ds_config(2, fold={"schedule": "1f1b"}, pipeline={"pipe_partitioned": True})
        build(False, config, 2, 4, topology=topology)

    with pytest.raises(RankError, match=r"ConfigError: pipeline.pipe_partitioned=true .* among the 2 tensor-parallel slices"):
        RankPool.of(4).run(job)

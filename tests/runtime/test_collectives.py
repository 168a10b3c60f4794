"""Collectives: the sums and the bytes of their definitions."""

from unittest import mock

import torch
import torch.distributed as dist
from pool import RankPool

from ds_fold.runtime.collectives import Replicas


def test_pairwise_collectives_equal_the_definition_and_send_what_they_must():
    def job():
        replicas = Replicas(dist.group.WORLD, chunk_bytes=30)
        D, rank, n = dist.get_world_size(), dist.get_rank(), 25
        sent, real = [], dist.isend
        with mock.patch.object(dist, "isend", lambda t, *args, **kwargs: sent.append(t.numel()) or real(t, *args, **kwargs)):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                sent.clear()
                all_inputs = [torch.randn(D * n, generator=torch.Generator().manual_seed(d)).to(dtype) for d in range(D)]
                mine = all_inputs[rank].clone()
                first, second = replicas.reduce_scatter(mine), replicas.all_reduce(all_inputs[rank].clone())
                expected = (all_inputs[0] + all_inputs[1]) + all_inputs[2]
                assert torch.equal(first.wait(), replicas.part(expected)) and torch.equal(mine, all_inputs[rank])
                assert torch.allclose(second.wait(), expected, atol=0.05)
                assert sum(sent) == (D - 1) * n * dtype.itemsize and max(sent) == 30 // dtype.itemsize * dtype.itemsize
                flat = torch.zeros(D * n, dtype=dtype)
                replicas.part(flat).copy_(replicas.part(expected))
                assert torch.equal(replicas.all_gather(flat).wait(), expected)
                assert sum(sent) == 2 * (D - 1) * n * dtype.itemsize
        replicas.destroy()
        return True

    assert RankPool.of(3).run(job) == [True] * 3

"""Collectives: the sums and the bytes of their definitions."""

import time

import torch
import torch.distributed as dist
from pool import RankPool
from sharded import bytes_sent_to_replicas

from ds_fold.runtime.collectives import Replicas


def test_pairwise_collectives_equal_the_definition_and_send_what_they_must():
    def job():
        replicas = Replicas(dist.group.WORLD, chunk_bytes=30)
        D, rank, n = dist.get_world_size(), dist.get_rank(), 25
        with bytes_sent_to_replicas() as sent:
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


def test_the_most_urgent_transfer_goes_first_and_one_that_hangs_keeps_nobody_from_posting():
    def job():
        rank, n = dist.get_rank(), 1 << 14
        replicas = Replicas(dist.group.WORLD, chunk_bytes=64)

        def launch(value, urgency):
            return replicas.all_gather(torch.full((2 * n, ), value + rank), urgency)

        expected = torch.tensor([0.0, 1.0]).repeat_interleave(n)
        for late in (0, 1, None):
            lazy = launch(10.0, 5)
            if rank == late:  # the other replica has turned to the urgent one, so that the lazy one hangs here
                time.sleep(0.3)
                assert lazy._works[0].is_alive()
            urgent = launch(0.0, 0)
            assert torch.equal(urgent.wait(), expected)
            assert lazy._works[0].is_alive()
            assert torch.equal(lazy.wait(), 10 + expected)
        replicas.destroy()
        return True

    assert RankPool.of(2).run(job) == [True, True]

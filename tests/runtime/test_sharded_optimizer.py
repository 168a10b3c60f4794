"""The sharded optimizer by itself, without a pipeline: a list of layers cut into segments, on one rank or on two replicas."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import TORCH_DTYPE, Block, ds_config, largest_difference, seed_cpu, train
from pairwise import pairwise
from pool import RankPool
from sharded import FP16, LAYERS, Model, batches_of, plain
from torch import nn

from ds_fold.runtime.sharded_optimizer import ShardedOptimizer

GRID = {
    "D": [1, 2],
    "v": [1, 2, 4],
    "stage": [0, 1, 2],
    "clip": [0.0, 0.1],
    "by_segments": [False, True],
    "defer_gather": [False, True],
}


@pytest.mark.parametrize("case", pairwise(GRID, lambda case: True), ids=lambda case: "-".join(f"{k}{v}" for k, v in case.items()))
def test_same_weights_as_plain_torch(case):
    def job(v, stage, clip, by_segments, defer_gather):
        model = Model(v, stage=stage, clip=clip, defer_gather=defer_gather)
        stream = batches_of(3)
        for _ in range(4):
            (model.step_by_segments if by_segments else model.step)(next(stream))
        ours, norm = model.weights(), float(model.optimizer.global_grad_norm)
        model.close()
        return (*largest_difference(ours, plain(3, 4, clip)), norm)

    options = {key: value for key, value in case.items() if key != "D"}
    for difference, size, norm in RankPool.of(case["D"]).run(job, **options):
        assert difference <= (1e-6 * size if case["clip"] else 0.0)
        assert not case["clip"] or norm > case["clip"]  # it did clip


@pytest.mark.parametrize("communicate, dtype", [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp16")])
def test_communication_dtype_is_stocks(communicate, dtype):
    def job():
        config = ds_config(2, 1, dtype, communication_data_type=communicate)
        if dtype == "fp16":
            config["fp16"] = FP16
        weights, _, _ = train(True, config, 1, LAYERS, steps=6, dtype=dtype)
        model = Model(2, dtype=dtype, communication_dtype=TORCH_DTYPE[communicate])
        wires = []
        real = model.optimizer.replicas.reduce_scatter
        model.optimizer.replicas.reduce_scatter = lambda flat: wires.append(flat.dtype) or real(flat)
        stream = batches_of(2, dtype)
        for _ in range(6):
            model.step(next(stream))
        return largest_difference(model.weights(), weights)[0], set(wires)

    assert RankPool.of(2).run(job) == [(0.0, {TORCH_DTYPE[communicate]})] * 2


@pytest.mark.parametrize("stage, by_segments", [(0, False), (1, False), (2, True)])
def test_three_replicas(stage, by_segments):
    """Not a power of two: averages are rounded, and sums have another order than the oracle's."""
    def job():
        model = Model(2, stage=stage)
        stream = batches_of(2)
        for _ in range(3):
            (model.step_by_segments if by_segments else model.step)(next(stream))
        return largest_difference(model.weights(), plain(2, 3))

    for difference, size in RankPool.of(3).run(job):
        assert difference <= 1e-6 * size


@pytest.mark.parametrize("D, dtype, accumulate, stage, clip, v", [
    (1, "fp32", None, 1, 0.1, 2),
    (2, "fp32", None, 2, 0.1, 4),
    (1, "bf16", None, 1, 0.0, 2),
    (2, "bf16", None, 2, 0.0, 4),
    (2, "bf16", None, 0, 0.0, 2),
    (1, "bf16", "fp32", 2, 0.0, 2),
    (2, "bf16", "fp32", 1, 0.0, 4),
    (2, "bf16", "fp32", 0, 0.0, 2),
    (1, "fp16", None, 1, 0.0, 2),
    (2, "fp16", None, 2, 0.0, 4),
    (2, "fp16", None, 0, 0.0, 2),
    (2, "fp16", "fp32", 1, 0.0, 2),
    (2, "fp16", None, 1, 0.1, 2),
])
def test_same_weights_as_stock_zero_1(D, dtype, accumulate, stage, clip, v):
    def job():
        config = ds_config(3, 1, dtype, clip, accumulate)
        if dtype == "fp16":
            config["fp16"] = FP16
        weights, losses, norms = train(True, config, 1, LAYERS, steps=8, dtype=dtype)
        options = {"accumulate_dtype": torch.float32} if accumulate else {}
        model = Model(v, dtype=dtype, stage=stage, clip=clip, **options)
        stream, our_losses, our_norms = batches_of(3, dtype), [], []
        for _ in range(8):
            loss = torch.tensor(model.step(next(stream)))
            dist.all_reduce(loss)
            our_losses.append(float(loss) / D)
            our_norms.append(float(model.optimizer.global_grad_norm))
        ours, skipped = model.weights(), model.skipped
        model.close()
        return largest_difference(ours, weights), losses, our_losses, norms, our_norms, skipped

    for (difference, size), losses, ours, norms, our_norms, skipped in RankPool.of(D).run(job):
        assert difference <= (0.0 if not clip else size * (1e-6 if dtype == "fp32" else 4 * 2.0**-10))
        assert ours == pytest.approx(losses, rel=1e-6 if dtype == "fp32" else 2e-2)
        assert our_norms == pytest.approx(norms, rel=1e-5 if dtype == "fp32" else 2e-2)
        if dtype == "fp16":
            assert 1 <= skipped < 6, "the test should skip some steps and take others"
            assert our_norms.count(float("inf")) == skipped


def test_an_overflow_in_one_shard_skips_the_step_on_all_and_halves_the_scale_once():
    def job():
        model = Model(2, dtype="fp16")
        before = model.weights()
        model.optimizer.override_loss_scale(8.0)  # with which nothing overflows by itself
        model.layers[-1].b.bias.register_hook(lambda grad: grad * float("inf"))  # the end of the last bucket: of rank 1's part
        model.step(next(batches_of(2, "fp16")))
        return model.optimizer.overflow, model.optimizer.loss_scaler.cur_scale, largest_difference(before, model.weights())[0]

    assert RankPool.of(2).run(job) == [(True, 2.0**17, 0.0)] * 2


def test_user_groups_and_their_schedulers_stay():
    def job():
        def groups(params):
            return [{"params": [p for p in params if p.dim() > 1]},
                    {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "lr": 2e-2}]

        model = Model(4, groups=groups)
        scheduler = torch.optim.lr_scheduler.LambdaLR(model.inner, [lambda step: 0.5**step, lambda step: 1.0 / (1 + step)])
        stream, rates = batches_of(2), []
        for _ in range(3):
            model.step(next(stream))
            scheduler.step()
            rates.append([group["lr"] for group in model.optimizer.param_groups])
        decays = [group["weight_decay"] for group in model.optimizer.param_groups]
        numel = [sum(p.numel() for p in group["params"]) for group in model.optimizer.param_groups]
        mine = sum(p.numel() for p in model.names)
        return rates, decays, numel, mine, model.optimizer.param_groups is model.inner.param_groups

    for rates, decays, numel, mine, same in RankPool.of(2).run(job):
        assert rates == [[5e-3, 1e-2], [2.5e-3, 2e-2 * (1.0 / 3)], [1.25e-3, 5e-3]] and decays == [0.01, 0.0] and same
        assert mine / 2 <= sum(numel) <= mine / 2 + 4 * 8  # half the model, and the padding of 8 buckets


def test_frozen_segments_unused_parameters_and_a_rank_with_nothing_to_train():
    def job():
        class Half(Block):
            """Whose second bias gets no gradient, on replica 1 in no micro-batch, on replica 0 in all but one."""

            def forward(self, x):
                use = dist.get_rank() == 0 and self.uses > 0
                self.uses += 1
                return super().forward(x) if use else x + nn.functional.linear(torch.tanh(self.a(x)), self.b.weight)

        def layers(kind):
            made = []
            for i in range(LAYERS):
                seed_cpu(i)
                made.append(kind() if i == 2 else Block())
                made[-1].uses = 0
            made[0].requires_grad_(False)
            made[3].b.bias.requires_grad_(False)
            return made

        model = Model(4, layers(Half))
        before = model.weights()
        stream = batches_of(3)
        for _ in range(2):
            model.step(next(stream))
        after = model.weights()
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        frozen = Model(2, [nn.Identity(), nn.Identity()], inner=lambda params: torch.optim.SGD([torch.zeros(1)], lr=1.0))
        frozen.inner.param_groups[0]["params"] = []
        frozen.begin_all()
        frozen.launch_all()
        frozen.optimizer.step()
        return moved, set(after) - moved, float(frozen.optimizer.global_grad_norm)

    for moved, still, norm in RankPool.of(2).run(job):
        assert still == {"0.a.weight", "0.a.bias", "0.b.weight", "0.b.bias", "3.b.bias"} and "2.b.bias" in moved and norm == 0.0


@pytest.mark.parametrize("D, stage, by_segments", [(1, 1, False), (2, 0, False), (2, 1, True), (2, 2, False), (2, 2, True)])
def test_a_parameter_shared_by_segments_begins_at_the_highest_and_leaves_with_the_lowest(D, stage, by_segments):
    def shared_layers():
        layers = [(seed_cpu(1234 + i), Block())[1] for i in range(LAYERS)]
        layers[3] = layers[1]
        return layers

    def job():
        model = Model(4, shared_layers(), stage=stage)
        stream = batches_of(3)
        for _ in range(4):
            (model.step_by_segments if by_segments else model.step)(next(stream))
        spans = {(bucket.key.segment, bucket.key.first) for bucket in model.optimizer.buckets}
        return largest_difference(model.weights(), plain(3, 4, layers=shared_layers())), spans

    for (difference, size), spans in RankPool.of(D).run(job):
        assert spans == {(0, 0), (1, 3), (2, 2)}
        assert difference <= (1e-6 * size if by_segments else 0.0)  # AIAO adds up segment by segment


@pytest.mark.parametrize("D, stage", [(1, 1), (1, 2), (2, 0), (2, 2)])
def test_tied_weights_are_summed_over_their_pipeline_ranks(D, stage):
    """Two pipeline ranks of D replicas; each has another gradient for the same weight, and the second's copy does not count.
    Their last layers differ in size, too: no rank may wait for a collective that another has not."""

    def job():
        p, d = divmod(dist.get_rank(), D)
        replicas = [dist.new_group([stage_id * D + i for i in range(D)]) for stage_id in range(2)]
        ties = [dist.new_group([i, D + i]) for i in range(D)]
        torch.manual_seed(0)
        tied, own = nn.Linear(5, 5, bias=False), nn.Linear(5, 5 + p)
        params = [*own.parameters(), tied.weight]
        # the tied weight lies in another segment on each pipeline rank: the ranks reach it in another order
        segments = [[tied.weight], list(own.parameters())] if p == 0 else [list(own.parameters()), [tied.weight]]
        optimizer = ShardedOptimizer(torch.optim.SGD(params, lr=1.0), segments, data_parallel_group=replicas[p],
                                     param_names={p: str(i) for i, p in enumerate(params)}, ties=[(tied.weight, ties[d])],
                                     stage=stage, counts_in_norm=lambda parameter: parameter is not tied.weight or p == 0)
        before = tied.weight.detach().clone()
        x = torch.full((1, 5), 1.0 + d)
        for k in (1, 0):
            optimizer.begin_backward(k)
            ((tied if (k == 0) == (p == 0) else own)(x) * (p + 1)).sum().backward()
            optimizer.launch_reduce(k)
        optimizer.step()
        optimizer.flush()
        gradient = before - tied.weight.detach()
        optimizer.destroy()
        return gradient, float(optimizer.global_grad_norm)

    x = (1 + D) / 2  # mean over the replicas
    for gradient, norm in RankPool.of(2 * D).run(job):
        assert torch.allclose(gradient, torch.full((5, 5), 3 * x))
        # 25 tied elements; 5 x 5 weights of x and 5 biases of 1; 5 x 6 weights and 6 biases of twice that
        assert norm == pytest.approx((25 * (3 * x)**2 + 25 * x**2 + 5 + 30 * (2 * x)**2 + 24)**0.5)


@pytest.mark.parametrize("v", [2, 4, 8])
def test_zero_2_holds_full_gradients_of_two_segments_at_most(v):
    def job(stage):
        model = Model(v, [(seed_cpu(i), Block())[1] for i in range(8)], stage=stage)
        seen = []
        for items in (next(batches_of(2)), next(batches_of(2))):
            model.step_by_segments(items, lambda k: seen.append(model.optimizer.full_gradient_bytes))
        whole = sum(p.numel() * p.element_size() for p in model.names)
        return max(seen) / whole, model.optimizer.peak_full_gradient_bytes / whole, model.optimizer.full_gradient_bytes / whole

    for seen, peak, after in RankPool.of(2).run(job, 2):
        assert peak == seen <= 2 / v + 0.01 and after == 0
    for _, peak, _ in RankPool.of(2).run(job, 1):
        assert 1 <= peak <= 1.01


def test_a_launch_returns_before_the_peer_has_launched():
    """With gloo's pairwise transfers and with its all-reduce."""

    def job(stage):
        model = Model(2, stage=stage)
        model.step(next(batches_of(1)))
        model.optimizer.flush()
        model.begin_all()
        model.optimizer.backward(model.loss(next(batches_of(1))[0]))
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.3)
        start = time.perf_counter()
        model.launch_all()
        launched = time.perf_counter() - start
        model.optimizer.wait_reduce(1)
        waited = time.perf_counter() - start
        model.optimizer.wait_reduce(0)
        model.optimizer.step()
        model.weights()
        return launched, waited

    for stage in (1, 0):
        (launched, waited), _ = RankPool.of(2).run(job, stage)
        assert launched < 0.2 < 0.25 < waited


@pytest.mark.parametrize("deferred", [True, False])
def test_gathers_run_behind_and_are_waited_for_by_segment_in_order_of_first_use(deferred):
    def job():
        model = Model(2, defer_gather=deferred)
        model.begin_all()
        model.optimizer.backward(model.loss(next(batches_of(1))[0]))
        model.launch_all()
        posted, reductions = [], []
        real, real_all_reduce, inner_step = model.optimizer.replicas.all_gather, dist.all_reduce, model.inner.step
        model.optimizer.replicas.all_gather = lambda flat, urgency: posted.append(flat) or real(flat, urgency)
        for k in range(2):
            model.optimizer.wait_reduce(k)
        model.inner.step = lambda: (time.sleep(0.3 * dist.get_rank()), inner_step())  # rank 1 is late with its shards
        with mock.patch.object(dist, "all_reduce", lambda *args, **kwargs: reductions.append(real_all_reduce(*args, **kwargs))):
            start = time.perf_counter()
            model.optimizer.step()
        stepped = time.perf_counter() - start
        order = [[b.flat for b in model.optimizer.buckets if b.flat is flat][0] is model.optimizer.buckets[i].flat
                 for i, flat in enumerate(posted)]
        model.optimizer.wait_params(0)
        waited = time.perf_counter() - start
        left = [bucket.gather is not None for bucket in model.optimizer.buckets]
        model.weights()
        return stepped, waited, order, left, len(reductions)

    (stepped, waited, order, left, reductions), _ = RankPool.of(2).run(job)
    assert reductions == 1, "the norm is one all-reduce"
    assert order == [True, True] and left == [False, deferred] and waited > 0.25
    assert stepped < 0.2 if deferred else stepped > 0.25


def test_calls_out_of_order_are_errors():
    def job():
        model = Model(2, [(seed_cpu(i), Block())[1] for i in range(2)])
        optimizer = model.optimizer
        messages = []

        def attempt(call, *args):
            with pytest.raises(RuntimeError) as error:
                call(*args)
            messages.append(str(error.value))

        attempt(optimizer.launch_reduce, 1)
        attempt(optimizer.wait_reduce, 1)
        model.begin_all()
        attempt(optimizer.begin_backward, 1)
        model.loss(next(batches_of(1))[0]).backward()
        optimizer.launch_reduce(1)
        attempt(optimizer.launch_reduce, 1)
        attempt(optimizer.step)
        optimizer.launch_reduce(0)
        model.loss(next(batches_of(1))[0]).backward()
        attempt(optimizer.step)
        optimizer.zero_grad()
        optimizer.step()
        model.loss(next(batches_of(1))[0]).backward()
        attempt(optimizer.begin_backward, 1)
        return messages

    messages, = RankPool.of(1).run(job)
    expected = ["launch_reduce(1): in this step the segment has not begun", "wait_reduce(1), but the segment has not begun",
                "begin_backward(1): in this step the segment has begun", "launch_reduce(1): in this step the segment has launched",
                "segment 0 has begun its backward", "arrived after its segment's launch_reduce()", "arrived before its segment's"]
    assert len(messages) == len(expected)
    for message, part in zip(messages, expected):
        assert part in message


def test_gradients_that_autograd_replaces_are_kept():
    def job():
        model = Model(2)
        model.begin_all()
        for item in next(batches_of(2)):
            (model.loss(item) / 2).backward(create_graph=True)
        model.launch_all()
        model.optimizer.step()
        return largest_difference(model.weights(), plain(2, 1))[0]

    assert RankPool.of(1).run(job) == [0.0]


def test_fp32_masters_are_the_parameters_and_one_replica_copies_no_gradient():
    def job():
        model = Model(2)
        p = model.layers[0].a.weight
        master = model.inner.param_groups[0]["params"][0]
        model.begin_all()
        address = p.grad.data_ptr()
        model.optimizer.backward(model.loss(next(batches_of(1))[0]))
        model.launch_all()
        model.optimizer.wait_reduce(0)
        reduced = model.optimizer.buckets[0].reduced
        return master.data_ptr() == p.data_ptr(), reduced.data_ptr() == address

    assert RankPool.of(1).run(job) == [(True, True)]

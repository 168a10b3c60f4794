"""Buckets by layer: they leave within the last backward, in one order everywhere, and change no number."""

import pytest
import torch
import torch.distributed as dist
from models import HIDDEN, MICRO_BATCH, Block, LayerSpec, build, data, ds_config, largest_difference, seed_cpu, train
from pairwise import pairwise
from pool import RankError, RankPool
from sharded import LAYERS, Model, batches_of, plain
from torch import nn
from torch.utils.checkpoint import checkpoint

LAYER = {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "layer", "overlap_param_gather": True}


def record_launches(optimizer, events):
    """Append ("launch", index of the bucket) to ``events`` at each launch."""
    real = optimizer._launch
    optimizer._launch = lambda bucket: events.append(("launch", optimizer.buckets.index(bucket))) or real(bucket)


# numbers ------------------------------------------------------------------------------------------------------------------

GRID = {
    "D": [1, 2],
    "v": [1, 2, 4],
    "stage": [0, 1, 2],
    "clip": [0.0, 0.1],
    "by_segments": [False, True],
    "bucket_numel": [1, 400, 10**6],
    "M": [1, 3],
}


@pytest.mark.parametrize("case", pairwise(GRID, lambda case: True), ids=lambda case: "-".join(f"{k}{v}" for k, v in case.items()))
def test_same_weights_as_plain_torch(case):
    def job(v, stage, clip, by_segments, bucket_numel, M):
        model = Model(v, stage=stage, clip=clip, by_layer=True, bucket_numel=bucket_numel)
        stream, early = batches_of(M), []
        launch_final = model.optimizer._launch_final
        for bucket in model.optimizer.buckets:
            bucket._on_final = lambda: early.append(1) or launch_final()
        for _ in range(20):
            (model.step_by_segments if by_segments else model.step)(next(stream))
        return (*largest_difference(model.weights(), plain(M, 20, clip)), len(early), len(model.optimizer.buckets))

    options = {key: value for key, value in case.items() if key != "D"}
    for difference, size, early, buckets in RankPool.of(case["D"]).run(job, **options):
        assert difference <= (1e-6 * size if case["clip"] else 0.0)
        # every bucket is found final in every step but the first
        assert early == (19 * buckets if case["by_segments"] or case["v"] == 1 else 0)


@pytest.mark.parametrize("zero, dtype, accumulate", [(0, "fp32", None), (1, "bf16", None), (2, "bf16", "fp32"), (1, "fp16", None)])
def test_twenty_steps_with_tiny_buckets_are_stocks(zero, dtype, accumulate):
    def job():
        stock = train(True, ds_config(3, int(dtype != "fp32"), dtype, accumulate=accumulate), 1, 8, 20, dtype=dtype)
        config = ds_config(3, zero, dtype, accumulate=accumulate, fold=LAYER)
        config["zero_optimization"]["reduce_bucket_size"] = 30
        ours = train(False, config, 1, 8, 20, dtype=dtype)
        return largest_difference(ours[0], stock[0])[0], ours[1] == stock[1]

    assert RankPool.of(2).run(job) == [(0.0, True)] * 2


# cuts ---------------------------------------------------------------------------------------------------------------------


def test_segment_0_has_a_bucket_per_layer_and_others_one_of_the_given_size():
    def job():
        block = sum(p.numel() for p in Block().parameters())
        names_of = [[f"{i}.{n}" for n in ("a.weight", "a.bias", "b.weight", "b.bias")] for i in range(8)]

        def buckets(numel, v=2):
            model = Model(v, [Block() for _ in range(8)], by_layer=True, bucket_numel=numel)
            return [(b.key.segment, b.numel, [model.names[p] for p in b.parameters]) for b in model.optimizer.buckets]

        whole, cut, tiny = buckets(10**6), buckets(2 * block + 1), buckets(1)
        assert [(k, n) for k, n, _ in whole] == [(0, block)] * 4 + [(1, 4 * block)]
        assert [(k, n) for k, n, _ in cut] == [(0, block)] * 4 + [(1, 2 * block)] * 2
        assert [names for _, _, names in cut[:4]] == names_of[:4]
        assert [names for *_, names in tiny] == [[name] for names in names_of for name in names]

    RankPool.of(1).run(job)


# order --------------------------------------------------------------------------------------------------------------------


class Optional(Block):
    """Whose second matrix gets no gradient where ``used`` is False."""
    used = True

    def forward(self, x):
        return super().forward(x) if self.used else x + torch.tanh(self.a(x))[:, :HIDDEN]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_order_is_the_same_where_a_parameter_gets_no_gradient_on_one_replica(stage):
    def layers():
        made = [(seed_cpu(1234 + i), Optional() if i == 2 else Block())[1] for i in range(LAYERS)]
        return made

    def job(stage):
        model = Model(1, layers(), stage=stage, by_layer=True)
        events, stream, launch_reduce = [], batches_of(2), model.optimizer.launch_reduce
        record_launches(model.optimizer, events)
        model.optimizer.launch_reduce = lambda k: events.append("end") or launch_reduce(k)
        for step in range(3):
            model.layers[2].used = step < 2 or dist.get_rank() == 0
            events.clear()
            model.step(next(stream))
        return events

    used, unused = RankPool.of(2).run(job, stage)
    order = [("launch", i) for i in (3, 2, 1, 0)]
    assert used == [*order, "end"]
    assert unused == [order[0], "end", *order[1:]], "what is behind the bucket that is not final leaves at the end"


def test_numbers_where_a_parameter_gets_no_gradient_on_one_replica():
    class ByReplica(Optional):
        """Uses its second matrix in positive data only: in some micro-batches of some replicas."""

        def forward(self, x):
            self.used = float(x.detach().sum()) > 0
            return super().forward(x)

    def layers():
        return [(seed_cpu(1234 + i), ByReplica())[1] for i in range(LAYERS)]

    def job():
        model, stream = Model(2, layers(), by_layer=True), batches_of(2)
        for _ in range(6):
            model.step_by_segments(next(stream))
        return largest_difference(model.weights(), plain(2, 6, layers=layers()))[0]

    assert RankPool.of(2).run(job) == [0.0] * 2


def test_one_segment_at_a_time_is_in_its_last_backward():
    def job():
        model = Model(2, by_layer=True)
        with pytest.raises(RuntimeError, match=r"begin_last_backward\(1\), but the segment has not begun"):
            model.optimizer.begin_last_backward(1)
        model.begin_all()
        model.optimizer.begin_last_backward(1)
        with pytest.raises(RuntimeError, match=r"begin_last_backward\(0\), .*; segment 1 is in its last backward"):
            model.optimizer.begin_last_backward(0)
        with pytest.raises(RuntimeError, match=r"launch_reduce\(0\), but segment 1 is in its last backward and has to leave first"):
            model.optimizer.launch_reduce(0)

    RankPool.of(1).run(job)


# the engine ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [{}, {"activation_checkpoint_interval": 1},
                                       {"activation_checkpoint_interval": 1, "use_reentrant": False}])
@pytest.mark.parametrize("fold", [LAYER, {"schedule": "1f1b", "overlap_grad_reduce": "layer"}], ids=lambda f: f["schedule"])
def test_a_layers_bucket_leaves_while_the_layers_below_it_compute(fold, recompute):
    """With 2, 4, 1 and 3 micro-batches: when layer i's last gradient is there, the buckets above it have left."""
    def job(fold, recompute):
        engine = build(False, ds_config(2, 1, fold=fold, pipeline=recompute), 2, 8)
        ranges, module, steps = engine.module.segment_ranges, engine.module, []
        for M in (2, 4, 1, 3):
            engine.set_train_batch_size(M * MICRO_BATCH * 2)
            events = []
            if not steps:
                record_launches(engine.optimizer, recorded := [])
            hooks = []
            for local in range(*ranges[0]):
                # before the accumulation that may launch
                hooks.append(module.forward_funcs[local].a.bias.register_hook(
                    lambda _, local=local: recorded.append(("gradient", local))))
            recorded.clear()
            engine.train_batch(data(engine.grid.get_data_parallel_rank()))
            for hook in hooks:
                hook.remove()
            low = {i for i, b in enumerate(engine.optimizer.buckets) if b.key.segment == 0}
            events = [e for e in recorded if e[0] == "gradient" or e[1] in low]
            steps.append(events)
        return steps, ranges[0][1]

    for steps, layers in RankPool.of(4).run(job, fold, recompute):
        down = list(reversed(range(layers)))
        assert layers == (2 if fold is LAYER else 4)
        for M, events in zip((2, 4, 1, 3), steps):
            before = [("gradient", i) for _ in range(M - 1) for i in down]
            last = ([("gradient", i) for i in down] + [("launch", i) for i in down] if M == 2 else
                    [event for i in down for event in (("gradient", i), ("launch", i))])
            assert events == before + last, M


def test_a_parameter_that_several_checkpoints_share_leaves_with_its_last_gradient():
    """A tied layer twice in one segment, recomputed apart: its gradient arrives twice in each backward."""
    from deepspeed.pipe import TiedLayerSpec

    def job(fold):
        twice, block = TiedLayerSpec("twice", Block), LayerSpec(Block)
        layers, config = [block, twice, block, twice, block], ds_config(2, 1, fold=fold, checkpoint=1)
        engine, events = build(False, config, 1, 5, layers=layers), []
        if fold["overlap_grad_reduce"] == "layer":
            shared = engine.module.tied_modules["twice"].b.weight  # before its a.weight
            record_launches(engine.optimizer, events)
            shared.register_post_accumulate_grad_hook(lambda p: events.append("shared"))
        losses = []
        for _ in range(4):
            events.clear()
            losses.append(float(engine.train_batch(data(dist.get_rank()))))
        return losses, events

    (ours, events), _ = RankPool.of(2).run(job, {"schedule": "1f1b", "overlap_grad_reduce": "layer"})
    (others, _), _ = RankPool.of(2).run(job, {"schedule": "1f1b", "overlap_grad_reduce": "segment"})
    assert ours == others
    launch = [("launch", i) for i in range(4)]  # layers 0, 1 and 3, 2, 4
    assert events == ["shared"] * 2 + [launch[3], "shared", launch[2], "shared", launch[1], launch[0]]


def test_a_gradient_that_comes_after_its_bucket_left_is_an_error():
    class Again(nn.Module):
        """From the third step on its weight gets two gradients in a backward."""

        def __init__(self):
            super().__init__()
            self.a, self.steps = nn.Linear(HIDDEN, HIDDEN), 0

        def forward(self, x):
            x = checkpoint(self.a, x, use_reentrant=True)
            return checkpoint(self.a, x, use_reentrant=True) if self.steps >= 2 else x

    def job(granularity):
        layers = [LayerSpec(Block), LayerSpec(Again), LayerSpec(Block)]
        config = ds_config(2, 1, fold={"schedule": "1f1b", "overlap_grad_reduce": granularity})
        engine = build(False, config, 1, 3, layers=layers)
        for _ in range(3):
            engine.train_batch(data(0))
            engine.module.forward_funcs[1].steps += 1

    RankPool.of(1).run(job, "segment")
    with pytest.raises(RankError, match=r"parameter 0 \(shape \[12, 12\]\) of .* bucket arrived after its bucket had left.*"
                                        r'Use "overlap_grad_reduce": "segment"'):
        RankPool.of(1).run(job, "layer")

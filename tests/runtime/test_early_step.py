"""Steps ahead of validation: the same bits as with "validated", whether they stay or are taken back."""

from copy import copy

import pytest
import torch
import torch.distributed as dist
from models import build, data, ds_config, make_layers, whole_model
from pairwise import pairwise
from pool import RankError, RankPool
from sharded import FP16, Model, batches_of

from ds_fold.runtime.early_step import Undo, why_not_in_pieces

STEPS = 10
INF = float("inf")


def bits(value):
    """What is compared: NaN equals itself, 0 is not -0."""
    return value.detach().contiguous().view(torch.uint8).tolist() if torch.is_tensor(value) and value.dim() else value


def middle(norms):
    """A norm that some steps exceed and others do not."""
    finite = sorted(norm for norm in norms if norm < INF)
    return finite[len(finite) // 2]


def run(v, early, steps=STEPS, M=2, spoil=None, **options):
    """Train a list of layers in AIAO order: weights, this rank's optimizer state, losses, norms, scales, steps taken back."""
    model = Model(v, **options)
    optimizer, taken_back = model.optimizer, []
    take_back = optimizer._take_back
    optimizer._take_back = lambda: taken_back.append([b.key.segment for b in take_back()]) or [
        b for b in optimizer.buckets if b.key.segment in taken_back[-1]]

    def ahead(k):
        if early and k + 1 < v:
            optimizer.step_segment(k + 1)

    stream, losses, norms, scales = batches_of(M, model.dtype), [], [], []
    for index in range(steps):
        hook = spoil and spoil(index, model)
        losses.append(str(model.step_by_segments(next(stream), ahead)))  # NaN equals itself
        if hook:
            hook.remove()
        norms.append(float(optimizer.global_grad_norm))
        scales.append(float(optimizer.loss_scale))
        assert all(bucket.undo is bucket.reduced is bucket.master.grad is None for bucket in optimizer.buckets)
    optimizer.flush()
    weights = {name: bits(p) for p, name in model.names.items()}
    state = [(bits(b.master), {key: bits(value) for key, value in optimizer.state.get(b.master, {}).items()})
             for b in optimizer.buckets]
    model.close()
    return (weights, state, losses, norms, scales), taken_back


GRID = {
    "D": [1, 2, 3],
    "stage": [0, 1, 2],
    "dtype": ["fp32", "bf16", "fp16"],
    "defer_gather": [False, True],
    "clipped": [False, True],
}


@pytest.mark.parametrize("case", pairwise(GRID, lambda case: True), ids=lambda case: "-".join(f"{k}{v}" for k, v in case.items()))
def test_the_same_bits_as_validated(case):
    """In fp16 the first steps overflow; where clipping is on, half of the steps need it."""

    def job(clipped, **options):
        del options["D"]
        options.update(v=4, clip=0.0)
        if clipped:
            options["clip"] = middle(run(early=False, **options)[0][3])
        validated, nothing = run(early=False, **options)
        return validated, nothing, *run(early=True, **options), options["clip"]

    for validated, nothing, early, taken_back, clip in RankPool.of(case["D"]).run(job, **case):
        assert early == validated
        assert all(segments == [] for segments in nothing)
        norms, scales = early[3:]
        overflows, too_long = norms.count(INF), 0
        for norm, used, grown in zip(norms, [2.0**18 if case["dtype"] == "fp16" else 1.0, *scales], scales):
            too_long += 0 < clip < norm * used / grown < INF  # in the step in which the scale grows, clipping sees half the norm
        assert (overflows > 0) == (case["dtype"] == "fp16") and (too_long > 0) == case["clipped"]
        assert taken_back == [[1, 2, 3]] * (overflows + too_long) and len(taken_back) < STEPS, "some steps stay"


@pytest.mark.parametrize("inner", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.NAdam(p, lr=0.01),
    lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
], ids=["momentum", "SGD", "Adagrad", "NAdam", "RMSprop"])
def test_other_optimizers(inner):
    def job():
        clip = middle(run(2, False, inner=inner)[0][3])
        return run(2, False, inner=inner, clip=clip)[0], *run(2, True, inner=inner, clip=clip)

    for validated, early, taken_back in RankPool.of(2).run(job):
        assert early == validated and 0 < len(taken_back) < STEPS


def test_user_groups_and_their_schedulers():
    def job():
        def groups(params):
            return [{"params": [p for p in params if p.dim() > 1]},
                    {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "lr": 2e-2}]

        def scheduled(index, model):
            for group, rate in zip(model.optimizer.param_groups, (1e-2, 2e-2)):
                group["lr"] = rate * 0.8**index

        return [run(4, early, groups=groups, spoil=scheduled)[0] for early in (False, True)]

    for validated, early in RankPool.of(2).run(job):
        assert early == validated


@pytest.mark.parametrize("dtype, expected", [("fp16", [[1], [1]]), ("fp32", [[1], [1]]), ("bf16", [])])
def test_one_ranks_gradient_that_is_not_finite_in_the_segment_reduced_last(dtype, expected):
    """fp16 and fp32 skip the step. bf16 is not checked: NaN spreads, to the same bits."""

    def job():
        def spoil(index, model):
            if dtype == "fp16":
                model.optimizer.override_loss_scale(8.0)
            if index in (0, 2) and dist.get_rank() == 1:
                return model.layers[0].a.bias.register_hook(lambda grad: grad * INF)

        return run(2, False, 4, spoil=spoil, dtype=dtype)[0], *run(2, True, 4, spoil=spoil, dtype=dtype)

    for validated, early, taken_back in RankPool.of(2).run(job):
        assert early == validated and taken_back == expected
        assert [norm == INF for norm in early[3]][::2] == [True, True]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_step_taken_back_leaves_parameters_and_state_as_they_were_on_all_replicas(dtype):
    def job():
        model = Model(2, dtype=dtype)
        stream, seen = batches_of(2, dtype), []
        if dtype == "fp16":
            model.optimizer.override_loss_scale(8.0)

        def look():
            model.optimizer.flush()
            return ([bits(b.flat) for b in model.optimizer.buckets], [bits(b.master) for b in model.optimizer.buckets],
                    [{key: bits(value) for key, value in state.items()} for state in model.optimizer.state.values()])

        def ahead(k):
            if k == 0:
                model.optimizer.step_segment(1)
                model.optimizer.flush()
                changed = [not torch.equal(b.flat, old) for b, old in zip(model.optimizer.buckets, before)]
                seen.append((changed, sum(b.undo is not None for b in model.optimizer.buckets)))

        for spoiled in (True, False, True):
            old = look()
            before = [b.flat.clone() for b in model.optimizer.buckets]
            hook = model.layers[0].a.bias.register_hook(lambda grad: grad * INF) if spoiled else None
            model.step_by_segments(next(stream), ahead)
            if hook:
                hook.remove()
            seen.append(look() == old)
        return seen

    for seen in RankPool.of(2).run(job):
        assert seen == [([False, True], 1), True, ([False, True], 1), False, ([False, True], 1), True]


def test_calls_out_of_order_are_errors():
    def job():
        model, messages = Model(2), []

        def attempt(k):
            with pytest.raises(RuntimeError) as error:
                model.optimizer.step_segment(k)
            messages.append(str(error.value))

        attempt(1)
        model.begin_all()
        model.optimizer.backward(model.loss(next(batches_of(1))[0]))
        attempt(1)
        model.launch_all()
        model.optimizer.step_segment(1)
        attempt(1)
        model.optimizer.step()
        return messages

    for messages in RankPool.of(2).run(job):
        assert len(messages) == 3 and "has not begun" in messages[0] and "has begun its backward" in messages[1]
        assert messages[2] == "step_segment(1): the segment was stepped already"


# engines ------------------------------------------------------------------------------------------------------------------

EARLY = {"optimizer_step": "post_validated"}
AIAO = {"schedule": "aiao", "segments": 3, "overlap_grad_reduce": "segment"}
INTERLEAVED = {"schedule": "interleaved_1f1b", "segments": 2, "overlap_grad_reduce": "segment"}


def train(fold, P, zero, dtype, clip, tied, steps=8):
    config = ds_config(4, zero, dtype, clip, fold=fold)
    if dtype == "fp16":
        config["fp16"] = FP16
    engine = build(False, config, P, 12, tied)
    batches = data(engine.grid.get_data_parallel_rank(), dtype)
    results = [(float(engine.train_batch(batches)), float(engine.get_global_grad_norm())) for _ in range(steps)]
    weights, skipped = whole_model(engine.module), engine.skipped_steps
    engine.destroy()
    return {name: bits(w) for name, w in weights.items()}, results, skipped


@pytest.mark.parametrize("P, D, fold, zero, dtype, tied, gather", [
    (1, 1, AIAO, 1, "fp32", True, True),
    (1, 2, AIAO, 2, "bf16", False, True),
    (2, 1, AIAO, 0, "fp16", True, False),
    (2, 2, AIAO, 1, "fp32", True, True),
    (2, 2, AIAO, 2, "fp16", True, True),
    (4, 1, AIAO, 1, "bf16", True, False),
    (2, 2, INTERLEAVED, 2, "fp32", True, False),
    (2, 2, INTERLEAVED, 1, "fp16", False, True),
])
def test_engines_train_to_the_same_bits(P, D, fold, zero, dtype, tied, gather):
    def job():
        validated = {**fold, "overlap_param_gather": gather}
        clip = middle(norm for _, norm in train(validated, P, zero, dtype, 0.0, tied)[1])
        return [train({**validated, **more}, P, zero, dtype, clip, tied) for more in ({}, EARLY)], clip

    (validated, early), clip = RankPool.of(P * D).run(job)[0]
    assert early == validated
    _, results, skipped = early
    norms = [norm for _, norm in results]
    assert any(clip < norm < INF for norm in norms) and any(norm <= clip for norm in norms)
    assert skipped == norms.count(INF) and (skipped > 0) == (dtype == "fp16")


def test_a_segment_is_stepped_and_gathered_in_the_backward_of_the_one_before():
    def job():
        fold = {**AIAO, "overlap_param_gather": True, **EARLY}
        engine = build(False, ds_config(4, 1, fold=fold), 1, 9)
        calls, optimizer = [], engine.optimizer
        for name in ("begin_backward", "launch_reduce", "step_segment", "step"):

            def record(*args, name=name, call=getattr(optimizer, name)):  # noqa: B008 (bound here, on purpose)
                calls.append(name + "".join(map(str, args)))
                return call(*args)
            setattr(optimizer, name, record)
        gather = optimizer.replicas.all_gather
        segment_of = {b.flat.data_ptr(): b.key.segment for b in optimizer.buckets}
        optimizer.replicas.all_gather = lambda flat, urgency: (
            calls.append(f"gather{segment_of[flat.data_ptr()]}") or gather(flat, urgency))
        engine.train_batch(data(engine.grid.get_data_parallel_rank()))
        return calls

    assert RankPool.of(2).run(job)[0] == [
        "begin_backward2", "launch_reduce2", "begin_backward1", "launch_reduce1", "step_segment2", "gather2", "begin_backward0",
        "launch_reduce0", "step_segment1", "gather1", "step", "gather0"]


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    def job(folder):
        config = ds_config(4, 2, "fp16", 2.0, fold={**AIAO, "overlap_param_gather": True, **EARLY})
        config["fp16"] = FP16
        validated = {**config, "ds_fold": {**AIAO, "overlap_param_gather": True}}
        results = []
        for first, second in ((config, config), (config, validated), (validated, validated)):
            engine = build(False, first, 2, 12)
            batches = data(engine.grid.get_data_parallel_rank(), "fp16")
            for _ in range(7):
                engine.train_batch(batches)
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = build(False, second, 2, 12)
            engine.load_checkpoint(folder)
            losses = [float(engine.train_batch(batches)) for _ in range(5)]
            results.append((losses, {name: bits(w) for name, w in whole_model(engine.module).items()}, engine.skipped_steps))
            engine.destroy()
        return results

    first, second, third = RankPool.of(4).run(job, str(tmp_path))[0]
    assert first == second == third and 0 < first[2] < 7


# which optimizers ---------------------------------------------------------------------------------------------------------


class CountsPerGroup(torch.optim.SGD):
    """As DeepSpeed's and Apex's fused optimizers once did."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step()


class CountsByItself(torch.optim.SGD):

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        super().step()


class StepsByTheirNumber(torch.optim.SGD):

    @torch.no_grad()
    def step(self, closure=None):
        live = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in live:
            p.sub_(p.grad, alpha=1 / len(live))


def test_torchs_own_optimizers_can_be_stepped_in_pieces():
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    for kind in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"):
        optimizer = getattr(torch.optim, kind)(parameters)
        before = str(optimizer.state_dict())
        assert why_not_in_pieces(optimizer) is None, kind
        assert str(optimizer.state_dict()) == before and optimizer.param_groups[0]["params"] == parameters
    assert why_not_in_pieces(torch.optim.SGD(parameters, lr=0.1, momentum=0.9)) is None


@pytest.mark.parametrize("kind, reason", [
    (CountsPerGroup, r"param_groups\[0\]\['step'\] depends on how many parameters are stepped at once \(3 for two.*6 one by one"),
    (CountsByItself, "AttributeError: 'CountsByItself' object has no attribute 'steps'"),
    (StepsByTheirNumber, "parameter 0 depends on how many"),
])
def test_an_optimizer_that_cannot_be_stepped_in_pieces_is_refused(kind, reason):
    def job():
        import ds_fold
        config = ds_config(4, 1, fold={**AIAO, "segments": 2, "optimizer_step": "post_validated"},
                           zero_allow_untested_optimizer=True)
        del config["optimizer"]
        net = ds_fold.PipelineModule(make_layers(4), num_stages=1, config=config)
        ds_fold.initialize(model=net, config=config, optimizer=kind(net.parameters(), lr=0.1))

    with pytest.raises(RankError, match=f"ConfigError: .*post_validated.*optimizer {kind.__name__} cannot.*{reason}.*torch_adam"):
        RankPool.of(1).run(job)


def test_undo_brings_back_values_of_every_kind_in_place():
    master, other = torch.zeros(3), torch.ones(2)
    state = {master: {"step": 3, "moment": torch.ones(3), "flags": [1]}, other: {"step": 5}}
    moment, undo = state[master]["moment"], Undo(master, state)
    master.add_(1)
    state[master].update(step=4, new=torch.ones(1))
    state[master]["flags"].append(2)
    moment.mul_(2)
    state[other]["step"] = 6
    undo.restore()
    assert master.tolist() == [0, 0, 0] and state[master]["moment"] is moment and moment.tolist() == [1, 1, 1]
    assert {**state[master], "moment": None} == {"step": 3, "moment": None, "flags": [1]} and state[other] == {"step": 6}
    fresh = copy(state)
    del fresh[master]
    undo = Undo(master, fresh)
    fresh[master] = {"step": 1}
    undo.restore()
    assert set(fresh) == {other}, "what had no state has none again"

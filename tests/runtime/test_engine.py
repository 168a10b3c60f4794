"""What the engine does with one batch, beyond the weights that test_exactness compares."""

import re

import pytest
import torch
from models import HIDDEN, MICRO_BATCH, build, data, ds_config, largest_difference, train, whole_model
from pool import RankError, RankPool
from torch import nn

AIAO = {"schedule": "aiao", "segments": 2}
SCHEDULES = [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "segments": 2}, AIAO,
             {"schedule": "aiao", "segments": 2, "last_segment": "all_forward"}, {"schedule": "gpipe"}]
schedules = pytest.mark.parametrize("fold", SCHEDULES, ids=lambda f: "-".join(map(str, f.values())))


class Mixed(nn.Module):
    """Takes and returns (ids, mask, hidden, scale, position): int, bool, float, 0-dim and float without gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs):
        if torch.is_tensor(inputs):
            hidden = inputs
            ids = torch.arange(hidden.shape[0])
            inputs = ids, ids > 0, hidden, torch.tensor(0.5), torch.ones(hidden.shape[0], 1)
        ids, mask, hidden, scale, position = inputs
        assert ids.dtype == torch.int64 and mask.dtype == torch.bool and scale.dim() == 0 and not position.requires_grad
        assert ids.tolist() == list(range(hidden.shape[0])) and mask.tolist() == [i > 0 for i in ids.tolist()]
        return ids, mask, hidden + torch.tanh(self.linear(hidden)) * scale * position, scale, position


class Last(nn.Module):
    def forward(self, inputs):
        return inputs[2]


def mixed_layers(count=8):
    from deepspeed.pipe import LayerSpec
    return [LayerSpec(Mixed) for _ in range(count - 1)] + [LayerSpec(Last)]


@schedules
@pytest.mark.parametrize("P", [1, 2, 3])
def test_tuples_of_all_dtypes_pass_and_train_as_on_one_rank(fold, P):
    def job(stages, fold):
        return train(False, ds_config(4, fold=fold), stages, 8, steps=3, layers=mixed_layers())

    weights, losses, _ = RankPool.of(P).run(job, P, fold)[0]
    alone, alone_losses, _ = RankPool.of(1).once(job, 1, {"schedule": "1f1b"})[0]
    assert losses == alone_losses and losses[-1] < losses[0]
    assert largest_difference(weights, alone)[0] == 0


class TwoOutputs(nn.Module):
    """Two outputs with a shared trunk, a third that nothing uses, and a count of the trunk's backwards."""
    backwards = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        a, b = (x, x) if torch.is_tensor(x) else x[:2]
        trunk = torch.tanh(self.linear(a + b))
        trunk.register_hook(self._count)
        return trunk, trunk * 2, trunk + 1

    @staticmethod
    def _count(grad):
        TwoOutputs.backwards += 1


def test_several_outputs_have_one_joint_backward():
    def job():
        from deepspeed.pipe import LayerSpec
        layers = [LayerSpec(TwoOutputs) for _ in range(7)] + [lambda x: x[0]]
        engine = build(False, ds_config(4, fold=AIAO), 2, 8, layers=layers)
        TwoOutputs.backwards = 0
        engine.train_batch(data(0))
        return TwoOutputs.backwards

    zero, one = RankPool.of(2).run(job)
    assert (zero, one) == (4 * 4, 3 * 4), "each layer's trunk once per micro-batch"


@pytest.mark.parametrize("returned,named", [("None", "NoneType"), ("[x]", "list"), ("{'x': x}", "dict"), ("(x, None)", "NoneType"),
                                            ("(x, (x,))", "tuple"), ("()", "tuple of ()")])
def test_what_cannot_pass_between_chunks_names_the_layer(returned, named):
    def job(returned):
        layers = [nn.Linear(HIDDEN, HIDDEN), lambda x: eval(returned, {"x": x}), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]
        engine = build(False, ds_config(2, fold={**AIAO, "partition": [0, 2, 4]}), 1, 4, layers=layers)
        engine.train_batch(data(0))

    with pytest.raises(RankError, match=rf"layer 1 \(<lambda>\) returned .*{re.escape(named)}.* must be a tensor or a tuple"):
        RankPool.of(1).run(job, returned)


@schedules
def test_nothing_is_left_after_a_batch(fold):
    def job(fold):
        engine = build(False, ds_config(4, fold=fold), 2, 8)
        for _ in range(2):
            engine.train_batch(data(0))
            engine.eval_batch(data(1))
            channels = [c for c in (engine._act_in, engine._act_out, engine._grad_in, engine._grad_out) if c is not None]
            assert not engine._slots and all(c.idle for c in channels) and channels
        return True

    assert RankPool.of(2).run(job, fold) == [True, True]


def test_a_slot_is_emptied_as_soon_as_nothing_needs_it():
    """The live slots of the engine never exceed what the program's proof says."""
    def job():
        from ds_fold.schedule import verify
        engine = build(False, ds_config(8, fold=AIAO), 2, 8)
        peak, forward = [0], engine._INSTRUCTION_MAP
        kinds = {kind.__name__: kind for kind in forward}
        original = forward[kinds["ForwardPass"]]

        def counting(self, **kwargs):
            original(self, **kwargs)
            peak[0] = max(peak[0], sum(slot.outputs is not None or slot.loss is not None for slot in self._slots.values()))

        engine._INSTRUCTION_MAP = {**forward, kinds["ForwardPass"]: counting}
        engine.train_batch(data(0))
        return peak[0], verify(engine.train_schedule().program).peak_live[engine.stage_id]

    for seen, proved in RankPool.of(2).run(job):
        assert seen == proved


@schedules
def test_evaluation_between_training_changes_nothing(fold):
    """First, between and after training, with its own data, leaving training as if it had been alone."""
    def job(fold, evaluate):
        engine = build(False, ds_config(4, fold=fold), 2, 8)
        batches, evaluations, losses = data(0), [], []
        for _ in range(3):
            if evaluate:
                evaluations.append(float(engine.eval_batch(data(5))))
            losses.append(float(engine.train_batch(batches)))
        return losses, evaluations, whole_model(engine.module)

    with_eval = RankPool.of(2).run(job, fold, True)[0]
    without = RankPool.of(2).run(job, fold, False)[0]
    assert with_eval[0] == without[0] and largest_difference(with_eval[2], without[2])[0] == 0
    one_rank = RankPool.of(1).once(_evaluations_alone)[0]
    assert with_eval[1] == one_rank


def _evaluations_alone():
    engine = build(True, ds_config(4), 1, 8)
    batches, evaluations = data(0), []
    for _ in range(3):
        evaluations.append(float(engine.eval_batch(data(5))))
        engine.train_batch(batches)
    return evaluations


def test_layers_may_work_in_place_on_their_input_and_never_on_the_users_data():
    def job():
        layers = [nn.ReLU(inplace=True)]
        for _ in range(4):
            layers += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True)]
        fold = {"schedule": "aiao", "segments": 2, "partition": [0, 2, 4, 6, 9]}  # chunks that begin with the in-place layer
        engine = build(False, ds_config(2, fold=fold), 2, 9, layers=layers)
        x = torch.randn(MICRO_BATCH, HIDDEN)
        kept = x.clone()
        engine.train_batch(iter([(x, x)] * 2))
        return torch.equal(x, kept)

    assert RankPool.of(2).run(job) == [True, True]


def test_the_loss_must_be_one_number():
    def job():
        engine = build(False, ds_config(2, fold=AIAO), 1, 8, loss_fn=nn.MSELoss(reduction="none"))
        engine.train_batch(data(0))

    with pytest.raises(RankError, match=r"must be one number, but loss_fn .* returned a tensor of shape \[2, 12\]"):
        RankPool.of(1).run(job)


def test_dynamic_shapes_and_a_change_between_batches():
    def job(dynamic):
        engine = build(False, ds_config(4, fold=AIAO), 2, 8, dynamic_shape=dynamic)
        losses = []
        for rows in ((2, 2, 2, 2), (2, 1, 3, 5) if dynamic else (3, 3, 3, 3)):
            x = [torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate(rows)]
            losses.append(float(engine.train_batch(iter([(t, t) for t in x]))))
            if not dynamic:
                engine.reset_activation_shape()
        return losses

    for dynamic in (True, False):
        two, one = RankPool.of(2).run(job, dynamic)[0], RankPool.of(1).run(lambda d: job_alone(d), dynamic)[0]
        assert two == one


def job_alone(dynamic):
    engine = build(True, ds_config(4), 1, 8, dynamic_shape=True)
    losses = []
    for rows in ((2, 2, 2, 2), (2, 1, 3, 5) if dynamic else (3, 3, 3, 3)):
        x = [torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate(rows)]
        losses.append(float(engine.train_batch(iter([(t, t) for t in x]))))
    return losses


def test_a_smaller_last_micro_batch_is_one_error_at_the_sender():
    def job():
        engine = build(False, ds_config(4, fold=AIAO), 2, 8)
        x = [torch.randn(n, HIDDEN) for n in (2, 2, 2, 1)]
        engine.train_batch(iter([(t, t) for t in x]))

    with pytest.raises(RankError) as error:
        RankPool.of(2).run(job, timeout=60)
    text = error.value.errors[0]
    assert "ShapeChangedError: virtual stage 0 -> 1 (layer 1 (Block)) sends float32[1, 12], requires_grad, but its first message " \
           "was float32[2, 12], requires_grad" in text


def test_custom_schedule_from_a_csv_file(tmp_path):
    from ds_fold.schedule import compute_order, write_csv
    orders = compute_order("aiao", 2, 2, 4)
    # another legal order: rank 1 runs the last backward of segment 1 as early as it can, like head_backward immediate
    write_csv(tmp_path / "custom.csv", orders)

    def job(fold):
        return train(False, ds_config(4, fold=fold), 2, 8, steps=2)[:2]

    custom = RankPool.of(2).run(job, {"schedule": {"file": str(tmp_path / "custom.csv")}, "segments": 2})[0]
    named = RankPool.of(2).run(job, AIAO)[0]
    assert custom[1] == named[1] and largest_difference(custom[0], named[0])[0] == 0


def test_a_custom_schedule_that_would_hang_is_refused_on_every_rank(tmp_path):
    (tmp_path / "bad.csv").write_text("F0.0,F0.1,B0.1,B0.0\nF0.1,F0.0,B0.0,B0.1\n")

    def job(path):
        try:
            build(False, ds_config(2, fold={"schedule": {"file": path}}), 2, 8)
        except ValueError as error:
            return str(error)

    texts = RankPool.of(2).run(job, str(tmp_path / "bad.csv"))
    assert texts[0] == texts[1] and "both ranks must order their computes alike" in texts[0]


def test_module_and_engine_must_have_the_same_fold():
    def job():
        from models import make_layers

        import ds_fold
        net = ds_fold.PipelineModule(make_layers(8), num_stages=2, loss_fn=nn.MSELoss(), config=ds_config(4))
        try:
            ds_fold.initialize(model=net, model_parameters=list(net.parameters()), config=ds_config(4, fold=AIAO))
        except ds_fold.ConfigError as error:
            return str(error)

    assert all("built for ds_fold.segments=1" in text and "says segments=2" in text for text in RankPool.of(2).run(job))


@pytest.mark.parametrize("zero,precision", [(0, "fp32"), (1, "fp32"), (1, "bf16")])
def test_clipping_uses_the_norm_of_the_whole_model(zero, precision):
    """By hand: SGD with lr 1 moves the weights by exactly the clip value, whatever the pipeline."""
    def job(P, fold):
        optimizer = {"type": "SGD", "params": {"lr": 1.0}}
        config = ds_config(4, zero, precision, clip=0.1, fold=fold, optimizer=optimizer, zero_allow_untested_optimizer=True)
        engine = build(False, config, P, 8, tied=True)
        before = whole_model(engine.module)
        engine.train_batch(data(0, precision))
        after = whole_model(engine.module)
        moved = sum(float((after[n] - before[n]).double().square().sum()) for n in after)**0.5
        return moved, float(engine.get_global_grad_norm())

    one = RankPool.of(1).run(job, 1, {"schedule": "1f1b"})[0]
    two = RankPool.of(2).run(job, 2, AIAO)[0]
    assert one[1] > 0.1 and two[1] == pytest.approx(one[1], rel=1e-6 if precision == "fp32" else 1e-2)
    assert two[0] == pytest.approx(0.1, rel=1e-5 if precision == "fp32" else 5e-2)

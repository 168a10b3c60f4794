"""Data-parallel communication behind compute: launched when it may be, waited for where needed, never seen from outside."""

import pytest
import torch
from models import build, data, ds_config, make_layers, whole_model
from pool import RankError, RankPool

OVERLAP = {"overlap_grad_reduce": "segment", "overlap_param_gather": True}
FOLDS = [{"schedule": "aiao", "segments": 2}, {"schedule": "interleaved_1f1b", "segments": 2}, {"schedule": "1f1b"}]
folds = pytest.mark.parametrize("fold", FOLDS, ids=lambda f: f["schedule"])


@folds
@pytest.mark.parametrize("zero", [1, 2])
def test_whoever_reads_parameters_after_a_step_sees_them_whole(fold, zero):
    """Evaluation, state_dict and named_parameters right after a step, against an engine that waits at once."""
    def job(fold, zero):
        engine = build(False, ds_config(4, zero, fold=fold), 2, 8, tied=True)
        batches, seen = data(engine.grid.get_data_parallel_rank()), []
        for _ in range(3):
            seen.append(float(engine.train_batch(batches)))
            seen.append(float(engine.eval_batch(data(7))))
            engine.train_batch(batches)
            seen.append({name: weights.clone() for name, weights in engine.module.state_dict().items()})
            engine.train_batch(batches)
            seen.append(whole_model(engine.module))
        return seen

    waiting, overlapped = (RankPool.of(4).run(job, block, zero if block is not fold else 1)
                           for block in (fold, {**fold, **OVERLAP}))
    for mine, theirs in zip(overlapped, waiting):
        for a, b in zip(mine, theirs):
            if isinstance(a, dict):
                assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-7) for name in b) and set(a) == set(b)
            else:
                assert a == pytest.approx(b, rel=1e-6)


def test_a_segment_is_reduced_before_the_next_ones_backward_and_gathered_before_its_forward():
    def job():
        engine = build(False, ds_config(4, 1, fold={"schedule": "aiao", "segments": 3, **OVERLAP}), 1, 9)
        calls, optimizer = [], engine.optimizer
        for name in ("begin_backward", "launch_reduce", "wait_reduce", "wait_params", "step"):

            def record(*args, name=name, call=getattr(optimizer, name)):  # noqa: B008 (bound here, on purpose)
                calls.append(name + "".join(map(str, args)))
                return call(*args)
            setattr(optimizer, name, record)
        forward = engine.module._run_chunk
        engine.module._run_chunk = lambda x, k, m: calls.append(f"forward{k}") or forward(x, k, m)
        batches = data(engine.grid.get_data_parallel_rank())
        engine.train_batch(batches)
        calls.clear()
        engine.train_batch(batches)
        return [call for i, call in enumerate(calls) if call != calls[i - 1]]

    calls = RankPool.of(2).run(job)[0]
    waits = [call for call in calls if call.startswith("wait_params")]
    step = calls.index("step")
    assert waits[:3] == ["wait_params0", "wait_params1", "wait_params2"]
    for k in range(3):
        assert calls.index(f"wait_params{k}") < calls.index(f"forward{k}")
        assert calls.index(f"begin_backward{k}") < calls.index(f"launch_reduce{k}") < calls.index(f"wait_reduce{k}") < step
    assert calls.index("launch_reduce2") < calls.index("begin_backward1") < calls.index("launch_reduce1")
    assert calls.index("forward0") < calls.index("wait_params1"), "the first forward does not wait for all gathers"


@pytest.mark.parametrize("segments", [4, 8])
def test_zero_2_holds_the_full_gradients_of_two_segments_at_most(segments):
    def job(segments):
        engine = build(False, ds_config(4, 2, fold={"schedule": "aiao", "segments": segments}), 1, 16)
        batches = data(engine.grid.get_data_parallel_rank())
        for _ in range(3):
            engine.train_batch(batches)
        model = sum(p.numel() * p.element_size() for p in engine.module.parameters())
        return engine.optimizer.peak_full_gradient_bytes / model, engine.optimizer.full_gradient_bytes

    for peak, left in RankPool.of(2).run(job, segments):
        assert 1 / segments < peak <= 2 / segments + 0.01 and left == 0


def test_a_checkpoint_loaded_right_after_a_step_is_not_overwritten_by_what_is_in_flight(tmp_path):
    def job(folder):
        engine = build(False, ds_config(4, 1, fold={**FOLDS[0], **OVERLAP}), 2, 8)
        batches = data(engine.grid.get_data_parallel_rank())
        engine.train_batch(batches)
        engine.save_checkpoint(folder)
        saved = whole_model(engine.module)
        for _ in range(3):
            engine.train_batch(batches)
            engine.load_checkpoint(folder)
        loaded = whole_model(engine.module)
        return max(float((loaded[name] - saved[name]).abs().max()) for name in saved), engine.global_steps

    assert RankPool.of(4).run(job, str(tmp_path))[0] == (0, 1)


def test_an_optimizer_that_needs_whole_matrices_is_refused():
    class Lamb(torch.optim.SGD):
        pass

    def job():
        import ds_fold
        config = ds_config(4, 1, fold={"schedule": "1f1b", **OVERLAP}, zero_allow_untested_optimizer=True)
        del config["optimizer"]
        net = ds_fold.PipelineModule(make_layers(4), num_stages=1, config=config)
        ds_fold.initialize(model=net, config=config, optimizer=Lamb(net.parameters(), lr=0.1))

    with pytest.raises(RankError, match="ConfigError: optimizer Lamb needs whole matrices"):
        RankPool.of(1).run(job)


def test_zero_3_is_refused():
    def job():
        build(False, ds_config(4, 3, fold={"schedule": "aiao", "segments": 2}), 1, 8)

    with pytest.raises(RankError, match="ZeRO-2 and ZeRO-3 are incompatible|zero_optimization.stage=3"):
        RankPool.of(1).run(job)

"""Data-parallel communication behind compute: launched when it may be, waited for where needed, never seen from outside."""

import pytest
import torch
from models import TORCH_DTYPE, Block, build, data, ds_config, make_layers, seed_cpu, whole_model
from pool import RankError, RankPool
from sharded import bytes_sent_to_replicas
from torch import nn

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

            def record(*args, name=name, call=getattr(optimizer, name), **options):  # noqa: B008 (bound here, on purpose)
                calls.append(name + "".join(map(str, args)))
                return call(*args, **options)
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


def test_by_layer_a_layer_waits_for_its_own_parameters_and_not_for_the_next_ones():
    def job():
        fold = {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "layer", "overlap_param_gather": True}
        engine = build(False, ds_config(4, 1, fold=fold), 1, 8)
        batches = data(engine.grid.get_data_parallel_rank())
        engine.train_batch(batches)
        flying = []  # by layer of segment 0: whose parameters its first forward found in flight
        in_flight = [bucket for bucket in engine.optimizer.buckets if bucket.key.segment == 0]
        for layer in engine.module.forward_funcs[:4]:
            layer.register_forward_pre_hook(lambda *_: flying.append([bucket.gather is not None for bucket in in_flight]))
        engine.train_batch(batches)
        return flying[:4]

    assert RankPool.of(2).run(job) == [[[i > layer for i in range(4)] for layer in range(4)]] * 2


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


@pytest.mark.parametrize("granularity", ["segment", "layer"])
@pytest.mark.parametrize("zero, communicate", [(0, "bf16"), (1, "bf16"), (2, "fp16"), (1, None)])
def test_communication_data_type_rounds_gradients_before_the_average(granularity, zero, communicate):
    """One step of SGD with lr 1: the weights move by the average of the replicas' rounded gradients, and by nothing else."""
    def gradients(replica):
        layers = [(seed_cpu(1234 + i), Block())[1] for i in range(4)]
        batches = data(replica)
        for _ in range(2):
            x, y = next(batches)
            for layer in layers:
                x = layer(x)
            (torch.nn.functional.mse_loss(x, y) / 2).backward()
        return {f"{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}

    def job():
        more = {"communication_data_type": communicate} if communicate else {}
        config = ds_config(2, zero, optimizer={"type": "SGD", "params": {"lr": 1.0}}, zero_allow_untested_optimizer=True,
                           fold={"schedule": "aiao", "segments": 2, "overlap_grad_reduce": granularity}, **more)
        engine = build(False, config, 1, 4)
        engine.train_batch(data(engine.grid.get_data_parallel_rank()))
        weights, wire, rounded = whole_model(engine.module), TORCH_DTYPE[communicate or "fp32"], False
        first, second = gradients(0), gradients(1)
        for name, weight in weights.items():
            average = (first[name].grad.to(wire) / 2 + second[name].grad.to(wire) / 2).float()
            assert torch.equal(weight, first[name].detach() - average), name
            rounded = rounded or not torch.equal(average, (first[name].grad + second[name].grad) / 2)
        return rounded

    assert RankPool.of(2).run(job) == [communicate is not None] * 2


def test_comm_chunk_bytes_bounds_every_message_between_replicas():
    def job():
        config = ds_config(2, 1, fold={"schedule": "1f1b", "comm_chunk_bytes": 1024, **OVERLAP})
        engine = build(False, config, 1, 4)
        with bytes_sent_to_replicas() as sent:
            engine.train_batch(data(engine.grid.get_data_parallel_rank()))
            engine.optimizer.flush()
        return max(sent), sum(sent), sum(bucket.flat.nbytes for bucket in engine.optimizer.buckets)

    # a half of the gradients and a half of the parameters leave each of the two replicas
    for largest, total, model in RankPool.of(2).run(job):
        assert largest == 1024 and total == model


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


@pytest.mark.parametrize("zero, dtype", [(1, "fp32"), (0, "bf16")])
def test_without_overlap_such_an_optimizer_keeps_deepspeeds_wrapper(zero, dtype):
    """And trains the same: what it is called decides who holds the shards, not what it computes."""
    class Lamb(torch.optim.SGD):
        pass

    def job(kind, zero, dtype):
        import ds_fold
        config = ds_config(4, zero, dtype, fold={"schedule": "aiao", "segments": 2}, zero_allow_untested_optimizer=True)
        del config["optimizer"]
        net = ds_fold.PipelineModule(make_layers(8), num_stages=2, loss_fn=nn.MSELoss(), config=config, partition_method="uniform",
                                     seed_layers=True)
        engine, *_ = ds_fold.initialize(model=net, config=config, optimizer=kind(net.parameters(), lr=0.1))
        batches = data(0, dtype)
        return engine.shards_optimizer, [float(engine.train_batch(batches)) for _ in range(3)]

    wrapped, sharded = (RankPool.of(2).run(job, kind, zero, dtype)[0] for kind in (Lamb, torch.optim.SGD))
    assert (wrapped[0], sharded[0]) == (False, True)
    assert wrapped[1] == sharded[1] and wrapped[1][2] < wrapped[1][0]


def test_zero_3_is_refused():
    def job():
        build(False, ds_config(4, 3, fold={"schedule": "aiao", "segments": 2}), 1, 8)

    with pytest.raises(RankError, match="ZeRO-2 and ZeRO-3 are incompatible|zero_optimization.stage=3"):
        RankPool.of(1).run(job)

"""Data: who reads what, labels that travel, epochs and their permutations, loaders."""

import pytest
import torch
from models import HIDDEN, MICRO_BATCH, build, data, ds_config, make_layers
from pool import RankError, RankPool
from torch import nn

AIAO = {"schedule": "aiao", "segments": 2}


@pytest.mark.parametrize("fold", [{"schedule": "1f1b"}, AIAO], ids=["1f1b", "aiao"])
@pytest.mark.parametrize("form", ["tensor", "tuple", "none"])
def test_labels_travel_from_the_only_rank_that_reads_data(fold, form):
    def job(P, fold, form, travel):
        pulled = [0]

        def source():
            for x, y in data(0):
                pulled[0] += 1
                yield x, {"tensor": y, "tuple": (y, torch.arange(MICRO_BATCH)), "none": None}[form]

        def loss_fn(out, labels):
            if form == "none":
                assert labels is None
                return out.square().mean()
            if form == "tuple":
                assert isinstance(labels, tuple) and labels[1].tolist() == list(range(MICRO_BATCH))
                labels = labels[0]
            return nn.functional.mse_loss(out, labels)

        engine = build(False, ds_config(4, fold=dict(fold, label_transport=travel)), P, 12, loss_fn=loss_fn)
        items = source() if engine.is_first_stage() or not travel else None
        losses = [float(engine.train_batch(items)) for _ in range(2)]
        losses.append(float(engine.eval_batch(items, num_micro_batches=3)))
        return losses, pulled[0]

    travelled, loaded = (RankPool.of(3).run(job, 3, fold, form, travel) for travel in (True, False))
    assert [pulled for _, pulled in travelled] == [11, 0, 0] and [pulled for _, pulled in loaded] == [11, 0, 11]
    assert travelled[0][0] == loaded[0][0] == travelled[2][0]


@pytest.mark.parametrize("item, message", [
    (lambda x: (x, "cat"), "labels must be a tensor or a tuple of tensors, got a str"),
    (lambda x: ({"x": x}, x), "inputs must be a tensor or a tuple of tensors, got a dict"),
    (lambda x: x, r"must be a pair \(inputs, labels\), got a Tensor"),
    (None, "no data: pass a data iterator"),
])
def test_items_that_cannot_be_used_are_one_clear_error(item, message):
    def job():
        engine = build(False, ds_config(1, fold=dict(AIAO, label_transport=True)), 2, 8)
        engine.train_batch(None if item is None else iter([item(next(data(0))[0])]))

    with pytest.raises(RankError, match=message):
        RankPool.of(2).run(job, timeout=30)


def first_items(fold, epochs, restart_at=None, D=1):
    """The first input of every micro-batch that replica 0 sees in ``epochs`` epochs of 16 items."""
    import ds_fold
    seen = []
    x = torch.arange(16.0).unsqueeze(1).repeat(1, HIDDEN)
    config = ds_config(2, fold=dict(AIAO, data_workers=0, **fold))
    net = ds_fold.PipelineModule(make_layers(4), num_stages=1, loss_fn=nn.MSELoss(), config=config)
    engine, *_ = ds_fold.initialize(model=net, model_parameters=net.parameters(), config=config,
                                    training_data=torch.utils.data.TensorDataset(x, x))
    engine.set_batch_fn(lambda batch: seen.extend(batch[0][:, 0].int().tolist()) or (batch[0] / 16, batch[1] / 16))
    if restart_at is not None:
        engine.train_batch()
        engine.set_epoch(restart_at)
        seen.clear()
    for _ in range(epochs * 16 // D // (2 * MICRO_BATCH)):
        engine.train_batch()
    return seen


def test_shuffling_permutes_each_epoch_anew_and_set_epoch_starts_one():
    def job():
        return (first_items({}, 2), first_items({"shuffle": True}, 2), first_items({"shuffle": True}, 1, restart_at=1),
                first_items({"shuffle": True, "shuffle_seed": 5}, 1))

    in_order, shuffled, second, reseeded = RankPool.of(1).run(job)[0]
    everything = list(range(16))
    assert in_order == everything * 2
    assert sorted(shuffled[:16]) == sorted(shuffled[16:]) == everything
    assert everything != shuffled[:16] != shuffled[16:] != everything and reseeded != shuffled[:16]
    assert second == shuffled[16:]


def test_the_loader_that_initialize_returns_is_an_iterator_that_the_engine_shares():
    """As DeepSpeed's RepeatingLoader."""
    def job():
        import ds_fold
        x = torch.arange(16.0).unsqueeze(1).repeat(1, HIDDEN)
        config = ds_config(2, fold={**AIAO, "data_workers": 0})
        net = ds_fold.PipelineModule(make_layers(4), num_stages=1, loss_fn=nn.MSELoss(), config=config)
        engine, _, loader, _ = ds_fold.initialize(model=net, model_parameters=net.parameters(), config=config,
                                                  training_data=torch.utils.data.TensorDataset(x, x))
        engine.train_batch()
        engine.train_batch(loader)
        seen = next(loader)[0][:, 0].tolist()
        engine.train_batch(iter(loader))
        return [seen, *(next(loader)[0][:, 0].tolist() for _ in range(2))]

    assert RankPool.of(1).run(job) == [[[8, 9], [14, 15], [0, 1]]]


def test_replicas_share_an_epoch_between_them():
    halves = RankPool.of(2).run(lambda: first_items({"shuffle": True}, 1, D=2))
    assert sorted(halves[0] + halves[1]) == list(range(16))


def test_datasets_that_cannot_be_epochs_are_refused():
    def job(dataset):
        import ds_fold
        net = ds_fold.PipelineModule(make_layers(4), num_stages=1, loss_fn=nn.MSELoss(), config=ds_config(2, fold=AIAO))
        ds_fold.initialize(model=net, model_parameters=net.parameters(), training_data=dataset)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from data(0)

    with pytest.raises(RankError, match="Stream without a length; make a loader"):
        RankPool.of(1).run(job, Stream())


def test_set_dataloader_and_set_epoch_of_its_sampler():
    def job():
        x = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(0))
        dataset = torch.utils.data.TensorDataset(x, 0.5 * x)
        sampler = torch.utils.data.distributed.DistributedSampler(dataset, 1, 0, shuffle=True)
        engine = build(False, ds_config(4, fold=AIAO), 2, 8)
        engine.set_dataloader(torch.utils.data.DataLoader(dataset, batch_size=MICRO_BATCH, sampler=sampler))
        first = float(engine.train_batch())
        engine.set_epoch(3)
        assert sampler.epoch == 3
        engine.train_batch()
        # evaluating something else leaves the training data where they were
        engine.eval_batch(data(0))
        engine.train_batch()
        return first, engine.global_steps

    results = RankPool.of(2).run(job)
    assert results[0] == results[1] and results[0][1] == 3

"""Weights that several layers share, and layers that are computed twice: ties and activation checkpoints."""

import pytest
import torch
from models import (
    Block,
    LayerSpec,
    Tied,
    TiedLayerSpec,
    build,
    data,
    ds_config,
    largest_difference,
    make_layers,
    tied_head,
    train_alone,
    whole_model,
)
from pool import RankPool

AIAO = {"schedule": "aiao", "segments": 2}
FOLDS = [(2, {"schedule": "1f1b"}), (2, {"schedule": "interleaved_1f1b", "segments": 2}), (2, AIAO),
         (4, {"schedule": "aiao", "segments": 2, "last_segment": "all_forward"}), (1, {"schedule": "aiao", "segments": 4})]
folds = pytest.mark.parametrize("P, fold", FOLDS, ids=lambda f: "-".join(map(str, f.values())) if isinstance(f, dict) else f"P{f}")


def with_ties(*users):
    """Eight layers; each of ``users`` is (key, index, head?)."""
    layers = make_layers(8)
    for key, index, head in users:
        layers[index] = TiedLayerSpec(key, Tied, forward_fn=tied_head if head else None)
    return layers


TIES = {
    "three users": [("a", 0, False), ("a", 3, True), ("a", 7, True)],
    "all on one rank of two": [("a", 0, False), ("a", 1, True), ("a", 4, True)],
    # with 2 ranks x 2 segments rank 0 meets "a" first, rank 1 "b"
    "two ties met in different order": [("a", 0, False), ("b", 2, False), ("b", 5, True), ("a", 7, True)],
}


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("P, fold, zero, precision", [(*FOLDS[0], 1, "fp32"), (*FOLDS[1], 0, "fp32"), (*FOLDS[2], 0, "fp32"),
                                                      (*FOLDS[2], 1, "fp32"), (*FOLDS[2], 1, "bf16"), (*FOLDS[3], 1, "fp32"),
                                                      (*FOLDS[4], 1, "fp32")])
def test_ties_train_as_in_one_process(P, fold, ties, zero, precision):
    def job(P, fold, ties, zero, precision):
        config = ds_config(4, zero, precision, clip=0.5, fold=fold, accumulate="fp32" if precision == "bf16" else None)
        engine = build(False, config, P, 8, layers=with_ties(*ties))
        batches = data(engine.grid.get_data_parallel_rank(), precision)
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        return whole_model(engine.module), losses

    weights, losses = RankPool.of(P).run(job, P, fold, TIES[ties], zero, precision)[0]
    expected, alone = train_alone(8, 4, 1, 3, clip=0.5, layers=with_ties(*TIES[ties]))
    difference, size = largest_difference(weights, expected)
    if precision == "fp32":  # Adam lifts the rounding of bf16 to the size of a step
        assert difference <= size * 1e-6, (difference, size)
    assert losses == pytest.approx(alone, rel=1e-6 if precision == "fp32" else 2e-2)


class Biased(Tied):
    """Tied with a bias that only one of its users adds, and that TiedLayerSpec's default attribute does not name."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(self.weight.shape[0]))

    def forward(self, x):
        return super().forward(x) + self.bias


def biased_head(module, x):
    return tied_head(module, x) + 2 * module.bias


def test_the_whole_module_is_tied_not_only_its_weight():
    def layers():
        specs = make_layers(8)
        specs[0], specs[7] = TiedLayerSpec("a", Biased), TiedLayerSpec("a", Biased, forward_fn=biased_head)
        return specs

    def job(layers):
        engine = build(False, ds_config(4, 1, clip=0.5, fold=AIAO), 2, 8, layers=layers)
        batches = data(0)
        for _ in range(3):
            engine.train_batch(batches)
        return whole_model(engine.module)

    expected, _ = train_alone(8, 4, 1, 3, clip=0.5, layers=layers())
    difference, size = largest_difference(RankPool.of(2).run(job, layers())[0], expected)
    assert difference <= 1e-6 * size


class Marked(Block):
    """A block of another class, for ``checkpointable_layers``."""


def run_checkpointed(P, fold, recompute, **kwargs):
    """One step: (weights, how often each layer of this rank ran)."""
    calls = []
    torch.manual_seed(0)
    layers = [LayerSpec(Marked if index in (1, 2, 5) else Block) for index in range(8)]
    engine = build(False, ds_config(4, fold=fold, pipeline=recompute), P, 8, layers=layers, **kwargs)
    for local, index in enumerate(engine.module.global_layer_indices):
        engine.module.forward_funcs[local].register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    engine.train_batch(data(0))
    counts = {index: calls.count(index) for index in engine.module.global_layer_indices}
    return whole_model(engine.module), counts


@folds
def test_only_checkpointable_layers_are_recomputed(P, fold):
    def job(P, fold):
        plain, once = run_checkpointed(P, fold, {})
        chosen, counts = run_checkpointed(P, fold, {"activation_checkpoint_interval": 1}, checkpointable_layers=["Marked"])
        return largest_difference(plain, chosen)[0], once, counts

    for difference, once, counts in RankPool.of(P).run(job, P, fold):
        assert difference == 0
        assert once == dict.fromkeys(counts, 4)
        assert counts == {index: 8 if index in (1, 2, 5) else 4 for index in counts}


@pytest.mark.parametrize("reentrant", [True, False])
@folds
def test_a_checkpoint_function_of_the_users_own(P, fold, reentrant):
    def job(P, fold, reentrant):
        served = [0]

        def own(function, *inputs):
            served[0] += 1
            return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=reentrant)

        plain, _ = run_checkpointed(P, fold, {})
        own_weights, counts = run_checkpointed(P, fold, {"activation_checkpoint_interval": 2}, activation_checkpoint_func=own)
        return largest_difference(plain, own_weights)[0], served[0], counts

    blocks = {1: 4, 2: 2, 4: 2}[P]  # of up to two layers, on each rank
    for difference, served, counts in RankPool.of(P).run(job, P, fold, reentrant):
        assert difference == 0 and served == 4 * blocks
        assert set(counts.values()) == {8}, "every layer runs once forward and once more for the backward"

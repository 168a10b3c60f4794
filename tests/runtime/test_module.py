"""Placement, construction, ties, topologies and layer files of the folded module."""

import pytest
from models import LayerSpec, Tied, TiedLayerSpec, ds_config, tied_head
from pool import RankPool
from torch import nn


def fold(segments=2, **more):
    return {"ds_fold": {"schedule": "aiao", "segments": segments, **more}}


def make(layers, P, config, **kwargs):
    import ds_fold
    return ds_fold.PipelineModule(layers, num_stages=P, loss_fn=nn.MSELoss(), config=config, **kwargs)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("P", [2, 3])
def test_every_layer_is_built_exactly_once(P, v):
    """n in 1..13 layers over P x v, by every method: each layer on one rank, no empty chunk, or one clear error."""
    def job(P, v, method):
        from ds_fold import ConfigError
        found = {}
        for n in range(1, 14):
            try:
                net = make([LayerSpec(nn.Linear, 2, 2) for _ in range(n)], P, fold(v), partition_method=method)
            except ConfigError as error:
                assert n < P * v and f"{n} layers cannot fill ds_fold.segments={v} x {P}" in str(error)
                continue
            assert n >= P * v and all(a < b for a, b in zip(net.parts, net.parts[1:]))
            assert len(net.forward_funcs) == len(net.global_layer_indices)
            found[n] = sorted(int(name.split(".")[0]) for name, _ in net.named_parameters())
        return found

    for method in ("uniform", "parameters", "type:linear"):  # a task each: a module's process groups go when it is over
        ranks = RankPool.of(P).run(job, P, v, method)
        for n in ranks[0]:
            built = [i for rank in ranks for i in set(rank[n])]
            assert sorted(built) == list(range(n)), (n, method)


def test_layers_go_round_the_ranks():
    def job():
        net = make([LayerSpec(nn.Linear, 2, 2) for _ in range(9)], 2, fold(2))
        return net.parts, net.chunk_bounds(), net.global_layer_indices, [net.stage_owner(i) for i in range(9)]

    parts, bounds, indices, owners = RankPool.of(2).run(job)[1]
    assert parts == [0, 2, 4, 6, 9] and bounds == [(2, 4), (6, 9)] and indices == [2, 3, 6, 7, 8]
    assert owners == [0, 0, 1, 1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("cuts,message", [([0, 1, 2, 9], "must be 5 ascending cuts from 0 to 9"), ([0, 1, 1, 5, 9], "5 ascending"),
                                          ([0, 2, 4, 6, 8], "from 0 to 9"), ([1, 2, 3, 4, 9], "from 0"),
                                          ("type", "partition='type' is not known"), ("type:nothing", "no valid layers")])
def test_wrong_partitions_are_refused_on_every_rank(cuts, message):
    def job():
        try:
            make([LayerSpec(nn.Linear, 2, 2) for _ in range(9)], 2, fold(2, partition=cuts))
        except (ValueError, RuntimeError) as error:
            return str(error)

    assert all(message in text for text in RankPool.of(2).run(job))


def test_explicit_cuts_and_functions_and_modules_in_the_list():
    def job():
        import torch
        layers = [nn.Linear(3, 3), torch.tanh, LayerSpec(nn.Linear, 3, 3), lambda x: x * 2, nn.ReLU()]
        net = make(layers, 2, fold(2, partition=[0, 2, 3, 4, 5]))
        return net.parts, len(net.forward_funcs), sorted(name for name, _ in net.named_parameters())

    zero, one = RankPool.of(2).run(job)
    assert zero == ([0, 2, 3, 4, 5], 3, ["0.bias", "0.weight"]) and one == ([0, 2, 3, 4, 5], 2, ["2.bias", "2.weight"])


def test_frozen_parameters_count_in_the_partition_and_building_for_it_draws_no_random_numbers():
    def job():
        import torch

        class Frozen(nn.Linear):
            def __init__(self, size):
                super().__init__(size, size)
                self.requires_grad_(False)

        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        net = make([LayerSpec(Frozen, s) for s in (10, 1, 1, 1, 1, 10)], 2, {}, partition_method="parameters")
        assert net.count_parameters() == [110, 2, 2, 2, 2, 110]
        torch.manual_seed(3)
        net.count_parameters()
        assert torch.equal(torch.rand(1), expected)
        return net.parts

    assert RankPool.of(2).run(job)[0] == [0, 3, 6]


def test_three_users_of_a_tied_weight_on_two_ranks():
    def job():
        import torch.distributed as dist
        layers = [LayerSpec(nn.Linear, 12, 12) for _ in range(8)]
        for i in (0, 3, 7):
            layers[i] = TiedLayerSpec("w", Tied, forward_fn=None if i == 0 else tied_head)
        layers[1] = TiedLayerSpec("a", Tied)  # a group of one rank
        net = make(layers, 2, fold(2))
        return sorted(net.tied_comms), [sorted(c["ranks"]) for _, c in sorted(net.tied_comms.items())], dist.get_rank()

    zero, one = RankPool.of(2).run(job)
    assert zero[:2] == (["a", "w"], [[0], [0, 1]]) and one[:2] == (["w"], [[0, 1]])


def test_a_wrong_config_is_one_message_on_every_rank_before_any_layer_is_built():
    def job():
        from ds_fold import ConfigError

        class Built(nn.Module):
            def __init__(self):
                raise AssertionError("a layer was built")

        layers = [LayerSpec(Built) for _ in range(8)]
        messages = []
        for block in ({"segmens": 2}, {"schedule": "aiao", "segments": 5}, {"schedule": "1f1b", "segments": 2}):
            try:
                make(layers, 2, {"ds_fold": block, "gradient_accumulation_steps": 4})
            except ConfigError as error:
                messages.append(str(error))
        return messages

    ranks = RankPool.of(2).run(job)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 3
    assert "did you mean 'segments'" in ranks[0][0] and "8 layers cannot fill" in ranks[0][1] and "use segments=1" in ranks[0][2]


@pytest.mark.parametrize("axes", [["pipe", "data"], ["data", "pipe"]])
def test_any_order_of_axes(axes):
    def job():
        from deepspeed.runtime.pipe.topology import ProcessTopology
        from models import build, data, whole_model
        engine = build(False, ds_config(4, fold={"schedule": "aiao", "segments": 2}), None, 8,
                       topology=ProcessTopology(axes=axes, dims=[2, 2]))
        batches = data(engine.grid.get_data_parallel_rank())
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        return losses, {n: w.tolist() for n, w in whole_model(engine.module).items()}

    losses, weights = RankPool.of(4).run(job)[0]
    from models import train_alone
    alone, alone_losses = train_alone(8, 4, 2, steps=3)
    assert losses == pytest.approx(alone_losses, rel=1e-5)
    for name, w in alone.items():
        assert w.numpy() == pytest.approx(__import__("numpy").array(weights[name]), abs=1e-5)


def test_forward_of_the_whole_model_where_it_lies_on_one_rank():
    def job():
        import torch
        from models import make_layers
        net = make(make_layers(6), 1, fold(3), seed_layers=True)
        x = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
        y = net(x)
        for layer in net.forward_funcs:
            x = layer(x)
        return torch.equal(x, y)

    assert RankPool.of(1).run(job) == [True]

"""A module that is cut by a profile: the same on every rank, trained to the same weights, and refused by one message."""

import pytest
import torch.distributed as dist
from models import MICRO_BATCH, Block, LayerSpec, build, data, ds_config, largest_difference, make_layers, train_alone, whole_model
from pool import RankPool
from torch import nn

LAYERS = 10


def measured(path):
    """Rank 0 measures the model that the tests train."""
    from ds_fold.plan.profile import profile_layers
    if dist.get_rank() == 0:
        x, y = next(data(0))
        profile_layers(make_layers(LAYERS), x, y, nn.MSELoss(), repeats=3).save(path)
    dist.barrier()


@pytest.mark.parametrize("fold", [{"schedule": "aiao", "segments": 2, "partition": {"method": "throughput"}, "recompute": "auto"},
                                  {"schedule": "hippie"}], ids=lambda fold: fold["schedule"])
def test_a_measured_placement_trains_the_same_weights(fold, tmp_path):
    def job(path):
        measured(path)
        engine = build(False, ds_config(4, 1, fold={**fold, "profile": path}), 2, LAYERS)
        batches = data(0)
        losses = [float(engine.train_batch(batches)) for _ in range(4)]
        return whole_model(engine.module), losses, engine.module.parts, engine.module.recomputed

    zero, one = RankPool.of(2).run(job, str(tmp_path / "profile.json"))
    assert zero[2:] == one[2:] and len(zero[2]) == 2 * fold.get("segments", 1) + 1
    weights, losses = train_alone(LAYERS, 4, 1, steps=4)
    difference, size = largest_difference(zero[0], weights)
    assert difference <= 1e-6 * size and zero[1] == pytest.approx(losses, rel=1e-6)


def test_what_cannot_be_placed_is_one_message_on_every_rank(tmp_path):
    def job(folder):
        import ds_fold
        from ds_fold.plan import Cluster, Link, Profile
        profile, small, few = (f"{folder}/{name}.json" for name in ("profile", "small", "few"))
        if dist.get_rank() == 0:
            Profile.uniform(6, 0.001, parameter_bytes=1e6, activation_bytes=1e6, micro_batch_size=MICRO_BATCH).save(profile)
            Cluster(hosts=2, inter_host=Link(gbit_per_s=1), device_memory_bytes=1e6).save(small)
            Cluster(hosts=1, inter_host=Link(gbit_per_s=1)).save(few)
        dist.barrier()

        def refusal(layers=6, size=MICRO_BATCH, **block):
            config = ds_config(4, 1, fold={"partition": {"method": "memory"}, "profile": profile, **block},
                               train_micro_batch_size_per_gpu=size)
            with pytest.raises(ds_fold.ConfigError) as error:
                ds_fold.PipelineModule([LayerSpec(Block)] * layers, num_stages=2, loss_fn=nn.MSELoss(), config=config)
            return str(error.value)

        return [refusal(7), refusal(size=3), refusal(cluster=small), refusal(cluster=few), refusal(profile=f"{folder}/gone.json")]

    zero, one = RankPool.of(2).run(job, str(tmp_path))
    assert zero == one
    for message, part in zip(zero, ("it has 6 layers, the model 7; measure this model", "micro-batches of 2 were measured, but",
                                    "too little) with 0 of 6 layers recomputed", "need 2 ranks, but the cluster has 1 hosts",
                                    "gone.json: cannot be read")):
        assert part in message

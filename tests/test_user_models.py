"""As a new user would try it: three kinds of trainers for DeepSpeed's pipelines, unchanged, each with stock DeepSpeed and under a
ds_fold block. Losses and weights are the same to the last bit."""

import functools

import pytest
import torch
from models import largest_difference, seed_cpu, whole_model
from test_dropin import AIAO, OVERLAP
from test_habits import Adapted, under
from torch import nn
from torch.nn import functional as F


def assert_same_losses(trainer, fold, *args, **kwargs):
    losses, weights = under(None, trainer, *args, **kwargs)[0]
    mine, my_weights = under(fold, trainer, *args, **kwargs)[0]
    assert losses == mine and len(set(losses)) > 1
    assert largest_difference(weights, my_weights)[0] == 0


# a convolutional net on images --------------------------------------------------------------------------------------------------


class Images(torch.utils.data.Dataset):
    """CIFAR's shape, made up: 3 x 32 x 32 and one of 10 classes."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        label = index % 10
        image = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        return image + 0.1 * label, label


def image_trainer(config, P):
    """A list of torch's layers and lambdas, default partition, ``training_data``, ``train_batch()`` without an iterator."""
    import deepspeed
    from deepspeed.pipe import PipelineModule
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
                             nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    head = nn.Sequential(nn.Dropout(0.2), nn.Linear(12 * 16, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))
    net = PipelineModule(layers=[*features, lambda x: torch.flatten(x, 1), *head], num_stages=P, loss_fn=nn.CrossEntropyLoss(),
                         seed_layers=True, seed_fn=lambda seed: seed_cpu(int(seed)))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=[p for p in net.parameters() if p.requires_grad],
                                      training_data=Images(), config=config)
    losses = [float(engine.train_batch()) for _ in range(4)]
    return losses, whole_model(net)


def test_images_with_layers_and_lambdas_and_training_data():
    assert_same_losses(image_trainer, {**OVERLAP, "data_workers": 0}, zero=1)


# a language model with (hidden, position_ids, mask) through every layer -----------------------------------------------------------

VOCABULARY, HIDDEN, SEQUENCE = 17, 16, 6


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, inputs):
        tokens, position_ids, mask = inputs
        return self.word_embeddings(tokens), position_ids, mask


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(SEQUENCE, HIDDEN)

    def forward(self, inputs):
        hidden, position_ids, mask = inputs
        return hidden + self.positions(position_ids), position_ids, mask


class Attention(nn.Module):
    """A causal layer whose mask says what must not be looked at."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs):
        hidden, position_ids, mask = inputs
        assert mask.dtype == torch.bool and position_ids.dtype == torch.int64
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) / HIDDEN**0.5).masked_fill(mask, -1e4)
        return hidden + self.out(scores.softmax(-1) @ v), position_ids, mask


def logits(embedding, inputs):
    return inputs[0] @ embedding.word_embeddings.weight.t()


def masked_loss(outputs, labels):
    targets, loss_mask = labels
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * loss_mask.flatten()).sum() / loss_mask.sum()


def text_batch(tokens):
    """What a trainer's batch_fn makes of an item: ((tokens, position_ids, mask), (labels, loss_mask))."""
    rows = tokens.shape[0]
    causal = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool().expand(rows, -1, -1).contiguous()
    position_ids = torch.arange(SEQUENCE).expand(rows, -1).contiguous()
    return (tokens[:, :-1], position_ids, causal), (tokens[:, 1:], (tokens[:, 1:] != 0).float())


def text_trainer(config, P, tied):
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    class GPT2ModelPipe(PipelineModule):
        """The name by which DeepSpeed knows that the last tensor is a mask."""

    first, last = LayerSpec(Embedding), [lambda x: x[0], LayerSpec(nn.Linear, HIDDEN, VOCABULARY)]
    if tied:
        first = TiedLayerSpec("embed", Embedding, tied_weight_attr="word_embeddings.weight")
        last = [TiedLayerSpec("embed", Embedding, forward_fn=logits, tied_weight_attr="word_embeddings.weight")]
    layers = [first, LayerSpec(Positions), *(LayerSpec(Attention) for _ in range(6)), *last]
    torch.manual_seed(0)
    net = GPT2ModelPipe(layers, num_stages=P, loss_fn=masked_loss, partition_method="type:Attention|Linear|Embedding",
                        seed_layers=True, seed_fn=lambda seed: seed_cpu(int(seed)))
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)
    engine.set_batch_fn(text_batch)
    generator = torch.Generator().manual_seed(5)
    items = iter([torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator) for _ in range(20)])
    losses = [float(engine.train_batch(data_iter=items)) for _ in range(3)]
    losses.append(float(engine.eval_batch(items)))
    losses.append(float(engine.train_batch(data_iter=items)))
    return losses, whole_model(net)


def test_text_with_position_ids_and_a_mask_through_every_layer():
    assert_same_losses(text_trainer, {**AIAO, "overlap_grad_reduce": "layer"}, False, zero=1)


def test_text_with_a_tied_embedding():
    """The sum over the two users of the weight has another order."""
    losses, weights = under(None, text_trainer, True, zero=1)[0]
    mine, my_weights = under(OVERLAP, text_trainer, True, zero=1)[0]
    difference, size = largest_difference(weights, my_weights)
    assert mine == pytest.approx(losses, rel=1e-6) and difference <= 1e-6 * size


# a diffusion model whose shapes change with every step ----------------------------------------------------------------------------


class TextStates(nn.Module):
    """The frozen first layer: it prepares what all others take."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, HIDDEN)
        self.requires_grad_(False)

    def forward(self, inputs):
        noisy, time, text = inputs
        return noisy, time, self.project(text)


class Denoiser(Adapted):

    def __init__(self):
        super().__init__(HIDDEN, 3)

    def forward(self, inputs):
        noisy, time, text = inputs
        mixed = noisy + text.mean(1, keepdim=True) + time.view(-1, 1, 1)
        return noisy + self.change(mixed), time, text


def diffusion_item(generator, length):
    latents = torch.randn(2, length, HIDDEN, generator=generator)
    noise = torch.randn(latents.shape, generator=generator)
    time = torch.rand(2, generator=generator)
    mixed = latents + time.view(-1, 1, 1) * (noise - latents)
    text = torch.randn(2, length // 2, 4, generator=generator)
    return (mixed, time, text), (noise - latents, torch.ones(2, 1, 1))


def diffusion_trainer(config, P, own_noise=False):
    """A partition by hand, a checkpoint function of its own, an optimizer from a callable, sizes by the step, evaluation with
    another number of micro-batches. With ``own_noise`` each pipeline rank draws noise of its own, as its data loader would."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    class ManualModule(PipelineModule):
        def __init__(self, *args, split=None, **kwargs):
            self.split = split
            super().__init__(*args, **kwargs)

        def _partition_layers(self, method="uniform"):
            if self.split is None or len(self.split) + 1 != self.num_stages:
                return super()._partition_layers("uniform")
            self.parts = [0, *self.split, len(self._layer_specs)]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def loss(output, labels):
        target, mask = labels
        return (F.mse_loss(output, target, reduction="none") * mask).mean()

    torch.manual_seed(0)
    layers = [TextStates(), *(Denoiser() for _ in range(6)), lambda x: x[0]]
    net = ManualModule(layers, num_stages=P, split=[3], loss_fn=loss, activation_checkpoint_interval=1,
                       activation_checkpoint_func=functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    parameters = [p for p in net.parameters() if p.requires_grad]
    config = {key: value for key, value in config.items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=config,
                                      optimizer=lambda given: torch.optim.AdamW(given, lr=1e-2, eps=1e-4))
    # the first and the last pipeline rank have to draw the same noise, unless labels travel with the inputs
    losses, generator = [], torch.Generator().manual_seed(7 + engine.stage_id * own_noise)
    for length in (4, 6, 10, 4):
        engine.reset_activation_shape()
        losses.append(float(engine.train_batch(iter([diffusion_item(generator, length) for _ in range(4)]))))
    engine.reset_activation_shape()
    losses.append(float(engine.eval_batch(iter([diffusion_item(generator, 8) for _ in range(3)]), num_micro_batches=3)))
    engine.reset_activation_shape()
    losses.append(float(engine.train_batch(iter([diffusion_item(generator, 8) for _ in range(4)]))))
    return losses, whole_model(net)


def test_diffusion_with_adapters_and_shapes_that_change():
    assert_same_losses(diffusion_trainer, OVERLAP, zero=1)


def test_noise_that_only_the_first_rank_drew_reaches_the_loss():
    losses, _ = under(None, diffusion_trainer, zero=1)[0]
    own_noise = functools.partial(diffusion_trainer, own_noise=True)
    assert under({**OVERLAP, "label_transport": True}, own_noise, zero=1)[0][0] == losses
    assert under(OVERLAP, own_noise, zero=1)[0][0] != losses

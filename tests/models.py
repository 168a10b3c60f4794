"""Small models, data and oracles: the same layers trained by stock DeepSpeed, by ds_fold, and by one plain process."""

import os
import sys
from contextlib import contextmanager
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

HIDDEN = 12
MICRO_BATCH = 2


class Block(nn.Module):
    """Residual block with odd sizes, so that shards cut parameters."""

    def __init__(self, hidden=HIDDEN, inner=2 * HIDDEN + 1):
        super().__init__()
        self.a = nn.Linear(hidden, inner)
        self.b = nn.Linear(inner, hidden)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Tied(nn.Module):
    """A matrix used as an embedding at one end and as a head at the other."""

    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, hidden) * 0.1)

    def forward(self, x):
        return x + x @ self.weight


def tied_head(module, x):
    return x @ module.weight.t()


def make_layers(count, tied=False):
    layers = [LayerSpec(Block) for _ in range(count)]
    if tied:
        layers[0] = TiedLayerSpec("embed", Tied)
        layers[-1] = TiedLayerSpec("embed", Tied, forward_fn=tied_head)
    return layers


# not 1e-8: Adam would lift rounding in gradients that are nearly zero to the size of a step
ADAM = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}


def ds_config(M, zero=0, dtype="fp32", clip=0.0, accumulate=None, checkpoint=0, fold=None, optimizer=None, **more):
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": M,
        "steps_per_print": 10**9,
        "optimizer": optimizer or {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "gradient_clipping": clip,
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 100000},
        "pipeline": {"activation_checkpoint_interval": checkpoint},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if accumulate:
        config["data_types"] = {"grad_accum_dtype": accumulate}
    if fold is not None:
        config["ds_fold"] = fold
    config.update(more)
    return config


def seed_cpu(seed):
    # DeepSpeed's own seeding visits every kind of device and formats a stack trace for each
    torch.default_generator.manual_seed(seed)


TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def data(replica, dtype="fp32", seed=100):
    generator = torch.Generator().manual_seed(seed + replica)
    while True:
        x = torch.randn(MICRO_BATCH, HIDDEN, generator=generator)
        yield x.to(TORCH_DTYPE[dtype]), (0.5 * x).to(TORCH_DTYPE[dtype])


def share(engine, batch, dtype="fp32", skip_steps=0):
    """This replica's part of one stream of ``batch`` items a step: the same step sees the same items under every topology."""
    replica, M = engine.grid.get_data_parallel_rank(), engine.micro_batches
    for index, item in enumerate(data(0, dtype)):
        if index >= skip_steps * batch and index % batch // M == replica:
            yield item


def to_universal(source: str, target: str) -> None:
    """DeepSpeed's ``ds_to_universal`` on a checkpoint folder."""
    from types import SimpleNamespace

    from deepspeed.checkpoint import ds_to_universal
    ds_to_universal.main(SimpleNamespace(input_folder=source, output_folder=target, num_extract_workers=1, num_merge_workers=1,
                                         keep_temp_folder=False, strict=True, inject_missing_state=True))


def whole_model(module):
    """name -> fp32 weights of the whole model, from all ranks; replicas must be equal bit by bit."""
    mine = {name: p.detach().float().clone() for name, p in module.named_parameters()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    model = {}
    for part in everyone:
        for name, weights in part.items():
            if name in model:
                assert torch.equal(model[name], weights), f"replicas differ: {name}"
            model[name] = weights
    return model


@contextmanager
def installed(config=None, argv=(), variable=None):
    """Within this context DeepSpeed's names fold, with these words on the command line and this DS_FOLD_CONFIG."""
    import ds_fold
    before = sys.argv
    sys.argv = ["train.py", *argv]
    if variable is not None:
        os.environ["DS_FOLD_CONFIG"] = variable
    ds_fold.install(config)
    try:
        yield
    finally:
        ds_fold.uninstall()
        sys.argv = before
        os.environ.pop("DS_FOLD_CONFIG", None)


def build(stock, config, P, count, tied=False, loss_fn=None, layers=None, **kwargs):
    """An engine over ``count`` layers on P pipeline ranks; ``stock`` says whose."""
    layers = make_layers(count, tied) if layers is None else layers
    kwargs = dict(num_stages=P, loss_fn=loss_fn or nn.MSELoss(), partition_method="uniform", seed_layers=True,
                  seed_fn=seed_cpu, **kwargs)
    torch.manual_seed(0)
    if stock:
        from deepspeed.pipe import PipelineModule
        module = PipelineModule(layers, **kwargs)
        engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    else:
        import ds_fold
        module = ds_fold.PipelineModule(layers, config=config, **kwargs)
        engine, *_ = ds_fold.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    return engine


def train(stock, config, P, count, steps=5, tied=False, dtype="fp32", **kwargs):
    """Train and return (weights of the whole model, losses, gradient norms)."""
    engine = build(stock, config, P, count, tied, **kwargs)
    batches = data(engine.grid.get_data_parallel_rank(), dtype)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(float(engine.train_batch(batches)))
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    weights = whole_model(engine.module)
    engine.destroy()
    return weights, losses, norms


def train_alone(count, M, D, steps=5, tied=False, clip=0.0, layers=None, batches=None):
    """The oracle: one process, no pipeline, plain torch; replicas one after another, gradients averaged."""
    torch.manual_seed(0)
    modules, functions, params = {}, [], {}
    for index, spec in enumerate(make_layers(count, tied) if layers is None else layers):
        seed_cpu(1234 + index)
        if isinstance(spec, TiedLayerSpec):
            layer = modules.setdefault(spec.key, None) or spec.build()
            modules[spec.key] = layer
            functions.append(layer if spec.forward_fn is None else partial(spec.forward_fn, layer))
            params.update({f"tied_modules.{spec.key}.{name}": p for name, p in layer.named_parameters()})
        else:
            layer = spec.build()
            functions.append(layer)
            params.update({f"{index}.{name}": p for name, p in layer.named_parameters()})
    optimizer = torch.optim.AdamW(list(params.values()), **ADAM)
    trainable = [p for p in params.values() if p.requires_grad]
    iterators, losses = batches or [data(d) for d in range(D)], []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for iterator in iterators:
            for _ in range(M):
                x, y = next(iterator)
                for function in functions:
                    x = function(x)
                loss = nn.functional.mse_loss(x, y)
                if loss.requires_grad:
                    (loss / (M * D)).backward()
                total += float(loss.detach()) / (M * D)
        for p in trainable:  # one that got no gradient counts as zero
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if clip and trainable:
            torch.nn.utils.clip_grad_norm_(list(params.values()), clip)
        optimizer.step()
        losses.append(total)
    return {name: p.detach().clone() for name, p in params.items()}, losses


def largest_difference(a, b):
    """(max |a - b|, max |a|) over two dicts of weights with the same names."""
    assert set(a) == set(b), set(a) ^ set(b)
    return max(float((a[n] - b[n]).abs().max()) for n in a), max(float(a[n].abs().max()) for n in a)

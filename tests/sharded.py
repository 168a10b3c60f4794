"""The sharded optimizer on a list of layers, and its oracle: one process of plain torch."""

from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from models import ADAM, TORCH_DTYPE, Block, data, seed_cpu
from torch import nn

from ds_fold.runtime import collectives
from ds_fold.runtime.sharded_optimizer import ShardedOptimizer

LAYERS = 4


@contextmanager
def bytes_sent_to_replicas():
    """The bytes of each message that reductions and gathers post within it."""
    sent, post = [], collectives._Exchange._post

    def noting(exchange):
        sent.extend(round.sent.nbytes for round in exchange._rounds)
        return post(exchange)

    with mock.patch.object(collectives._Exchange, "_post", noting):
        yield sent


FP16 = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
SCALER = {"init_scale": 2.0**18, "scale_window": 2, "min_scale": 1, "delayed_shift": 1, "consecutive_hysteresis": False}


class Model:
    """Layers in v segments with the weights that the stock engine starts from, and their optimizer."""

    def __init__(self, v, layers=None, dtype="fp32", stage=1, groups=None, inner=None, by_layer=False, **options):
        self.layers = [] if layers is None else layers
        for index in range(LAYERS if layers is None else 0):
            seed_cpu(1234 + index)
            self.layers.append(Block())
        for layer in self.layers:
            layer.to(TORCH_DTYPE[dtype])
        count = len(self.layers)
        self.cuts = [count * k // v for k in range(v + 1)]
        self.names = {}
        for index, layer in enumerate(self.layers):
            for name, p in layer.named_parameters():
                self.names.setdefault(p, f"{index}.{name}")
        trainable = [p for p in self.names if p.requires_grad]
        self.inner = (inner or (lambda params: torch.optim.AdamW(params, **ADAM)))(groups(trainable) if groups else trainable)
        self.v, self.dtype = v, dtype
        segments = [[p for layer in self.segment(k) for p in layer.parameters()] for k in range(v)]
        if dtype == "fp16":
            options.update(dynamic_loss_scale=True, dynamic_loss_args=SCALER)
        if by_layer:
            options["layer_of"] = {p: int(name.split(".")[0]) for p, name in self.names.items()}
        self.optimizer = ShardedOptimizer(self.inner, segments, param_names=self.names, data_parallel_group=dist.group.WORLD,
                                          stage=stage, chunk_bytes=404, **options)
        self.skipped = 0

    def segment(self, k):
        return self.layers[self.cuts[k]:self.cuts[k + 1]]

    def loss(self, item):
        x, y = item
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)

    def launch_all(self):
        for k in reversed(range(self.v)):
            self.optimizer.launch_reduce(k)

    def begin_all(self):
        for k in reversed(range(self.v)):
            self.optimizer.begin_backward(k)

    def step(self, items):
        """One step with whole-model backwards; returns the mean loss over the micro-batches."""
        for k in range(self.v):
            self.optimizer.wait_params(k)
        self.begin_all()
        total = 0.0
        for item in items:
            loss = self.loss(item)
            if item is items[-1] and self.v == 1:
                self.optimizer.begin_last_backward(0)
            self.optimizer.backward(loss / len(items))
            total += float(loss.detach())
        self.launch_all()
        self.optimizer.step()
        self.skipped += self.optimizer.overflow
        return total / len(items)

    def step_by_segments(self, items, observe=lambda k: None):
        """One step in AIAO order: all micro-batches through a segment, forward and then backward."""
        M, inputs, outputs = len(items), [[x for x, _ in items]], []
        for k in range(self.v):
            self.optimizer.wait_params(k)
            if k:
                inputs.append([y.detach().requires_grad_() for y in outputs[-1]])
            outputs.append([])
            for x in inputs[k]:
                for layer in self.segment(k):
                    x = layer(x)
                outputs[-1].append(x)
        losses = [nn.functional.mse_loss(x, y) for x, (_, y) in zip(outputs.pop(), items)]
        for k in reversed(range(self.v)):
            self.optimizer.begin_backward(k)
            for m in range(M):
                if m == M - 1:
                    self.optimizer.begin_last_backward(k)
                if k == self.v - 1:
                    self.optimizer.backward(losses[m] / M)
                else:
                    outputs[k][m].backward(inputs[k + 1][m].grad)
            observe(k)
            self.optimizer.launch_reduce(k)
        self.optimizer.step()
        return sum(float(loss.detach()) for loss in losses) / M

    def weights(self):
        """name -> fp32 weights, whole; replicas must hold the same bits."""
        self.optimizer.flush()
        mine = {name: p.detach().float().clone() for p, name in self.names.items()}
        for name, weights in mine.items():
            others = weights.clone()
            dist.broadcast(others, 0)
            assert torch.equal(others, weights), f"replicas differ: {name}"
        return mine

    def close(self):
        self.optimizer.destroy()


def batches_of(M, dtype="fp32", replica=None):
    stream = data(dist.get_rank() if replica is None else replica, dtype)
    while True:
        yield [next(stream) for _ in range(M)]


def plain(M, steps, clip=0.0, layers=None):
    """The oracle in fp32: torch's AdamW on the same layers, replicas one after another."""
    model_layers = layers or [(seed_cpu(1234 + i), Block())[1] for i in range(LAYERS)]
    named = {}
    for i, layer in enumerate(model_layers):
        for name, p in layer.named_parameters():
            named.setdefault(p, f"{i}.{name}")
    params = [p for p in named if p.requires_grad]
    optimizer, D = torch.optim.AdamW(params, **ADAM), dist.get_world_size()
    streams = [batches_of(M, replica=d) for d in range(D)]
    for _ in range(steps):
        sums = [torch.zeros_like(p) for p in params]
        for stream in streams:
            for p in params:
                p.grad = torch.zeros_like(p)
            for x, y in next(stream):
                for layer in model_layers:
                    x = layer(x)
                (nn.functional.mse_loss(x, y) / M).backward()
            for total, p in zip(sums, params):
                total += p.grad / D
        for total, p in zip(sums, params):
            p.grad = total
        if clip:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return {name: p.detach() for p, name in named.items()}

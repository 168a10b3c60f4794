"""Layers whose compute takes a set time while the processor sleeps; weights, activations and gradients are real.

    y = x * (1 + head) + mean(tail)        head: as many weights as x has features; tail: all others

A layer may pass on fewer features than it gets (the first of them), and keep more for its backward than its input.

The time of a forward or a backward includes its real work, which is kept small so that two cores can be many ranks: the tail is
read once a step, and its gradient, the same for all its weights, is summed over the micro-batches as one number and becomes a
tensor in the step's last backward. What is trained is exact and can be compared between schedules, and all bytes are reduced.
"""

import time
from typing import List, Optional, Tuple

import torch
from torch import nn


class Live:
    """How many forwards of layers wait for their backward on this rank."""

    def __init__(self):
        self.now = self.peak = 0

    def forward(self) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)

    def backward(self) -> None:
        self.now -= 1


class EmulatedLayer(nn.Module):
    """A layer of set cost.

    Args:
        index: place in the model; the initial weights depend on it alone.
        features: of the inputs, [items, features] fp32.
        weights: number of fp32 weights, more than ``features``.
        forward_s: seconds of a forward; a backward takes twice as long.
        micro_batches: backwards of a step; the last of them brings the tail's gradient.
        live: counts this layer's activations.
        out_features: of the outputs, at most ``features``; default: as many.
        kept_bytes: what is kept for the backward besides the input, never read.
    """

    def __init__(self, index: int, features: int, weights: int, forward_s: float, micro_batches: int, live: Live,
                 out_features: Optional[int] = None, kept_bytes: int = 0):
        super().__init__()
        if weights <= features:
            raise ValueError(f"weights={weights} must be more than features={features}")
        generator = torch.Generator().manual_seed(index)
        self.index, self.forward_s, self.micro_batches, self.live = index, forward_s, micro_batches, live
        self.head = nn.Parameter(0.1 * torch.randn(features, generator=generator))
        self.tail = nn.Parameter(0.1 * torch.randn(weights - features, generator=generator))
        self.out_features, self.kept_bytes = out_features or features, kept_bytes
        self._mean: Optional[torch.Tensor] = None  # of the tail, in this step
        self._backwards, self._tail_gradient = 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Emulated.apply(x, self.head, self.tail, self)


class _Emulated(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, head, tail, layer):
        end = time.perf_counter() + layer.forward_s
        # untouched memory: it counts, and costs nothing
        kept = [torch.empty(layer.kept_bytes, dtype=torch.uint8)] if layer.kept_bytes else []
        ctx.save_for_backward(x, head, *kept)
        ctx.layer = layer
        layer.live.forward()
        if layer._mean is None:
            layer._mean = tail.mean()
        y = torch.addcmul(x, x, head)[:, :layer.out_features] + layer._mean
        _sleep_until(end)
        return y

    @staticmethod
    def backward(ctx, grad):
        layer = ctx.layer
        x, head, *_ = ctx.saved_tensors  # which may take a forward: not part of the backward's time
        end = time.perf_counter() + 2 * layer.forward_s
        grad = nn.functional.pad(grad, (0, x.shape[1] - grad.shape[1]))
        layer.live.backward()
        layer._tail_gradient += float(grad.sum()) / len(layer.tail)
        layer._backwards += 1
        to_tail = None
        if layer._backwards == layer.micro_batches:
            to_tail = torch.full_like(layer.tail, layer._tail_gradient)
            layer._mean, layer._backwards, layer._tail_gradient = None, 0, 0.0
        to_x, to_head = torch.addcmul(grad, grad, head), (grad * x).sum(0)
        _sleep_until(end)
        return to_x, to_head, to_tail, None


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


def batch_of(replica: int, micro_batches: int, features: int) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches (inputs, targets) of a step, one item each."""
    generator = torch.Generator().manual_seed(1000 + replica)
    inputs = torch.randn(micro_batches, 1, features, generator=generator)
    return [(x, 0.5 * x) for x in inputs]

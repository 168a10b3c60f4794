"""What one micro-batch holds on one chunk, and how a received tensor becomes part of its graph."""

from typing import List, Optional, Tuple

import torch

from .channels import Message, MessageSpec


class Slot:
    """Everything that one micro-batch holds on one chunk."""
    __slots__ = ("inputs", "input_spec", "input_grads", "outputs", "output_grads", "labels", "loss")

    def __init__(self):
        self.inputs: Optional[Message] = None
        self.input_spec: Optional[MessageSpec] = None
        self.input_grads: List[Optional[torch.Tensor]] = []
        self.outputs: Optional[Message] = None
        self.output_grads: Optional[Tuple[torch.Tensor, ...]] = None
        self.labels = None
        self.loss: Optional[torch.Tensor] = None


class Received(torch.autograd.Function):
    """Makes a received tensor part of the graph: not a leaf, so that layers may work on it in place, and without a copy.
    Its gradient goes to ``sink[index]``."""

    @staticmethod
    def forward(ctx, anchor, tensor, sink, index):
        ctx.sink, ctx.index = sink, index
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.sink[ctx.index] = grad
        return None, None, None, None

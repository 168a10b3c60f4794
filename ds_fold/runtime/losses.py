"""Losses over micro-batches, replicas and pipeline ranks: tensors of one number, or lists of them."""

from typing import List, Union

import torch
import torch.distributed as dist

Loss = Union[torch.Tensor, List[torch.Tensor]]


def add(total, value) -> Loss:
    """Running sum; ``total`` is None at first. Starts from zeros, as DeepSpeed does."""
    if torch.is_tensor(value):
        return (torch.zeros_like(value) if total is None else total) + value
    return [add(None if total is None else total[i], part) for i, part in enumerate(value)]


def average(losses: List[Loss], group, replicas: int) -> Loss:
    """Mean over micro-batches (the list) and over the ``replicas`` ranks of ``group``, in the form of one loss."""
    total = None
    for loss in losses:
        total = add(total, loss)
    parts = [part / len(losses) for part in (total if isinstance(total, list) else [total])]
    if replicas > 1:
        for part in parts:
            dist.all_reduce(part, group=group)
            part /= replicas
    return parts if isinstance(total, list) else parts[0]


def broadcast(loss: Loss, source: int, group, device: torch.device) -> Loss:
    """The loss that rank ``source`` has on all ranks of ``group``, in fp32: first its form, then its values."""
    mine = dist.get_rank() == source
    parts = [part.float() for part in (loss if isinstance(loss, list) else [loss])] if mine else []
    form = [int(isinstance(loss, list)), len(parts), parts[0].dim()] if mine else [0, 0, 0]
    header = torch.tensor(form, device=device)
    dist.broadcast(header, source, group=group)
    is_list, count, dims = header.tolist()
    values = torch.stack([part.reshape(()) for part in parts]) if mine else torch.zeros(count, device=device)
    dist.broadcast(values, source, group=group)
    parts = [value.reshape([1] * dims) for value in values]
    return parts if is_list else parts[0]

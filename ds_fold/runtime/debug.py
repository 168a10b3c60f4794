"""Debug mode: memory that must not be read is NaN, memory in flight is watched, replicas compare what they launch, and a batch may
leave nothing behind.

The numbers are the same. It costs a copy of what is in flight, a checksum of it at launch and wait, and an exchange between the
replicas before each launch, since gloo aborts a process whose peer launched something of another size.
"""

import zlib
from typing import Callable, Dict, Iterable, Iterator, List, Optional

import torch
import torch.distributed as dist

from .buckets import Bucket
from .channels import Channel, Message, TensorSpec
from .collectives import CHUNK_BYTES, Pending, Replicas, duplicate_group
from .sharded_optimizer import ShardedOptimizer

#: each 16 bits of poison: a NaN in fp16, bf16, fp32 and fp64, and not the one that processors make of inf - inf
_POISON = -2


@torch.no_grad()
def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor with poison, where its dtype has NaN; returns it."""
    if _has_nan(tensor):
        tensor.view(-1).view(torch.int16).fill_(_POISON)
    return tensor


def count_poison(tensor: torch.Tensor) -> int:
    """How many elements are poison; a NaN that was computed from other values is none."""
    if not _has_nan(tensor) or tensor.numel() == 0:
        return 0
    words = tensor.detach().contiguous().view(-1).view(torch.int16).view(tensor.numel(), -1)
    return int((words == _POISON).all(1).sum())


def _has_nan(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1


def _checksum(tensor: torch.Tensor) -> int:
    # a copy: memory that numpy has seen can never be resized
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).clone().cpu().numpy())


def _check_arrived(what: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        missing = count_poison(tensor)
        if missing:
            raise RuntimeError(f"debug: {what} is over, but {missing} of {tensor.numel()} elements have not arrived")


def _watch(what: str, read: Callable[[], object]) -> Callable[[], None]:
    """A check that ``read()`` still returns what it returns now."""
    before = read()

    def check():
        if read() != before:
            raise RuntimeError(f"debug: {what} was written while in flight, between its launch and its wait")

    return check


class CheckedReplicas(Replicas):
    """Replicas that compare what they launch, and whose buffers cannot be used between a launch and its wait unnoticed.

    What is received lands in a buffer of its own and is copied at the wait: memory read too early is NaN however fast the
    transfer was.
    """

    def __init__(self, group: dist.ProcessGroup, chunk_bytes: int = CHUNK_BYTES):
        super().__init__(group, chunk_bytes)
        self._control = duplicate_group(group, "gloo") if self.size > 1 else None
        self._agreed: List[str] = []  # what all replicas have launched, since the last optimizer step
        self._landings: List[torch.Tensor] = []  # of the reduce-scatter that is being launched
        #: what a buffer holds, for messages
        self.name_of: Callable[[torch.Tensor], str] = lambda flat: "a tensor"

    def agree(self, what: str) -> None:
        """Raises RuntimeError on all replicas if not all of them call it with the same ``what``."""
        if self._control is not None:
            everyone: List[Optional[str]] = [None] * self.size
            dist.all_gather_object(everyone, what, group=self._control)
            if len(set(everyone)) > 1:
                after = f"after {self._agreed[-1]}" if self._agreed else "first of all"
                differ = "; ".join(f"rank {rank} launches {entry}" for rank, entry in zip(self._ranks, everyone))
                raise RuntimeError(f"debug: replicas launch different collectives. They agreed on {len(self._agreed)} since the "
                                   f"last optimizer step began; then, {after}, {differ}")
        self._agreed.append(what)

    def begin_step(self) -> None:
        """The optimizer's step begins: all replicas have launched all reductions."""
        self.agree("the optimizer step")
        self._agreed = self._agreed[-1:]

    def _launch(self, kind: str, flat: torch.Tensor) -> str:
        what = f"the {kind} of {self.name_of(flat)}"
        self.agree(f"{what}, {flat.numel()} x {str(flat.dtype).replace('torch.', '')}")
        return what

    def _landing(self, like: torch.Tensor) -> torch.Tensor:
        self._landings.append(poison(super()._landing(like)))
        return self._landings[-1]

    def reduce_scatter(self, flat: torch.Tensor) -> Pending:
        what = self._launch("reduce-scatter", flat)
        check = _watch(f"the gradient in {what}", lambda: _checksum(flat))
        pending = super().reduce_scatter(flat)
        landings, self._landings = self._landings, []

        def before_result():
            check()
            _check_arrived(what, *landings)

        return pending.checked(before_result)

    @torch.no_grad()
    def all_reduce(self, flat: torch.Tensor) -> Pending:
        what = self._launch("all-reduce", flat)
        landing = flat.clone()
        poison(flat)
        # by version, too: adding to NaN leaves it as it is
        check = _watch(f"the gradient in {what}", lambda: (flat._version, _checksum(flat)))
        return super().all_reduce(landing).checked(check).lands_in(flat)

    @torch.no_grad()
    def all_gather(self, flat: torch.Tensor, urgency: int = 0) -> Pending:
        what = self._launch("all-gather", flat)
        landing = flat.clone()
        for rank in range(self.size):
            if rank != self.rank:
                poison(self.part(flat, rank))
                poison(self.part(landing, rank))
        check = _watch(f"the buffer of {what}", lambda: _checksum(flat))

        def before_result():
            check()
            _check_arrived(what, landing)

        return super().all_gather(landing, urgency).checked(before_result).lands_in(flat)

    def destroy(self) -> None:
        super().destroy()
        if self._control is not None:
            dist.destroy_process_group(self._control)
            self._control = None


class DebugOptimizer(ShardedOptimizer):
    """The sharded optimizer with the same numbers, for finding faults. Beside what :class:`CheckedReplicas` do, full-size gradients
    are NaN from when they are given up until the next backward begins, and modules refuse to run on parameters in flight."""

    replicas_type = CheckedReplicas

    def __init__(self, *args, **kwargs):
        self._reducing: Optional[Bucket] = None  # whose reduction is being launched
        self._tied_checks: Dict[Bucket, Callable[[], None]] = {}
        self._guards: List = []
        super().__init__(*args, **kwargs)
        self.replicas.name_of = lambda flat: self._name(self._reducing or next(b for b in self.buckets if b.flat is flat))

    def _name(self, bucket: Bucket) -> str:
        first, last = (self.param_names[bucket.parameters[i]] for i in (0, -1))
        return f"bucket {self.buckets.index(bucket)} of segment {bucket.key.segment} ({first} .. {last})"

    def guard(self, module: torch.nn.Module) -> None:
        """Let every module raise where it runs before the gather of its own parameters was waited for."""
        bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

        def refuse(layer, _):
            for name, p in layer._parameters.items():
                bucket = bucket_of.get(p)
                if bucket is not None and (bucket.gather is not None or not bucket.whole):
                    state = "released" if bucket.gather is None else "being gathered"
                    raise RuntimeError(f"debug: {type(layer).__name__} runs with its {name} ({self.param_names[p]}) while "
                                       f"{self._name(bucket)} is {state}; it has to wait, or call engine.optimizer.flush(), first")

        for layer in module.modules():
            if any(p in bucket_of for p in layer._parameters.values()):
                self._guards.append(layer.register_forward_pre_hook(refuse))

    def left(self) -> Iterator[str]:
        """What a batch should not have left behind."""
        for bucket in self.buckets:
            for attribute in ("tied_sum", "reduction", "reduced", "undo"):
                if getattr(bucket, attribute) is not None:
                    yield f"{attribute} of {self._name(bucket)}"
            for p in bucket.parameters:
                if p.grad is not None:
                    yield f"gradient of {self.param_names[p]}"

    def _launch(self, bucket: Bucket) -> None:
        super()._launch(bucket)
        if bucket.tied_sum is not None:
            full = bucket.full  # which the sum changes, but not its version
            self._tied_checks[bucket] = _watch(f"the tied gradient in {self._name(bucket)}", lambda: full._version)

    def _reduce(self, bucket: Bucket) -> None:
        if bucket in self._tied_checks:
            self._tied_checks.pop(bucket)()
        accumulated, self._reducing = bucket.full, bucket
        super()._reduce(bucket)
        self._reducing = None
        if accumulated.dtype != self._wire_dtype(bucket):
            poison(accumulated)

    @torch.no_grad()
    def _finish(self, buckets: Iterable[Bucket]) -> None:
        finished = [(bucket, bucket.full) for bucket in buckets if bucket.reduction is not None or bucket.tied_sum is not None]
        super()._finish(bucket for bucket, _ in finished)
        for bucket, full in finished:
            if full.untyped_storage().data_ptr() != bucket.reduced.untyped_storage().data_ptr():
                poison(full)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.replicas.begin_step()
        super().step(closure)
        for bucket in self.buckets:
            if bucket.full is not None:
                poison(bucket.full)

    def destroy(self) -> None:
        super().destroy()
        while self._guards:
            self._guards.pop().remove()


class CheckedChannel(Channel):
    """A channel that refuses to send poison, and notices messages that were changed while in flight or have not arrived."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._sent: List = []  # of messages not waited for: edge, check

    def send(self, edge: str, message: Message) -> None:
        poisoned = sum(map(count_poison, message if isinstance(message, tuple) else (message, )))
        if poisoned:
            raise RuntimeError(f"debug: {edge} would send {poisoned} NaN from memory that was read before it had arrived, or "
                               f"after it was given up")
        super().send(edge, message)
        _, buffers = self._sending[-1]
        self._sent.append((edge, _watch(f"the message {edge}", lambda: [_checksum(buffer) for buffer in buffers])))

    def wait_send(self) -> None:
        super().wait_send()
        _, check = self._sent.pop(0)
        check()

    def _buffer(self, spec: TensorSpec) -> torch.Tensor:
        return poison(super()._buffer(spec))

    def wait_receive(self):
        edge = self._receiving[0].edge
        message, spec = super().wait_receive()
        _check_arrived(f"the message {edge}", *(message if isinstance(message, tuple) else (message, )))
        return message, spec

    def left(self) -> Iterator[str]:
        """What a batch should not have left behind."""
        for edge, _ in self._sent:
            yield f"send {edge}"
        for receive in self._receiving:
            yield f"receive {receive.edge}"


def check_nothing_left(slots: Iterable, channels: Iterable[Optional[CheckedChannel]], optimizer: Optional[DebugOptimizer],
                       group) -> None:
    """At the end of a batch, on all ranks: raises RuntimeError on every rank where any has left something behind.

    Args:
        slots: (segment, micro-batch) of each slot that there is.
        channels: this rank's; None is skipped.
        optimizer: None where DeepSpeed's wrappers reduce.
        group: a gloo group of all ranks; None where there is one.
    """
    left = [f"slot of segment {k}, micro-batch {m}" for k, m in slots]
    for channel in channels:
        left += [] if channel is None else channel.left()
    left += [] if optimizer is None else optimizer.left()
    everyone = [left]
    if group is not None:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, left, group=group)
    if any(everyone):
        raise RuntimeError("debug: the batch has left behind: " + "; ".join(
            f"on rank {rank}: {', '.join(names)}" for rank, names in enumerate(everyone) if names))


__all__ = ["CheckedChannel", "CheckedReplicas", "DebugOptimizer", "check_nothing_left", "count_poison", "poison"]

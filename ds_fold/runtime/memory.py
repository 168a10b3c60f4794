"""Counts what one rank holds while its engine runs.

On CUDA the allocator tells. On a CPU nobody does, so tensors are counted: after each action those that the engine, its optimizer,
its channels and the graphs' own functions (DeepSpeed's activation checkpoints) can reach, and at any time those that autograd has
saved. Storages count once. What lives within one action only (a layer's temporaries, the optimizer's) is not seen there.
"""

from collections import deque
from contextlib import suppress
from itertools import chain
from types import FunctionType
from typing import Any, Dict, Iterable, Iterator, Tuple

import torch

#: kinds of what is held; a storage that several of them reach counts in the first
KINDS = ("parameters", "gradients", "optimizer", "messages", "activations")
_CONTAINERS = (list, tuple, set, frozenset, deque)


class MeasuredMemory:
    """Within this context, the peak memory of an engine's batches::

        with MeasuredMemory(engine) as memory:
            engine.train_batch(data)
        memory.peak_bytes, memory.peak          # {"parameters": ..., "gradients": ..., ...}; empty on CUDA

    On a CPU it makes a batch slower: look at no times of it. The device is the engine's.
    """

    def __init__(self, engine):
        self.engine = engine
        #: most bytes held at once
        self.peak_bytes = 0
        #: what they were, by kind
        self.peak: Dict[str, int] = {}
        self._on_cuda = engine.device.type == "cuda"
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._saved: Dict[int, Tuple[int, int]] = {}  # address of a storage -> how many saved tensors share it, its bytes
        self._held: Dict[str, Dict[int, int]] = {kind: {} for kind in KINDS}  # after the last action: kind -> address -> bytes
        self._reached = frozenset()
        self._bytes = 0

    def __enter__(self) -> "MeasuredMemory":
        if self._on_cuda:  # not run on the machine this was written on
            torch.cuda.reset_peak_memory_stats(self.engine.device)
        else:
            self._hooks.__enter__()
            self.engine.measured_memory = self
        return self

    def __exit__(self, *exception) -> None:
        if self._on_cuda:
            self.peak_bytes = torch.cuda.max_memory_allocated(self.engine.device)
        else:
            self._hooks.__exit__(*exception)
            self.engine.measured_memory = None

    def watch(self, schedule) -> Iterator:
        """``schedule``'s steps; looks at what is held after each."""
        for step in schedule:
            yield step
            self._look()

    def _look(self) -> None:
        engine, seen = self.engine, set()
        # not module.parameters(), which waits for gathers that another replica may launch only after this rank has gone on
        buckets = getattr(engine.optimizer, "buckets", [])
        parameters = [*chain(*engine.module.segment_parameters()), *engine.module.buffers()]
        flats = [flat for bucket in buckets for flat in (bucket.flat, bucket.weights)]
        gradients = [*(p.grad for p in parameters), *(getattr(p, "grad_accum", None) for p in parameters),
                     *(bucket.full for bucket in buckets)]
        masters = [p.grad for group in engine.optimizer.param_groups for p in group["params"]]
        slots = engine.slot_tensors()
        for kind, roots in zip(KINDS, (parameters + flats, gradients, [engine.optimizer, *masters], engine.message_tensors(),
                                       [*slots, *_kept_by_functions(slots)])):
            self._held[kind] = _storages(roots, seen)
        self._reached = frozenset(seen)
        activations = self._held["activations"]
        for address, (_, size) in self._saved.items():
            if address not in seen:
                activations[address] = size
        self._bytes = sum(sum(sizes.values()) for sizes in self._held.values())
        self._compare()

    def _compare(self) -> None:
        if self._bytes > self.peak_bytes:
            self.peak_bytes = self._bytes
            known = {kind: sum(sizes.values()) for kind, sizes in self._held.items()}
            # what was saved since the last action
            known["activations"] += self._bytes - sum(known.values())
            self.peak = known

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        return _Saved(self, tensor)

    def saved(self, address: int, size: int) -> None:
        count, _ = self._saved.get(address, (0, size))
        self._saved[address] = count + 1, size
        if count == 0 and address not in self._reached:
            self._bytes += size
            self._compare()

    def freed(self, address: int) -> None:
        count, size = self._saved.pop(address)
        if count > 1:
            self._saved[address] = count - 1, size
        elif address not in self._reached:
            self._bytes -= size


class _Saved:
    """A tensor that autograd has saved; its end is that tensor's."""
    __slots__ = ("memory", "tensor", "address")

    def __init__(self, memory: MeasuredMemory, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        self.memory, self.tensor, self.address = memory, tensor, None
        # sharded parameters move when they are released and gathered again, and are counted as parameters
        if storage._cdata not in getattr(memory.engine.optimizer, "releasing", ()):
            self.address = storage.data_ptr()
            memory.saved(self.address, storage.nbytes())

    def __del__(self):
        if self.address is not None:
            self.memory.freed(self.address)


def _storages(roots: Iterable[Any], seen: set) -> Dict[int, int]:
    """address -> bytes of the storages that can be reached from ``roots`` and are not in ``seen``, which grows by them.

    Looks into containers, what functions close over, and objects of ds_fold, DeepSpeed's runtime and
    torch.optim; not into modules, whose tensors others count.
    """
    found: Dict[int, int] = {}
    visited: Dict[int, Any] = {}  # the objects, too, so that no id is used again
    stack = list(roots)
    while stack:
        value = stack.pop()
        if torch.is_tensor(value):
            storage = value.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[storage.data_ptr()] = storage.nbytes()
            continue
        if isinstance(value, (str, bytes, int, float, type(None), type, torch.nn.Module)) or id(value) in visited:
            continue
        visited[id(value)] = value
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, _CONTAINERS):
            stack += value
        elif isinstance(value, FunctionType):
            stack += _closed_over(value)
        elif isinstance(value, torch.optim.Optimizer) or type(value).__module__.startswith(("ds_fold.", "deepspeed.runtime.")):
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            stack += [*vars(value).values()] if hasattr(value, "__dict__") else []
            stack += [getattr(value, name, None) for name in slots]
    return found


def _kept_by_functions(roots: Iterable[Any]) -> Iterator[Dict[str, Any]]:
    """The attributes of the custom autograd functions in the graphs of ``roots``: tensors, or tuples and lists of them."""
    stack = [t.grad_fn for root in roots for t in (root if isinstance(root, _CONTAINERS) else (root, )) if torch.is_tensor(t)]
    visited = {None}
    while stack:
        node = stack.pop()
        if node not in visited:
            visited.add(node)
            stack += [following for following, _ in node.next_functions]
            if hasattr(node, "__dict__"):
                # random states lie in the host's memory
                yield {name: value for name, value in vars(node).items() if "rng" not in name}


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has none yet
            yield cell.cell_contents


__all__ = ["KINDS", "MeasuredMemory"]

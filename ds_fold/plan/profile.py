"""Measures the layers of a model one after the other: what each computes, keeps for its backward and passes on.

A layer is built, timed on what the layer before it returned, and dropped, so that no more than one is ever there. Equal layers
(same class, arguments and input shapes) are measured once.
"""

import copy
import statistics
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch.autograd.graph import saved_tensors_hooks
from tqdm import tqdm

from .. import compat
from ..runtime.channels import Message, MessageSpec
from ..runtime.module import layer_name
from ..runtime.slots import Received
from .costs import Head, Layer, PlanError, Profile, Recomputed

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size, torch.device)


class _Kept(NamedTuple):
    """What one forward keeps for its backward, parameters aside.

    Attributes:
        inside: bytes of storages that are neither an input's nor an output's.
        inputs, outputs: indices of the tensors of the input and the output that are kept.
    """
    inside: int
    inputs: FrozenSet[int]
    outputs: FrozenSet[int]


class _Measured(NamedTuple):
    """Of one layer; times in s. ``output`` is what it returned, detached, with ``output_requires_grad`` for each tensor of it."""
    forward_s: float
    backward_s: float
    recomputed_backward_s: float
    kept: _Kept
    recomputed_bytes: int
    parameters: Tuple[int, int, int, int]  # bytes and number of all, then of the trainable ones
    output: Message
    spec: MessageSpec


def profile_layers(layers: Sequence,
                   inputs: Message,
                   labels: Any = None,
                   loss_fn: Optional[Callable] = None,
                   *,
                   name: str = "",
                   dtype: Optional[torch.dtype] = None,
                   micro_batch_size: Optional[int] = None,
                   repeats: int = 5,
                   warm_up: int = 2,
                   autocast: Callable = nullcontext,
                   progress: bool = False) -> Profile:
    """Measure every layer and the loss on one micro-batch. Needs no process group; one rank's device does it.

    Args:
        layers: as PipelineModule takes them: LayerSpec, TiedLayerSpec, modules (copied) and functions.
        inputs: of the first layer: a tensor or a tuple of tensors, one micro-batch.
        labels, loss_fn: the loss is ``loss_fn(output, labels)``; without it the last layer's output is the loss.
        name: of the model.
        dtype: in which layers are trained; default: as they are built.
        micro_batch_size: samples of the micro-batch; default: the size of the input's first dimension.
        repeats, warm_up: forwards and backwards that count (their median) and that come before.
        autocast: makes the context of each forward.
        progress: show a bar.

    Returns:
        The profile. Bytes are those of whole storages, which several tensors may share. Kept are tensors that autograd saves; what
        passes unchanged through several layers counts in each that saves it.

    Raises:
        PlanError: a layer cannot be built or run by itself.
    """
    if repeats < 1 or warm_up < 0:
        raise PlanError(f"repeats={repeats}, warm_up={warm_up}: measure at least one repeat, after none or more to warm up")
    device = compat.current_device()
    inputs, labels = _to(inputs, device), _to(labels, device)
    run = _Run(device, dtype, repeats, warm_up, autocast)
    measured: List[_Measured] = []
    known: List[Tuple[Any, MessageSpec, _Measured]] = []
    x, form = inputs, MessageSpec.of(inputs)
    with compat.preserved_rng():
        for i, spec in enumerate(tqdm(layers, "profile", unit="layer", disable=not progress)):
            found = next((m for other, seen, m in known if seen == form and _same(spec, other)), None)
            if found is None:
                try:
                    found = run.layer(spec, x, form)
                except Exception as error:
                    raise PlanError(f"layer {i} ({layer_name(spec)}) cannot be profiled alone, on input {form}: "
                                    f"{type(error).__name__}: {error}. A layer has to be built by itself and run on what the one "
                                    f"before it returns") from error
                known.append((spec, form, found))
            measured.append(found)
            x, form = found.output, found.spec
        head, loss_keeps = run.loss(x, form, labels, loss_fn) if loss_fn is not None else (Head(), frozenset())
    entering = [MessageSpec.of(inputs), *(m.spec for m in measured)]
    made = []
    for i, (spec, m) in enumerate(zip(layers, measured)):
        # a tensor between two layers is one, whichever of them keeps it: its user counts it
        inside = m.kept.inside + _bytes(entering[i], m.kept.inputs | (measured[i - 1].kept.outputs if i else frozenset()))
        all_bytes, all_count, trainable_bytes, trainable_count = m.parameters
        made.append(Layer(
            name=layer_name(spec), forward_s=m.forward_s, backward_s=m.backward_s, parameter_bytes=all_bytes,
            trainable_bytes=trainable_bytes, parameter_count=all_count, trainable_count=trainable_count, activation_bytes=inside,
            boundary_bytes=m.spec.nbytes,
            recomputed=Recomputed(backward_s=m.recomputed_backward_s, activation_bytes=m.recomputed_bytes)))
    head = head.model_copy(update={
        "activation_bytes": head.activation_bytes + _bytes(entering[-1], loss_keeps | measured[-1].kept.outputs)})
    model_bytes = max((m.parameters[0] / m.parameters[1] for m in measured if m.parameters[1]), default=4)
    return Profile(name=name, micro_batch_size=micro_batch_size or _samples(inputs), layers=made, head=head,
                   input_bytes=entering[0].nbytes, tied_bytes=_tied_bytes(layers, made),
                   optimizer_bytes_per_byte=2.0 if model_bytes >= 4 else 12 / model_bytes)


def describe_layers(layers: Sequence) -> Tuple[List[str], List[int]]:
    """Names and numbers of parameters of layers, built one at a time: what :meth:`Profile.check_model` compares."""
    with compat.preserved_rng():
        counts = [_count(list(layer.parameters())) if isinstance(layer, torch.nn.Module) else 0
                  for layer in (spec.build() if isinstance(spec, LayerSpec) else spec for spec in layers)]
    return [layer_name(spec) for spec in layers], counts


class _Run:
    """How things are measured."""

    def __init__(self, device: torch.device, dtype: Optional[torch.dtype], repeats: int, warm_up: int, autocast: Callable):
        self.device, self.dtype, self.repeats, self.warm_up, self.autocast = device, dtype, repeats, warm_up, autocast
        self.anchor = torch.zeros((), device=device, requires_grad=True)

    def layer(self, spec, x: Message, form: MessageSpec) -> _Measured:
        module = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(module, torch.nn.Module):
            module = (module if module is not spec else copy.deepcopy(module)).to(self.device, self.dtype).train()
        function = module
        if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None:
            function = partial(spec.forward_fn, module)
        parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
        fixed = [*parameters, *(module.buffers() if isinstance(module, torch.nn.Module) else ())]

        def checkpointed(inputs):
            return compat.non_reentrant_checkpoint(lambda *tensors: function(tensors if form.is_tuple else tensors[0]),
                                                   *_tensors(inputs))

        output = self._forward(function, self._inputs(x, form))
        if not all(map(torch.is_tensor, _tensors(output))) or not _tensors(output):
            raise TypeError(f"it returned a {type(output).__name__}, but what passes between layers must be a tensor or a tuple of "
                            f"tensors")
        kept = self._kept(function, x, form, fixed)
        recomputed = self._kept(checkpointed, x, form, fixed)
        forward_s, backward_s = self._times(function, x, form)
        _, recomputed_backward_s = self._times(checkpointed, x, form)
        trainable = [p for p in parameters if p.requires_grad]
        return _Measured(forward_s, backward_s, recomputed_backward_s, kept,
                         recomputed.inside + _bytes(form, recomputed.inputs),
                         (_nbytes(parameters), _count(parameters), _nbytes(trainable), _count(trainable)),
                         _each(output, lambda t: t.detach().clone()), MessageSpec.of(output))

    def loss(self, x: Message, form: MessageSpec, labels, loss_fn: Callable) -> Tuple[Head, FrozenSet[int]]:
        """Costs of the loss, and which tensors of its input it keeps."""

        def function(outputs):
            return loss_fn(outputs, labels)

        fixed = [t for t in _tensors(labels) if torch.is_tensor(t)]
        try:
            kept = self._kept(function, x, form, fixed)
            forward_s, backward_s = self._times(function, x, form)
        except Exception as error:
            raise PlanError(f"the loss cannot be computed on {form}: {type(error).__name__}: {error}. It has to run on what the "
                            f"last layer returns and the labels of one micro-batch") from error
        return Head(forward_s=forward_s, backward_s=backward_s, activation_bytes=kept.inside), kept.inputs

    def _inputs(self, x: Message, form: MessageSpec) -> Message:
        """Inputs as the engine makes them: not leaves, and with storage of their own."""
        sink = [None] * len(form.tensors)
        fresh = [t.clone() for t in _tensors(x)]
        inputs = tuple(Received.apply(self.anchor, t, sink, i) if spec.requires_grad else t
                       for i, (t, spec) in enumerate(zip(fresh, form.tensors)))
        return inputs if form.is_tuple else inputs[0]

    def _forward(self, function: Callable, inputs: Message) -> Message:
        with self.autocast():
            return function(inputs)

    def _kept(self, function: Callable, x: Message, form: MessageSpec, fixed: Sequence[torch.Tensor]) -> _Kept:
        skip = {t.untyped_storage().data_ptr() for t in fixed}
        saved: Dict[int, int] = {}

        def pack(t):
            storage = t.untyped_storage()
            if storage.data_ptr() not in skip:
                saved[storage.data_ptr()] = storage.nbytes()
            return t

        with saved_tensors_hooks(pack, lambda t: t):
            inputs = self._inputs(x, form)
            output = self._forward(function, inputs)  # as long as it lives, no address is used again
        of_inputs = [t.untyped_storage().data_ptr() for t in _tensors(inputs)]
        of_outputs = [t.untyped_storage().data_ptr() for t in _tensors(output) if torch.is_tensor(t)]
        inside = sum(size for address, size in saved.items() if address not in of_inputs and address not in of_outputs)
        return _Kept(inside, frozenset(i for i, address in enumerate(of_inputs) if address in saved),
                     frozenset(i for i, address in enumerate(of_outputs) if address in saved and address not in of_inputs))

    def _times(self, function: Callable, x: Message, form: MessageSpec) -> Tuple[float, float]:
        """Median (forward, backward) in s; 0 for a backward of what needs none."""
        forward, backward = [], []
        for _ in range(self.warm_up + self.repeats):
            inputs = self._inputs(x, form)
            start = compat.synchronized_time()
            output = self._forward(function, inputs)
            forward.append(compat.synchronized_time() - start)
            roots = [t for t in _tensors(output) if torch.is_tensor(t) and t.requires_grad]
            gradients = [torch.ones_like(t) for t in roots]
            start = compat.synchronized_time()
            if roots:
                torch.autograd.backward(roots, gradients)
            backward.append(compat.synchronized_time() - start if roots else 0.0)
        return statistics.median(forward[self.warm_up:]), statistics.median(backward[self.warm_up:])


def _same(a, b) -> bool:
    """Whether two layers are built alike: one object, or specs of one class with equal plain arguments."""
    if a is b:
        return True
    if type(a) is not type(b) or not isinstance(a, LayerSpec) or a.typename is not b.typename:
        return False
    if isinstance(a, TiedLayerSpec) and (a.key, a.forward_fn) != (b.key, b.forward_fn):
        return False
    return _equal(a.module_args, b.module_args) and _equal(a.module_kwargs, b.module_kwargs)


def _equal(a, b) -> bool:
    """Equal plain values, or the same object: nothing else is compared."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return isinstance(a, _PLAIN) and a == b


def _tied_bytes(layers: Sequence, made: List[Layer]) -> float:
    users: Dict[str, List[int]] = {}
    for i, spec in enumerate(layers):
        if isinstance(spec, TiedLayerSpec):
            users.setdefault(spec.key, []).append(i)
    return sum(made[indices[0]].trainable_bytes for indices in users.values() if len(indices) > 1)


def _tensors(value) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, )


def _each(message: Message, function: Callable) -> Message:
    return tuple(map(function, message)) if isinstance(message, (tuple, list)) else function(message)


def _to(value, device: torch.device):
    return _each(value, lambda t: t.detach().to(device) if torch.is_tensor(t) else t)


def _bytes(form: MessageSpec, indices: FrozenSet[int]) -> int:
    return sum(form.tensors[i].nbytes for i in indices)


def _nbytes(parameters: Sequence[torch.Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _count(parameters: Sequence[torch.Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def _samples(inputs: Message) -> int:
    return next((len(t) for t in _tensors(inputs) if t.dim()), 1)


__all__ = ["describe_layers", "profile_layers"]

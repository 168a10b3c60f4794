"""The interpreter: what each instruction of a program does on one pipeline rank.

Per (segment, micro-batch) there is one slot; it is made when its first part arrives and gone when its gradient has been sent.

    LOAD / WAIT_RECV_ACT -> slot.inputs --F--> slot.outputs --SEND_ACT--> next virtual stage
                                                  |                           |
    SEND_GRAD <-- slot.input_grads <------B------ slot.output_grads <-- WAIT_RECV_GRAD
"""

import inspect
from typing import Callable, Dict, List, Optional, Tuple

import torch
from deepspeed.runtime.pipe.module import PipelineError
from deepspeed.runtime.pipe.schedule import PipeInstruction

from .. import compat
from ..config import FoldConfig
from ..schedule import actions as op
from . import losses
from .channels import Channel, Message, MessageSpec
from .data import BatchQueue, label_message, labels_of, load_labels
from .instructions import INSTRUCTIONS
from .sharded_optimizer import ShardedOptimizer
from .slots import Received, Slot


class Interpreter(compat.PipelineEngineBase):
    """The instructions, as methods of an engine, whose construction sets what is declared here.

    Attributes:
        fold: the typed ``ds_fold`` block.
    """
    fold: FoldConfig
    _slots: Dict[Tuple[int, int], Slot]  # (segment, micro-batch) -> slot
    _batches: BatchQueue
    _labels_travel: bool
    _training_batch: bool
    _anchor: torch.Tensor  # makes received tensors part of the graph
    _backwards: Dict[int, int]  # segment -> backwards that have begun in this batch
    _last_virtual_stage: int
    _edges: List[str]  # edge into a virtual stage -> its name
    _act_in: Optional[Channel]
    _act_out: Optional[Channel]
    _grad_in: Optional[Channel]
    _grad_out: Optional[Channel]
    #: ds_fold's own optimizer, or None where DeepSpeed's wrappers do the reduction
    _sharded: Optional[ShardedOptimizer] = None
    #: what runs now, or ran last
    current_instruction: Optional[PipeInstruction] = None

    def instruction_methods(self) -> Dict[type, Callable]:
        """What does each instruction: the methods below, or a function that a script has put into ``_INSTRUCTION_MAP``, which gets
        those of ``buffer_id``, ``segment`` and ``micro_batch`` that it has parameters for."""
        own = Interpreter._INSTRUCTION_MAP
        return {**own, **{kind: _with_its_parameters(function) for kind, function in self.patched_instructions(own).items()}}

    def run_current(self) -> None:
        instruction = self.current_instruction
        Interpreter._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)

    def _slot(self, segment: int, micro_batch: int) -> Slot:
        slot = self._slots.get((segment, micro_batch))
        if slot is None:
            slot = self._slots[segment, micro_batch] = Slot()
        return slot

    def _virtual_stage(self, segment: int) -> int:
        return segment * self.num_stages + self.stage_id

    # loading --------------------------------------------------------------------------------------------------------------

    def exec_load(self, segment, micro_batch, **_):
        inputs, labels, *_ = self._batches.pop()
        if self.is_first_stage():
            if not torch.is_tensor(inputs):
                inputs = tuple(self._own_input(t) for t in inputs)
            self._slot(0, micro_batch).inputs = inputs if isinstance(inputs, tuple) else self._own_input(inputs)
        if self.is_last_stage():
            self._slot(self.fold.segments - 1, micro_batch).labels = load_labels(labels, self.device)
        elif self._labels_travel:
            self._slot(0, micro_batch).labels = load_labels(labels, self.device)

    def _own_input(self, tensor: torch.Tensor) -> torch.Tensor:
        # a copy: the first layer may work in place
        mine = tensor.detach().to(self.device, copy=True)
        if self._training_batch and self.reentrant_checkpointing and mine.is_floating_point():
            mine.requires_grad = True
        return mine

    # compute --------------------------------------------------------------------------------------------------------------

    def exec_forward(self, segment, micro_batch, **_):
        slot = self._slot(segment, micro_batch)
        inputs, slot.inputs = slot.inputs, None
        with self.autocast():
            outputs = self.module(inputs, segment=segment, micro_batch=micro_batch)
        s = self._virtual_stage(segment)
        if s == self._last_virtual_stage:
            self._compute_head(slot, outputs)
            if not self._training_batch:
                del self._slots[segment, micro_batch]
            return
        self._check_outputs(outputs, segment)
        slot.outputs = outputs if self._sharded is None else self._sharded.keep_from_release(outputs)
        if self.num_stages == 1:
            self._hand_over(segment, micro_batch)
        elif self._training_batch:
            self._grad_in.expect(self._edges[s + 1], MessageSpec.of(slot.outputs).gradients())

    def _compute_head(self, slot: Slot, outputs) -> None:
        """The loss of one micro-batch, as DeepSpeed counts it."""
        if self.computes_loss and self.module.loss_fn is not None:
            with self.autocast():
                loss = self.module.loss_fn(outputs, slot.labels)
        else:
            loss = outputs
        slot.labels = None
        if self.eval_return_logits:
            self.outputs.append(outputs)
        detached = loss.detach() if torch.is_tensor(loss) else [part.detach() for part in loss]
        self.fwd_outputs.append(detached)
        self.total_loss = losses.add(self.total_loss, detached)
        additional = self.module.get_additional_losses()
        if additional is not None:
            totals = self.total_additional_losses or type(additional)()
            for name, value in additional.items():
                totals[name] = losses.add(totals.get(name), value.detach())
            self.total_additional_losses = totals
        if self._training_batch:
            slot.loss = self._backward_root(loss)

    def _backward_root(self, loss) -> torch.Tensor:
        if not torch.is_tensor(loss) or loss.numel() != 1:
            form = f"a tensor of shape {list(loss.shape)}" if torch.is_tensor(loss) else f"a {type(loss).__name__}"
            raise PipelineError(f"the loss of a training batch must be one number, but loss_fn (or the last layer) returned {form}")
        # as DeepSpeed does, also where a script has set micro_batches, which run, to something else
        return self.scale_loss(loss / self.gradient_accumulation_steps())

    def exec_backward(self, segment, micro_batch, **_):
        slot = self._slot(segment, micro_batch)
        if self._sharded is not None:
            count = self._backwards[segment] = self._backwards.get(segment, 0) + 1
            if count == 1:
                self._sharded.begin_backward(segment)
            if count == self.micro_batches:  # whatever the order of the micro-batches
                self._sharded.begin_last_backward(segment)
        if self._virtual_stage(segment) == self._last_virtual_stage:
            if slot.loss.requires_grad:
                torch.autograd.backward(slot.loss)
        else:
            outputs = slot.outputs if isinstance(slot.outputs, tuple) else (slot.outputs, )
            roots = [t for t in outputs if t.requires_grad]
            if roots:
                # one joint backward: a trunk that several outputs share runs once
                torch.autograd.backward(roots, slot.output_grads)
        slot.outputs = slot.output_grads = slot.loss = None
        if self.num_stages == 1 and segment > 0:
            self._hand_back(segment, micro_batch)
        elif self._virtual_stage(segment) == 0:
            del self._slots[segment, micro_batch]

    def _check_outputs(self, outputs, segment: int) -> None:
        if torch.is_tensor(outputs):
            return
        if isinstance(outputs, tuple) and outputs and all(torch.is_tensor(t) for t in outputs):
            return
        form = type(outputs).__name__
        if isinstance(outputs, tuple):
            form = f"a tuple of ({', '.join(type(t).__name__ for t in outputs)})"
        raise PipelineError(f"{self.module.describe_last_layer(segment)} returned {form}, but what passes between chunks must be "
                            f"a tensor or a tuple of tensors")

    # hand-over on one rank --------------------------------------------------------------------------------------------------

    def _hand_over(self, segment: int, micro_batch: int) -> None:
        slot = self._slots[segment, micro_batch]
        self._take_inputs(segment + 1, micro_batch, slot.outputs)
        if not self._training_batch:
            del self._slots[segment, micro_batch]

    def _hand_back(self, segment: int, micro_batch: int) -> None:
        self._slots[segment - 1, micro_batch].output_grads = self._take_input_grads(segment, micro_batch)

    def _take_inputs(self, segment: int, micro_batch: int, message: Message, spec: Optional[MessageSpec] = None) -> None:
        """Put a message into its slot; tensors that require gradients become part of the graph."""
        slot = self._slot(segment, micro_batch)
        if not self._training_batch:
            slot.inputs = message
            return
        slot.input_spec = spec or MessageSpec.of(message)
        slot.input_grads = [None] * len(slot.input_spec.tensors)
        tensors = tuple(
            Received.apply(self._anchor, t.detach(), slot.input_grads, i) if t_spec.requires_grad else t.detach()
            for i, (t, t_spec) in enumerate(zip(message if isinstance(message, tuple) else (message, ), slot.input_spec.tensors)))
        slot.inputs = tensors if isinstance(message, tuple) else tensors[0]

    def _take_input_grads(self, segment: int, micro_batch: int) -> Tuple[torch.Tensor, ...]:
        """The gradients of a chunk's inputs, zeros for an input that nothing used; empties the slot."""
        slot = self._slots.pop((segment, micro_batch))
        return tuple(
            torch.zeros(t.shape, dtype=t.dtype, device=self.device) if grad is None else grad
            for grad, t in zip(slot.input_grads, slot.input_spec.tensors) if t.requires_grad)

    # messages -------------------------------------------------------------------------------------------------------------

    def exec_send_activation(self, segment, micro_batch, **_):
        slot = self._slots[segment, micro_batch]
        edge = self._edges[self._virtual_stage(segment) + 1]
        self._act_out.send(edge, slot.outputs)
        if self._labels_travel:
            self._act_out.send(f"labels, {edge}", label_message(slot.labels))
            slot.labels = None
        if not self._training_batch:
            del self._slots[segment, micro_batch]

    def exec_wait_send_activation(self, segment, micro_batch, **_):
        for _ in range(1 + self._labels_travel):
            self._act_out.wait_send()

    def exec_receive_activation(self, segment, micro_batch, **_):
        edge = self._edges[self._virtual_stage(segment)]
        self._act_in.post(edge)
        if self._labels_travel:
            self._act_in.post(f"labels, {edge}")

    def exec_wait_receive_activation(self, segment, micro_batch, **_):
        message, spec = self._act_in.wait_receive()
        self._take_inputs(segment, micro_batch, message, spec)
        if self._labels_travel:
            self._slots[segment, micro_batch].labels = labels_of(self._act_in.wait_receive()[0])

    def exec_send_grad(self, segment, micro_batch, **_):
        self._grad_out.send(self._edges[self._virtual_stage(segment)], self._take_input_grads(segment, micro_batch))

    def exec_wait_send_grad(self, segment, micro_batch, **_):
        self._grad_out.wait_send()

    def exec_receive_grad(self, segment, micro_batch, **_):
        slot = self._slots.get((segment, micro_batch))
        spec = None if slot is None or slot.outputs is None else MessageSpec.of(slot.outputs).gradients()
        self._grad_in.post(self._edges[self._virtual_stage(segment) + 1], spec)

    def exec_wait_receive_grad(self, segment, micro_batch, **_):
        self._slots[segment, micro_batch].output_grads, _ = self._grad_in.wait_receive()

    # end of the batch -----------------------------------------------------------------------------------------------------

    def exec_reduce_tied_grads(self):
        if self._sharded is None:  # which sums them when the segment with their last gradient is reduced
            self.reduce_tied_gradients()

    def exec_reduce_grads(self, segment):
        if self._sharded is not None:
            self._sharded.launch_reduce(segment)
        elif segment == 0:  # the last one: DeepSpeed's wrappers reduce everything at once, and return when it is done
            self.reduce_gradients()

    def exec_wait_reduce_grads(self, segment):
        if self._sharded is not None:
            self._sharded.wait_reduce(segment)

    def exec_step_segment(self, segment):
        self._sharded.step_segment(segment)

    def exec_step(self):
        self.step_optimizer()

    def exec_gather_params(self, segment):
        if self._sharded is not None:
            # nothing unless parameters are sharded: launched by the segment's step, or at the end of the step in order of segments
            self._sharded.gather_params(segment)

    def exec_wait_gather_params(self, segment):
        if self._sharded is not None:
            self._sharded.wait_params(segment, by_layer=self.module.before_layer is not None)

    def exec_release_params(self, segment):
        self._sharded.release_params(segment)

    #: instruction -> method; ``ACTION_METHODS`` says which method runs which op
    ACTION_METHODS = {
        op.LOAD: exec_load,
        op.F: exec_forward,
        op.B: exec_backward,
        op.SEND_ACT: exec_send_activation,
        op.WAIT_SEND_ACT: exec_wait_send_activation,
        op.RECV_ACT: exec_receive_activation,
        op.WAIT_RECV_ACT: exec_wait_receive_activation,
        op.SEND_GRAD: exec_send_grad,
        op.WAIT_SEND_GRAD: exec_wait_send_grad,
        op.RECV_GRAD: exec_receive_grad,
        op.WAIT_RECV_GRAD: exec_wait_receive_grad,
        op.REDUCE_TIED: exec_reduce_tied_grads,
        op.REDUCE: exec_reduce_grads,
        op.WAIT_REDUCE: exec_wait_reduce_grads,
        op.STEP_SEGMENT: exec_step_segment,
        op.STEP: exec_step,
        op.GATHER: exec_gather_params,
        op.WAIT_GATHER: exec_wait_gather_params,
        op.RELEASE: exec_release_params,
    }
    _INSTRUCTION_MAP = {INSTRUCTIONS[name]: method for name, method in ACTION_METHODS.items()}


def _with_its_parameters(function: Callable) -> Callable:
    """``function``, called with those keyword arguments only that it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function
    names = {p.name for p in parameters}

    def call(self, **kwargs):
        function(self, **{name: value for name, value in kwargs.items() if name in names})

    return call

"""Channels: ordered, asynchronous messages of tensors between two neighbouring pipeline ranks.

One channel is one directed use of one edge of the ring and has a communicator of its own, so that no receive ever stands in
front of a send and no gradient behind an activation. A message is a tensor or a tuple of tensors of any dtype and shape.

    sender                                receiver
    send(edge, tensors)                   post(edge)            receives are posted ahead, in the order of the sends
      [header]  -- first time on an edge --> recv(header)       or every time with dynamic shapes
      tensor 0  ---------------------------> recv(into the tensor that will be used)
      tensor 1  ---------------------------> ...
    wait_send()                           wait_receive() -> tensors
"""

import math
from collections import deque
from contextlib import contextmanager
from typing import Deque, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
import torch.distributed as dist

Message = Union[torch.Tensor, Tuple[torch.Tensor, ...]]

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
           torch.uint8, torch.bool, torch.complex64, torch.complex128)
#: what every backend moves as it is
_NATIVE = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
                     torch.uint8))
_HEADER_SIZE = 512  # int64 words: enough for about 80 tensors of 4 dimensions


class TensorSpec(NamedTuple):
    """What the receiver of a tensor must know before it arrives."""
    dtype: torch.dtype
    shape: Tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        return f"{str(self.dtype).replace('torch.', '')}{list(self.shape)}{grad}"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class MessageSpec(NamedTuple):
    """The form of a message: a tuple of tensors or one tensor alone."""
    is_tuple: bool
    tensors: Tuple[TensorSpec, ...]

    def __str__(self) -> str:
        inner = ", ".join(map(str, self.tensors))
        return f"({inner})" if self.is_tuple else inner

    @classmethod
    def of(cls, message: Message) -> "MessageSpec":
        tensors = message if isinstance(message, tuple) else (message, )
        return cls(isinstance(message, tuple), tuple(TensorSpec(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors))

    def fits(self, message: Message) -> bool:
        """The same as ``self == MessageSpec.of(message)``, quicker: asked of every message."""
        tensors = message if isinstance(message, tuple) else (message, )
        return self.is_tuple == isinstance(message, tuple) and len(tensors) == len(self.tensors) and all(
            t.shape == spec.shape and t.dtype == spec.dtype and t.requires_grad == spec.requires_grad
            for t, spec in zip(tensors, self.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without a header."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def gradients(self) -> "MessageSpec":
        """The form of the message that carries this message's gradients back: one tensor for each that requires one."""
        return MessageSpec(True, tuple(t._replace(requires_grad=False) for t in self.tensors if t.requires_grad))

    def encode(self, edge: str) -> torch.Tensor:
        words = [int(self.is_tuple), len(self.tensors)]
        for spec in self.tensors:
            if spec.dtype not in _DTYPES:
                raise TypeError(f"{edge}: tensors of dtype {spec.dtype} cannot be sent between pipeline ranks")
            words += (_DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape)
        if len(words) > _HEADER_SIZE:
            raise ValueError(f"{edge}: {len(self.tensors)} tensors need {len(words)} words of metadata, more than "
                             f"{_HEADER_SIZE}; pack them into fewer tensors")
        return torch.tensor(words + [0] * (_HEADER_SIZE - len(words)), dtype=torch.int64)

    @classmethod
    def decode(cls, header: torch.Tensor) -> "MessageSpec":
        words = iter(header.tolist())
        is_tuple, count = bool(next(words)), next(words)
        tensors = []
        for _ in range(count):
            dtype, requires_grad, dims = _DTYPES[next(words)], bool(next(words)), next(words)
            tensors.append(TensorSpec(dtype, tuple(next(words) for _ in range(dims)), requires_grad))
        return cls(is_tuple, tuple(tensors))


class ShapeChangedError(RuntimeError):
    """A message has another form than the first one on its edge, and shapes were promised to be static."""


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent: the tensor, or its bytes where it is not contiguous or a backend might not know its dtype. Shares memory with a
    contiguous tensor."""
    if tensor.dtype in _NATIVE and tensor.is_contiguous():
        return tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class _Receive:
    """One posted receive. ``spec`` is None until the header has told it."""
    __slots__ = ("edge", "spec", "header", "works", "tensors", "started")

    def __init__(self, edge: str, spec: Optional[MessageSpec]):
        self.edge, self.spec = edge, spec
        self.header = None
        self.works: List = []
        self.tensors: Tuple[torch.Tensor, ...] = ()
        self.started = False


class Channel:
    """One end of a channel.

    Args:
        group: the channel's own process group of two ranks.
        peer: global rank of the other end.
        device: where received tensors live.
        dynamic_shape: metadata travels with every message.
        with_header: False for gradients, whose form the receiver knows from its own output (:meth:`expect`).
    """

    def __init__(self, group, peer: int, device: torch.device, dynamic_shape: bool = False, with_header: bool = True):
        self.group, self.device = group, device
        # the group's own calls: torch's functions around them cost as much again, twice for each message
        self._peer = dist.get_group_rank(group, peer)
        self.dynamic_shape, self.with_header = dynamic_shape, with_header
        self.specs: Dict[str, MessageSpec] = {}  # the form of the messages on each edge, once known
        self._sending: Deque[Tuple[list, list]] = deque()
        self._receiving: Deque[_Receive] = deque()

    def forget_shapes(self) -> None:
        """The next message on each edge carries its metadata again. Both ends must call this between batches."""
        self.specs = {}

    @contextmanager
    def separate_shapes(self):
        """Within this context messages have forms of their own: an evaluation's micro-batches neither are bound by those of
        training nor change them."""
        specs, self.specs = self.specs, {}
        try:
            yield
        finally:
            self.specs = specs

    @property
    def idle(self) -> bool:
        """Nothing is launched or posted that was not waited for."""
        return not self._sending and not self._receiving

    def buffers(self) -> List[torch.Tensor]:
        """Of messages in flight, in either direction."""
        headers = [receive.header[0] for receive in self._receiving if receive.header is not None]
        return [buffer for _, sent in self._sending for buffer in sent] + headers + [
            t for receive in self._receiving for t in receive.tensors]

    # sending --------------------------------------------------------------------------------------------------------------

    def send(self, edge: str, message: Message) -> None:
        """Launch the send of ``message``; it is kept until :meth:`wait_send`.

        Raises:
            ShapeChangedError: before anything is sent, if the form differs from the first message on this edge.
        """
        buffers = []
        if self.with_header:
            known = None if self.dynamic_shape else self.specs.get(edge)
            if known is None:
                spec = MessageSpec.of(message)
                buffers.append(_wire(spec.encode(edge).to(self.device)))
                self.specs[edge] = spec
            elif not known.fits(message):
                raise ShapeChangedError(f"{edge} sends {MessageSpec.of(message)}, but its first message was {known}. Pass "
                                        f"dynamic_shape=True to PipelineModule, or call engine.reset_activation_shape() on all "
                                        f"ranks before the change")
        tensors = message if isinstance(message, tuple) else (message, )
        buffers += [_wire(t.detach()) for t in tensors if t.numel()]
        works = [self.group.send([buffer], self._peer, 0) for buffer in buffers]
        self._sending.append((works, buffers))

    def wait_send(self) -> None:
        """Wait until the oldest launched message has left."""
        works, _ = self._sending.popleft()
        for work in works:
            work.wait()

    # receiving ------------------------------------------------------------------------------------------------------------

    def post(self, edge: str, spec: Optional[MessageSpec] = None) -> None:
        """Post the receive of the next message. Where its form is not known yet, only its header is received for now.

        Args:
            edge: the same name as the sender's.
            spec: the form, where the caller knows it (gradients).
        """
        if self.with_header and not self.dynamic_shape:
            spec = self.specs.get(edge)
        self._receiving.append(_Receive(edge, spec))
        self._start_receives()

    def expect(self, edge: str, spec: MessageSpec) -> None:
        """Tell the form of the oldest posted message on ``edge`` whose form is not known yet (gradients)."""
        for receive in self._receiving:
            if receive.edge == edge and receive.spec is None:
                receive.spec = spec
                break
        self._start_receives()

    def wait_receive(self) -> Tuple[Message, MessageSpec]:
        """Wait for the oldest posted message and return it as it was sent, with its form."""
        receive = self._receiving[0]
        if receive.spec is None:
            if receive.header is None:
                raise RuntimeError(f"{receive.edge}: the form of this message was never told")
            header, work = receive.header
            work.wait()
            receive.spec = self.specs[receive.edge] = MessageSpec.decode(header)
            self._start_receives()
        self._receiving.popleft()
        for work in receive.works:
            work.wait()
        return (receive.tensors if receive.spec.is_tuple else receive.tensors[0]), receive.spec

    def _buffer(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor to receive into."""
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def _start_receives(self) -> None:
        # messages of a channel are ordered: nothing may be posted behind one whose form is unknown
        for receive in self._receiving:
            if receive.spec is None and self.with_header and not self.dynamic_shape:
                receive.spec = None if receive.header else self.specs.get(receive.edge)
            if receive.spec is None:
                if self.with_header and receive.header is None:
                    header = torch.empty(_HEADER_SIZE, dtype=torch.int64, device=self.device)
                    receive.header = (header, self.group.recv([_wire(header)], self._peer, 0))
                return
            if not receive.started:
                receive.started = True
                receive.tensors = tuple(map(self._buffer, receive.spec.tensors))
                receive.works = [self.group.recv([_wire(t)], self._peer, 0) for t in receive.tensors if t.numel()]

"""Buckets: flat buffers of the parameters that are reduced, stepped and gathered together.

::

    flat     [ p0 | p1      | p2  |pad]  parameters are views of it; D equal parts, one per replica
    master        [ p1 |p2 ]             fp32 part of this rank, what the optimizer steps; a view of ``flat`` where that is fp32
    full     [ g0 | g1      | g2  | 0 ]  accumulated gradients; from the first to the last backward p.grad are views of it
    reduced       [ g1 |g2 ]             fp32 part of this rank of the average over the replicas

Where parameters are sharded, ``flat`` is filled and freed in place, as in FSDP (Zhao et al., VLDB 2023): the storage stays the same
object, so that what autograd has saved of it is right again when it is filled, and version counters do not move.
"""

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from .collectives import Pending, Replicas
from .early_step import Undo


class BucketKey(NamedTuple):
    """What parameters of one bucket have in common. Buckets of one user group are sorted by it, alike on all replicas."""
    #: segment of the last gradient and of the first use
    segment: int
    #: segment of the first gradient: higher than ``segment`` for a parameter that several segments of this rank share
    first: int
    dtype: str
    #: whether this rank's gradients count in the model's norm
    counted: bool
    #: index of the tie that sums the gradients over pipeline ranks, -1 for none
    tie: int
    #: by layer: place of its first parameter in the model, so that buckets of a segment are in order of first use; else 0
    place: int = 0

    @property
    def leaves_early(self) -> bool:
        """Whether its gradients may be final within a backward, and its parameters are free after it: nothing comes from or goes to
        other segments or ranks."""
        return self.first == self.segment and self.tie < 0


def assign(param_groups: Sequence[dict], segments: Sequence[Sequence[torch.nn.Parameter]], ties: Sequence[Tuple],
           counts_in_norm: Callable[[torch.nn.Parameter], bool], layer_of: Optional[Dict[torch.nn.Parameter, int]] = None,
           bucket_numel: int = 0) -> List[Dict[BucketKey, List[torch.nn.Parameter]]]:
    """For each user group, its trainable parameters by bucket, in the group's order; keys are sorted.

    A parameter of the optimizer that lies in no segment gets gradients from anywhere: from the highest down to segment 0. With
    ``layer_of`` (parameter -> layer), buckets hold ``bucket_numel`` elements at most (or one parameter), and in segment 0 one
    layer; their parameters are in the model's order.
    """
    span: Dict[torch.nn.Parameter, Tuple[int, int]] = {}
    place: Dict[torch.nn.Parameter, int] = {}
    for k, parameters in enumerate(segments):
        for p in parameters:
            span[p] = (span.get(p, (k, k))[0], k)
            place.setdefault(p, len(place))
    groups_of_ties = list({id(group): group for _, group in ties})
    tie_of = {p: groups_of_ties.index(id(group)) for p, group in ties}
    result = []
    for group in param_groups:
        buckets: Dict[BucketKey, List[torch.nn.Parameter]] = {}
        for p in group["params"]:
            if p.requires_grad and p.numel() > 0:
                segment, first = span.get(p, (0, len(segments) - 1))
                key = BucketKey(segment, first, str(p.dtype), bool(counts_in_norm(p)), tie_of.get(p, -1))
                buckets.setdefault(key, []).append(p)
                place.setdefault(p, len(place))
        if layer_of is not None:
            buckets = {key._replace(place=place[piece[0]]): piece for key, parameters in buckets.items()
                       for piece in _cut(key, sorted(parameters, key=place.get), layer_of, bucket_numel)}
        result.append({key: buckets[key] for key in sorted(buckets)})
    return result


def _cut(key: BucketKey, parameters: List[torch.nn.Parameter], layer_of: Dict[torch.nn.Parameter, int],
         bucket_numel: int) -> List[List[torch.nn.Parameter]]:
    """Pieces of a bucket, filled from the back as a backward does: what leaves last is the smallest."""
    if not key.leaves_early:
        return [parameters]
    pieces: List[List[torch.nn.Parameter]] = []
    numel = 0
    for p in reversed(parameters):
        other_layer = pieces and key.segment == 0 and layer_of.get(p) != layer_of.get(pieces[0][0])
        if not pieces or other_layer or numel + p.numel() > bucket_numel:
            pieces.insert(0, [])
            numel = 0
        pieces[0].insert(0, p)
        numel += p.numel()
    return pieces


class Bucket:
    """One bucket's buffers and the state of its gradients in this step.

    Args:
        key: see :class:`BucketKey`.
        parameters: trainable, of one dtype and device, in the order of the flat buffer. Their data move into it.
        replicas: the data-parallel ranks.
        sharded: each replica steps its part; otherwise each steps all of it (ZeRO-0).
        accumulate_dtype: of ``full``.
        tie: process group over which gradients of tied weights are summed before the replicas average them.
        on_final: called within a backward that :meth:`count_gradients` announced, when all gradients have arrived. Default:
            gradients are not counted.
        releases: the parameters may be released: this rank's part of them is kept in memory of its own. Needs ``sharded``.
    """

    def __init__(self, key: BucketKey, parameters: List[torch.nn.Parameter], replicas: Replicas, sharded: bool,
                 accumulate_dtype: torch.dtype, tie=None, on_final: Optional[Callable[[], None]] = None, releases: bool = False):
        self.key, self.parameters, self.tie = key, parameters, tie
        self.replicas, self.sharded = replicas, sharded
        self.accumulate_dtype = accumulate_dtype
        self._offsets, self.numel = [], 0
        for p in parameters:
            self._offsets.append(self.numel)
            self.numel += p.numel()
        align = 2 * replicas.size  # as DeepSpeed aligns for NCCL
        padded = -(-self.numel // align) * align
        first = parameters[0]
        self._set_flat(torch.zeros(padded, dtype=first.dtype, device=first.device))
        for p, view in zip(parameters, self._parameter_views):
            view.copy_(p.detach())
            p.data = view
        self.releases = releases
        #: this rank's part of the parameters, a view of ``flat`` unless that may be released
        self.weights = replicas.part(self.flat) if sharded else self.flat
        if releases:
            self.weights = self.weights.clone()
        #: where ``weights`` starts in ``flat``, and the part of it that is padding, in elements
        self.start = replicas.rank * self.weights.numel() if sharded else 0
        self.padding = max(0, min(self.weights.numel(), self.start + self.weights.numel() - self.numel))
        self.master = self.weights.detach() if self.aliased else self.weights.detach().float()
        self.master.requires_grad_(True)
        self.full: Optional[torch.Tensor] = None
        self.reduced: Optional[torch.Tensor] = None
        self.tied_sum = None  # work
        self.reduction: Optional[Pending] = None
        self.gather: Optional[Pending] = None
        self.undo: Optional[Undo] = None  # from an early step to its validation
        self._full_views: List[torch.Tensor] = []
        self._gradients: Optional[List[torch.Tensor]] = None  # these views while gradients arrive
        self._adds = accumulate_dtype != first.dtype  # else p.grad are the views
        self._on_final = on_final
        # how often each parameter's gradient arrives in one backward: more than once where reentrant checkpoints share it
        self._expected = [0] * len(parameters)  # most so far, and once at least; 0: not known yet
        self._arrived: Optional[List[int]] = None
        self._missing = 0  # parameters that have not been seen as often as expected
        self._hooks = []
        if self._adds or on_final is not None:
            self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(parameters)]

    @property
    def aliased(self) -> bool:
        """Whether the fp32 master is the parameters themselves."""
        return self.flat.dtype == torch.float32

    def _views(self, flat: torch.Tensor) -> List[torch.Tensor]:
        return [flat[o:o + p.numel()].view(p.shape) for p, o in zip(self.parameters, self._offsets)]

    # gradients ------------------------------------------------------------------------------------------------------------

    def release_full(self) -> None:
        """Free the full-size gradient."""
        self.full, self._full_views = None, []

    def open(self) -> None:
        """Zero ``full`` (made where it is not there) and let gradients flow into it."""
        self.check_no_stray("before its segment's begin_backward()")
        if self.full is None:
            self.full = torch.zeros_like(self.flat, dtype=self.accumulate_dtype)
            self._full_views = self._views(self.full)
        else:
            self.full.zero_()
        self._gradients = self._full_views
        if not self._adds:
            for p, view in zip(self.parameters, self._gradients):
                p.grad = view

    def count_gradients(self) -> None:
        """The last backward begins: call ``on_final`` when it has made all gradients."""
        if self._on_final is not None:
            self._arrived, self._missing = [0] * len(self.parameters), len(self.parameters)

    @property
    def is_open(self) -> bool:
        """Whether gradients flow into ``full`` now."""
        return self._gradients is not None

    @property
    def is_final(self) -> bool:
        """Whether the last backward has made all gradients that it made before."""
        return self._arrived is not None and self._missing == 0

    def close(self) -> None:
        """Take p.grad away: ``full`` is final. A parameter that got no gradient has zeros."""
        if self._arrived is not None:
            self._expected = [max(1, *counts) for counts in zip(self._expected, self._arrived)]
            self._arrived = None
        if not self._adds:
            for p, view in zip(self.parameters, self._gradients):
                grad, p.grad = p.grad, None
                if grad is None:  # someone cleared it
                    view.zero_()
                elif grad.data_ptr() != view.data_ptr():  # autograd replaced it, as with create_graph=True
                    view.copy_(grad.detach())
        self._gradients = None

    def check_no_stray(self, when: str, remedy: str = "Backward passes of a segment must lie between begin_backward() and "
                       "launch_reduce(); zero_grad() drops gradients made elsewhere") -> None:
        """Raises RuntimeError if a parameter has a gradient that would never be reduced."""
        for i, p in enumerate(self.parameters):
            if p.grad is not None:
                raise RuntimeError(f"a gradient of parameter {i} (shape {list(p.shape)}) of segment {self.key.segment}'s bucket "
                                   f"arrived {when}; it would be lost. {remedy}")

    def _hook(self, index: int):

        def arrive(p):  # must return None
            if self._gradients is None:
                return  # it stays, for check_no_stray
            if self._adds:
                self._gradients[index].add_(p.grad)
                p.grad = None
            if self._arrived is not None:
                self._arrived[index] += 1
                if self._arrived[index] == self._expected[index]:
                    self._missing -= 1
                    if self._missing == 0:
                        self._on_final()

        return arrive

    @property
    def full_bytes(self) -> int:
        """Bytes of the full-size gradient that is held now."""
        return 0 if self.full is None else self.full.numel() * self.full.element_size()

    # parameters -----------------------------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether the parameters have memory: they are there, or are being gathered."""
        return self.flat.untyped_storage().nbytes() > 0

    def _set_flat(self, flat: torch.Tensor) -> None:
        self.flat, self._flat_bytes, self._parameter_views = flat, flat.untyped_storage().nbytes(), self._views(flat)

    def fill(self) -> None:
        """Make room for the whole parameters and put this rank's part there, for a gather."""
        self.flat.untyped_storage().resize_(self._flat_bytes)
        self.replicas.part(self.flat).copy_(self.weights)
        for p, view in zip(self.parameters, self._parameter_views):
            p.data = view

    def adopt(self) -> None:
        """Parameters may have been set from outside while they were whole: keep this rank's part of them."""
        if self.releases and self.whole:
            self.weights.copy_(self.replicas.part(self.flat))

    def free(self) -> None:
        """Free the whole parameters. Whoever reads one all the same finds NaNs of its shape, and not freed memory."""
        nothing = torch.full((), float("nan"), dtype=self.flat.dtype, device=self.flat.device)
        for p in self.parameters:
            p.data = nothing.expand(p.shape)
        if not self.flat.untyped_storage().resizable():  # it is numpy's, too, which keeps it
            self._set_flat(torch.empty_like(self.flat))
        self.flat.untyped_storage().resize_(0)

    def norm_part(self) -> torch.Tensor:
        """The elements of ``reduced`` that this rank counts: each element once over all replicas."""
        return self.reduced if self.sharded else self.replicas.part(self.reduced)

    def publish(self) -> None:
        """Round the master into this rank's part of the parameters."""
        if not self.aliased:
            self.weights.copy_(self.master)

    def refresh_master(self) -> None:
        """The inverse of :meth:`publish`: parameters were set from outside."""
        self.adopt()
        if not self.aliased:
            self.master.copy_(self.weights)

    def saved_master(self) -> torch.Tensor:
        """The master without padding, with storage of its own."""
        return self.master.detach()[:self.master.numel() - self.padding].clone()

    def destroy(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._on_final, self._gradients, self.reduced = [], None, None, None
        self.release_full()


__all__ = ["Bucket", "BucketKey", "assign"]

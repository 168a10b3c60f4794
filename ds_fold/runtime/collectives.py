"""Collectives of the data-parallel replicas that are launched now and waited for later, each moving the bytes it must and no more.

gloo's own reduce-scatter is an all-reduce inside (twice the bytes), and its all-gather is slow between two ranks; there both are
built from pairwise transfers::

    reduce_scatter, 3 ranks                       all_gather
    rank 0 sends part 1 to 1, part 2 to 2         every rank sends its part to both others,
    and adds up part 0 of ranks 0, 1, 2           straight into its place

Parts travel in chunks, all posted at once: gloo moves a chunk when both ends have posted it, without anyone waiting.
"""

from typing import Callable, List, Optional, Sequence

import torch
import torch.distributed as dist

#: most bytes of one message, see :class:`Replicas`
CHUNK_BYTES = 4 << 20


class Pending:
    """A transfer in flight; its tensors must not be touched before :meth:`wait`."""
    __slots__ = ("_works", "_finish")

    def __init__(self, works: List, finish: Callable[[], torch.Tensor]):
        self._works, self._finish = works, finish

    def wait(self) -> torch.Tensor:
        """Block until the transfer is over and return its result; call it once.

        On CUDA this makes the current stream wait, not the host, and the backend keeps the tensors alive until then.
        """
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return self._finish()

    def checked(self, check: Callable[[], None]) -> "Pending":
        """This transfer, with a call of ``check`` between its end and its result."""
        finish = self._finish
        self._finish = lambda: (check(), finish())[1]
        return self

    @torch.no_grad()
    def lands_in(self, target: torch.Tensor) -> "Pending":
        """This transfer, with its result copied to ``target``, which becomes the result."""
        finish = self._finish
        self._finish = lambda: target.copy_(finish())
        return self


def duplicate_group(group: Optional[dist.ProcessGroup], backend: Optional[str] = None):
    """A new process group of the same ranks as ``group`` (None: all ranks), with traffic of its own; default: of its backend.

    All ranks of the job must call it together, each with its own group; groups that differ must be disjoint.
    """
    mine = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    everyone: List = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    own = None
    for ranks in sorted(set(map(tuple, everyone))):  # all ranks create all groups, in one order
        created = dist.new_group(list(ranks), backend=backend or dist.get_backend(group))
        if dist.get_rank() in ranks:
            own = created
    return own


class Replicas:
    """The ranks that hold the same layers, with a process group of their own for gradients and parameters.

    All of them must launch the same collectives in the same order. With one rank nothing is sent and results are the inputs.

    Args:
        group: the data-parallel process group. Groups of the job must be of one size.
        chunk_bytes: most bytes of one message between two ranks (gloo) or of one piece of an all-reduce, and one element at
            least. Smaller ones let pipeline messages on the same link through sooner, at 0.1 to 0.6 ms per message. Other backends
            cut their reduce-scatter and all-gather themselves.
    """

    def __init__(self, group: dist.ProcessGroup, chunk_bytes: int = CHUNK_BYTES):
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes} must be at least 1")
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.chunk_bytes = chunk_bytes
        self._ranks = dist.get_process_group_ranks(group)
        self._group = duplicate_group(group) if self.size > 1 else None
        self.pairwise = self.size > 1 and dist.get_backend(group) == "gloo"

    def part(self, flat: torch.Tensor, rank: Optional[int] = None) -> torch.Tensor:
        """The ``rank``-th (default: this rank's) of ``size`` equal parts of a flat tensor, as a view."""
        numel = flat.numel() // self.size
        return flat.narrow(0, (self.rank if rank is None else rank) * numel, numel)

    def reduce_scatter(self, flat: torch.Tensor) -> Pending:
        """Launch the sum over the ranks of this rank's part. ``flat``: [size * n], unchanged. Result: [n], of the same dtype.

        Terms are added in the order of ranks, whatever the order of arrival. Pairwise, ``flat``'s bytes * (size - 1) / size are
        received into buffers of their own, of which one becomes the result.
        """
        if self.size == 1:
            return Pending([], lambda: flat)
        own = self.part(flat)
        if not self.pairwise:  # not run on the machine this was written on
            result = self._landing(own)
            work = dist.reduce_scatter_tensor(result, flat, group=self._group, async_op=True)
            return Pending([work], lambda: result)
        terms = [own if rank == self.rank else self._landing(own) for rank in range(self.size)]
        works = self._exchange(lambda peer: self.part(flat, peer), lambda peer: terms[peer])

        def add_up():
            total = terms[0]
            for term in terms[1:]:
                # never into ``flat``
                total = torch.add(total, term, out=term if total is own else total)
            return total

        return Pending(works, add_up)

    def all_gather(self, flat: torch.Tensor) -> Pending:
        """Launch the gather of all parts, in place. ``flat``: [size * n] of which this rank's part is valid. Result: ``flat``."""
        if self.size == 1:
            return Pending([], lambda: flat)
        own = self.part(flat)
        if self.pairwise:
            works = self._exchange(lambda peer: own, lambda peer: self.part(flat, peer))
        else:  # not run on the machine this was written on
            works = [dist.all_gather_into_tensor(flat, own, group=self._group, async_op=True)]
        return Pending(works, lambda: flat)

    def all_reduce(self, flat: torch.Tensor) -> Pending:
        """Launch the sum over the ranks, in place. Result: ``flat``."""
        works = [] if self.size == 1 else [
            dist.all_reduce(piece, group=self._group, async_op=True) for piece in self._chunks(flat)
        ]
        return Pending(works, lambda: flat)

    def _landing(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer to receive into."""
        return torch.empty_like(like)

    def _chunks(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return flat.split(max(1, self.chunk_bytes // flat.element_size()))

    def _exchange(self, outgoing, incoming) -> List:
        """Post all messages: ``outgoing(peer)`` goes to each peer, ``incoming(peer)`` is filled by it."""
        pairs = []
        for step in range(1, self.size):  # each step is a permutation: no rank is everyone's target at once
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            pairs.append((to, self._chunks(outgoing(to)), source, self._chunks(incoming(source))))
        works = []
        for chunk in range(max(len(sent) for _, sent, _, _ in pairs)):
            for to, sent, source, received in pairs:
                works.append(dist.irecv(_bytes(received[chunk]), self._ranks[source], group=self._group))
                works.append(dist.isend(_bytes(sent[chunk]), self._ranks[to], group=self._group))
        return works

    def destroy(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # every dtype travels alike


__all__ = ["CHUNK_BYTES", "Pending", "Replicas", "duplicate_group"]

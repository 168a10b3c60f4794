"""Collectives of the data-parallel replicas that are launched now and waited for later, each moving the bytes it must and no more.

gloo's own reduce-scatter is an all-reduce inside (twice the bytes), and its all-gather is slow between two ranks; there both are
built from pairwise transfers::

    reduce_scatter, 3 ranks                       all_gather
    rank 0 sends part 1 to 1, part 2 to 2         every rank sends its part to both others,
    and adds up part 0 of ranks 0, 1, 2           straight into its place

Parts travel in chunks, of which a rank has few in flight, so that a message of the pipeline waits behind few on the card. Where
several transfers are launched, the next chunk is the most urgent one's::

    gather of segment 3    1 2 3                 4 5 6
    reduction of segment 2       1 2 3 4 5 6 7 8         launched later and more urgent; the gather goes on behind it

A thread for each transfer, which sleeps in gloo most of the time, posts a chunk when the one before is over.
"""

import atexit
import threading
from collections import deque
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

#: most bytes of one message, see :class:`Replicas`
CHUNK_BYTES = 1 << 20
#: rounds of messages that a transfer has in flight: one moves while the end of the other is noticed
ROUNDS = 2
#: exchanges are numbered in the order of their launches, and messages carry the number, so that several may be in flight
TAGS = 1 << 30
#: how long a process that ends lets its transfers finish
EXIT_S = 5


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


class _Round(NamedTuple):
    """A message to one peer and one from another; ranks are those of the group."""
    to: int
    sent: torch.Tensor
    source: int
    received: torch.Tensor


class _Turns:
    """Says which of a rank's transfers may post: the most urgent that has anything left to post, and among equals the first.

    Others' turns on other ranks may differ for a while: what is posted stays posted and does not keep a more urgent transfer from
    posting, so that all go on as soon as all ranks have launched them.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: List[Tuple[int, int]] = []  # (urgency, number)
        self._joined = 0

    def join(self, urgency: int) -> Tuple[int, int]:
        """A ticket: the urgency, and the transfer's number in the order of launches."""
        with self._changed:
            self._joined += 1
            self._waiting.append((urgency, self._joined))
            return self._waiting[-1]

    def wait_for(self, ticket: Tuple[int, int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: min(self._waiting) == ticket)

    def leave(self, ticket: Tuple[int, int]) -> None:
        with self._changed:
            self._waiting.remove(ticket)
            self._changed.notify_all()


class _Exchange(threading.Thread):
    """Rounds of messages, of which :data:`ROUNDS` are in flight."""

    def __init__(self, group: dist.ProcessGroup, rounds: List[_Round], turns: _Turns, urgency: int):
        super().__init__(daemon=True)
        self._group, self._rounds, self._turns = group, rounds, turns
        self._error: Optional[BaseException] = None
        self._ticket = turns.join(urgency)  # here: launches have an order
        self._tag = self._ticket[1] % TAGS
        self.start()

    def run(self) -> None:
        try:
            flying = deque()
            for works in self._post():
                flying.append(works)
                if len(flying) == ROUNDS:
                    self._wait(flying.popleft())
            for works in flying:
                self._wait(works)
        except BaseException as error:  # for who waits
            self._error = error
        self._group = self._rounds = None

    def _post(self) -> Iterator[Tuple[dist.Work, dist.Work]]:
        try:
            for to, sent, source, received in self._rounds:
                self._turns.wait_for(self._ticket)
                yield self._group.recv([received], source, self._tag), self._group.send([sent], to, self._tag)
        finally:
            self._turns.leave(self._ticket)

    @staticmethod
    def _wait(works: Tuple[dist.Work, dist.Work]) -> None:
        for work in works:
            work.wait()

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


@atexit.register
def _finish_exchanges() -> None:
    """A thread that returns from gloo to an interpreter that is gone would end the process with an error."""
    for thread in threading.enumerate():
        if isinstance(thread, _Exchange):
            thread.join(EXIT_S)


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
            least. Two of them are in flight in each direction. Smaller ones let pipeline messages and more urgent transfers
            through sooner, at 0.1 to 0.6 ms per message. Other backends cut their reduce-scatter and all-gather themselves.
    """

    def __init__(self, group: dist.ProcessGroup, chunk_bytes: int = CHUNK_BYTES):
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes} must be at least 1")
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.chunk_bytes = chunk_bytes
        self._ranks = dist.get_process_group_ranks(group)
        self._group = duplicate_group(group) if self.size > 1 else None
        self.pairwise = self.size > 1 and dist.get_backend(group) == "gloo"
        self._turns = _Turns()

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
        works = self._exchange(lambda peer: self.part(flat, peer), lambda peer: terms[peer], urgency=0)

        def add_up():
            total = terms[0]
            for term in terms[1:]:
                # never into ``flat``
                total = torch.add(total, term, out=term if total is own else total)
            return total

        return Pending(works, add_up)

    def all_gather(self, flat: torch.Tensor, urgency: int = 0) -> Pending:
        """Launch the gather of all parts, in place. ``flat``: [size * n] of which this rank's part is valid. Result: ``flat``.

        Pairwise, transfers of lower ``urgency`` go first, and among equals the one launched first; a reduction's is 0.
        """
        if self.size == 1:
            return Pending([], lambda: flat)
        own = self.part(flat)
        if self.pairwise:
            works = self._exchange(lambda peer: own, lambda peer: self.part(flat, peer), urgency)
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

    def _exchange(self, outgoing, incoming, urgency: int) -> List["_Exchange"]:
        """Launch all messages: ``outgoing(peer)`` goes to each peer, ``incoming(peer)`` is filled by it."""
        rounds = []
        for step in range(1, self.size):  # each step is a permutation: no rank is everyone's target at once
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            pieces = zip(map(_bytes, self._chunks(outgoing(to))), map(_bytes, self._chunks(incoming(source))))
            rounds += [_Round(to, sent, source, received) for sent, received in pieces]
        return [_Exchange(self._group, rounds, self._turns, urgency)]

    def destroy(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # every dtype travels alike


__all__ = ["CHUNK_BYTES", "Pending", "Replicas", "duplicate_group"]

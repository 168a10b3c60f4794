"""The parameters' side of the sharded optimizer: gathers launched, waited for before use, and segments released in between."""

from datetime import timedelta
from itertools import chain
from typing import Dict, Iterable, List, Optional, Set

import torch
import torch.distributed as dist

from ..schedule.sharding import gather_urgency
from .buckets import Bucket
from .collectives import Replicas

#: how long a replica that reads sharded parameters waits for the others to read them, too
READ_TIMEOUT_S = 300


class ParameterGathers:
    """Of :class:`~ds_fold.runtime.sharded_optimizer.ShardedOptimizer`, which makes the attributes."""

    buckets: List[Bucket]
    replicas: Replicas
    #: segment -> its buckets, in order of first use
    _end_with: List[List[Bucket]]
    #: by layer: layer -> buckets that it is the first to use, but for each segment's first; and all of these
    _begin_at: Dict[int, List[Bucket]]
    _late: Set[Bucket]
    #: gloo group of the replicas, where parameters are sharded
    _readers: Optional[dist.ProcessGroup] = None
    _destroyed = False
    #: whether any bucket may be released
    _releases: bool
    #: most bytes of whole parameters that were held at once after a gather_params(), since it was last set
    peak_full_parameter_bytes = 0

    @property
    def releasing(self) -> Set[int]:
        """Addresses of the storages that may be released."""
        return {bucket.flat.untyped_storage()._cdata for bucket in self.buckets if bucket.releases}

    def _launch_gathers(self, buckets: Iterable[Bucket]) -> None:
        """Of what was stepped, in order of first use; where parameters are sharded, it waits for gather_params(). On CUDA they run
        on the communicator's own stream (not run on the machine this was written on)."""
        wanted = set(buckets)
        for bucket in chain(*self._end_with):
            if bucket not in wanted or not bucket.sharded or self.replicas.size == 1:
                continue
            if not bucket.releases:
                bucket.gather = self.replicas.all_gather(bucket.flat, gather_urgency(bucket.key.segment, within=False))
            elif bucket.whole:  # with old parameters
                bucket.free()

    @staticmethod
    def _wait_gathers(buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket.gather is not None:
                bucket.gather.wait()
                bucket.gather = None

    def wait_params(self, k: int, by_layer: bool = False) -> None:
        """Call before segment ``k``'s first forward of a batch: blocks until its parameters are whole; with ``by_layer``, until
        those are that its first layer uses, and the others are left to :meth:`wait_layer`."""
        self._wait_gathers(b for b in self._end_with[k] if not by_layer or b not in self._late)

    def wait_layer(self, layer: int) -> None:
        """By layer: call before each forward of a layer; blocks until its parameters are whole."""
        self._wait_gathers(self._begin_at.get(layer, ()))

    @torch.no_grad()
    def gather_params(self, k: int) -> None:
        """Launch the gather of segment ``k``'s parameters, as far as they are released."""
        for bucket in self._end_with[k]:
            if not bucket.whole:
                bucket.fill()
                bucket.gather = self.replicas.all_gather(bucket.flat, gather_urgency(k, within=True))
        self.peak_full_parameter_bytes = max(self.peak_full_parameter_bytes, self.full_parameter_bytes)

    @torch.no_grad()
    def release_params(self, k: int) -> None:
        """Where parameters are sharded, free those of segment ``k`` but for this rank's part. Waits for a gather of them."""
        self._wait_gathers(self._end_with[k])
        for bucket in self._end_with[k]:
            if bucket.releases and bucket.whole:
                bucket.adopt()
                bucket.free()

    def shard(self) -> None:
        """Release all parameters that may be."""
        for k in range(len(self._end_with) if self._releases else 0):  # else their gathers go on
            self.release_params(k)

    def keep_from_release(self, outputs):
        """``outputs``, a tensor or a tuple of tensors, with a copy in place of a parameter or a view of one: it is used later, when
        the parameter may be released."""
        if not self._releases:
            return outputs
        releasing = self.releasing

        def kept(t):
            return t.clone() if t.untyped_storage()._cdata in releasing else t

        return tuple(map(kept, outputs)) if isinstance(outputs, tuple) else kept(outputs)

    @property
    def full_parameter_bytes(self) -> int:
        """Bytes of whole parameters, and of buffers that they are gathered into, on this rank now."""
        return sum(bucket.flat.untyped_storage().nbytes() for bucket in self.buckets)

    def flush(self) -> None:
        """Wait until all parameters are whole; whatever reads or writes them outside of the forward calls this first. Where they
        are sharded it gathers them, and all replicas must call it.

        Raises:
            RuntimeError: another replica did not call it within 5 minutes; or after :meth:`destroy`.
        """
        self._wait_gathers(self.buckets)
        if all(bucket.whole for bucket in self.buckets):
            return
        if self._destroyed:
            raise RuntimeError("parameters are sharded and their optimizer is destroyed: read them, with state_dict() or "
                               "named_parameters() on all ranks, before destroy()")
        try:
            dist.monitored_barrier(self._readers, timedelta(seconds=READ_TIMEOUT_S))
        except RuntimeError as error:
            raise RuntimeError("parameters are sharded (ds_fold.shard_params): reading them, by state_dict(), named_parameters(), "
                               "evaluation or a checkpoint, gathers them and is for all replicas to do, but ranks "
                               f"{dist.get_process_group_ranks(self._readers)} did not all come within {READ_TIMEOUT_S} s. Let "
                               "every rank read them, also where one of them writes") from error
        for k in range(len(self._end_with)):
            self.gather_params(k)
        self._wait_gathers(self.buckets)


__all__ = ["READ_TIMEOUT_S", "ParameterGathers"]

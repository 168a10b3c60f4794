"""One sharded optimizer for ZeRO 0, 1 and 2 and every dtype, whose reductions and parameter gathers run behind other work.

A segment's gradients leave when its last backward is over, its parameters return before its first forward of the next step::

    begin_backward(2)  backward of segment 2   launch_reduce(2) ....................
      begin_backward(1)    backward of segment 1   launch_reduce(1) ................
        begin_backward(0)      backward of segment 0   launch_reduce(0) ............
                                                           step(): wait, norm, clip, step on shards, launch all gathers
        wait_params(0)     forward of segment 0 ...        <- gathers in this order
          wait_params(1)       forward of segment 1 ...

The split of an all-reduce into a reduce-scatter behind the backward and an all-gather behind the next forward is Fold3D's (Li et
al., TPDS 2023); unlike there, clipping and overflow checks see all gradients before any weight changes, or change it back: with
step_segment(2) behind launch_reduce(1) segment 2 is stepped and gathered at once, and step() validates it. Shards are ZeRO's
(Rajbhandari et al., SC 2020).
"""

from contextlib import contextmanager
from copy import copy
from enum import Enum
from itertools import chain
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from ..compat.optimizer import TIMERS, ZeroOptimizerBase
from .buckets import Bucket, assign
from .collectives import CHUNK_BYTES, Replicas, duplicate_group
from .early_step import Undo
from .gathers import ParameterGathers


class _Phase(Enum):
    """Of one segment in one step; the value says what happened last."""
    IDLE = "has not begun"
    BEGUN = "has begun its backward"
    LAUNCHED = "has launched its reduction"


class ShardedOptimizer(ParameterGathers, ZeroOptimizerBase):
    """Steps the user's optimizer on fp32 shards of flat buckets, averaged over the data-parallel ranks.

    The numbers are those of DeepSpeed's ZeRO-1: bit by bit without clipping where sums have the same order (up to 2 replicas);
    with clipping the norm is rounded once, from fp64. Constructed by all ranks of the job together.

    Args:
        optimizer: the user's, elementwise (Adam, SGD, ...: not LAMB or Muon, which need whole matrices) and not yet stepped. Its
            groups stay, their "params" become fp32 shards. The parameters' data move into flat buffers.
        segments: this rank's parameters by segment; one that several segments use is listed in each. May be empty lists.
        param_names: parameter -> its name in checkpoints.
        data_parallel_group: the replicas. All of them must make the calls below in one order.
        ties: (parameter, process group) for weights that other pipeline ranks hold, too. Gradients are summed over the group before
            replicas average them. A group serves one tied module only and nothing else while a reduction is in flight.
        stage: ZeRO stage. 0: all-reduce, every rank steps everything. 1: reduce-scatter and shards. 2: as 1, and full-size
            gradients live only from begin_backward() until reduced.
        clip: largest global L2 norm of the gradients, 0 for no clipping.
        counts_in_norm: False for a copy of a parameter that another rank counts. Default: all count.
        dtype: of the model; default: that of the first parameter. Only fp16 scales the loss.
        accumulate_dtype: in which micro-batches' gradients are summed; default: the parameter's.
        communication_dtype: in which replicas' gradients are summed; default: ``dtype``.
        layer_of: parameter -> layer; given: buckets are cut and leave by layer, as in HIPPIE (ICPP 2021): each within the
            segment's last backward, as soon as its gradients are final. Segment 0, which has no other segment's backward to
            hide behind, has a bucket per layer; others have one, unless ``bucket_numel`` is smaller.
        bucket_numel: with ``layer_of``, most elements of a bucket, unless it is one parameter.
        chunk_bytes: most bytes of one message, see :class:`~ds_fold.runtime.collectives.Replicas`.
        shard_params: with stages 1 and 2, release_params() frees a segment's parameters but for this rank's part, until the next
            gather_params(). Tied weights, parameters that several segments share and, with one replica, all stay whole.
        defer_gather: False: step() returns with all parameters whole.
        check_overflow: skip a step whose gradients are not finite; default: unless bf16, as DeepSpeed's ZeRO.
        static_loss_scale, dynamic_loss_scale, dynamic_loss_args: DeepSpeed's, for fp16.
        mpu: DeepSpeed's grid, for the tensor-parallel rank in universal checkpoints.
        timers: DeepSpeed's timers for the phases of step(); default: none.
    """
    replicas_type = Replicas

    def __init__(self,
                 optimizer: torch.optim.Optimizer,
                 segments: Sequence[Sequence[torch.nn.Parameter]],
                 *,
                 param_names: Dict[torch.nn.Parameter, str],
                 data_parallel_group: dist.ProcessGroup,
                 ties: Sequence[Tuple[torch.nn.Parameter, dist.ProcessGroup]] = (),
                 stage: int = 1,
                 clip: float = 0.0,
                 counts_in_norm: Callable[[torch.nn.Parameter], bool] = lambda p: True,
                 dtype: Optional[torch.dtype] = None,
                 accumulate_dtype: Optional[torch.dtype] = None,
                 communication_dtype: Optional[torch.dtype] = None,
                 layer_of: Optional[Dict[torch.nn.Parameter, int]] = None,
                 bucket_numel: int = 500_000_000,
                 chunk_bytes: int = CHUNK_BYTES,
                 shard_params: bool = False,
                 defer_gather: bool = True,
                 check_overflow: Optional[bool] = None,
                 static_loss_scale: float = 1.0,
                 dynamic_loss_scale: bool = False,
                 dynamic_loss_args: Optional[dict] = None,
                 mpu=None,
                 timers=None):
        if stage not in (0, 1, 2):
            raise ValueError(f"ZeRO stage {stage} is not one of 0, 1, 2")
        if dtype is None:
            dtype = next((p.dtype for group in optimizer.param_groups for p in group["params"]), torch.float32)
        super().__init__(optimizer, param_names, data_parallel_group, stage, clip, dtype, static_loss_scale, dynamic_loss_scale,
                         dynamic_loss_args, mpu, timers)
        self.communication_dtype = communication_dtype or dtype
        self.check_overflow = dtype != torch.bfloat16 if check_overflow is None else check_overflow
        self.defer_gather = defer_gather
        if shard_params and stage == 0:
            raise ValueError("shard_params needs ZeRO stage 1 or 2, which keep shards")
        self.replicas = self.replicas_type(data_parallel_group, chunk_bytes)
        # not the replicas' group: a norm must not queue behind gathers
        self._everyone = duplicate_group(None) if dist.get_world_size() > 1 else None
        if shard_params and self.replicas.size > 1:
            self._readers = duplicate_group(data_parallel_group, "gloo")
        by_layer = layer_of is not None
        self.buckets: List[Bucket] = []
        groups_of_ties = list({id(group): group for _, group in ties}.values())
        planned = assign(optimizer.param_groups, segments, ties, counts_in_norm, layer_of, bucket_numel)
        for group, buckets in zip(optimizer.param_groups, planned):
            made = [
                Bucket(key, parameters, self.replicas, stage > 0, accumulate_dtype or parameters[0].dtype,
                       groups_of_ties[key.tie] if key.tie >= 0 else None,
                       self._launch_final if by_layer and key.leaves_early else None,
                       shard_params and key.leaves_early and self.replicas.size > 1)
                for key, parameters in buckets.items()
            ]
            group["params"] = [bucket.master for bucket in made]
            self.buckets += made
        self._releases = any(bucket.releases for bucket in self.buckets)
        v = len(segments)
        self._begin_with = [[b for b in self.buckets if b.key.first == k] for k in range(v)]
        # in order of first use
        self._end_with = [sorted((b for b in self.buckets if b.key.segment == k), key=lambda b: b.key.place) for k in range(v)]
        # one order for all replicas, whichever gradient comes first: that of a backward, then what has to wait for its end
        self._launch_order = [sorted(buckets, key=lambda b: (not b.key.leaves_early, -b.key.place)) for buckets in self._end_with]
        self._begin_at = {}
        if by_layer:
            for buckets in self._end_with:
                first_use = {b: min((layer_of[p] for p in b.parameters if p in layer_of), default=-1) for b in buckets}
                for bucket, layer in first_use.items():
                    if layer > min(first_use.values()):
                        self._begin_at.setdefault(layer, []).append(bucket)
        self._late = set(chain(*self._begin_at.values()))
        self._phases = [_Phase.IDLE] * v
        self._launched: List[int] = []  # segments of this step, in order
        self._by_layer = by_layer
        self._leaving: Optional[int] = None  # the segment in its last backward, by layer
        #: most bytes of full-size gradients that were held at once, since it was last set
        self.peak_full_gradient_bytes = 0
        self.link_parameters()

    # gradients ------------------------------------------------------------------------------------------------------------

    def begin_backward(self, k: int) -> None:
        """Call before the first backward of segment ``k`` in a step: gradients flow into zeroed flat buffers from here on.

        ZeRO-2 waits here until the full-size gradients of at most one launched segment are left, so that with this one there are
        two segments' worth. (What does not count, since nothing here could end it: segments that have begun and not launched,
        tied weights, and parameters that several segments of this rank share.)
        """
        self._advance(k, "begin_backward", _Phase.IDLE, _Phase.BEGUN)
        if self.stage == 2:
            flying = [s for s in self._launched if any(b.reduction is not None for b in self._end_with[s])]
            for segment in flying[:-1]:
                self._finish(b for b in self._end_with[segment] if b.tie is None)
        for bucket in self._begin_with[k]:
            bucket.open()
        self.peak_full_gradient_bytes = max(self.peak_full_gradient_bytes, self.full_gradient_bytes)

    def begin_last_backward(self, k: int) -> None:
        """By layer: call before the last backward of segment ``k`` in a step, which may be its first; the next launch must be
        ``launch_reduce(k)``. A bucket leaves within that backward once all its gradients have arrived as often as in such a
        backward before, and all buckets before it in the fixed order have left. So nothing leaves early in the first step, nor
        behind a parameter that gets no gradient."""
        if not self._by_layer:
            return
        if self._phases[k] is not _Phase.BEGUN or self._leaving is not None:
            other = f"; segment {self._leaving} is in its last backward" if self._leaving is not None else ""
            raise RuntimeError(f"begin_last_backward({k}), but the segment {self._phases[k].value}{other}")
        self._leaving = k
        for bucket in self._launch_order[k]:
            bucket.count_gradients()

    @torch.no_grad()
    def launch_reduce(self, k: int) -> None:
        """Call after the last backward of segment ``k``: what has not left yet leaves now; never blocks. A weight that several
        segments of this rank share leaves with the lowest of them; a tied weight's sum over pipeline ranks is launched here, and
        its average over replicas once that is over, in :meth:`wait_reduce` or :meth:`step`.

        Raises:
            RuntimeError: also where a gradient came after its bucket had left.
        """
        for bucket in self._end_with[k]:
            if self._phases[bucket.key.first] is not _Phase.LAUNCHED and bucket.key.first != k:
                raise RuntimeError(f"launch_reduce({k}): segment {bucket.key.first} shares weights with it and "
                                   f"{self._phases[bucket.key.first].value}")
        if self._leaving not in (None, k):  # replicas would launch in different orders
            raise RuntimeError(f"launch_reduce({k}), but segment {self._leaving} is in its last backward and has to leave first")
        self._leaving = None
        self._advance(k, "launch_reduce", _Phase.BEGUN, _Phase.LAUNCHED)
        self._launched.append(k)
        for bucket in self._launch_order[k]:
            if bucket.is_open:
                self._launch(bucket)
            else:
                bucket.check_no_stray("after its bucket had left, since it came more often than in any last backward before",
                                      'Use "overlap_grad_reduce": "segment" for such a model')

    @torch.no_grad()
    def _launch_final(self) -> None:
        """Called within the last backward of a segment: launch what is final, as far as the order allows."""
        for bucket in self._launch_order[self._leaving]:
            if bucket.is_open:
                if not bucket.is_final:
                    break
                self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        bucket.close()
        if bucket.tie is not None and dist.get_world_size(bucket.tie) > 1:
            bucket.tied_sum = dist.all_reduce(bucket.full, group=bucket.tie, async_op=True)
        else:
            self._reduce(bucket)

    def wait_reduce(self, k: int) -> None:
        """Block until segment ``k``'s reduction, which was launched, is over on this rank: until all replicas have launched it.
        Tied weights are left to :meth:`step`: their sum also waits for other pipeline ranks, whose backward may need this rank."""
        if self._phases[k] is not _Phase.LAUNCHED:
            raise RuntimeError(f"wait_reduce({k}), but the segment {self._phases[k].value}")
        self._finish(b for b in self._end_with[k] if b.tie is None)

    @property
    def full_gradient_bytes(self) -> int:
        """Bytes of full-size gradients on this rank now, without the pieces of other replicas that gloo is receiving."""
        return sum(bucket.full_bytes for bucket in self.buckets)

    def bytes_sent(self, k: int) -> Tuple[int, int]:
        """Bytes that this rank sends in a reduction and in a gather of segment ``k``, without the sums of tied weights; where
        parameters are sharded, in each of its gathers, of what is released."""
        reduced = gathered = 0
        for bucket in self._end_with[k]:
            sent = bucket.flat.numel() // self.replicas.size * (self.replicas.size - 1)
            # an all-reduce moves a reduce-scatter and a gather
            reduced += sent * self._wire_dtype(bucket).itemsize * (1 if bucket.sharded else 2)
            gathered += sent * bucket.flat.element_size() * (bucket.releases if self._releases else bucket.sharded)
        return reduced, gathered

    def _advance(self, k: int, call: str, expected: _Phase, next_phase: _Phase) -> None:
        if self._phases[k] is not expected:
            raise RuntimeError(f"{call}({k}): in this step the segment {self._phases[k].value}, but this call is for one that "
                               f"{expected.value}")
        self._phases[k] = next_phase

    def _reduce(self, bucket: Bucket) -> None:
        """Launch the average over the replicas."""
        # rounding to the communication dtype happens with one replica, too: results do not depend on their number, and it is
        # what DeepSpeed does for bf16 with fp32 accumulation
        wire = bucket.full.to(self._wire_dtype(bucket))
        if self.stage == 2 and wire is not bucket.full:
            bucket.release_full()  # the accumulator is not needed any more
            bucket.full = wire
        if self.replicas.size > 1:
            wire.div_(self.replicas.size)  # before the sum, as ZeRO-1: fp16 has no room for the sum
        bucket.reduction = self.replicas.reduce_scatter(wire) if bucket.sharded else self.replicas.all_reduce(wire)

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self.communication_dtype if bucket.flat.dtype == self.dtype else bucket.flat.dtype

    @torch.no_grad()
    def _finish(self, buckets) -> None:
        """Wait for reductions; leaves fp32 shards."""
        buckets = list(buckets)
        for bucket in buckets:
            if bucket.tied_sum is not None:
                bucket.tied_sum.wait()
                bucket.tied_sum = None
                self._reduce(bucket)
        for bucket in buckets:
            if bucket.reduction is not None:
                # rounded to what gradients were summed in even where the wire was finer, as ZeRO-1
                bucket.reduced = bucket.reduction.wait().to(bucket.accumulate_dtype).to(torch.float32)
                bucket.reduction = None
                if self.stage == 2:
                    bucket.release_full()

    # step -----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step_segment(self, k: int) -> None:
        """Step segment ``k``'s shards as if no gradient of the model overflowed and none had to be clipped, and launch the gathers
        of its parameters; :meth:`step` finds out, and takes the step back where it was wrong. Tied weights are left to it.

        Call after the segment's last use of parameters in the batch. Waits for the segment's reduction. Until :meth:`step` a copy
        of the masters and of the inner optimizer's state of them is held. The inner optimizer must be one that
        :func:`~ds_fold.runtime.early_step.why_not_in_pieces` finds nothing wrong with.
        """
        self.wait_reduce(k)
        buckets = [b for b in self._end_with[k] if b.tie is None]
        if any(b.undo is not None for b in buckets):
            raise RuntimeError(f"step_segment({k}): the segment was stepped already")
        self._wait_gathers(buckets)
        for bucket in buckets:
            bucket.undo = Undo(bucket.master, self.state)
        scale = self.loss_scale
        if not self.custom_loss_scaler:
            scaler = copy(self.loss_scaler)
            scaler.update_scale(False)
            scale = scaler.cur_scale
        self._step(buckets, self._clip_factor(0.0) * scale)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Wait for all reductions, then unscale, clip and step the shards, and launch the gathers of the new parameters.

        Where any gradient of the model is not finite (and :attr:`check_overflow`), no rank changes anything but its loss scale;
        :attr:`overflow` says so. What :meth:`step_segment` has stepped stays as it is, unless there was an overflow or gradients
        are clipped: then it is taken back, on all ranks.
        """
        if closure is not None:
            raise NotImplementedError("step() takes no closure")
        missing = [f"{k} {phase.value}" for k, phase in enumerate(self._phases) if phase is not _Phase.LAUNCHED]
        if missing:
            raise RuntimeError(f"step() needs launch_reduce() of every segment; but segment {', segment '.join(missing)}")
        for bucket in self.buckets:
            bucket.check_no_stray("after its segment's launch_reduce()")
        self._wait_gathers(b for b in self.buckets if b.undo is None)
        self._finish(b for k in self._launched for b in self._end_with[k])
        self._phases, self._launched = [_Phase.IDLE] * len(self._phases), []
        norm = self._norm()
        finite = bool(torch.isfinite(norm))
        self.overflow = self.check_overflow and not finite
        used_scale = self.loss_scale
        if self.overflow:
            self._launch_gathers(self._take_back())
        self.loss_scaler.update_scale(self.overflow)
        self.global_grad_norm = norm / used_scale if finite else float("inf")
        if not self.overflow:
            # as in DeepSpeed, the scale is the one after its update: in the step in which it grows, gradients are divided by twice
            # what they were multiplied by
            clip_factor = self._clip_factor(norm / self.loss_scale)
            if clip_factor > 1.0:
                self._take_back()
            self._step([b for b in self.buckets if b.undo is None], clip_factor * self.loss_scale)
            self.link_state()
        if not self.defer_gather:
            with self._timed(TIMERS[2]):
                self.flush()
        for bucket in self.buckets:
            bucket.reduced = bucket.undo = None

    def _norm(self) -> torch.Tensor:
        """L2 norm of the whole model's average gradients, still scaled; inf where any is not finite. fp32 scalar on the device.

        One all-reduce over all ranks, however many buckets each has.
        """
        device = self.buckets[0].flat.device if self.buckets else torch.device("cpu")
        total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of squares, number of buckets that are not finite
        for bucket in self.buckets:
            square = torch.linalg.vector_norm(bucket.norm_part(), dtype=torch.float64).square()
            if bucket.key.counted:
                total[0] += square
            total[1] += ~torch.isfinite(square)
        if self._everyone is not None:
            dist.all_reduce(total, group=self._everyone)
        norm = total[0].sqrt().float()
        return torch.where(total[1] > 0, torch.full_like(norm, float("inf")), norm)

    def _clip_factor(self, norm):
        """What gradients of this norm are divided by: at least 1. DeepSpeed's arithmetic, rounding for rounding."""
        if self.clip_grad == 0:
            return 1.0
        return torch.clamp((torch.as_tensor(norm, dtype=torch.float32) + 1e-6) / self.clip_grad, min=1.0)

    def _step(self, buckets: List[Bucket], divisor) -> None:
        """Step these buckets' shards with the reduced gradients / ``divisor``, and launch their gathers."""
        with self._timed(TIMERS[0]):
            for bucket in buckets:
                # an early step must leave the gradient as it is, for the norm and to do it again
                bucket.master.grad = bucket.reduced if bucket.undo is None else bucket.reduced.clone()
                if torch.is_tensor(divisor) or divisor != 1.0:
                    bucket.master.grad.mul_(1.0 / divisor)
        with self._timed(TIMERS[1]):
            with torch.enable_grad():
                self.optimizer.step()  # once for all of them: some optimizers count steps per group
            for bucket in buckets:
                bucket.master.grad = None
                bucket.publish()
        with self._timed(TIMERS[2]):
            self._launch_gathers(buckets)

    def _take_back(self) -> List[Bucket]:
        """Undo all early steps on this rank's shards. Returns their buckets, which other replicas' shards must be gathered into."""
        early = [b for b in self.buckets if b.undo is not None]
        self._wait_gathers(early)
        for bucket in early:
            bucket.undo.restore()
            bucket.undo = None
            bucket.publish()
        return early

    @contextmanager
    def _timed(self, name: str):
        self.timers(name).start()
        yield
        self.timers(name).stop()

    # parameters -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """The masters were loaded from outside: the parameters follow, on all replicas. Call on all ranks."""
        self.flush()
        for bucket in self.buckets:
            bucket.publish()
        self._launch_gathers(self.buckets)
        self.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop p.grad of all parameters, and with it what a backward outside of the begin and launch calls has left."""
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.grad = None

    # loss and groups --------------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self.external_loss_scale if self.custom_loss_scaler else self.loss_scaler.cur_scale

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this scale from now on, whatever overflows."""
        self.custom_loss_scaler, self.external_loss_scale = True, loss_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, **_) -> None:
        """Backward of the scaled loss; begin_backward() and launch_reduce() are still the caller's."""
        self.scale_if_loss(loss).backward(retain_graph=retain_graph)

    @property
    def param_groups(self) -> List[dict]:
        """The user's, in number and order; their "params" are the fp32 masters, one per bucket."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state

    # end ------------------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Wait for what is in flight and free buffers, hooks and process groups. Call on all ranks. Sharded parameters stay so."""
        self._wait_gathers(self.buckets)
        self._destroyed = True
        self.unlink()
        for bucket in self.buckets:
            bucket.destroy()
        self.replicas.destroy()
        for group in filter(None, (self._everyone, self._readers)):
            dist.destroy_process_group(group)
        self._everyone = self._readers = None


__all__ = ["ShardedOptimizer"]

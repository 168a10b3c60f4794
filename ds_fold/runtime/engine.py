"""The engine: DeepSpeed's ``PipelineEngine`` around the programs of :mod:`ds_fold.schedule`, of one pipeline rank.

What the instructions of a program do is in :mod:`~ds_fold.runtime.interpreter`; here is what surrounds a batch: channels,
schedules, the choice of the optimizer, data, evaluation, checkpoints and what a recording says of the run.
"""

from contextlib import ExitStack, nullcontext
from functools import cached_property
from typing import Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineError

from .. import compat
from ..config import WHOLE_MATRICES, ConfigError, FoldConfig, fold_config
from ..schedule import ScheduleError
from ..schedule import actions as op
from ..trace.recorder import Recorder
from . import checkpoint, losses, watchdog
from .channels import Channel
from .data import BatchQueue, EpochLoader, check_item
from .debug import CheckedChannel, DebugOptimizer, check_nothing_left
from .early_step import why_not_in_pieces
from .instructions import OTHER_END, ProgramSchedule, orders_of
from .interpreter import Interpreter
from .module import PipelineModule
from .sharded_optimizer import ShardedOptimizer
from .slots import Slot


class PipelineEngine(Interpreter):
    """DeepSpeed's ``PipelineEngine`` that runs the programs of :mod:`ds_fold.schedule`. Built by :func:`ds_fold.initialize`."""

    def __init__(self, *args, **kwargs):
        #: process groups of this engine's own; first of all, since destroy() comes also when the construction fails
        self._groups: List = []
        self._recorder: Optional[Recorder] = None
        self._watchdog: Optional[watchdog.Watchdog] = None
        #: counts what this rank holds while batches run, see :class:`~ds_fold.runtime.memory.MeasuredMemory`
        self.measured_memory = None
        if not isinstance(kwargs.get("model"), PipelineModule):
            raise ConfigError("ds_fold's engine needs a ds_fold.PipelineModule")
        super().__init__(*args, **kwargs)
        for key in ("segments", "partition", "recompute", "profile", "cluster"):
            mine, others = getattr(self.fold, key), getattr(self.module.fold, key)
            if mine != others:
                raise ConfigError(f"the module was built for ds_fold.{key}={others}, but the engine's config says {key}={mine}; "
                                  f"name one config for both: in PipelineModule(config=...) and initialize(), or with "
                                  f"--deepspeed_config or install()")
        self.module.check_recompute(self.module.activation_checkpoint_interval)
        self.fold.check(self.num_stages, self.micro_batches, len(self.module.layer_specs), self.dp_world_size,
                        self.grid.get_slice_parallel_world_size())
        self._refuse_partitioned_messages()
        self._schedules: Dict[Tuple[bool, int, Optional[type]], ProgramSchedule] = {}
        self._slots: Dict[Tuple[int, int], Slot] = {}
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._training_batch = True
        self._backwards: Dict[int, int] = {}  # segment -> backwards that have begun in this batch
        P, v = self.num_stages, self.fold.segments
        self._last_virtual_stage = v * P - 1
        #: edge into a virtual stage -> its name on the channels and in messages, where the sender adds the layer
        self._edges = [f"virtual stage {s - 1} -> {s}" for s in range(v * P)]
        for k, s in enumerate(range(self.stage_id + 1, v * P, P)):
            self._edges[s] += f" ({self.module.describe_last_layer(k)})"
        # small agreements between all ranks, on the CPU whatever the device
        self._control = self._new_group(None, backend="gloo") if dist.get_world_size() > 1 else None
        self._batches = BatchQueue(self._control if self.fold.data_check else None)
        if self.fold.trace.enabled:
            self._recorder = Recorder(self, self._control)
        self._labels_travel = self.fold.label_transport and P > 1
        self._watchdog = watchdog.of_engine(self.global_rank, dist.get_world_size(), self.describe_current, self.current_action,
                                            self.fold.watchdog_s)
        self._open_channels()
        self.train_schedule()  # a schedule that cannot run is refused now, on every rank

    def _refuse_partitioned_messages(self) -> None:
        asked = [key for key in ("pipe_partitioned", "grad_partitioned") if (self.ds_config.get("pipeline") or {}).get(key)]
        if asked and self.grid.get_slice_parallel_world_size() > 1:
            raise ConfigError(f"pipeline.{asked[0]}=true cuts messages between pipeline ranks among the "
                              f"{self.grid.get_slice_parallel_world_size()} tensor-parallel slices, but under a ds_fold block each "
                              f"slice sends them whole; set it to false or leave it out: the numbers are the same")

    def took_optimizer(self) -> None:
        #: ds_fold's own optimizer, or None where DeepSpeed's wrappers do the reduction
        self._sharded = self.optimizer if isinstance(self.optimizer, ShardedOptimizer) else None
        if self._sharded is not None:
            self.module.before_read = self._sharded.flush
            if self.fold.overlap_grad_reduce == "layer" and self.fold.overlap_param_gather and not self.fold.shard_params:
                self.module.before_layer = self._sharded.wait_layer
        if isinstance(self._sharded, DebugOptimizer):
            self._sharded.guard(self.module)

    @cached_property
    def fold(self) -> FoldConfig:
        """The typed ``ds_fold`` block."""
        return fold_config(self.ds_config)

    def _open_channels(self) -> None:
        """One process group per directed use of an edge. All ranks create all groups, in one order."""
        self._act_in = self._act_out = self._grad_in = self._grad_out = None
        P, kind = self.num_stages, CheckedChannel if self.fold.debug else Channel
        if P == 1:
            return
        edges = P if self.fold.segments > 1 else P - 1  # the last edge is the wrap-around
        for ranks in self.grid.pipe_groups:
            for r in range(edges):
                ends = [ranks[r], ranks[(r + 1) % P]]
                for forward in (True, False):
                    group = self._new_group(ends)
                    if self.global_rank not in ends:
                        continue
                    peer = ends[1] if self.global_rank == ends[0] else ends[0]
                    channel = kind(group, peer, self.device, self.module.dynamic_shape, with_header=forward)
                    if (self.global_rank == ends[0]) == forward:
                        name = "_act_out" if forward else "_grad_out"
                    else:
                        name = "_act_in" if forward else "_grad_in"
                    setattr(self, name, channel)

    def _new_group(self, ranks, **options):
        group = dist.new_group(ranks, **options)
        if ranks is None or self.global_rank in ranks:
            self._groups.append(group)
        return group

    def destroy(self):
        """DeepSpeed's ``destroy``, and the engine's process groups with their sockets and threads. Call on all ranks."""
        if self._recorder is not None:
            self._recorder.close()
        if self._watchdog is not None:
            self._watchdog.close()
        super().destroy()
        self._act_in = self._act_out = self._grad_in = self._grad_out = None
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    # schedules ------------------------------------------------------------------------------------------------------------

    def train_schedule(self) -> ProgramSchedule:
        """This rank's program for a training batch, proved once per number of micro-batches. Raises ConfigError."""
        return self._schedule(True, self.micro_batches)

    def eval_schedule(self, micro_batches: int) -> ProgramSchedule:
        """This rank's forward-only program."""
        return self._schedule(False, micro_batches)

    def schedule_of(self, pipe_schedule) -> ProgramSchedule:
        if isinstance(pipe_schedule, ProgramSchedule):
            return pipe_schedule
        return self._schedule(True, pipe_schedule.micro_batches, type(pipe_schedule))

    def _schedule(self, train: bool, M: int, replaced: Optional[type] = None) -> ProgramSchedule:
        replaced = replaced or (self.replaced_schedule if train else None)
        if (train, M, replaced) not in self._schedules:
            try:
                if replaced is not None:
                    self.fold.check_replaced(replaced)
                    program = self.fold.train_program(self.num_stages, M, self.fold_zero_stage,
                                                      orders_of(replaced, self.num_stages, M))
                elif train:
                    program = self.fold.train_program(self.num_stages, M, self.fold_zero_stage)
                else:
                    program = self.fold.eval_program(self.num_stages, M)
            except ScheduleError as error:
                raise ConfigError(str(error)) from None
            self._schedules[train, M, replaced] = ProgramSchedule(program, self.stage_id)
        return self._schedules[train, M, replaced]

    def run_schedule(self, schedule) -> None:
        """Execute the instructions of this rank through ``_INSTRUCTION_MAP``, on the batch that was pulled."""
        self._training_batch = self.module.training
        self.fwd_outputs = []
        if self.shapes_were_reset():  # before this batch, on all ranks
            for channel in self._act_channels():
                channel.forget_shapes()
        if not self._batches.pulled:  # by a train_batch or eval_batch of the script's own
            self._pull_batch(schedule.micro_batches)
        if self._training_batch:
            self.begin_batch()
            if self._sharded is not None:
                self._sharded.shard()
            self._backwards.clear()
            with nullcontext() if self._recorder is None else self._recorder.count_memory():
                self._interpret(schedule)
        else:
            if self._sharded is not None:
                self._sharded.flush()
            with ExitStack() as stack:
                for channel in self._act_channels():
                    stack.enter_context(channel.separate_shapes())
                self._interpret(schedule)
            compat.reset_checkpoint_buffers()
        self._batches.pulled = False
        self.module.micro_offset += schedule.micro_batches
        if self.fold.debug:
            check_nothing_left(sorted(self._slots), self._channels(), self._sharded, self._control)
        if self._slots:
            raise RuntimeError(f"slots left after the batch: {sorted(self._slots)}")

    def owns_optimizer(self, optimizer, half: bool) -> bool:
        if self._why_no_shards(optimizer) and not self.fold.needs_own_optimizer(self.fold_zero_stage):
            return False
        return self.fold.owns_optimizer(self.fold_zero_stage, half)

    @property
    def shards_optimizer(self) -> bool:
        """Whether ds_fold's sharded optimizer steps, and not one of DeepSpeed's wrappers."""
        return self._sharded is not None

    def _why_no_shards(self, optimizer) -> Optional[str]:
        """Why the sharded optimizer cannot step with the user's; None if it can."""
        if any(word in type(optimizer).__name__.lower() for word in WHOLE_MATRICES):
            return f"optimizer {type(optimizer).__name__} needs whole matrices"
        if self.zero_use_cpu_optimizer():
            return "zero_optimization.offload_optimizer moves the optimizer away from the gradients"
        return None

    def make_optimizer(self, optimizer, **options):
        reason = self._why_no_shards(optimizer)
        if reason:
            raise ConfigError(f"{reason}, but overlap and ZeRO-2 step shards of flat buckets in place: use an optimizer that works "
                              f"element by element, without offload, or ds_fold.overlap_grad_reduce: \"off\", "
                              f"overlap_param_gather: false and ZeRO 0 or 1")
        reason = why_not_in_pieces(optimizer) if self.fold.optimizer_step == "post_validated" else None
        if reason:
            raise ConfigError(f"ds_fold.optimizer_step=\"post_validated\" steps each segment by itself, and may take it back; but "
                              f"optimizer {type(optimizer).__name__} cannot: {reason}. Use one of torch's own (\"torch_adam\": "
                              f"true in optimizer.params), or ds_fold.optimizer_step: \"validated\"")
        by_layer = self.fold.overlap_grad_reduce == "layer"
        # the program waits for the gathers, right after the step if not later
        kind = DebugOptimizer if self.fold.debug else ShardedOptimizer
        return kind(optimizer, self.module.segment_parameters(), defer_gather=True,
                    shard_params=self.fold.overlap(self.fold_zero_stage).shard,
                    layer_of=self.module.first_layers() if by_layer else None, chunk_bytes=self.fold.comm_chunk_bytes, **options)

    def _interpret(self, schedule) -> None:
        deterministic = self.fold.deterministic_rng
        if self._training_batch and self._recorder is not None and self._recorder.covers(self.global_steps):
            schedule = self._recorder.watch(schedule)
        if self.measured_memory is not None:
            schedule = self.measured_memory.watch(schedule)
        self.module.rng_key = (self.global_steps, self.grid.get_data_parallel_rank()) if deterministic else None
        methods = self.instruction_methods()
        try:
            with compat.preserved_rng() if deterministic else nullcontext():
                for step in schedule:
                    for instruction in step:
                        self.__dict__["current_instruction"] = instruction  # past torch's slow setattr
                        methods[type(instruction)](self, **instruction.kwargs)
        except Exception as error:
            self._watchdog.record(error)
            raise
        self.current_instruction = None
        self.module.rng_key = None

    def current_action(self):
        """What tells this action from others, None outside of a batch."""
        instruction = self.current_instruction
        return None if instruction is None else (id(instruction), self.global_steps)

    def describe_current(self) -> str:
        """This rank and what it does, for messages."""
        words = [f"rank {self.global_rank} (pipeline rank {self.stage_id}, replica {self.grid.get_data_parallel_rank()})"]
        instruction = self.current_instruction
        if instruction is None:
            return f"{words[0]}, outside of a batch's program, {self.global_steps} steps done"
        words += [f"step {self.global_steps}", type(instruction).__name__]
        if type(instruction) in OTHER_END:
            stage = (self.stage_id + OTHER_END[type(instruction)]) % self.num_stages
            words[-1] += f" (other end: rank {self.grid.stage_to_global(stage_id=stage)})"
        words += [f"{name.replace('_', '-')} {instruction.kwargs[name]}" for name in ("segment", "micro_batch")
                  if name in instruction.kwargs]
        return ", ".join(words)

    def _channels(self) -> Tuple[Optional[Channel], ...]:
        return self._act_in, self._act_out, self._grad_in, self._grad_out

    def _act_channels(self) -> List[Channel]:
        return [channel for channel in (self._act_in, self._act_out) if channel is not None]

    def train_batch(self, data_iter=None):
        """DeepSpeed's ``train_batch``: one step on ``micro_batches`` items of the data iterator; returns the mean loss.

        Raises:
            StopIteration: on every rank and before anything is computed, where any rank's data ended.
        """
        if torch.is_grad_enabled():
            if data_iter is not None:
                self.set_dataiterator(data_iter)
            self._pull_batch(self.micro_batches)
        return super().train_batch()

    def message_tensors(self) -> List[torch.Tensor]:
        """Buffers of messages that are posted or launched and not yet waited for."""
        return [t for channel in self._channels() if channel is not None for t in channel.buffers()]

    def slot_tensors(self) -> List:
        """What the slots hold now: tensors, tuples and lists of them."""
        return [getattr(slot, name) for slot in self._slots.values() for name in slot.__slots__]

    # recording ------------------------------------------------------------------------------------------------------------

    def describe_run(self) -> str:
        """Title of a recording."""
        fold, zero = self.fold, self.fold_zero_stage
        words = [fold.preset or fold.schedule.file, f"P={self.num_stages} D={self.dp_world_size} v={fold.segments} "
                 f"M={self.micro_batches}", f"ZeRO {zero}"]
        overlap = fold.overlap(zero)
        words += ["reductions overlapped"] * overlap.reduce + ["gathers overlapped"] * overlap.gather
        words += ["parameters sharded"] * overlap.shard
        return ", ".join(words)

    def transfer_bytes(self) -> Dict[str, int]:
        """Bytes that this rank moves in the last message of each segment and kind, and in each reduction and gather; by their
        launch, such as ``SA0`` and ``R1``. What DeepSpeed's wrappers reduce is not known."""
        sizes: Dict[str, int] = {}
        for k in range(self.fold.segments):
            s = self._virtual_stage(k)
            sides = ((op.RECV_ACT, op.SEND_GRAD, self._act_in, s), (op.SEND_ACT, op.RECV_GRAD, self._act_out, s + 1))
            for activation, gradient, channel, edge in sides:
                if channel is not None and 0 < edge <= self._last_virtual_stage:
                    known = [channel.specs[name] for name in (self._edges[edge], f"labels, {self._edges[edge]}")
                             if name in channel.specs]
                    sizes[f"{activation}{k}"] = sum(spec.nbytes for spec in known)
                    sizes[f"{gradient}{k}"] = known[0].gradients().nbytes
            sizes[f"{op.REDUCE}{k}"], sizes[f"{op.GATHER}{k}"] = (0, 0) if self._sharded is None else self._sharded.bytes_sent(k)
        if self._sharded is None and self.dp_world_size > 1:
            del sizes[f"{op.REDUCE}0"]
        return sizes

    # evaluation -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_batch(self, data_iter, return_logits=False, compute_loss=True, reduce_output="avg", bcast_loss=True,
                   num_micro_batches=None):
        """Evaluate ``num_micro_batches`` (default: as many as in training) items of ``data_iter`` without touching training.

        Args:
            data_iter: read on the first and the last pipeline rank.
            return_logits: return what the last layer made, too, on the last pipeline rank: one output if there is one
                micro-batch, else a list with one for each.
            compute_loss: False returns the outputs in place of the losses, on the last pipeline rank only.
            reduce_output: "avg" averages over micro-batches and replicas; None returns the list of all micro-batches' losses.
            bcast_loss: all pipeline ranks get the result, not only the last.

        Returns:
            The loss, in the form that loss_fn gave it (a tensor of shape [] or [1], or a list of them); with ``return_logits`` a
            pair of it and the logits.
        """
        if reduce_output is not None and str(reduce_output).lower() != "avg":
            raise NotImplementedError(f"reduce_output={reduce_output!r}: only 'avg' and None are known")
        was_training, train_iterator, loader = self.module.training, self.data_iterator, self.training_dataloader
        micro_batches = self.micro_batches if num_micro_batches is None else num_micro_batches
        self.module.eval()
        self.computes_loss, self.eval_return_logits = compute_loss, return_logits
        self.set_dataiterator(data_iter)
        self.total_loss, self.outputs = None, []
        try:
            self._pull_batch(micro_batches)
            self.run_schedule(self.eval_schedule(micro_batches))
        finally:
            self.module.train(was_training)
            self.data_iterator, self.training_dataloader = train_iterator, loader
            self.eval_return_logits = False
        result = self.fwd_outputs if self.is_last_stage() else None
        if reduce_output is not None and self.is_last_stage():
            result = losses.average(result, self.grid.get_data_parallel_group(), self.dp_world_size)
        if compute_loss and reduce_output is not None and (bcast_loss or self.monitor.enabled):
            result = losses.broadcast(result, self.grid.stage_to_global(self.num_stages - 1), self.grid.get_pipe_parallel_group(),
                                      self.device)
            if self.global_rank == 0 and self.monitor.enabled:
                first = result[0] if isinstance(result, list) else result
                self.monitor.write_events([("Train/Samples/eval_loss", first.mean().item(), self.global_samples)])
        logits, self.outputs = self.outputs, None
        if not return_logits:
            return result
        return result, (None if not logits else logits[0] if micro_batches == 1 else logits)

    # checkpoints ----------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """DeepSpeed's ``save_checkpoint``, all or nothing: a save that is killed half-way leaves the checkpoints before it and
        ``latest`` as they were."""
        client_state = client_state or {}
        if self._sharded is not None:
            self._sharded.flush()  # layers are saved as they are
        if self.checkpoint_engine.is_decoupled():  # such an engine commits on its own, later
            return super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        leader = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
        if leader and save_dir:
            checkpoint.begin(save_dir, tag)
        super().save_checkpoint(save_dir, tag + checkpoint.UNFINISHED, client_state, False, exclude_frozen_parameters)
        if leader:  # the line above ends with a barrier: every rank's files are there
            checkpoint.commit(save_dir, tag, save_latest)
        dist.barrier()
        return True

    def load_checkpoint(self, *args, **kwargs):
        """DeepSpeed's ``load_checkpoint``."""
        if self._sharded is not None:
            self._sharded.flush()  # a gather in flight would overwrite what is loaded
        return super().load_checkpoint(*args, **kwargs)

    # data -----------------------------------------------------------------------------------------------------------------

    def training_loader(self, dataset):
        return EpochLoader(self.deepspeed_io, dataset, self.dp_world_size, self.grid.get_data_parallel_rank(), self.fold.shuffle,
                           self.fold.shuffle_seed, self.fold.data_workers)

    def set_epoch(self, epoch: int) -> None:
        """Start epoch ``epoch`` (from 0) of ``training_data`` or of a loader whose sampler has ``set_epoch``, at its first item.
        Call on all ranks. Without it, one epoch follows the other."""
        loader = self.training_dataloader
        if not (self.is_first_stage() or self.is_last_stage()):
            return
        target = loader if hasattr(loader, "set_epoch") else getattr(loader, "sampler", None)
        if not hasattr(target, "set_epoch"):
            raise PipelineError("set_epoch needs training_data= or a loader whose sampler has set_epoch")
        target.set_epoch(epoch)
        self.data_iterator = iter(loader)

    def _pull_batch(self, micro_batches: int) -> None:
        """Take this batch's items from the data iterator, and agree with all other ranks that everybody has them."""
        loads = self.is_first_stage() or (self.is_last_stage() and not self._labels_travel)
        self._batches.pull(self._next_item, micro_batches if loads else 0)

    def _next_item(self):
        if self.data_iterator is None:
            raise PipelineError("no data: pass a data iterator to train_batch() or eval_batch() on the first and the last pipeline "
                                "rank, or training_data= to initialize()")
        item = self.next_batch()
        check_item(item, self.is_first_stage(), self._labels_travel)
        return item

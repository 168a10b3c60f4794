"""The only place that touches DeepSpeed's private names: a new DeepSpeed release is this folder's work.

The two base classes translate between DeepSpeed's internal methods and the public hooks that the rest of the package
implements. Facts about the internals are for DeepSpeed 0.19.x.
"""

from .release import SUPPORTED_DEEPSPEED, check_deepspeed_version  # first: refuses releases that lack what follows

# isort: split
import random
import time
from contextlib import contextmanager
from typing import List, Tuple

import deepspeed
import numpy
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule as stock_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine as _StockEngine
from deepspeed.runtime.pipe.module import PipelineModule as _StockModule
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.utils.checkpoint import checkpoint

from .scripts import (
    ScriptEngine,
    config_of,
    decoded_config,
    engine_arguments,
    redirect_instructions,
    restore_instructions,
    set_config_of,
)


@contextmanager
def engine_class(cls):
    """Within this context, ``deepspeed.initialize`` builds ``cls`` for a PipelineModule: it looks the class up in its module."""
    stock, deepspeed.PipelineEngine = deepspeed.PipelineEngine, cls
    try:
        yield
    finally:
        deepspeed.PipelineEngine = stock


class PipelineModuleBase(_StockModule):
    """DeepSpeed's PipelineModule with hooks for placement and construction.

    Subclasses implement :meth:`place_layers`, :meth:`chunk_bounds` and :meth:`take_parts`. Where a subclass of those has a
    ``_partition_layers`` of its own, that sees all virtual stages in ``num_stages``, and its ``parts`` are taken.
    """

    def __init__(self, *args, **kwargs):
        object.__setattr__(self, "_partition_layers", self._partition_into_chunks)
        super().__init__(*args, **kwargs)
        del self._partition_layers  # the class's again

    def place_layers(self, method: str) -> List[int]:
        """The cuts between all virtual stages."""
        raise NotImplementedError

    def chunk_bounds(self) -> List[Tuple[int, int]]:
        """This rank's chunks as ranges of global layer indices, by segment."""
        raise NotImplementedError

    def take_parts(self, parts) -> List[int]:
        """Check the cuts that a subclass has made. Raises ConfigError unless they are those of v*P chunks."""
        raise NotImplementedError

    def count_parameters(self) -> List[int]:
        """Parameters of each layer."""
        raise NotImplementedError

    @property
    def layer_specs(self) -> list:
        return self._layer_specs

    @property
    def grid(self):
        return self._grid

    def layers_of_type(self, pattern: str) -> List[int]:
        """Indices of the layers whose class or function name matches ``pattern``, ignoring case."""
        return self._find_layer_type(pattern)

    def is_checkpointable(self, funcs) -> bool:
        return self._is_checkpointable(funcs)

    def layer_weights(self) -> List[int]:
        """What partition "parameters" balances: :meth:`count_parameters`, or what a subclass counts."""
        counts_itself = type(self)._count_layer_params is not _StockModule._count_layer_params
        return list(self._count_layer_params()) if counts_itself else self.count_parameters()

    def _partition_into_chunks(self, method="uniform"):
        if type(self)._partition_layers is PipelineModuleBase._partition_layers or self.fold.partition is not None:
            return PipelineModuleBase._partition_layers(self, method)
        P, self.parts = self.num_stages, None
        self.num_stages = P * self.num_segments
        type(self)._partition_layers(self, method)
        self.num_stages = P
        self.parts = self.take_parts(self.parts)

    def _partition_layers(self, method="uniform"):
        self.num_stages = self.num_pipeline_stages()
        self.parts = self.place_layers(method)
        self._set_bounds(*self.chunk_bounds()[0])

    def _build(self):
        #: the layers' global indices, in the order of forward_funcs
        self.global_layer_indices = []
        #: segment -> range of this rank's forward_funcs
        self.segment_ranges = []
        for start, stop in self.chunk_bounds():
            self._set_bounds(start, stop)
            first = len(self.forward_funcs)
            super()._build()
            self.segment_ranges.append((first, len(self.forward_funcs)))
            self.global_layer_indices.extend(range(start, stop))
        self._set_bounds(*self.chunk_bounds()[0])

    def index_chunk(self) -> None:
        """What :meth:`_build` would have set, for a module that DeepSpeed's class has built."""
        self.segment_ranges = [(0, len(self.forward_funcs))]
        self.global_layer_indices = list(range(self._local_start, self._local_stop))
        self._tie()

    def build_again(self, partition_method) -> None:
        """Other cuts for a module that DeepSpeed's class has built: what its constructor does from the cuts on. The process groups
        stay. Layers that were given as modules are used again as they are."""
        for name in self.fwd_map:
            delattr(self, name)
        self.forward_funcs, self.fwd_map = [], {}
        self.tied_modules, self.tied_weight_attrs = torch.nn.ModuleDict(), {}
        self._partition_into_chunks(partition_method)
        self._build()
        self.to(get_accelerator().device_name(self.local_rank))
        self._tie()

    def _tie(self) -> None:
        self.tied_comms = self._index_tied_modules()
        self._synchronize_tied_weights()

    def _index_tied_modules(self):
        ties = super()._index_tied_modules()
        for tie in ties.values():
            # the whole module is shared, as it is where its users lie on one rank; DeepSpeed ties the named weights only
            tie["weight_attr"] = [name for name, _ in tie["module"].named_parameters()]
        return ties

    @torch.no_grad()  # otherwise the broadcast becomes part of the weights' graph, and the first backward warns of it
    def _synchronize_tied_weights(self):
        for key, tie in self.tied_comms.items():
            # from its first user, whose initial weights do not depend on the fold; DeepSpeed's source is the lowest rank
            first_user = next(i for i, spec in enumerate(self.layer_specs) if getattr(spec, "key", None) == key)
            source = self.grid.stage_to_global(stage_id=self.stage_owner(first_user))
            for weight in tie["module"].parameters():
                dist.broadcast(weight, source, group=tie["group"])

    def _precompute_checkpointable_values(self):
        pass  # blocks are found per segment where they are used, see PipelineModule.forward

    @contextmanager
    def _global_index(self, local_idx):
        # checkpoint paths are _local_start + local index; with several chunks the sum is looked up instead
        start, self._local_start = self._local_start, self.global_layer_indices[local_idx] - local_idx
        try:
            yield
        finally:
            self._local_start = start

    def ckpt_layer_path(self, ckpt_dir, local_layer_idx):
        with self._global_index(local_layer_idx):
            return super().ckpt_layer_path(ckpt_dir, local_layer_idx)

    def ckpt_layer_path_list(self, ckpt_dir, local_layer_idx):
        with self._global_index(local_layer_idx):
            return super().ckpt_layer_path_list(ckpt_dir, local_layer_idx)


class PipelineEngineBase(ScriptEngine):
    """DeepSpeed's PipelineEngine with hooks for the schedule, and its gradient state reduced to plain functions.

    Subclasses implement the hooks below and those of :class:`ScriptEngine`.
    """

    def __init__(self, *args, **kwargs):
        config = kwargs["config_class"]
        # ZeRO-1 registers hooks for contiguous_gradients and holds two buffers of reduce_bucket_size for it; a pipeline reduces
        # once per batch and gains nothing from either
        config.zero_config.contiguous_gradients = False
        # accumulate each bf16 gradient as it appears, instead of walking all parameters around every backward
        config.bfloat16_config.immediate_grad_update = True
        #: ZeRO stage of the config
        self.fold_zero_stage = config.zero_config.stage
        if self.fold_zero_stage == 2:  # DeepSpeed refuses it with pipelines; only the optimizer below has to know
            config.zero_optimization_stage = config.zero_config.stage = 1
        super().__init__(*args, **kwargs)

    def look_at_optimizer(self):
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer) and not self.optimizer.cpu_offload:
            # its own issues collectives per parameter group, and ranks with different numbers of groups wait for each other
            self.optimizer.scaled_global_norm = self._zero_global_norm
        self.using_bf16_optimizer = isinstance(self.optimizer, BF16_Optimizer)
        self.took_optimizer()

    # hooks ----------------------------------------------------------------------------------------------------------------

    def took_optimizer(self) -> None:
        """Called when ``self.optimizer`` is there: once built, or later."""
        raise NotImplementedError

    def training_loader(self, dataset):
        """The iterable that ``training_data=`` becomes."""
        raise NotImplementedError

    def owns_optimizer(self, optimizer, half: bool) -> bool:
        """Whether :meth:`make_optimizer` replaces DeepSpeed's wrappers of the user's ``optimizer``. ``half``: fp16 or bf16."""
        raise NotImplementedError

    def make_optimizer(self, optimizer, **options):
        """A sharded optimizer over the user's ``optimizer``. ``options`` are what DeepSpeed's config and engine say."""
        raise NotImplementedError

    def _replaces_wrapper_of(self, optimizer) -> bool:
        return self.owns_optimizer(optimizer, self.get_data_types()[0] != torch.float32)

    def _do_optimizer_sanity_check(self, basic_optimizer):
        if not self._replaces_wrapper_of(basic_optimizer):
            return super()._do_optimizer_sanity_check(basic_optimizer)
        if self.fold_zero_stage > 0:
            super()._do_optimizer_sanity_check(basic_optimizer)
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer):
        if not self._replaces_wrapper_of(optimizer):
            return super()._configure_zero_optimizer(optimizer)
        if optimizer is None:
            return None  # it comes later, see _configure_optimizer, or never
        dtype, accumulate_dtype = self.get_data_types()
        grid = self.module.grid
        # like DeepSpeed's wrappers: with fp32 accumulation a step that is not finite is skipped in bf16, too
        bf16_check = accumulate_dtype == torch.float32 or self._config.bfloat16_config.check_grad_overflow
        return self.make_optimizer(
            optimizer, param_names=self.param_names, data_parallel_group=grid.get_data_parallel_group(), ties=self.tied_weights(),
            stage=self.fold_zero_stage, clip=self.gradient_clipping(), counts_in_norm=self._counts_in_norm, dtype=dtype,
            accumulate_dtype=accumulate_dtype, communication_dtype=self.communication_data_type,
            bucket_numel=self.zero_reduce_bucket_size(),
            check_overflow=bf16_check or dtype != torch.bfloat16,
            static_loss_scale=self.loss_scale(), dynamic_loss_scale=self.dynamic_loss_scale(),
            dynamic_loss_args=self.dynamic_loss_scale_args(), mpu=grid, timers=self.timers if self.wall_clock_breakdown() else None)

    def _configure_bf16_optimizer(self, optimizer):
        later = optimizer is None and self._replaces_wrapper_of(None)
        return None if later else super()._configure_bf16_optimizer(optimizer)

    def _build_data_iter(self, dataset):
        self.set_dataloader(self.training_loader(dataset))

    def _backward_prologue_per_tensor(self, grad):
        return grad  # gradient accumulation is scaled once, at the loss

    # what the engine needs to know --------------------------------------------------------------------------------------------

    @property
    def ds_config(self) -> dict:
        """The ds_config as the user wrote it."""
        return self._config._param_dict

    @property
    def computes_loss(self) -> bool:
        """False while evaluating with ``compute_loss=False``."""
        return self._compute_loss

    @computes_loss.setter
    def computes_loss(self, value: bool):
        self._compute_loss = value

    def next_batch(self):
        """The next item of the data iterator, after ``batch_fn``."""
        return self._next_batch()

    def autocast(self):
        """DeepSpeed's ``torch_autocast`` context, or one that does nothing."""
        return autocast_if_enabled(self)

    @property
    def reentrant_checkpointing(self) -> bool:
        return self._reentrant_activation_checkpointing()

    # gradients and step -------------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Forget what the optimizer wrapper remembers of the last batch's gradients."""
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer):
            self.optimizer.clear_backward_seen_flag()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, 1 unless training in fp16."""
        scale = getattr(self.optimizer, "loss_scale", getattr(self.optimizer, "cur_scale", 1.0))
        return loss if scale == 1.0 else loss * scale

    def accumulated_grad(self, parameter: torch.Tensor) -> torch.Tensor:
        """The buffer in which the gradients of this batch are summed, zeros where no gradient has come."""
        if isinstance(self.optimizer, BF16_Optimizer):
            for group, gradients in zip(self.optimizer.bf16_groups, self.optimizer.fp32_groups_gradients):
                for candidate, gradient in zip(group, gradients):
                    if candidate is parameter:
                        return gradient.view_as(parameter)
            raise KeyError("parameter does not belong to the optimizer")
        attribute = "grad_accum" if getattr(self.optimizer, "use_grad_accum_attribute", False) else "grad"
        if getattr(parameter, attribute, None) is None:
            dtype = self.optimizer.gradient_accumulation_dtype if attribute == "grad_accum" else parameter.dtype
            setattr(parameter, attribute, torch.zeros_like(parameter, dtype=dtype, requires_grad=False))
        return getattr(parameter, attribute)

    def tied_weights(self) -> List[Tuple[torch.Tensor, object]]:
        """Trainable weights that other pipeline ranks hold, too, with the process group of their holders."""
        return [(weight, group) for weight, group in self.module.get_tied_weights_and_groups() if weight.requires_grad]

    def reduce_tied_gradients(self) -> None:
        """Sum the gradients of tied weights over the pipeline ranks that hold them."""
        for weight, group in self.tied_weights():
            dist.all_reduce(self.accumulated_grad(weight), group=group)

    def reduce_gradients(self) -> None:
        """Average all gradients over the data-parallel ranks, by the optimizer wrapper's own means; returns when done."""
        if not isinstance(self.optimizer, BF16_Optimizer):
            # a parameter that got no gradient counts as zero, so that all replicas issue the same collectives
            for parameter in self.module.parameters():
                if parameter.requires_grad:
                    self.accumulated_grad(parameter)
        _StockEngine._exec_reduce_grads(self)

    def step_optimizer(self) -> None:
        _StockEngine._exec_optimizer_step(self)

    def clip_fp32_gradients(self):
        """Clip by the norm over the whole model. DeepSpeed's own counts the first pipeline rank's parameters only."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        counted = [p.grad for p in self.module.parameters() if p.grad is not None and self._counts_in_norm(p)]
        total = self._sum_of_squares(counted)
        dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        self._global_grad_norm = total.sqrt().item()
        if gradients:
            torch._foreach_mul_(gradients, min(1.0, self.gradient_clipping() / (self._global_grad_norm + 1e-6)))

    def _zero_global_norm(self, norm_type=2):
        """Norm of the gradients of the whole model, still scaled; inf where any is not finite (ZeRO-1)."""
        optimizer = self.optimizer
        counted = []
        for i, parameters in enumerate(optimizer.params_in_partition):
            gradients = [g for g in optimizer.averaged_gradients[i] if not getattr(g, "_zero_padding", False)]
            counted += [g.float() for g, p in zip(gradients, parameters) if self._counts_in_norm(p)]
        total = self._sum_of_squares(counted)
        dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        norm = total.sqrt()
        return norm.float() if torch.isfinite(norm) else torch.tensor(float("inf"), device=self.device)

    def _sum_of_squares(self, tensors) -> torch.Tensor:
        """fp64 scalar on this rank's device; 0 for no tensors."""
        if not tensors:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(torch._foreach_norm(tensors)).double().square().sum().to(self.device)

    def _counts_in_norm(self, parameter) -> bool:
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        sliced = getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)
        return sliced or self.module.grid.get_slice_parallel_rank() == 0


def current_device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def device_memory_bytes() -> int:
    """What the current device holds in all; with the CPU as accelerator the machine's memory."""
    return get_accelerator().total_memory()


def synchronized_time() -> float:
    """The host's clock, in s, once the accelerator has done what it was given."""
    get_accelerator().synchronize()
    return time.perf_counter()


def seed_device(seed: int) -> None:
    """Seed the current accelerator's generator, where it is not the CPU's own."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.manual_seed(seed)


def random_states() -> tuple:
    """Of all generators that DeepSpeed's ``seed_layers`` seeds: Python's, numpy's, torch's of the CPU and of the current device."""
    accelerator = get_accelerator()
    device = None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device


def set_random_states(states: tuple) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        get_accelerator().set_rng_state(states[3])


def tag_parameters(config_class, module) -> None:
    """What ``deepspeed.initialize`` does to a module's parameters before it builds the engine (Muon)."""
    deepspeed.set_optimizer_flags(config_class, module)


@contextmanager
def preserved_rng():
    """Within this context torch's random state may be changed freely; afterwards it is as before."""
    accelerator = get_accelerator()
    devices = [] if accelerator.device_name() == "cpu" else [accelerator.current_device()]
    with torch.random.fork_rng(devices, device_type=accelerator.device_name() if devices else "cuda"):
        yield


def non_reentrant_checkpoint(function, *inputs):
    """``function(*inputs)``, recomputed in backward; inputs need not require gradients."""
    return checkpoint(function, *inputs, use_reentrant=False)


def is_reentrant(checkpoint_function) -> bool:
    """Whether an activation checkpoint function needs an input that requires gradients."""
    return checkpoint_function is not checkpointing.non_reentrant_checkpoint


def reset_checkpoint_buffers() -> None:
    checkpointing.reset()


__all__ = [
    "SUPPORTED_DEEPSPEED", "PipelineEngineBase", "PipelineModuleBase", "check_deepspeed_version", "config_of", "current_device",
    "decoded_config", "device_memory_bytes", "engine_arguments", "engine_class", "is_reentrant", "non_reentrant_checkpoint",
    "preserved_rng", "random_states", "redirect_instructions", "reset_checkpoint_buffers", "restore_instructions", "seed_device",
    "set_config_of", "set_random_states", "stock_schedule", "synchronized_time", "tag_parameters"
]

"""The folded ``PipelineModule``: every pipeline rank holds one chunk of each segment."""

from functools import partial
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from deepspeed.runtime import utils as ds_utils
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec

from .. import compat
from ..config import (
    BLOCK,
    ConfigError,
    FoldConfig,
    fold_config,
    load_config,
    micro_batch_size_of,
    micro_batches_of,
    zero_stage_of,
)
from ..partition import PartitionError, cut_layers
from ..plan.costs import PlanError
from ..plan.placement import load_cluster, load_profile, place, simulation_options
from ..schedule import ScheduleError
from .construction import Construction


class PipelineModule(compat.PipelineModuleBase):
    """DeepSpeed's ``PipelineModule`` under looped placement.

    With P pipeline ranks and v segments the layers are cut into v*P chunks; chunk (virtual stage) ``s = k*P + r`` is segment k
    on pipeline rank r::

        P=2, v=2, 8 layers        rank 0          rank 1
                     segment 0    layers 0 1      layers 2 3
                     segment 1    layers 4 5      layers 6 7

    Args:
        layers, num_stages, topology, ...: DeepSpeed's, unchanged. ``partition_method`` is "uniform", "parameters" (all
            parameters count, frozen ones too), "type:regex", or a list of v*P + 1 cuts.
        config: path to the ds_config (JSON or HJSON), or the dict; its ``ds_fold`` block says how to fold. Without one: v=1.

    Raises:
        ConfigError: on every rank, before any layer is built, naming the key, the values and the remedy.
    """
    #: what initialize() runs the module with; None: PipelineEngine
    engine_class = None

    def __init__(self, layers, num_stages=None, topology=None, *args, config=None, **kwargs):
        ds_config = load_config(config)
        fold = fold_config(ds_config)
        layers = list(layers)
        block_only = not ds_config.keys() - {BLOCK}  # which says nothing of the batch
        if block_only and fold.searches:
            raise ConfigError(f"{BLOCK}.partition and recompute are to be searched for, which needs batch sizes and ZeRO stage "
                              f"where the module is built, but only the {BLOCK} block is known there; name the whole ds_config")
        if num_stages is not None or topology is not None:
            P = topology.get_dim("pipe") if topology is not None else num_stages
            D, T = (topology.get_dim("data"), topology.get_dim("model") or 1) if topology is not None else (None, None)
            # the engine, which has the whole config, checks again
            fold.check(P, None if block_only else micro_batches_of(ds_config, D), len(layers), D, T)
        self._take_config(ds_config, fold, len(layers), kwargs.get("activation_checkpoint_interval") or 0)
        super().__init__(layers, num_stages, topology, *args, **kwargs)
        self._get_ready()

    def _take_config(self, ds_config: dict, fold: FoldConfig, layers: int, interval: int) -> None:
        """Set what placement reads, past torch.nn.Module, which is not initialised yet."""
        object.__setattr__(self, "fold", fold)
        object.__setattr__(self, "ds_config", ds_config)
        #: global indices of the layers that are recomputed
        object.__setattr__(self, "recomputed", fold.recomputed(layers))
        interval = max((ds_config.get("pipeline") or {}).get("activation_checkpoint_interval") or 0, interval)
        self.check_recompute(interval)
        object.__setattr__(self, "_recomputes_by_interval", interval > 0)

    def _get_ready(self) -> None:
        #: called before anything outside of a batch reads or sets parameters; an engine waits here for those that are in flight
        self.before_read = None
        #: called with a layer's global index before each of its forwards
        self.before_layer: Optional[Callable[[int], None]] = None
        #: with deterministic_rng, what the engine seeds this batch's random numbers with; None leaves them alone
        self.rng_key = None
        if not any(p.requires_grad for p in self.parameters()):
            self.placeholder_parameter()

    def take_over(self, ds_config: dict, construction: Optional[Construction],
                  why_not: Callable[[], Optional[str]]) -> bool:
        """Make a module that DeepSpeed's class has built, with one chunk a rank, one of this class; where the ``ds_fold`` block
        asks for other cuts, by building its layers again as ``construction`` says. Returns whether it has.

        Raises:
            ConfigError: other cuts, but ``why_not()`` has a reason on some rank.
        """
        fold = fold_config(ds_config)
        again = fold.segments > 1 or fold.searches or fold.partition not in (None, self.parts)
        if again:
            reasons: List[Optional[str]] = [None] * self.world_size
            dist.all_gather_object(reasons, why_not(), group=self.world_group)  # all ranks build, or none
            for rank, reason in enumerate(reasons):
                if reason is not None:
                    raise ConfigError(
                        f"the {BLOCK} block of the config given to initialize() says segments={fold.segments} and partition="
                        f"{fold.partition!r}, but the PipelineModule was built before this was known and cannot be built again: "
                        f"{reason} (rank {rank}). Name the config before the module is built: --deepspeed_config FILE on the "
                        f"command line, DS_FOLD_CONFIG=FILE in the environment, or ds_fold.install(config=...)")
        self._check(fold, micro_batches_of(ds_config, self.grid.get_data_parallel_world_size()) if again else None)
        self._take_config(ds_config, fold, len(self.layer_specs), self.activation_checkpoint_interval)
        if again:
            with construction.again():
                self.build_again(construction.partition_method)
        else:
            self.index_chunk()
        self._get_ready()
        return again

    def placeholder_parameter(self) -> torch.nn.Parameter:
        """One trainable number for a rank that has nothing to train, so that its optimizer exists and it takes part in every
        collective. It gets no gradient and is in no layer's checkpoint file."""
        if "placeholder" not in self._parameters:
            self.placeholder = torch.nn.Parameter(torch.zeros(1, device=compat.current_device()))
            self.placeholder.ds_pipe_replicated = True  # not part of the model's norm
        return self.placeholder

    def check_recompute(self, interval: int) -> None:
        """Refuse to recompute both every ``interval`` layers and those that ``recompute`` names. Raises ConfigError."""
        if interval > 0 and self.fold.recompute != "none":
            raise ConfigError(f"ds_fold.recompute={self.fold.recompute!r} names the layers that are recomputed, but so does "
                              f"activation_checkpoint_interval={interval}; remove one of them, or set recompute: \"none\"")

    # placement ------------------------------------------------------------------------------------------------------------

    def _check(self, fold: FoldConfig, M: Optional[int] = None) -> None:
        fold.check(self.num_stages, M, len(self.layer_specs), self.grid.get_data_parallel_world_size(),
                   self.grid.get_slice_parallel_world_size())

    @property
    def num_segments(self) -> int:
        """v."""
        return self.fold.segments

    def place_layers(self, method: Union[str, Sequence[int]]) -> List[int]:
        """Cuts ``[0, ..., layers]`` of the v*P chunks, in model order. Raises ConfigError where no such cut exists."""
        chunks = self.num_segments * self.num_stages
        self._check(self.fold)
        method = method if self.fold.partition is None else self.fold.partition
        cuts, summary = None, ""
        if self.fold.objective is None:
            try:
                cuts = cut_layers(method, len(self.layer_specs), chunks, self.layer_weights, self._layers_match)
            except PartitionError as error:
                raise ConfigError(str(error)) from None
        if self.fold.searches:
            cuts, self.recomputed, summary = self._search_placement(cuts)
        if self.global_rank == 0:
            if summary:
                print(f"placement {summary}")
            for s in range(chunks):
                names = ", ".join(layer_name(spec) for spec in self.layer_specs[cuts[s]:cuts[s + 1]])
                print(f"virtual stage {s:2d} = segment {s // self.num_stages} on pipeline rank {s % self.num_stages}: "
                      f"layers [{cuts[s]}, {cuts[s + 1]}) {names}")
        return cuts

    def take_parts(self, parts) -> List[int]:
        """Cuts that a subclass's own ``_partition_layers`` has put into ``parts``. Raises ConfigError."""
        name, chunks = type(self).__name__, self.num_segments * self.num_stages
        try:
            if parts is None:
                raise PartitionError("it has set no self.parts")
            cuts = cut_layers(list(parts), len(self.layer_specs), chunks, self.layer_weights, self._layers_match)
        except PartitionError as error:
            raise ConfigError(f"{name} partitions its layers itself, but {BLOCK}.segments={self.num_segments} needs cuts of "
                              f"{self.num_segments} x {self.num_stages} pipeline ranks = {chunks} chunks: {error}. Make "
                              f"num_stages many (it counts virtual stages there), or name the cuts in {BLOCK}.partition") from None
        if self.fold.searches:  # the recomputed layers
            cuts, self.recomputed, _ = self._search_placement(cuts)
        return cuts

    def _search_placement(self, cuts: Optional[List[int]]):
        """What the profile says is best, searched on rank 0 and told to the others, so that no file can divide them."""
        answer = [None]
        if self.global_rank == 0:
            P, D, config = self.num_stages, self.grid.get_data_parallel_world_size(), self.ds_config
            zero, M = zero_stage_of(config), micro_batches_of(config, D)

            def same_model(profile):
                profile.check_model([layer_name(spec) for spec in self.layer_specs], self.count_parameters())

            try:
                profile = load_profile(self.fold, same_model, micro_batch_size_of(config, D))
                answer = [place(self.fold, profile, load_cluster(self.fold, P * D), P, M, zero,
                                simulation_options(config, self.fold, zero, D), cuts, self._recomputes_by_interval)]
            except (PlanError, ScheduleError) as error:
                answer = [f"ds_fold.partition and recompute: {error}"]
            except Exception as error:  # the others wait
                answer = [f"the search for a placement failed: {type(error).__name__}: {error}"]
        dist.broadcast_object_list(answer, 0, group=self.world_group)
        if isinstance(answer[0], str):
            raise ConfigError(answer[0])
        recomputed = frozenset() if self._recomputes_by_interval else answer[0].recomputed
        return answer[0].cuts, recomputed, answer[0].summary

    def _layers_match(self, regex: str) -> List[bool]:
        matching = set(self.layers_of_type(regex))
        return [i in matching for i in range(len(self.layer_specs))]

    def chunk_bounds(self) -> List[Tuple[int, int]]:
        return [(self.parts[s], self.parts[s + 1])
                for s in range(self.stage_id, self.num_segments * self.num_stages, self.num_stages)]

    def count_parameters(self) -> List[int]:
        """Parameters of each layer, frozen ones too. Builds one layer at a time and leaves the random state as it was."""
        counts = []
        with torch.random.fork_rng():
            for spec in self.layer_specs:
                layer = spec.build() if isinstance(spec, LayerSpec) else spec
                counts.append(sum(p.numel() for p in layer.parameters()) if isinstance(layer, torch.nn.Module) else 0)
        return counts

    def segment_parameters(self) -> List[List[torch.nn.Parameter]]:
        """This rank's parameters by segment; a tied one appears in every segment that uses it, frozen ones too."""
        return [list(dict.fromkeys(p for local in range(first, last) for p in self._layer_parameters(local)))
                for first, last in self.segment_ranges]

    def first_layers(self) -> Dict[torch.nn.Parameter, int]:
        """This rank's parameters -> global index of the first layer that uses them."""
        return {p: index for local, index in reversed(list(enumerate(self.global_layer_indices)))
                for p in self._layer_parameters(local)}

    def _layer_parameters(self, local: int) -> List[torch.nn.Parameter]:
        spec = self.layer_specs[self.global_layer_indices[local]]
        layer = self.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else self.forward_funcs[local]
        return list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []

    def named_parameters(self, *args, **kwargs):
        self._wait_before_read()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        self._wait_before_read()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        self._wait_before_read()
        return super().load_state_dict(*args, **kwargs)

    def _wait_before_read(self) -> None:
        before_read = self.__dict__.get("before_read")
        if before_read is not None:
            before_read()

    def virtual_stage_of(self, layer: int) -> int:
        """The virtual stage whose chunk holds the layer with this global index."""
        return next(s for s in range(len(self.parts) - 1) if self.parts[s] <= layer < self.parts[s + 1])

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that holds a layer."""
        return self.virtual_stage_of(layer_idx) % self.num_stages

    # execution ------------------------------------------------------------------------------------------------------------

    def forward(self, inputs, segment: Optional[int] = None, micro_batch: int = 0):
        """Run one chunk, or the whole model where it lies on one rank and no segment is named.

        Args:
            inputs: tensor or tuple of tensors.
            segment: k.
            micro_batch: index in the batch; with ``seed_layers`` it is part of every layer's seed.
        """
        if segment is not None:
            return self._run_chunk(inputs, segment, micro_batch)
        if self.num_stages > 1 and self.num_segments > 1:
            raise RuntimeError("a folded module on several pipeline ranks has no forward of its own; use train_batch() or "
                               "eval_batch(), or name the segment")
        for k in range(self.num_segments):
            inputs = self._run_chunk(inputs, k, micro_batch)
        self.micro_offset += 1
        return inputs

    def _run_chunk(self, x, segment: int, micro_batch: int):
        first, last = self.segment_ranges[segment]
        seed_offset = self.micro_offset + micro_batch + 2  # DeepSpeed's numbering: its first micro-batch has 2
        if self.activation_checkpoint_interval == 0 and not self.recomputed:
            return self._run_layers(first, last, seed_offset, x)
        for start, stop, recompute in self._blocks(first, last):
            run = partial(self._run_layers, start, stop, seed_offset)
            inputs = x if isinstance(x, tuple) else (x, )
            if not recompute:
                x = run(*inputs)
            elif compat.is_reentrant(self.activation_checkpoint_func) and not any(t.requires_grad for t in inputs):
                # a reentrant checkpoint would cut the graph here and leave this block without gradients
                x = compat.non_reentrant_checkpoint(run, *inputs)
            else:
                x = self.activation_checkpoint_func(run, *inputs)
        return x

    def _blocks(self, first: int, last: int) -> Iterator[Tuple[int, int, bool]]:
        """Ranges of forward_funcs in [first, last), and whether each is recomputed as one."""
        interval = self.activation_checkpoint_interval
        if interval > 0:
            for start in range(first, last, interval):
                stop = min(start + interval, last)
                yield start, stop, self.is_checkpointable(self.forward_funcs[start:stop])
            return
        start = first
        for local in range(first, last):
            if self.global_layer_indices[local] in self.recomputed:
                if start < local:
                    yield start, local, False
                yield local, local + 1, True
                start = local + 1
        if start < last:
            yield start, last, False

    def _run_layers(self, start: int, stop: int, seed_offset: int, *inputs):
        x = inputs[0] if len(inputs) == 1 else inputs
        for local in range(start, stop):
            self.__dict__["curr_layer"] = layer = self.global_layer_indices[local]  # past torch's slow setattr: once per layer
            if self.before_layer is not None:
                self.before_layer(layer)
            if self.rng_key is not None:
                _seed_everything(hash((self.base_seed, *self.rng_key, seed_offset - self.micro_offset, self.curr_layer)))
            elif self.seed_layers:
                (self.seed_fn or ds_utils.set_random_seed)(self.base_seed * seed_offset + self.curr_layer)
            x = self.forward_funcs[local](x)
        return x

    def describe_last_layer(self, segment: int) -> str:
        """Name of the layer that makes a chunk's output, for messages."""
        index = self.global_layer_indices[self.segment_ranges[segment][1] - 1]
        return f"layer {index} ({layer_name(self.layer_specs[index])})"


def _seed_everything(seed: int) -> None:
    """Seed torch's generators of the CPU and of the current device, nothing else."""
    seed &= (1 << 63) - 1
    torch.default_generator.manual_seed(seed)
    compat.seed_device(seed)


def layer_name(spec) -> str:
    """Of a layer as PipelineModule takes them: the name of its class or function."""
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return spec.__class__.__name__ if isinstance(spec, torch.nn.Module) else getattr(spec, "__name__", str(spec))

"""The ``ds_fold`` block of a ds_config: typed, with every wrong key, type or combination refused by one clear message."""

import difflib
import os
from typing import Any, Dict, FrozenSet, List, Optional, Union

import hjson
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import Field, ValidationError, field_validator, model_validator

from .config_blocks import ObjectivePartition, PlanConfig, ScheduleFile, TraceConfig
from .runtime.collectives import CHUNK_BYTES
from .schedule import (
    DEFAULT_RECEIVE_AHEAD,
    SCHEDULE_NAMES,
    Orders,
    Overlap,
    Program,
    ScheduleError,
    compute_order,
    forward_order,
    lower,
    read_csv,
    verify,
)

BLOCK = "ds_fold"
#: what schedule "hippie" sets where the block does not (HIPPIE, TPDS 2023); and besides, where there is a profile
HIPPIE = {"head_backward": "immediate", "overlap_grad_reduce": "layer", "overlap_param_gather": True}
HIPPIE_PROFILED = {"partition": {"method": "memory_efficiency"}, "recompute": "auto"}
#: words in the names of optimizers that cannot step shards of flat buckets
WHOLE_MATRICES = ("lamb", "lars", "muon")


class ConfigError(ValueError):
    """A ds_config that cannot be run; the message names the key, the values and the remedy."""


def describe_layout(P: int, D: Optional[int], T: Optional[int]) -> str:
    replicas = "" if D is None else f" x D={D} replicas"
    return f"P={P} pipeline ranks{replicas}" + (f" x T={T} tensor-parallel slices" if (T or 1) > 1 else "")


class FoldConfig(DeepSpeedConfigModel):
    """The ``ds_fold`` block. Without it, the pipeline runs plain 1F1B."""

    schedule: Union[str, ScheduleFile] = "1f1b"
    """"gpipe", "1f1b", "interleaved_1f1b", "aiao", {"file": "my.csv"}, or "hippie": 1F1B with last-stage scheduling and reductions
    by layer, gathers overlapped, and with a profile the partition and the recomputed layers of best memory efficiency. Keys that
    the block has win over what the preset sets."""

    segments: int = Field(1, ge=1, strict=True)
    """v: model chunks per pipeline rank. Virtual stage k*P + r lives on pipeline rank r."""

    last_segment: str = "1f1b"
    """AIAO only. "1f1b": 1F1B inside the last segment, same makespan and less memory; "all_forward": Fold3D's figure."""

    micro_batch_group: Optional[int] = Field(None, ge=1, strict=True)
    """Micro-batches that pass a segment together, between P and M. Default: P for interleaved_1f1b, M for aiao."""

    head_backward: str = "scheduled"
    """"immediate": the last virtual stage's backward follows its forward at once, so that logits never pile up."""

    partition: Optional[Union[str, List[int], ObjectivePartition]] = None
    """"uniform", "parameters", "type:regex", the list of v*P + 1 cuts [0, ..., layers], or {"method": "memory_efficiency"} (or
    "throughput", "memory"): the best cuts that a simulation of the whole step finds. Default: partition_method."""

    recompute: Union[str, List[int]] = "none"
    """Layers whose forward runs again in their backward, so that only their inputs are kept: "none", "all", a list of layer
    indices, or "auto": those that are best for the partition's objective (else for "memory_efficiency") and fit into memory."""

    profile: Optional[str] = None
    """Profile file for an objective's partition and for recompute "auto"; relative to the working directory."""

    cluster: Optional[str] = None
    """Cluster file for the same."""

    data_check: bool = True
    """Before each batch all ranks agree that every data iterator has its micro-batches: data that end raise the same error
    everywhere, before anything is computed. Costs one all-reduce of 8 bytes; false where data never end."""

    overlap_grad_reduce: str = "off"
    """"segment": a segment's gradients are reduced behind the backward of the others; "layer": within the segment's last backward,
    too, bucket by bucket, a bucket being a layer in segment 0 and elsewhere the segment, both cut to
    ``zero_optimization.reduce_bucket_size`` elements; "off": all after the last backward. The numbers are the same."""

    align_grad_reduce: bool = False
    """All pipeline ranks launch a segment's reduction at the same point of the schedule: rank r waits for r more of its backwards,
    or for its last one. On a shared network reductions then slow all ranks alike, not one after the other. Needs
    overlap_grad_reduce "segment"."""

    overlap_param_gather: bool = False
    """ZeRO 1 and 2: parameters that were stepped elsewhere arrive while the next batch's forward runs, each segment's before its
    first use; with overlap_grad_reduce "layer" each layer's before its own. What reads parameters through the engine or the
    module's named_parameters() and state_dict() waits for them."""

    shard_params: bool = False
    """ZeRO 1 and 2: a segment's parameters are gathered for its forwards and again for its backwards, and released in between, so
    that two segments are whole at a time and of the others there is this replica's shard; ``overlap_param_gather`` gathers one
    segment ahead. The numbers are the same. Sends up to twice the bytes of a gather per step. Weights that several segments or
    pipeline ranks share stay whole. Needs more than one segment, and saves from three on. Reading parameters, evaluating and saving
    gathers all of them: every replica has to do it."""

    comm_chunk_bytes: int = Field(CHUNK_BYTES, ge=1024, strict=True)
    """Most bytes of one message of a reduction or gather (gloo; with ZeRO-0 any backend), so that a message between pipeline ranks
    waits behind the two that are in flight at most. Each costs 0.1 to 0.6 ms. Where DeepSpeed's wrappers reduce, they send in their
    own way."""

    optimizer_step: str = "validated"
    """"validated": every rank knows the norm of all gradients before anything is stepped. "post_validated": the early_segments are
    stepped, and their gathers launched, as soon as the next one's reduction is; at the end of the batch the norm is checked, and
    where gradients overflowed or must be clipped the steps are taken back and made anew: the numbers are the same. Costs a copy of
    the master weights and optimizer state (12 bytes a parameter with Adam, sharded) of those segments, from their step to the end
    of the batch. Gains where clipping is rare: see docs/benchmarks.md. Needs overlap_grad_reduce and more than one segment to
    change anything."""

    early_segments: Optional[List[int]] = None
    """Which segments a "post_validated" optimizer_step steps early. Default: all but segment 0, which is reduced last. On gloo
    their gathers move only while no reduction does. A backend that moves transfers in the order of their launches, as NCCL, lets
    each delay the reductions behind it, so that few gain most there: by simulation segments-2 alone."""

    shuffle: bool = False
    """``training_data=`` only: each epoch has a permutation of its own, the same under every fold; ``engine.set_epoch(n)``
    starts epoch n."""

    shuffle_seed: int = Field(0, ge=0, strict=True)
    """What the permutations depend on, besides the epoch."""

    data_workers: Optional[int] = Field(None, ge=0, strict=True)
    """``training_data=`` only: processes that read ahead, started anew each epoch; 0: none. Default: DeepSpeed's, two a device."""

    label_transport: bool = False
    """Labels travel along the pipeline, so that only the first pipeline rank reads data; the last one's iterator is not used."""

    deterministic_rng: bool = False
    """Random numbers inside layers (dropout) depend on (base seed, step, layer, micro-batch, replica) only: the same under every
    schedule and fold, also when recomputed. The user's own random state is not touched."""

    receive_ahead: int = Field(DEFAULT_RECEIVE_AHEAD, ge=1, strict=True)
    """Most receives posted and not yet waited for. More hides more latency; each holds its buffer."""

    watchdog_s: Optional[float] = Field(None, gt=0)
    """Seconds after which an action of a batch that is not over ends the job: every rank shows what it does, and exits with 1. Has
    to be longer than the longest forward or backward, compilation included. Default: nobody watches."""

    debug: bool = False
    """Find faults of overlapped communication: memory that must not be read is NaN, what is in flight must not be written, replicas
    compare what they launch, and a batch must leave nothing behind. The numbers are the same; see docs/debugging.md."""

    trace: TraceConfig = TraceConfig()
    """Record what ran when: {"enabled": true, "steps": [3, 6], "path": "traces"}."""

    plan: Optional[PlanConfig] = None
    """Written by ``python -m ds_fold plan``: P and D that the block was planned for, and predictions. Another launch is refused."""

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value):
        if isinstance(value, str) and value not in SCHEDULE_NAMES:
            raise ValueError(f"{value!r} is not a schedule{_did_you_mean(value, SCHEDULE_NAMES)}; use one of "
                             f"{', '.join(SCHEDULE_NAMES)}, or " '{"file": "my.csv"}')
        return value

    @field_validator("last_segment")
    @classmethod
    def _known_last_segment(cls, value):
        return _one_of(value, ("1f1b", "all_forward"))

    @field_validator("head_backward")
    @classmethod
    def _known_head_backward(cls, value):
        return _one_of(value, ("scheduled", "immediate"))

    @field_validator("overlap_grad_reduce")
    @classmethod
    def _known_overlap(cls, value):
        return _one_of(value, ("off", "segment", "layer"))

    @field_validator("shard_params")
    @classmethod
    def _segments_to_shard(cls, value, info):
        if value and info.data.get("segments") == 1:
            raise ValueError("releases a segment's parameters while others compute, but segments=1: they are needed all the time; "
                             "set segments to 3 or more with schedule \"aiao\", or shard_params: false")
        return value

    @field_validator("recompute")
    @classmethod
    def _known_recompute(cls, value):
        if isinstance(value, str):
            return _one_of(value, ("none", "all", "auto"))
        if sorted(set(value)) != value or min(value, default=0) < 0:
            raise ValueError(f"{value} must be ascending layer indices from 0, or \"none\", \"all\" or \"auto\"")
        return value

    @field_validator("align_grad_reduce")
    @classmethod
    def _can_align(cls, value, info):
        reduce = info.data.get("overlap_grad_reduce", "segment")
        if value and reduce != "segment":
            why = "launches within a segment's last backward" if reduce == "layer" else "reduces all at the end"
            raise ValueError(f"true launches reductions of whole segments together on all pipeline ranks, but overlap_grad_reduce="
                             f"{reduce!r} {why}; set overlap_grad_reduce: \"segment\", or align_grad_reduce: false")
        return value

    @field_validator("optimizer_step")
    @classmethod
    def _known_step(cls, value, info):
        if _one_of(value, ("validated", "post_validated")) != "validated" and info.data.get("overlap_grad_reduce") == "off":
            raise ValueError(f"{value!r} steps a segment when its own reduction is over, but overlap_grad_reduce='off' reduces all "
                             f"of them at the end; set overlap_grad_reduce: \"segment\", or optimizer_step: \"validated\"")
        return value

    @field_validator("early_segments")
    @classmethod
    def _known_early_segments(cls, value, info):
        step, segments = info.data.get("optimizer_step"), info.data.get("segments", 1)
        if value is not None and step != "post_validated":
            raise ValueError(f"{value!r} says what is stepped before all gradients are known, but optimizer_step={step!r} steps "
                             f"nothing before; set optimizer_step: \"post_validated\", or leave early_segments out")
        wrong = [k for k in value or () if not 1 <= k < segments]
        if wrong:
            raise ValueError(f"{wrong} are not in 1..{segments - 1}: segments={segments}, of which segment 0 is reduced last and "
                             f"cannot be early")
        return value

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, block):
        if not isinstance(block, dict) or block.get("schedule") != "hippie":
            return block
        partition = block.get("partition")
        profiled = block.get("profile") or isinstance(partition, dict) and partition.get("profile")
        return {**HIPPIE, **(HIPPIE_PROFILED if profiled else {}), **block}

    @model_validator(mode="after")
    def _has_a_profile(self):
        if self.searches and self.profile_path is None:
            what = "recompute 'auto'" if self.objective is None else f"partition {self.objective!r}"
            raise ValueError(f"{what} needs to know what the layers take: set {BLOCK}.profile to a profile's file, or name "
                             f"the {'layers' if self.objective is None else 'cuts'}")
        return self

    def __init__(self, **data):
        super().__init__(strict=True, **data)  # DeepSpeed's models drop keys whose value is "auto"

    @property
    def objective(self) -> Optional[str]:
        """Of a partition that is searched for."""
        return self.partition.method if isinstance(self.partition, ObjectivePartition) else None

    @property
    def searches(self) -> bool:
        """Whether cuts or recomputed layers follow from a profile."""
        return self.objective is not None or self.recompute == "auto"

    @property
    def profile_path(self) -> Optional[str]:
        """The partition's own, or the block's."""
        return getattr(self.partition, "profile", None) or self.profile

    @property
    def cluster_path(self) -> Optional[str]:
        """The partition's own, or the block's."""
        return getattr(self.partition, "cluster", None) or self.cluster

    def recomputed(self, layers: int) -> FrozenSet[int]:
        """Indices of the layers that ``recompute`` names; none where it is "auto"."""
        return frozenset(range(layers) if self.recompute == "all" else () if isinstance(self.recompute, str) else self.recompute)

    def needs_own_optimizer(self, zero_stage: int) -> bool:
        """Whether only ds_fold's sharded optimizer can do what the block says."""
        return self.overlap_grad_reduce != "off" or self.overlap_param_gather or self.shard_params or zero_stage == 2

    def owns_optimizer(self, zero_stage: int, half: bool = False) -> bool:
        """Whether ds_fold's sharded optimizer takes the place of DeepSpeed's wrappers, of which there is none with ZeRO-0 in fp32.
        Not without a ``ds_fold`` block."""
        return self.needs_own_optimizer(zero_stage) or bool(self.model_fields_set) and (zero_stage == 1 or half)

    def _early(self) -> FrozenSet[int]:
        if self.optimizer_step != "post_validated" or self.segments == 1:
            return frozenset()
        return frozenset(range(1, self.segments) if self.early_segments is None else self.early_segments)

    def overlap(self, zero_stage: int) -> Overlap:
        """Where reductions and gathers stand; ZeRO-2 holds the full gradients of two segments at most. Raises ConfigError."""
        if self.shard_params and zero_stage == 0:
            raise ConfigError(f"{BLOCK}.shard_params keeps a shard of the parameters per replica, but zero_optimization.stage=0 "
                              f"shards nothing; set the stage to 1 or 2 (2: gradients of two segments at a time, too), or "
                              f"{BLOCK}.shard_params: false")
        return Overlap(reduce=self.overlap_grad_reduce != "off" or zero_stage == 2, gather=self.overlap_param_gather,
                       in_flight=1 if zero_stage == 2 else None, early=self._early(),
                       align=self.align_grad_reduce, shard=self.shard_params)

    @property
    def preset(self) -> Optional[str]:
        """Key of ``PRESETS``; None for a schedule from a file."""
        if not isinstance(self.schedule, str):
            return None
        return "aiao_all_forward" if self.schedule == "aiao" and self.last_segment == "all_forward" else self.schedule

    def orders(self, P: int, M: int):
        """The compute order of every pipeline rank. Raises ScheduleError where it cannot run."""
        if self.last_segment != "1f1b" and self.schedule != "aiao":
            raise ScheduleError(f"{BLOCK}.last_segment={self.last_segment!r} belongs to schedule 'aiao', but "
                                f"{BLOCK}.schedule={self.schedule!r}; remove it or use 'aiao'")
        if self.preset is None:
            for key in ("micro_batch_group", "head_backward"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ScheduleError(f"{BLOCK}.{key} has no meaning for a schedule from a file; remove it")
            return read_csv(self.schedule.file, P, self.segments, M)
        return compute_order(self.preset, P, self.segments, M, self.micro_batch_group, self.head_backward)

    def check_replaced(self, schedule: type) -> None:
        """Refuse what goes not together with a script's own TrainSchedule. Raises ScheduleError."""
        mine = [f"{BLOCK}.{key}" for key in ("schedule", "segments", "micro_batch_group", "head_backward", "last_segment")
                if key in self.model_fields_set]
        if mine:
            raise ScheduleError(f"the script has a schedule of its own, {schedule.__name__} in place of DeepSpeed's TrainSchedule, "
                                f"but the config has {', '.join(mine)}; remove these, or leave TrainSchedule as it is")

    def train_program(self, P: int, M: int, zero_stage: int = 0, orders: Optional[Orders] = None) -> Program:
        """The program of one training batch on P pipeline ranks, proved; of ``orders`` in place of the block's schedule. Raises
        ScheduleError."""
        program = lower(orders or self.orders(P, M), self.segments, M, self.receive_ahead, label_transport=self.label_transport,
                        overlap=self.overlap(zero_stage))
        verify(program)
        return program

    def eval_program(self, P: int, M: int) -> Program:
        """The forward-only program of one evaluation batch, proved."""
        program = lower(forward_order(P, self.segments, M), self.segments, M, self.receive_ahead, forward_only=True,
                        label_transport=self.label_transport)
        verify(program)
        return program

    def check(self, P: int, M: Optional[int] = None, layers: Optional[int] = None, D: Optional[int] = None,
              T: Optional[int] = None) -> None:
        """Refuse what cannot run on P pipeline ranks with M micro-batches, this many layers, D replicas and T tensor-parallel
        slices (None: not known yet).

        Raises:
            ConfigError
        """
        plan = self.plan
        if plan is not None and (P != plan.P or D not in (None, plan.D) or T not in (None, plan.T)):
            raise ConfigError(f"{BLOCK}.plan was made for {describe_layout(plan.P, plan.D, plan.T)}, but there are "
                              f"{describe_layout(P, D, T)}; launch {plan.P * plan.D * plan.T} ranks with "
                              f"num_stages={plan.P}, or plan anew: python -m ds_fold plan")
        try:
            if M is None and self.preset is not None:
                M = max(P, self.micro_batch_group or P)  # the smallest that shows the combinations that never work
            if M is not None:
                self.orders(P, M)
        except ScheduleError as error:
            raise ConfigError(str(error)) from None
        if layers is not None and isinstance(self.recompute, list) and self.recompute and self.recompute[-1] >= layers:
            raise ConfigError(f"{BLOCK}.recompute names layer {self.recompute[-1]}, but there are {layers} layers; use indices in "
                              f"0..{layers - 1}")
        if layers is not None and layers < self.segments * P:
            raise ConfigError(f"{layers} layers cannot fill {BLOCK}.segments={self.segments} x {P} pipeline ranks = "
                              f"{self.segments * P} chunks; use segments <= {max(1, layers // P)} or fewer pipeline ranks")


def load_config(config: Union[None, str, Dict[str, Any]]) -> Dict[str, Any]:
    """A ds_config as a dict, from a path to a JSON or HJSON file, or the dict itself; None is empty.

    Raises:
        ConfigError: no such file, or it is neither JSON nor HJSON, or holds no object.
    """
    if config is None:
        return {}
    if isinstance(config, dict):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"config={config!r}: expected a path to a JSON or HJSON file, or a dict")
    try:
        with open(config) as file:
            loaded = hjson.load(file, object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise ConfigError(f"config {os.fspath(config)!r} cannot be read: {error.strerror}") from None
    except (hjson.HjsonDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {os.fspath(config)!r} is neither JSON nor HJSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"config {os.fspath(config)!r} must hold one JSON object, found {type(loaded).__name__}")
    return loaded


def fold_config(config: Union[None, str, Dict[str, Any]]) -> FoldConfig:
    """The typed ``ds_fold`` block of a ds_config (path, dict or None). Raises ConfigError naming every wrong key."""
    block = load_config(config).get(BLOCK, {})
    if not isinstance(block, dict):
        raise ConfigError(f"{BLOCK} must be an object such as {{\"schedule\": \"aiao\", \"segments\": 4}}, found {block!r}")
    try:
        return FoldConfig(**block)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors() if not _other_branch(e))) from None


def micro_batches_of(config: Dict[str, Any], data_parallel: Optional[int] = None) -> Optional[int]:
    """M as DeepSpeed derives it: ``gradient_accumulation_steps``, or train_batch_size / (micro-batch size * D), or 1.

    Args:
        config: the ds_config.
        data_parallel: D, where known.

    Returns:
        None where the config leaves it to D, and D is not given. Contradictions are left to DeepSpeed, which reports them.
    """
    keys = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    gas, batch, micro = (value if isinstance(value := config.get(key), int) else None for key in keys)
    if gas is not None:
        return gas
    if batch is None or micro is None:
        return 1
    return None if data_parallel is None else max(1, batch // (micro * data_parallel))


def micro_batch_size_of(config: Dict[str, Any], data_parallel: int) -> Optional[int]:
    """Samples of a micro-batch: ``train_micro_batch_size_per_gpu``, or train_batch_size / (M * D); None where the config has
    neither."""
    size, batch = (value if isinstance(value := config.get(key), int) else None
                   for key in ("train_micro_batch_size_per_gpu", "train_batch_size"))
    if size is None and batch is not None:
        return batch // ((micro_batches_of(config, data_parallel) or 1) * data_parallel)
    return size


def zero_stage_of(config: Dict[str, Any]) -> int:
    """``zero_optimization.stage``, 0 where the config has none."""
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    return stage if isinstance(stage, int) else 0


def _one_of(value: str, allowed) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(map(repr, allowed))}{_did_you_mean(value, allowed)}")
    return value


def _did_you_mean(word: str, known) -> str:
    close = difflib.get_close_matches(word.lower(), known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _other_branch(error: Dict[str, Any]) -> bool:
    """True for the complaint of one form of a union about a value that was clearly meant for another."""
    form = error["loc"][-1] if error["loc"] else None
    return (form == "str" and isinstance(error["input"], (dict, list)) or form == "list[int]" and isinstance(error["input"], dict)
            or form in ("ScheduleFile", "ObjectivePartition") and not isinstance(error["input"], dict))


def _explain(error: Dict[str, Any]) -> str:
    """One pydantic error as a line: the key, what was given, what is expected."""
    where = [str(part) for part in error["loc"] if part not in ("str", "ScheduleFile", "ObjectivePartition", "list[int]")]
    key = ".".join([BLOCK, *where])
    if error["type"] == "extra_forbidden":
        nested = {"trace": TraceConfig, "partition": ObjectivePartition, "plan": PlanConfig}
        known = list((nested.get(where[0], FoldConfig) if len(where) > 1 else FoldConfig).model_fields)
        return f"{key}: unknown key{_did_you_mean(where[-1], known)}; known keys are {', '.join(known)}"
    message = error["msg"].replace("Value error, ", "")
    given = "" if error["type"] in ("value_error", "missing") else f", got {error['input']!r}"
    return f"{key}: {message[0].lower() + message[1:] if message[:1].isupper() else message}{given}"


def _no_duplicates(pairs):
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"key {key!r} appears twice in the config; keep one")
    return dict(pairs)

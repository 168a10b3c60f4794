"""The objects that keys of the ``ds_fold`` block may have as values."""

from typing import List, Optional

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import Field, field_validator

from .plan.partition import Objective

#: steps of one recording
MOST_STEPS = 1000


class ScheduleFile(DeepSpeedConfigModel):
    """A custom schedule."""

    file: str
    """CSV of compute order: one row per pipeline rank, cells such as F0.3 and B1.0."""


class TraceConfig(DeepSpeedConfigModel):
    """Which steps to record."""

    enabled: bool = False
    """Whether to record at all."""

    steps: List[int] = [3, 6]
    """First global step and one past the last, counted from 0. A recording is held in memory until its end."""

    path: str = "traces"
    """Folder of one file per rank, made where it is missing; each host writes its own ranks' files."""

    @field_validator("steps")
    @classmethod
    def _a_range(cls, value):
        if len(value) != 2 or not 0 <= value[0] < value[1] <= value[0] + MOST_STEPS:
            raise ValueError(f"{value} must be [first, one past the last] global step, counted from 0 and at most {MOST_STEPS} "
                             f"steps apart, such as [3, 6]")
        return value


class ObjectivePartition(DeepSpeedConfigModel):
    """Cuts that are searched for."""

    method: Objective
    """What is best: most samples/s per byte of the fullest rank (HIPPIE's ME), the shortest step, or the smallest peak memory."""

    profile: Optional[str] = None
    """Profile file, see docs/hippie.md. Default: ``ds_fold.profile``."""

    cluster: Optional[str] = None
    """Cluster file. Default: ``ds_fold.cluster``; without either, communication is free and memory has no limit."""


class PlanConfig(DeepSpeedConfigModel):
    """What ``python -m ds_fold plan`` wrote: the layout that the block was planned for, and what it predicts there. A launch with
    another layout is refused; the predictions are for people."""

    objective: Objective
    """What was best."""

    P: int = Field(ge=1, strict=True)
    """Pipeline ranks: the training script's num_stages."""

    D: int = Field(ge=1, strict=True)
    """Replicas."""

    T: int = Field(1, ge=1, strict=True)
    """Tensor-parallel slices of each layer. The launch has P*D*T ranks."""

    step_s: float = Field(gt=0)
    """Seconds of a step."""

    throughput: float = Field(gt=0)
    """Samples per second."""

    peak_gib: float = Field(ge=0)
    """Memory of the fullest rank, in 2**30 bytes."""

    memory_efficiency: Optional[float] = Field(None, gt=0)
    """Samples per second and GiB of the fullest rank."""


__all__ = ["MOST_STEPS", "ObjectivePartition", "PlanConfig", "ScheduleFile", "TraceConfig"]

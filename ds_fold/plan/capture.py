"""Finds the layers, the loss and one micro-batch of a training script by running it until it wants to train.

The script's module and engine are real, on one rank, but of a placeholder layer in place of its layers: so batch sizes, precision,
data and the user's own code around them are as in training, and nothing of the model is built.
"""

import os
import runpy
import socket
import sys
from argparse import Namespace
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec

import ds_fold

from ..config import BLOCK, ConfigError, load_config
from ..initialization import initialize
from ..runtime.channels import Message
from ..runtime.engine import PipelineEngine
from ..runtime.module import PipelineModule
from .costs import PlanError

#: keys of a ds_config that act on the model's own parameters, write files, or build ops that take minutes
_LEFT_OUT = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "compression_training")


class Captured(NamedTuple):
    """What a script trains, as :func:`~ds_fold.plan.profile.profile_layers` takes it."""
    layers: List
    loss_fn: Optional[Callable]
    inputs: Message
    labels: Any
    dtype: torch.dtype
    micro_batch_size: int
    autocast: Callable


class _Stop(BaseException):
    """Ends the script at its first batch: no ``except Exception`` of it holds this up."""

    def __init__(self, captured: Captured):
        self.captured = captured


class CapturingEngine(PipelineEngine):
    """An engine whose first batch is taken and not trained."""

    def train_batch(self, data_iter=None):
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        inputs, labels, *_ = self._next_item()
        raise _Stop(Captured(self.module.captured, self.module.loss_fn, inputs, labels, self.get_data_types()[0],
                             self.train_micro_batch_size_per_gpu(), self.autocast))

    def eval_batch(self, data_iter, *args, **kwargs):
        self.train_batch(data_iter)

    def load_checkpoint(self, *args, **kwargs):
        return None, {}  # weights do not matter, and there are none


class CapturingModule(PipelineModule):
    """Keeps the layers as they were given, and has one placeholder instead, on one rank."""
    engine_class = CapturingEngine
    replicas = 1

    def __init__(self, layers, num_stages=None, topology=None, *args, config=None, **kwargs):
        super().__init__([LayerSpec(torch.nn.Linear, 1, 1)], 1, None, *args,
                         config=one_rank_config(load_config(config), self.replicas), **kwargs)
        self.captured = list(layers)

    def place_layers(self, method) -> List[int]:
        return [0, 1]


def one_rank_config(config: dict, replicas: int) -> dict:
    """The ds_config on one rank, whose micro-batch is as large as with ``replicas`` replicas. Raises ConfigError."""
    config = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    config["zero_optimization"] = {"stage": 1}
    config[BLOCK] = {"data_workers": 0}  # processes that read ahead of the one batch would be waited for, up to 20 s
    if "optimizer" in config:
        config["optimizer"] = {"type": "Adam", "params": {"torch_adam": True}}
    batch = config.get("train_batch_size")
    if isinstance(batch, int):
        if batch % replicas:
            raise ConfigError(f"train_batch_size={batch} cannot be cut into the {replicas} replicas that --dp names; give the "
                              f"number that it is trained with")
        config["train_batch_size"] = batch // replicas
    return config


def _initialize(args=None, model=None, *positional, config=None, **kwargs):
    """``ds_fold.initialize`` on one rank."""
    if isinstance(model, CapturingModule):
        named = getattr(args, "deepspeed_config", None)
        given = config if config is not None else kwargs.pop("config_params", None) or named or model.ds_config
        config = one_rank_config(load_config(given), 1 if given is model.ds_config else model.replicas)
        args = Namespace(**{**vars(args), "deepspeed_config": None}) if named else args
    return initialize(args, model, *positional, config=config, **kwargs)


@contextmanager
def _capturing(replicas: int) -> Iterator[None]:
    """Within this context ``ds_fold.PipelineModule`` and ``ds_fold.initialize`` are those above."""
    before = {name: getattr(ds_fold, name) for name in ("PipelineModule", "initialize")}
    ds_fold.PipelineModule = type("PipelineModule", (CapturingModule, ), {"replicas": replicas})
    ds_fold.initialize = _initialize
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(ds_fold, name, value)


def capture_script(path: str, arguments: Sequence[str], replicas: int = 1) -> Captured:
    """Run the training script ``path`` with ``arguments`` until its first batch.

    Args:
        replicas: data-parallel ranks of the training, where the config derives the micro-batch's size from them.

    Raises:
        PlanError: there is no such file, there are several ranks, or the script ends without a batch of a ds_fold module.
        What the script raises itself.
    """
    if not os.path.isfile(path):
        raise PlanError(f"there is no script {path!r}")
    _be_alone()
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *arguments], os.path.dirname(os.path.abspath(path))
    try:
        with _capturing(replicas):
            runpy.run_path(path, run_name="__main__")
    except _Stop as stop:
        return stop.captured
    except SystemExit as error:
        raise PlanError(f"{path} ended with exit code {error.code} before it trained") from None
    finally:
        sys.argv, sys.path[0] = before
        if dist.is_initialized():
            dist.destroy_process_group()
    raise PlanError(f"{path} ended without training a batch: it has to build ds_fold.PipelineModule and pass it to "
                    f"ds_fold.initialize, under these names, and call train_batch()")


def _be_alone() -> None:
    """Be a job of one rank, also without a launcher. Raises PlanError where a launcher started several."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        raise PlanError(f"a profile is measured on one rank, but {ranks} were launched; use --num_accelerators 1, and --dp for the "
                        f"replicas of the training")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", port)):
        os.environ.setdefault(name, value)


__all__ = ["Captured", "capture_script"]

"""``initialize``: DeepSpeed's entry point with the folded engine."""

import deepspeed
import torch

from . import compat
from .config import ConfigError, load_config
from .runtime.data import check_dataset
from .runtime.engine import PipelineEngine
from .runtime.module import PipelineModule


def initialize(args=None, model=None, optimizer=None, model_parameters=None, *, config=None, **kwargs):
    """``deepspeed.initialize`` for a :class:`ds_fold.PipelineModule`; same arguments, same results.

    The config is given as ``config=`` (path to JSON or HJSON, or dict) or by ``args.deepspeed_config``.

    Returns:
        (engine, optimizer, training_dataloader, lr_scheduler)

    Raises:
        ConfigError: on every rank, before any training, naming the key, the values and the remedy.
    """
    if not isinstance(model, PipelineModule):
        raise ConfigError(f"model is a {type(model).__name__}; build it with ds_fold.PipelineModule")
    if config is None and getattr(args, "deepspeed_config", None) is None and "config_params" not in kwargs and model.ds_config:
        config = model.ds_config
    if isinstance(config, str):
        config = load_config(config)
    kwargs = prepared({**kwargs, "model": model, "model_parameters": model_parameters})
    with compat.engine_class(model.engine_class or PipelineEngine):
        return deepspeed.initialize(args, optimizer=optimizer, config=config, **kwargs)


def prepared(arguments: dict) -> dict:
    """Arguments of an engine, by name: the dataset checked, the parameters those that are trained."""
    if arguments.get("training_data") is not None:
        check_dataset(arguments["training_data"])
    return {**arguments, "model_parameters": _trainable(arguments["model"], arguments.get("model_parameters"))}


def listed(parameters) -> list:
    """A list of parameters or groups from all that torch's optimizers take: an iterator, pairs with names, one tensor alone."""
    items = [parameters] if torch.is_tensor(parameters) else list(parameters)
    return [{**item, "params": listed(item["params"])} if isinstance(item, dict) else item[1] if isinstance(item, tuple) else item
            for item in items]


def _trainable(model, model_parameters):
    """``model_parameters`` without what is frozen; groups that lose everything are left out. A rank that has nothing to train
    gets the module's placeholder."""
    given = listed(model.parameters() if model_parameters is None else model_parameters)
    if given and isinstance(given[0], dict):
        groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in given]
        groups = [group for group in groups if group["params"]]
        return groups or [{**given[0], "params": [model.placeholder_parameter()]}]
    return [p for p in given if p.requires_grad] or [model.placeholder_parameter()]

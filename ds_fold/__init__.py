"""Folded pipelines for DeepSpeed: data-parallel communication disappears behind compute.

>>> net = ds_fold.PipelineModule(layers, num_stages=4, loss_fn=loss_fn, config="ds_config.json")
>>> engine, optimizer, loader, scheduler = ds_fold.initialize(args=args, model=net, training_data=data)
>>> loss = engine.train_batch()

Importing the package is cheap: DeepSpeed and torch are loaded with the first name that needs them.
"""

__version__ = "0.1.0"

_HOMES = {
    "PipelineModule": "ds_fold.runtime.module",
    "PipelineEngine": "ds_fold.runtime.engine",
    "initialize": "ds_fold.initialization",
    "LayerSpec": "deepspeed.pipe",
    "TiedLayerSpec": "deepspeed.pipe",
    "FoldConfig": "ds_fold.config",
    "ConfigError": "ds_fold.config",
    "install": "ds_fold.dropin",
    "uninstall": "ds_fold.dropin",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name):
    from importlib import import_module
    if name == "models":
        return import_module(f"{__name__}.models")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__():
    return sorted(__all__)

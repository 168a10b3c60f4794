"""``install``: scripts that were written for DeepSpeed's pipelines run under a ``ds_fold`` block, unchanged.

DeepSpeed's classes stay what and where they are. What changes is their construction: where a ``ds_fold`` block is known, a
``PipelineModule`` (or a subclass) becomes one of ds_fold's as it is built, and so does a ``PipelineEngine``; their own methods, and
those of subclasses, keep their place in front of ds_fold's. Without a block both are built as ever.
"""

import inspect
import os
import sys
from functools import lru_cache, wraps
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union
from weakref import WeakKeyDictionary

from deepspeed.pipe import DualPipeVModule
from deepspeed.pipe import PipelineModule as StockModule
from deepspeed.runtime.pipe.engine import PipelineEngine as StockEngine

from . import compat
from .config import BLOCK, ConfigError, load_config
from .initialization import listed, prepared
from .runtime.construction import Construction
from .runtime.engine import PipelineEngine
from .runtime.module import PipelineModule

#: a JSON or HJSON file whose block counts where the script's own config has none
VARIABLE = "DS_FOLD_CONFIG"
#: how scripts name their config on the command line
ARGUMENTS = ("--deepspeed_config", "--deepspeed-config")
#: DeepSpeed's own: a script may have wrapped the constructor before install()
_SIGNATURE = inspect.signature(StockModule.__init__)


class _Installed(NamedTuple):
    config: Optional[Dict[str, Any]]
    #: where relative paths begin, if the script goes elsewhere
    folder: str
    constructors: List[Tuple[type, Callable]]


_installed: Optional[_Installed] = None
#: modules of DeepSpeed's own class, built without a block, until an engine takes them: a block may still come with its config
_constructions: "WeakKeyDictionary[StockModule, Construction]" = WeakKeyDictionary()


def install(config: Union[None, str, Dict[str, Any]] = None) -> None:
    """From here on, a ``ds_fold`` block folds the pipelines that DeepSpeed's own names build: ``deepspeed.pipe.PipelineModule``,
    ``deepspeed.initialize`` and subclasses of DeepSpeed's ``PipelineModule`` and ``PipelineEngine``.

    A module has to know its block when it is built. The first of these that has one counts: ``config``; the file that
    ``--deepspeed_config`` names on the command line; the file that the environment's ``DS_FOLD_CONFIG`` names.

    Args:
        config: ds_config (path or dict).

    Raises:
        ConfigError: ``config`` cannot be read.
    """
    global _installed
    uninstall()
    constructors = [(cls, cls.__init__) for cls in (StockModule, StockEngine)]
    _installed = _Installed(None if config is None else load_config(config), os.getcwd(), constructors)
    for (cls, constructor), folding in zip(constructors, (_build_module, _build_engine)):
        cls.__init__ = _redirected(constructor, folding)
    compat.redirect_instructions()


def uninstall() -> None:
    """Take :func:`install` back. What was built stays as it is."""
    global _installed
    if _installed is not None:
        for cls, constructor in _installed.constructors:
            cls.__init__ = constructor
        compat.restore_instructions()
    _installed = None


def _redirected(constructor: Callable, folding: Callable[..., bool]) -> Callable:
    @wraps(constructor)
    def __init__(self, *args, **kwargs):
        if folding(self, args, kwargs):
            return
        if type(self) is not StockModule:
            constructor(self, *args, **kwargs)
            return
        given = _SIGNATURE.bind(self, *args, **kwargs)
        given.apply_defaults()
        construction = Construction(given.arguments["partition_method"])
        constructor(self, *args, **kwargs)
        construction.built(self)
        _constructions[self] = construction
    return __init__


def _build_module(self, args, kwargs) -> bool:
    """Build ``self`` as one of ds_fold's modules; False if it is one already, or there is no block."""
    if isinstance(self, PipelineModule):
        return False
    config, source = _with_block(*_config_at_construction())
    if source is None:
        return False
    _refuse_dual_pipe(self, source)
    self.__class__ = _folded(type(self), PipelineModule)
    PipelineModule.__init__(self, *args, config=config, **kwargs)
    if self.global_rank == 0:
        print(f"{type(self).__name__} is folded: {BLOCK} block of {source}")
    return True


def _build_engine(self, args, kwargs) -> bool:
    """Build ``self`` as one of ds_fold's engines; False if it is one already, or there is no block."""
    if isinstance(self, PipelineEngine):
        return False
    kwargs = compat.engine_arguments(args, kwargs)
    model, config_class = kwargs.get("model"), kwargs.get("config_class")
    if not isinstance(model, StockModule) or config_class is None:
        return False
    construction = _constructions.pop(model, None)
    config, source = _with_block(compat.config_of(config_class), "its config")
    if isinstance(model, PipelineModule):
        if BLOCK not in compat.config_of(config_class):  # the module's is what it was built with
            config = {**config, BLOCK: model.ds_config.get(BLOCK, {})}
    elif source is None:
        return False
    else:
        _refuse_dual_pipe(model, source)
        kwargs = _take_over(model, config, construction, kwargs)
    compat.set_config_of(config_class, config)
    self.__class__ = _folded(type(self), model.engine_class or PipelineEngine)
    PipelineEngine.__init__(self, **prepared(kwargs))
    return True


def _take_over(model, config: Dict[str, Any], construction: Optional[Construction], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Fold a module that was built without a block; the engine's arguments, with its parameters if it was built again."""
    built_by, parameters = type(model), kwargs.get("model_parameters")
    parameters = kwargs["model_parameters"] = None if parameters is None else listed(parameters)

    def why_not() -> Optional[str]:
        if construction is not None:
            return construction.why_not(model, parameters, kwargs.get("optimizer"))
        return ("it was built before ds_fold.install()" if built_by is StockModule
                else f"{built_by.__name__}, a subclass, may hold more than its layers")

    model.__class__ = _folded(built_by, PipelineModule)
    if model.take_over(config, construction, why_not):
        kwargs["model_parameters"] = None  # all that the module has now
        compat.tag_parameters(kwargs["config_class"], model)
    return kwargs


def _refuse_dual_pipe(module, source: str) -> None:
    if isinstance(module, DualPipeVModule):
        raise ConfigError(f"DualPipeVModule has a schedule of its own, but {source} has a {BLOCK} block; remove the block, or use "
                          f"PipelineModule")


@lru_cache(maxsize=None)
def _folded(cls: type, base: type) -> type:
    """``cls``, a subclass of one of DeepSpeed's classes, on top of ds_fold's ``base``, under its own name."""
    if issubclass(base, cls):
        return base
    return type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__})


def _config_at_construction() -> Tuple[Dict[str, Any], str]:
    """The config that is known before a module is built, {} if there is none, and how it was named."""
    if _installed.config is not None:
        return _installed.config, "install(config)"
    value = _argument(sys.argv[1:])
    if not value:
        return {}, ""
    if os.path.exists(_path(value)):
        return load_config(_path(value)), f"--deepspeed_config {value}"
    try:
        return compat.decoded_config(value), "--deepspeed_config"
    except ValueError:
        return {}, ""  # DeepSpeed says what is wrong with it


def _with_block(config: Dict[str, Any], source: str) -> Tuple[Dict[str, Any], Optional[str]]:
    """``config``, with the block of ``DS_FOLD_CONFIG`` where it has none; and whose the block is, None if there is none."""
    path = os.environ.get(VARIABLE)
    if BLOCK in config:
        return config, source
    if not path:
        return config, None
    block = load_config(_path(path)).get(BLOCK)
    if block is None:
        raise ConfigError(f"{VARIABLE}={path} has no {BLOCK} block; add one, or unset the variable")
    return {**config, BLOCK: block}, f"{VARIABLE}={path}"


def _path(name: str) -> str:
    return name if os.path.exists(name) else os.path.join(_installed.folder, name)


def _argument(words: List[str]) -> Optional[str]:
    found = None  # the last counts, as with argparse
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ARGUMENTS:
            found = value if equals else words[i + 1] if i + 1 < len(words) else None
    return found


__all__ = ["VARIABLE", "install", "uninstall"]

"""What scripts know of DeepSpeed's pipeline engine and change from outside: its schedule, instructions, buffers and optimizer."""

import base64
import inspect
from functools import wraps
from typing import Callable, Dict, Type

import hjson
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule as stock_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine as _StockEngine
from deepspeed.runtime.pipe.module import PipelineError

#: DeepSpeed's own, before a script replaces or patches them
_TRAIN_SCHEDULE, _INFERENCE_SCHEDULE = stock_schedule.TrainSchedule, stock_schedule.InferenceSchedule
_STOCK_INSTRUCTIONS = dict(_StockEngine._INSTRUCTION_MAP)


class ScriptEngine(_StockEngine):
    """DeepSpeed's PipelineEngine whose private methods and attributes, where scripts use them, act on the engine below.

    Subclasses implement the hooks.
    """

    def __init__(self, *args, **kwargs):
        self.is_built = False
        super().__init__(*args, **kwargs)
        self.pipe_buffers = {name: _NoBuffers() for name in self.pipe_buffers}
        self.shapes_were_reset()
        self.look_at_optimizer()
        self.is_built = True

    # hooks ----------------------------------------------------------------------------------------------------------------

    def train_schedule(self):
        raise NotImplementedError

    def eval_schedule(self, micro_batches: int):
        raise NotImplementedError

    def run_schedule(self, schedule) -> None:
        raise NotImplementedError

    def schedule_of(self, pipe_schedule):
        """The program to run where a script asks for a schedule of a class of its own."""
        raise NotImplementedError

    def run_current(self) -> None:
        """Do what the instruction that runs now says, by this engine's own method for it."""
        raise NotImplementedError

    def look_at_optimizer(self) -> None:
        """Called when ``self.optimizer`` is there or, in an engine that was built without one, comes later."""
        raise NotImplementedError

    # schedule and instructions ----------------------------------------------------------------------------------------------

    def _exec_schedule(self, pipe_schedule):
        # what _train_schedule and _inference_schedule have made, DeepSpeed's or a script's
        if type(pipe_schedule) is _TRAIN_SCHEDULE:
            pipe_schedule = self.train_schedule()
        elif type(pipe_schedule) is _INFERENCE_SCHEDULE:
            pipe_schedule = self.eval_schedule(pipe_schedule.micro_batches)
        else:
            pipe_schedule = self.schedule_of(pipe_schedule)
        self.run_schedule(pipe_schedule)

    @property
    def replaced_schedule(self):
        """The class that a script has put in the place of DeepSpeed's ``schedule.TrainSchedule``, else None."""
        return None if stock_schedule.TrainSchedule is _TRAIN_SCHEDULE else stock_schedule.TrainSchedule

    def patched_instructions(self, own: Dict[Type, Callable]) -> Dict[Type, Callable]:
        """Instruction -> function, where a script has put one into the map of this engine, of its class or of DeepSpeed's, that is
        neither DeepSpeed's nor ``own``."""
        found = {}
        for owner in (*reversed(type(self).__mro__), self):
            for kind, function in vars(owner).get("_INSTRUCTION_MAP", {}).items():
                if function not in (own.get(kind), _STOCK_INSTRUCTIONS.get(kind), _REDIRECTED.get(kind)):
                    found[kind] = function
        return found

    # shapes, optimizer ------------------------------------------------------------------------------------------------------

    def shapes_were_reset(self) -> bool:
        """Whether, since this was last asked, ``reset_activation_shape`` was called, or a script has set by hand what it sets."""
        reset = self.first_output_send or self.pipe_recv_buf is None
        self.first_output_send, self.pipe_recv_buf = False, ()
        return reset

    def _configure_optimizer(self, client_optimizer, model_parameters):
        super()._configure_optimizer(client_optimizer, model_parameters)
        if self.is_built:
            self.look_at_optimizer()


def _own_method(name: str) -> Callable:
    def method(self, *args, **kwargs):
        self.run_current()
    method.__name__ = name
    return method


# a script's function for an instruction calls these: by name, or as it found them in the map, see redirect_instructions
for _function in _STOCK_INSTRUCTIONS.values():
    setattr(ScriptEngine, _function.__name__, _own_method(_function.__name__))


def _redirected(function: Callable) -> Callable:
    @wraps(function)
    def redirected(self, *args, **kwargs):
        return self.run_current() if isinstance(self, ScriptEngine) else function(self, *args, **kwargs)
    return redirected


_REDIRECTED = {kind: _redirected(function) for kind, function in _STOCK_INSTRUCTIONS.items()}


def redirect_instructions() -> None:
    """From here on DeepSpeed's functions for instructions, as a script takes them from the map, do on a folded engine what that
    does."""
    _exchange(_STOCK_INSTRUCTIONS, _REDIRECTED)


def restore_instructions() -> None:
    """Take :func:`redirect_instructions` back; a script's own entries stay."""
    _exchange(_REDIRECTED, _STOCK_INSTRUCTIONS)


def _exchange(old: Dict[Type, Callable], new: Dict[Type, Callable]) -> None:
    _StockEngine._INSTRUCTION_MAP.update({kind: new[kind] for kind, function in old.items()
                                          if _StockEngine._INSTRUCTION_MAP.get(kind) is function})


class _NoBuffers(list):
    """In place of DeepSpeed's list of micro-batches' tensors: it may be emptied, but holds nothing to work on."""

    def __getitem__(self, index):
        raise PipelineError("ds_fold's engine has no pipe_buffers: what micro-batches need is kept by segment and micro-batch, and "
                            "gone when nothing needs it. A function of your own for an instruction may call the engine's, and do "
                            "something before and after, but cannot work on the buffers")


def config_of(config_class) -> dict:
    """The ds_config that a DeepSpeedConfig was made of."""
    return config_class._param_dict


def set_config_of(config_class, config: dict) -> None:
    config_class._param_dict = config


def decoded_config(text: str) -> dict:
    """A ds_config as DeepSpeed takes it in place of a path: JSON in base64. Raises ValueError."""
    return hjson.loads(base64.urlsafe_b64decode(text).decode())


def engine_arguments(args: tuple, kwargs: dict) -> dict:
    """The arguments of an engine by name; DeepSpeed's pipeline engine has one before those of its base."""
    names = ["has_bool_tensors", *list(inspect.signature(DeepSpeedEngine.__init__).parameters)[1:]]
    return {**dict(zip(names, args)), **kwargs}

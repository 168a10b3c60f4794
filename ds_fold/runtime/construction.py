"""``Construction``: what a module was built from and was afterwards, so that it can be built again with other cuts, or not."""

import zlib
from contextlib import contextmanager
from typing import Iterator, List, Optional

import torch

from .. import compat

#: values of attributes that stay with the module; anything else may hold a layer that is to be replaced
PLAIN = (str, bytes, int, float, complex, type(None))


class Construction:
    """Made before DeepSpeed's ``PipelineModule`` is built; then :meth:`built`.

    Args:
        partition_method: the constructor's.
    """

    def __init__(self, partition_method):
        self.partition_method = partition_method
        self._random = compat.random_states()
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()

    def built(self, module) -> None:
        """Remember what ``module`` is now: one pass over its weights."""
        self._modules = _modules(module)
        self._tensors, self._unreadable = {}, None
        try:
            self._tensors = _tensors(module)
        except Exception as error:  # lazy parameters, tensors of a library's own class: without a block nobody asks for them
            self._unreadable = f"its weights cannot be compared ({type(error).__name__}: {error})"

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, random numbers and defaults are those with which the module was built; afterwards those of the script, which
        go on as under DeepSpeed, where ``initialize`` builds nothing."""
        states, dtype = compat.random_states(), torch.get_default_dtype()
        compat.set_random_states(self._random)
        torch.set_default_dtype(self._dtype)
        try:
            with torch.device(self._device):
                yield
        finally:
            torch.set_default_dtype(dtype)
            compat.set_random_states(states)

    def why_not(self, module, model_parameters: Optional[List], optimizer) -> Optional[str]:
        """What would be lost if ``module`` were built again, None if nothing."""
        if self._unreadable is not None:
            return self._unreadable
        if optimizer is not None and not callable(optimizer):
            return "optimizer= holds its parameters"
        if model_parameters is not None:
            given = {id(p) for p in model_parameters}
            mine = {id(p) for p in module.parameters()}
            trainable = {id(p) for p in module.parameters() if p.requires_grad}
            if given not in (mine, trainable):
                return "model_parameters= are not its parameters as they are, but groups or some of them"
        now = _modules(module)
        if now.keys() != self._modules.keys():
            return f"its layers were exchanged: {', '.join(sorted(now.keys() ^ self._modules.keys()))}"
        for name, before in self._modules.items():
            changed = [key for key in sorted({*before, *now[name]}) if not _same(before.get(key), now[name].get(key))
                       and not (name == "" and key in vars(module) and isinstance(vars(module)[key], PLAIN))]
            if changed:
                return f"{', '.join(changed)} of {name or 'the module'} was set since"
        tensors = _tensors(module)
        changed = [name for name in {**self._tensors, **tensors} if self._tensors.get(name) != tensors.get(name)]
        return f"{changed[0]} was changed since (weights loaded, converted, frozen or tagged)" if changed else None


def _modules(root) -> dict:
    """name -> attribute -> [value, and what it holds], which keeps them alive, so that they can be told from others."""
    return {name: {key: [value, *_contents(value)] for key, value in vars(module).items()}
            for name, module in root.named_modules()}


def _contents(value) -> list:
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return list(value) if isinstance(value, (list, set)) else []


def _same(before: Optional[list], now: Optional[list]) -> bool:
    return before is not None and now is not None and len(before) == len(now) and all(a is b for a, b in zip(before, now))


def _tensors(module) -> dict:
    """name -> properties and checksum. Not ``_version``, which does not count what is done to ``.data``."""
    return {name: (t.dtype, t.device, t.shape, t.requires_grad, t.grad is None, _tags(t),
                   zlib.crc32(t.detach().cpu().reshape(-1).view(torch.uint8).numpy()))
            for name, t in [*module.named_parameters(), *module.named_buffers()]}


def _tags(tensor) -> str:
    return repr(sorted((name, value) for name, value in vars(tensor).items() if "muon" not in name))  # initialize() sets those

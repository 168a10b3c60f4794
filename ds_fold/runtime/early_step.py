"""What stepping a segment ahead of validation needs: an exact way back, and an optimizer that can be stepped piece by piece.

Post-validation is zero-bubble's (Qi et al., ICLR 2024), there for the whole step and by arithmetic inverse; here it is by segment
and from a copy, so that what is taken back is what was there, bit for bit.
"""

import copy
from collections import defaultdict
from typing import Optional

import torch


class Undo:
    """A copy of a master and of the inner optimizer's state of it: with Adam 12 bytes an element, until the step is validated."""

    def __init__(self, master: torch.Tensor, optimizer_state: dict):
        self._master, self._optimizer_state = master, optimizer_state
        self._values = master.detach().clone()
        self._state = {key: _copy(value) for key, value in optimizer_state.get(master, {}).items()}

    @torch.no_grad()
    def restore(self) -> None:
        """In place: whoever holds the master or the state's tensors sees the old values."""
        self._master.copy_(self._values)
        state = self._optimizer_state[self._master]
        for key in list(state):
            if torch.is_tensor(state[key]) and torch.is_tensor(self._state.get(key)):
                state[key].copy_(self._state[key])
            elif key in self._state:
                state[key] = self._state[key]
            else:
                del state[key]
        if not state:
            del self._optimizer_state[self._master]


def _copy(value):
    return value.clone() if torch.is_tensor(value) else copy.deepcopy(value)


def why_not_in_pieces(optimizer: torch.optim.Optimizer) -> Optional[str]:
    """Why stepping parameters one after the other would not be the same as stepping them together, or could not be taken back;
    None if all is well.

    Found by trying: a copy of what torch says an optimizer is (its defaults, groups and state, and no other attribute) steps two
    small parameters both ways.
    """
    try:
        together, apart = _trial(optimizer, [(0, 1)]), _trial(optimizer, [(0, ), (1, )])
    except Exception as error:
        return f"a copy of its param_groups and state alone cannot step ({type(error).__name__}: {error})"
    for what in {**together, **apart}:
        a, b = together.get(what), apart.get(what)
        if not (torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a == b):
            return f"{what} depends on how many parameters are stepped at once ({a} for two together, {b} one by one)"
    return None


@torch.no_grad()
def _trial(optimizer: torch.optim.Optimizer, turns) -> dict:
    """Everything there is after three steps, by name. ``turns``: which of two parameters are stepped at once."""
    group = optimizer.param_groups[0]
    device = group["params"][0].device if group["params"] else None
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 4 + i, device=device)) for i in range(2)]
    trial = copy.copy(optimizer)
    trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": parameters}]
    for step in range(3):
        for turn in turns:
            for i, p in enumerate(parameters):
                p.grad = torch.cos(p + step) if i in turn else None
            with torch.enable_grad():
                trial.step()
    found = {f"param_groups[0][{key!r}]": value for key, value in trial.param_groups[0].items() if key != "params"}
    for i, p in enumerate(parameters):
        found[f"parameter {i}"] = p.detach()
        found.update({f"state[parameter {i}][{key!r}]": value for key, value in trial.state[p].items()})
    return found


__all__ = ["Undo", "why_not_in_pieces"]

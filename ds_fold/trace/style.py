"""How timelines look: colours that colour-blind readers tell apart, and where each event's box lies in its rank's row."""

from typing import List, NamedTuple, Tuple

from ..events import COMPUTE, DATA_PARALLEL, PIPELINE, WAITING, Event, Timeline
from ..schedule import actions as op
from ..schedule.actions import Action

# Okabe-Ito colours: forwards light, backwards dark
FORWARD = ("#56B4E9", "#F0E442", "#E69F00", "#CC79A7")
BACKWARD = ("#0072B2", "#9A8F00", "#D55E00", "#882255")


class Look(NamedTuple):
    """Of a kind of events: colour of the box, colour of text in it, name in the legend."""
    colour: str
    text: str
    label: str


class Box(NamedTuple):
    """An event in the picture. ``top`` and ``height`` in rows, counted downwards from the first rank's."""
    event: Event
    action: Action
    look: Look
    top: float
    height: float


_WAITING = Look("#DDDDDD", "black", "waiting")
_LOOKS = {
    op.LOAD: Look("#999999", "black", "load, step"),
    op.STEP: Look("#999999", "black", "load, step"),
    op.STEP_SEGMENT: Look("#999999", "black", "load, step"),
    op.RELEASE: Look("#999999", "black", "load, step"),
    op.SEND_ACT: Look("#009E73", "white", "message, activation"),
    op.RECV_ACT: Look("#009E73", "white", "message, activation"),
    op.SEND_GRAD: Look("#00523C", "white", "message, gradient"),
    op.RECV_GRAD: Look("#00523C", "white", "message, gradient"),
    op.REDUCE: Look("#000000", "white", "reduction"),
    op.GATHER: Look("#777777", "white", "gather"),
}


def look(event: Event, action: Action) -> Look:
    """How an event is drawn."""
    if event.track == WAITING:
        return _WAITING
    if action.op == op.F:
        return Look(FORWARD[action.segment % len(FORWARD)], "black", f"forward, segment {action.segment}")
    if action.op == op.B:
        return Look(BACKWARD[action.segment % len(BACKWARD)], "white", f"backward, segment {action.segment}")
    return _LOOKS[action.op]


def boxes(timeline: Timeline) -> List[Box]:
    """The events as boxes: in each row the rank's work and waiting above its transfers; waiting first, so that work covers it."""
    present = {event.track for event in timeline.events}
    weights = {COMPUTE: 2.0, PIPELINE: 1.0 * (PIPELINE in present), DATA_PARALLEL: 1.0 * (DATA_PARALLEL in present)}
    total, top, places = sum(weights.values()), 0.04, {}
    for track, weight in weights.items():
        height = 0.92 * weight / total
        places[track] = (top, height)
        top += height
    places[WAITING] = places[COMPUTE]
    result = []
    for event in sorted(timeline.events, key=lambda e: (e.track != WAITING, e.start)):
        action = Action.parse(event.action)
        offset, height = places[event.track]
        result.append(Box(event, action, look(event, action), event.rank + offset, height))
    return result


def legend(drawn: List[Box]) -> List[Look]:
    """What appears, each once: forwards, backwards, then the others."""
    looks = {box.look for box in drawn}
    return sorted(looks, key=lambda one: (not one.label.startswith("forward"), not one.label.startswith("backward"), one.label))


def unit(timelines: List[Timeline]) -> Tuple[float, str]:
    """(factor, name) of the time axis: milliseconds unless the timelines' ``about["unit"]`` says that times count another unit."""
    name = timelines[0].about.get("unit")
    return (1e3, "ms") if name is None else (1.0, name)

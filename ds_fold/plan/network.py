"""Transfers that share network cards: a fluid model with an event for each start and each end.

::

    rank 0  activations --+                    A channel is one connection: its transfers go one after the other.
            gradients   --+--> port out ...    A port is one direction of a card. The channels that are active on it share its
            bulk        --+                    rate equally; with priority, messages share it and bulk gets what they leave.

A message runs at the smaller of its shares on the sender's and the receiver's port; what it leaves unused there is bulk's. A
change on one port touches only the channels of that port and of their other ends, so that the cost of an event does not grow
with the number of ranks.
"""

import heapq
from typing import Dict, List, Tuple


class Port:
    """One direction of a network card, or of a rank's link inside its host; ``rate`` in bytes per second."""
    __slots__ = ("rate", "messages", "bulk")

    def __init__(self, rate: float):
        self.rate = rate
        #: the channels whose transfer is under way
        self.messages: List[Channel] = []
        self.bulk: List[Channel] = []


class Channel:
    """One connection, or the collectives of one group of replicas. Transfers are numbered in the order of their sends.

    Attributes:
        begun: when each transfer began to move.
        ends: when each transfer was over: it is at the receiver, and the sender is told.
        parked: who waits for a transfer that is not over yet.
    """
    __slots__ = ("out", "into", "is_bulk", "places", "sizes", "sent", "posted", "ready", "begun", "ends", "parked", "flowing",
                 "rate", "remaining", "since", "version")

    def __init__(self, out: Port, into: Port, is_bulk: bool = False):
        self.out, self.into, self.is_bulk = out, into, is_bulk
        #: where it stands while it is active
        self.places = (out.bulk, into.bulk) if is_bulk else (out.messages, into.messages)
        self.parked: List = []
        self.flowing, self.rate, self.remaining, self.since, self.version = False, 0.0, 0.0, 0.0, 0
        self.forget()

    def forget(self) -> None:
        """Start counting anew; nothing may be under way."""
        self.sizes: List[Tuple[float, float]] = []  # bytes, delay
        self.sent: List[float] = []
        self.posted: List[float] = []
        self.ready: List[float] = []  # both ends are there
        self.begun: List[float] = []
        self.ends: List[float] = []


class Bulk(Channel):
    """The collectives of one group of replicas: numbered in the order of their launches, and over in that of their urgency."""
    __slots__ = ("urgencies", "waiting", "current")

    def __init__(self, out: Port, into: Port):
        super().__init__(out, into, is_bulk=True)

    def forget(self) -> None:
        super().forget()
        #: number -> when it was over
        self.ends: Dict[int, float] = {}
        self.urgencies: List[int] = []
        #: (urgency, number, bytes left) of those that are launched and do not move
        self.waiting: List[Tuple[int, int, float]] = []
        self.current = -1


class Network:
    """The transfers of all channels in order of time. With ``priority``, bulk gets what messages leave."""

    def __init__(self, priority: bool = False):
        self.priority = priority
        self._events: List[Tuple[float, int, Channel, int]] = []
        self._count = 0

    def send(self, channel: Channel, time: float, size: Tuple[float, float]) -> None:
        """The sender is ready at ``time``. ``size`` is (bytes, seconds from the last byte's departure to the end)."""
        channel.sizes.append(size)
        channel.sent.append(time)
        j = len(channel.sent) - 1
        if j < len(channel.posted):
            self._pair(channel, max(time, channel.posted[j]))

    def post(self, channel: Channel, time: float) -> None:
        """The receiver is ready at ``time``: rendezvous, nothing moves before both are."""
        channel.posted.append(time)
        j = len(channel.posted) - 1
        if j < len(channel.sent):
            self._pair(channel, max(time, channel.sent[j]))

    def launch(self, channel: Bulk, time: float, size: Tuple[float, float], urgency: int = 0) -> int:
        """A collective of symmetric replicas: all are ready at once. Of those launched the one of lowest ``urgency`` moves,
        and among equals the first. Returns the transfer's number."""
        j = len(channel.ready)
        channel.sizes.append(size)
        channel.ready.append(time)
        channel.begun.append(None)
        channel.urgencies.append(urgency)
        self._count += 1
        heapq.heappush(self._events, (time, self._count, channel, -1 - j))
        return j

    def next(self) -> List:
        """Go to the next event; returns who may go on. Raises IndexError where nothing is left."""
        while True:
            now, _, channel, version = heapq.heappop(self._events)
            if version == channel.version:
                break
            if version < 0:
                self._arrive(channel, -1 - version, now)
                return []
        if channel.is_bulk:
            return self._finish_bulk(channel, now)
        if channel.flowing:
            return self._finish(channel, now)
        self._begin(channel, now)
        return []

    def _pair(self, channel: Channel, time: float) -> None:
        channel.ready.append(time)
        if not channel.flowing and len(channel.ready) - 1 == len(channel.begun):  # else its predecessor's end begins it
            self._schedule(channel, time)

    def _schedule(self, channel: Channel, time: float) -> None:
        channel.version += 1
        self._count += 1
        heapq.heappush(self._events, (time, self._count, channel, channel.version))

    def _begin(self, channel: Channel, now: float) -> None:
        channel.remaining = channel.sizes[len(channel.begun)][0]
        channel.begun.append(now)
        self._enter(channel, now)

    def _enter(self, channel: Channel, now: float) -> None:
        """It becomes active on its ports."""
        channel.since, channel.flowing, channel.rate = now, True, 0.0
        out, into = channel.out, channel.into
        for place in channel.places:
            place.append(channel)
        if len(out.messages) + len(out.bulk) + len(into.messages) + len(into.bulk) == 2:  # alone, the usual case
            self._set_rate(channel, min(out.rate, into.rate), now)
        else:
            self._share(out, into, now)

    def _leave(self, channel: Channel, now: float) -> None:
        channel.flowing, channel.rate = False, 0.0
        out, into = channel.out, channel.into
        for place in channel.places:
            place.remove(channel)
        if out.messages or out.bulk or into.messages or into.bulk:
            self._share(out, into, now)

    def _finish(self, channel: Channel, now: float) -> List:
        j = len(channel.ends)
        channel.ends.append(now + channel.sizes[j][1])
        following = j + 1 < len(channel.ready)
        if following and channel.ready[j + 1] <= now:  # the next one takes its place: nobody's share changes
            channel.remaining, channel.since = channel.sizes[j + 1][0], now
            channel.begun.append(now)
            self._schedule(channel, now + channel.remaining / channel.rate)
        else:
            self._leave(channel, now)
            if following:
                self._schedule(channel, channel.ready[j + 1])
        waiting, channel.parked = channel.parked, []
        return waiting

    def _arrive(self, bulk: Bulk, j: int, now: float) -> None:
        """A launched transfer joins those that wait, or takes the place of a less urgent one."""
        heapq.heappush(bulk.waiting, (bulk.urgencies[j], j, bulk.sizes[j][0]))
        if not bulk.flowing:
            self._take_up(bulk, now)
            self._enter(bulk, now)
        elif bulk.waiting[0] < (bulk.urgencies[bulk.current], bulk.current):
            left = max(0.0, bulk.remaining - bulk.rate * (now - bulk.since))
            heapq.heappush(bulk.waiting, (bulk.urgencies[bulk.current], bulk.current, left))
            self._take_up(bulk, now)

    def _take_up(self, bulk: Bulk, now: float) -> None:
        """Go on with the most urgent transfer that waits."""
        _, bulk.current, bulk.remaining = heapq.heappop(bulk.waiting)
        bulk.since = now
        if bulk.begun[bulk.current] is None:
            bulk.begun[bulk.current] = now
        if bulk.rate > 0:
            self._schedule(bulk, now + bulk.remaining / bulk.rate)

    def _finish_bulk(self, bulk: Bulk, now: float) -> List:
        bulk.ends[bulk.current] = now + bulk.sizes[bulk.current][1]
        if bulk.waiting:
            self._take_up(bulk, now)
        else:
            self._leave(bulk, now)
        waiting, bulk.parked = bulk.parked, []
        return waiting

    def _share(self, out: Port, into: Port, now: float) -> None:
        """Give everyone a new rate whom a change on these two ports concerns."""
        ports = [out, into]
        for channel in out.messages + [c for c in into.messages if c.out is not out]:
            rate = min(self._share_of_messages(channel.out), self._share_of_messages(channel.into))
            if rate != channel.rate:
                self._set_rate(channel, rate, now)
                ports += (channel.out, channel.into)
        for bulk in {id(bulk): bulk for port in ports for bulk in port.bulk}.values():
            rate = min(self._share_of_bulk(bulk.out), self._share_of_bulk(bulk.into))
            if rate != bulk.rate:
                self._set_rate(bulk, rate, now)

    def _share_of_messages(self, port: Port) -> float:
        return port.rate / (len(port.messages) + (0 if self.priority else len(port.bulk)))

    @staticmethod
    def _share_of_bulk(port: Port) -> float:
        left = port.rate - sum(channel.rate for channel in port.messages)
        return left / len(port.bulk) if left > 1e-9 * port.rate else 0.0  # rounding leaves no rate

    def _set_rate(self, channel: Channel, rate: float, now: float) -> None:
        channel.remaining = max(0.0, channel.remaining - channel.rate * (now - channel.since))
        channel.since, channel.rate = now, rate
        if rate > 0:
            self._schedule(channel, now + channel.remaining / rate)
        else:
            channel.version += 1  # stands still until its share changes

import random

import pytest

from ds_fold.plan.network import Bulk, Channel, Network, Port


class Checked(Network):
    """After every event: no port carries more than it can, and no transfer stands still for nothing."""

    def __init__(self, channels, priority):
        super().__init__(priority)
        self.channels = channels

    def next(self):
        result = super().next()
        flowing = [channel for channel in self.channels if channel.flowing]
        assert all(channel.flowing or channel.rate == 0 for channel in self.channels)
        for channel in flowing:
            shares, left = [], []
            for port in (channel.out, channel.into):
                here = [c for c in flowing if port in (c.out, c.into)]
                load = sum(c.rate for c in here)
                assert load <= port.rate * (1 + 1e-9)
                left.append(port.rate - load)
                shares.append(port.rate / sum(not (self.priority and c.is_bulk) for c in here) if not channel.is_bulk else 0)
            if channel.is_bulk:  # takes all that is left on one of its ports, for the most urgent of what is there
                assert min(left) == pytest.approx(0, abs=1e-9)
                assert all((channel.urgencies[channel.current], channel.current) < other[:2] for other in channel.waiting)
            else:
                assert channel.rate == min(shares)
        return result


@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_random_transfers_share_ports_and_all_arrive(seed, priority):
    draw = random.Random(seed)
    hosts = 4
    out = [Port(draw.choice([1.0, 2.0, 4.0])) for _ in range(hosts)]
    into = [Port(port.rate) for port in out]
    channels = [Channel(out[a], into[b]) for a in range(hosts) for b in range(hosts) if a != b and draw.random() < 0.7]
    channels += [Bulk(out[a], into[a]) for a in range(hosts)]
    network = Checked(channels, priority)
    for channel in channels:
        sent = sorted(draw.uniform(0, 30) for _ in range(10))
        posted = sorted(draw.uniform(0, 30) for _ in range(10))
        for send, post in zip(sent, posted):
            size = (draw.choice([0.0, 1.0, 5.0]), draw.choice([0.0, 0.5]))
            if channel.is_bulk:
                network.launch(channel, send, size, draw.randrange(3))
            else:
                network.post(channel, post)
                network.send(channel, send, size)
    with pytest.raises(IndexError):
        while True:
            network.next()
    for channel in channels:
        assert len(channel.ends) == 10
        fastest = min(channel.out.rate, channel.into.rate)
        for j in range(10):
            size, delay = channel.sizes[j]
            assert channel.begun[j] >= channel.ready[j] and channel.ends[j] >= channel.begun[j] + size / fastest + delay - 1e-9
            if not channel.is_bulk:
                assert channel.ready[j] == max(channel.sent[j], channel.posted[j])
            if j and not channel.is_bulk:
                assert channel.begun[j] >= channel.ends[j - 1] - channel.sizes[j - 1][1] - 1e-9


def test_three_messages_on_one_card():
    # two leave together at half the rate; when the shorter is over at 4, the other has 2 of its 4 bytes left
    here, there, elsewhere = Port(1.0), Port(1.0), Port(1.0)
    network = Network()
    first, second = Channel(here, there), Channel(here, elsewhere)
    for channel, size in ((first, 2.0), (second, 4.0)):
        network.post(channel, 0.0)
        network.send(channel, 0.0, (size, 0.0))
    network.post(first, 0.0)
    network.send(first, 5.0, (1.0, 0.25))  # shares the card with the second's last byte
    with pytest.raises(IndexError):
        while True:
            network.next()
    assert first.ends == [4.0, 7.25] and second.ends == [7.0]


def test_a_more_urgent_collective_takes_the_place_of_another_which_goes_on_behind_it():
    network = Network()
    bulk = Bulk(Port(1.0), Port(1.0))
    for time, size, urgency in ((0.0, 4.0, 3), (1.0, 2.0, 0), (2.0, 1.0, 0), (3.5, 1.0, 1), (7.0, 1.0, 0)):
        network.launch(bulk, time, (size, 0.25), urgency)
    with pytest.raises(IndexError):
        while True:
            network.next()
    # the first has 3 bytes left at 1; reductions until 4, then the fourth until 5; at 7 one byte is left, and a reduction until 8
    assert bulk.ends == {1: 3.25, 2: 4.25, 3: 5.25, 4: 8.25, 0: 9.25} and bulk.begun == [0.0, 1.0, 3.0, 4.0, 7.0]

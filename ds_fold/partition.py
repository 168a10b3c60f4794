"""Cuts a chain of layers into contiguous chunks: the parts of the virtual stages. Pure Python."""

from typing import Callable, List, Sequence, Union


class PartitionError(ValueError):
    """A partition that does not cut the layers into the chunks."""


def cut_layers(method: Union[str, Sequence[int]], layers: int, chunks: int, parameters: Callable[[], Sequence[int]],
               matching: Callable[[str], Sequence[bool]]) -> List[int]:
    """Cuts ``[0, ..., layers]`` by the config's ``partition``.

    Args:
        method: "uniform", "parameters", "type:regex", or the cuts themselves.
        layers, chunks: numbers of them; layers >= chunks.
        parameters: called for "parameters": each layer's number of them, or bytes.
        matching: called with the regex of "type:regex": whether each layer's name matches.

    Raises:
        PartitionError: another method, or cuts that do not fit.
    """
    if not isinstance(method, str):
        cuts = [int(cut) for cut in method]
        ascending = all(a < b for a, b in zip(cuts, cuts[1:]))
        if len(cuts) != chunks + 1 or cuts[0] != 0 or cuts[-1] != layers or not ascending:
            raise PartitionError(f"partition={cuts} must be {chunks + 1} ascending cuts from 0 to {layers} (one chunk of at least "
                                 f"one layer for each of the {chunks} virtual stages), such as {partition_uniform(layers, chunks)}")
        return cuts
    kind = method.lower()
    if kind == "uniform":
        return partition_uniform(layers, chunks)
    if kind == "parameters":
        return partition_balanced(parameters(), chunks)
    if kind.startswith("type:"):
        return partition_balanced([int(hit) for hit in matching(method[len("type:"):])], chunks)
    raise PartitionError(f"partition={method!r} is not known; use 'uniform', 'parameters', 'type:regex' or a list of "
                         f"{chunks + 1} cuts")


def partition_uniform(layers: int, parts: int) -> List[int]:
    """Cuts ``[0, ..., layers]`` into ``parts`` chunks whose lengths differ by at most one, longer ones first."""
    base, extra = divmod(layers, parts)
    cuts = [0]
    for i in range(parts):
        cuts.append(cuts[-1] + base + (i < extra))
    return cuts


def partition_balanced(weights: Sequence[int], parts: int) -> List[int]:
    """Cuts into ``parts`` non-empty chunks with the smallest possible weight of the heaviest chunk.

    Args:
        weights: non-negative integer weight of each layer.
        parts: number of chunks, at most ``len(weights)``.

    Returns:
        ``parts + 1`` cuts; neighbouring chunks are balanced against each other as far as single layers allow.

    Raises:
        ValueError: more parts than layers.
    """
    layers = len(weights)
    if not 1 <= parts <= layers:
        raise ValueError(f"cannot cut {layers} layers into {parts} non-empty chunks")
    if not any(weights):
        return partition_uniform(layers, parts)
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _chunks_needed(weights, middle)[0] <= parts:
            high = middle
        else:
            low = middle + 1
    return _balance_neighbours(weights, _cut_under(weights, parts, low))


def _chunks_needed(weights: Sequence[int], limit: int) -> List[int]:
    """Entry i: fewest chunks of weight <= limit that hold layers i.. (limit >= every single weight)."""
    layers = len(weights)
    needed = [0] * (layers + 1)
    stop, total = layers, 0
    for i in range(layers - 1, -1, -1):
        total += weights[i]
        while total > limit:
            stop -= 1
            total -= weights[stop]
        needed[i] = needed[stop] + 1
    return needed


def _cut_under(weights: Sequence[int], parts: int, limit: int) -> List[int]:
    """Non-empty chunks of weight <= limit, each filled towards the average of what remains."""
    needed, cuts, remaining = _chunks_needed(weights, limit), [0], sum(weights)
    for left in range(parts - 1, 0, -1):
        stop, total, average = cuts[-1] + 1, weights[cuts[-1]], remaining / (left + 1)
        # further while the rest would not fit, or while that comes nearer the average and leaves a layer for each later chunk
        while needed[stop] > left or (total + weights[stop] <= limit and len(weights) - stop > left
                                      and abs(total + weights[stop] - average) < abs(total - average)):
            total += weights[stop]
            stop += 1
        cuts.append(stop)
        remaining -= total
    return [*cuts, len(weights)]


def _balance_neighbours(weights: Sequence[int], cuts: List[int]) -> List[int]:
    """Move each cut to where the heavier of its two chunks is lightest, until none moves; never makes a chunk the heaviest."""
    before = [0]
    for weight in weights:
        before.append(before[-1] + weight)
    moved = True
    while moved:
        moved = False
        for i in range(1, len(cuts) - 1):
            low, high = cuts[i - 1], cuts[i + 1]

            def heavier(cut, low=low, high=high):
                return max(before[cut] - before[low], before[high] - before[cut])

            # equal weights: the cut in the middle, so that chunks without weight share their layers
            best = min(range(low + 1, high), key=lambda cut: (heavier(cut), abs(2 * cut - low - high)))
            if heavier(best) < heavier(cuts[i]):
                cuts[i], moved = best, True
    return cuts

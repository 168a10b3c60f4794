import itertools
import random

import pytest

from ds_fold.partition import partition_balanced, partition_uniform


def heaviest(weights, cuts):
    return max(sum(weights[a:b]) for a, b in zip(cuts, cuts[1:]))


def best_by_search(weights, parts):
    inner = itertools.combinations(range(1, len(weights)), parts - 1)
    return min(heaviest(weights, [0, *cuts, len(weights)]) for cuts in inner)


def test_every_small_chain_is_cut_optimally_and_without_empty_chunks():
    generator = random.Random(5)
    for _ in range(400):
        weights = [generator.choice([0, 0, 1, 2, 5, 100]) for _ in range(generator.randint(1, 10))]
        parts = generator.randint(1, len(weights))
        cuts = partition_balanced(weights, parts)
        assert cuts[0] == 0 and cuts[-1] == len(weights) and len(cuts) == parts + 1
        assert all(a < b for a, b in zip(cuts, cuts[1:])), (weights, cuts)
        assert heaviest(weights, cuts) == best_by_search(weights, parts), (weights, cuts)


def test_heavy_ends():
    assert partition_balanced([100] + [1] * 10 + [100], 4) == [0, 1, 6, 11, 12]


def test_equal_layers_are_spread_evenly():
    for layers, parts in [(12, 5), (8, 4), (7, 3), (20, 6)]:
        cuts = partition_balanced([3] * layers, parts)
        lengths = [b - a for a, b in zip(cuts, cuts[1:])]
        assert max(lengths) - min(lengths) <= 1


def test_uniform_drops_no_layer():
    for layers in range(1, 21):
        for parts in range(1, layers + 1):
            cuts = partition_uniform(layers, parts)
            lengths = [b - a for a, b in zip(cuts, cuts[1:])]
            assert sum(lengths) == layers and max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_more_chunks_than_layers_is_an_error():
    with pytest.raises(ValueError, match="3 layers into 4"):
        partition_balanced([1, 1, 1], 4)


def test_a_long_chain_is_cut_in_no_time():
    generator = random.Random(1)
    weights = [generator.randint(0, 10**9) for _ in range(2000)]
    cuts = partition_balanced(weights, 512)
    assert len(cuts) == 513 and heaviest(weights, cuts) >= max(weights)

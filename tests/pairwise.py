"""Pairwise sampling: few combinations in which every possible pair of option values meets."""

import itertools
import random
from typing import Callable, Dict, List


def pairwise(grid: Dict[str, list], possible: Callable[[dict], bool], seed: int = 0) -> List[dict]:
    """Cases over ``grid`` such that each pair of values that any possible case holds is held by one of the returned.

    Greedy: each next case is the one, of many random possible ones built around an unmet pair, that meets most unmet pairs.
    """
    generator = random.Random(seed)
    names = list(grid)

    def pairs(case):
        return {(a, repr(case[a]), b, repr(case[b])) for a, b in itertools.combinations(names, 2)}

    def around(fixed):
        for _ in range(200):
            case = {name: fixed.get(name, generator.choice(grid[name])) for name in names}
            if possible(case):
                return case
        return None

    unmet = [({a: x, b: y}, (a, repr(x), b, repr(y))) for a, b in itertools.combinations(names, 2)
             for x in grid[a] for y in grid[b]]
    met, cases = set(), []
    for fixed, pair in unmet:
        if pair in met:
            continue
        candidates = [case for case in (around(fixed) for _ in range(12)) if case]
        if not candidates:
            continue  # no case holds this pair
        best = max(candidates, key=lambda case: len(pairs(case) - met))
        met |= pairs(best)
        cases.append(best)
    return cases

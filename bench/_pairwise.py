"""A covering array: few cases in which every possible pair of options occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from random import Random

Case = dict[str, str]
Pair = tuple[str, str, str, str]
CANDIDATES = 4
"""Cases that are drawn for each one that is kept."""
USUAL = 0.7
"""How often the usual option is taken where others are as good."""


def cover_pairs(
    factors: Mapping[str, Sequence[str]],
    is_valid: Callable[[Case], bool],
    seed: int,
    usual: Mapping[str, str] | None = None,
    given: Sequence[Case] = (),
) -> list[Case]:
    """Return cases, one option for each factor, that contain every valid pair of options.

    The cases of `given` come first. Each further case is the best of some random ones, so the next
    cases contain the most new pairs. Where several options are as good, the one of `usual` is taken
    more often. `is_valid` receives cases that may lack factors, and judges those that are there.
    """
    random = Random(seed)
    uncovered = [
        (one, x, two, y)
        for one, two in combinations(factors, 2)
        for x in factors[one]
        for y in factors[two]
        if is_valid({one: x, two: y})
    ]
    random.shuffle(uncovered)
    left = dict.fromkeys(uncovered)
    cases = list(given)
    for case in cases:
        for pair in list_pairs(case, factors):
            left.pop(pair, None)
    while left:
        one, x, two, y = first = next(iter(left))
        drawn = [
            _complete({one: x, two: y}, factors, is_valid, left, usual or {}, random)
            for _ in range(CANDIDATES)
        ]
        complete = [case for case in drawn if case is not None]
        if not complete:
            del left[first]  # no third option goes with both
            continue
        best = max(complete, key=lambda case: sum(x in left for x in list_pairs(case, factors)))
        for pair in list_pairs(best, factors):
            left.pop(pair, None)
        cases.append(best)
    return cases


def list_single_steps(
    factors: Mapping[str, Sequence[str]],
    is_valid: Callable[[Case], bool],
    seed: int,
    usual: Mapping[str, str],
    times: int = 2,
) -> list[Case]:
    """Return the cases that differ from `usual` in one option; factors that it lacks are drawn.

    Each comes so many times, after all others.
    """
    random = Random(seed)
    steps = [dict(usual)]
    steps += [{**usual, name: x} for name, one in usual.items() for x in factors[name] if x != one]
    cases = []
    for _ in range(times):
        random.shuffle(steps)
        for step in steps:
            drawn = {name: random.choice(options) for name, options in factors.items()}
            case = {name: step.get(name, drawn[name]) for name in factors}
            if is_valid(case) and case not in cases:
                cases.append(case)
    return cases


def list_pairs(case: Case, factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    return [(one, case[one], two, case[two]) for one, two in combinations(factors, 2)]


def _complete(
    case: Case,
    factors: Mapping[str, Sequence[str]],
    is_valid: Callable[[Case], bool],
    left: Mapping[Pair, None],
    usual: Mapping[str, str],
    random: Random,
) -> Case | None:
    """Return the case with the options that add most uncovered pairs, factor by factor."""
    place = {name: i for i, name in enumerate(factors)}
    missing = [name for name in factors if name not in case]
    random.shuffle(missing)

    def count_new(name: str, option: str) -> int:
        return sum(
            ((name, option, other, x) if place[name] < place[other] else (other, x, name, option))
            in left
            for other, x in case.items()
        )

    for name in missing:
        options = [x for x in factors[name] if is_valid({**case, name: x})]
        if not options:
            return None
        new = [count_new(name, x) for x in options]
        best = [x for x, n in zip(options, new, strict=True) if n == max(new)]
        prefers = usual.get(name) in best and random.random() < USUAL
        case[name] = usual[name] if prefers else random.choice(best)
    return case

"""Which quantization each unit of a model gets, under a budget of bytes or of KL divergence.

A unit is what is quantized alike: linears that share an input, or the embedding. The model's KL is taken to be the sum
of what each unit costs alone, so the choice is a knapsack in which each unit takes one option. On the lower convex
hull of its options, the steps of all units in order of KL saved a byte lead from frontier to frontier: at the bytes
that a run of them takes, no other choice has less KL (Lagrange multipliers, Everett 1963, doi:10.1287/opre.11.3.399).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from export.quantized import QuantSpec


class Option(NamedTuple):
    """A way to quantize a unit: its bytes, and the KL in nats a token if nothing else is quantized."""

    spec: QuantSpec
    bytes: int
    kl: float


class Point(NamedTuple):
    """The sums of a choice over all units."""

    bytes: int
    kl: float


Choice = dict[str, Option]


def total(choice: Choice) -> Point:
    """The bytes and the KL of a choice."""
    return Point(sum(option.bytes for option in choice.values()), sum(option.kl for option in choice.values()))


def hull(options: Sequence[Option]) -> list[Option]:
    """The options on the lower convex hull, from the fewest bytes to the least KL."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bytes, option.kl)):
        if kept and option.kl >= kept[-1].kl:
            continue
        while len(kept) > 1 and gain(kept[-2], kept[-1]) <= gain(kept[-1], option):
            kept.pop()
        kept.append(option)
    return kept


def gain(a: Option, b: Option) -> float:
    """KL that is saved a byte on the way from `a` to the larger `b`."""
    return (a.kl - b.kl) / (b.bytes - a.bytes)


def steps(units: Mapping[str, Sequence[Option]]) -> list[tuple[str, Option, Option]]:
    """Each unit's steps along its hull, (unit, from, to), by KL saved a byte; a unit's own stay in their order."""
    found = [(name, *pair) for name, options in units.items() for pair in itertools.pairwise(hull(options))]
    return sorted(found, key=lambda step: -gain(*step[1:]))


def least(units: Mapping[str, Sequence[Option]]) -> Choice:
    """The choice of fewest bytes."""
    return {name: hull(options)[0] for name, options in units.items()}


def frontier(units: Mapping[str, Sequence[Option]]) -> list[Point]:
    """What the choices on the frontier take and leave, from the fewest bytes to the least KL."""
    choice = least(units)
    points = [total(choice)]
    for name, _, to in steps(units):
        choice[name] = to
        points.append(total(choice))
    return points


def under_budget(units: Mapping[str, Sequence[Option]], budget: int | float) -> Choice | None:
    """The choice of least KL that steps along the frontier find within `budget` bytes; None if there is none.

    Where a step does not fit, later ones of other units fill what is left. More bytes never give more KL: a step that
    a larger budget takes first saves more than what fills the same bytes in its place.
    """
    choice = least(units)
    room = budget - total(choice).bytes
    if room < 0:
        return None
    for name, at, to in steps(units):
        if choice[name] == at and to.bytes - at.bytes <= room:
            choice[name] = to
            room -= to.bytes - at.bytes
    return choice


def under_kl(units: Mapping[str, Sequence[Option]], limit: float) -> Choice | None:
    """The smallest choice on the frontier whose KL is at most `limit`; None if there is none."""
    choice = least(units)
    ahead = iter(steps(units))
    while total(choice).kl > limit:
        step = next(ahead, None)
        if step is None:
            return None
        choice[step[0]] = step[2]
    return choice

"""Few configurations in which every two values of every two settings meet.

A fault that sits where two parts meet needs two settings at certain values, whatever the others are. A covering array
holds each such pair in some configuration, with far fewer configurations than all combinations.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Configuration = dict[str, Any]
Valid = Callable[[Configuration], bool]
# A setting's index and the index of one of its values, twice, in the order of the settings.
_Pair = tuple[tuple[int, int], tuple[int, int]]

_SEARCH_LIMIT = 20_000  # calls of `valid` after which a search for one configuration is given up
_CANDIDATES = 4  # tries for each configuration, the best of which is taken


def covering(options: Mapping[str, Sequence[Any]], seed: int, valid: Valid | None = None) -> list[Configuration]:
    """Returns configurations in which every two values of every two settings meet, wherever they can.

    The same arguments give the same configurations in every process.

    Args:
        options: The values of each setting, by name. Values are told apart by their place in the list; they may be of
            any kind.
        seed: Chooses among the many sets of configurations that cover the pairs.
        valid: Says whether a configuration may be used. It is also asked about partial configurations, which lack some
            settings: there a False rules out every configuration that holds these values. None allows all.

    Returns:
        Configurations with a value for every setting; all of them valid.

    Raises:
        RuntimeError: The search for a configuration with some pair took too long to tell whether one exists.
    """
    table = _Table(options, valid)
    rng = random.Random(seed)
    uncovered = set(table.possible(rng))
    # Sets have no order to rely on: pairs are taken from a list.
    waiting = sorted(uncovered)
    rng.shuffle(waiting)
    rows: list[list[int]] = []
    for pair in waiting:
        if pair not in uncovered:
            continue
        tries = [table.complete(dict(pair), rng, uncovered) for _ in range(_CANDIDATES)]
        gains = [0 if row is None else len(uncovered.intersection(table.pairs(row))) for row in tries]
        row = tries[gains.index(max(gains))]
        assert row is not None  # `possible` has found one with the same search
        rows.append(row)
        uncovered.difference_update(table.pairs(row))
    return [table.configuration(row) for row in rows]


def coverage(
    options: Mapping[str, Sequence[Any]], configurations: Sequence[Configuration], valid: Valid | None = None
) -> tuple[int, int]:
    """Counts the pairs of values that meet in some configuration, and the pairs that can meet at all.

    Args:
        options: As for `covering`.
        configurations: Configurations with a value for every setting, taken from `options`.
        valid: As for `covering`.

    Returns:
        covered: The number of pairs that meet; those of configurations that `valid` forbids do not count.
        possible: The number of pairs that meet in at least one valid configuration.
    """
    table = _Table(options, valid)
    possible = set(table.possible(random.Random(0)))
    met: set[_Pair] = set()
    for configuration in configurations:
        if table.valid(configuration):
            met.update(table.pairs(table.row(configuration)))
    return len(met & possible), len(possible)


def any_configuration(
    options: Mapping[str, Sequence[Any]], rng: random.Random, valid: Valid | None = None
) -> Configuration:
    """Returns one valid configuration, drawn by `rng`.

    Raises:
        RuntimeError: There is none, or the search took too long.
    """
    row = _Table(options, valid).complete({}, rng, set())
    if row is None:
        raise RuntimeError("No configuration is valid.")
    return _Table(options, valid).configuration(row)


class _Table:
    """The settings by number, and the search for configurations that hold certain values."""

    def __init__(self, options: Mapping[str, Sequence[Any]], valid: Valid | None) -> None:
        self.names = list(options)
        self.values = [list(options[name]) for name in self.names]
        self.valid: Valid = valid or (lambda configuration: True)

    def configuration(self, row: Sequence[int]) -> Configuration:
        return {name: self.values[i][value] for i, (name, value) in enumerate(zip(self.names, row, strict=True))}

    def row(self, configuration: Configuration) -> list[int]:
        return [_place(values, configuration[name]) for name, values in zip(self.names, self.values, strict=True)]

    def pairs(self, row: Sequence[int]) -> list[_Pair]:
        return list(itertools.combinations(enumerate(row), 2))

    def possible(self, rng: random.Random) -> list[_Pair]:
        """The pairs that meet in at least one valid configuration."""
        found: set[_Pair] = set()
        pairs: list[_Pair] = []
        for first, second in itertools.combinations(range(len(self.names)), 2):
            for a, b in itertools.product(range(len(self.values[first])), range(len(self.values[second]))):
                pair = ((first, a), (second, b))
                if pair not in found:
                    row = self.complete(dict(pair), rng, set())
                    if row is None:
                        continue
                    found.update(self.pairs(row))
                pairs.append(pair)
        return pairs

    def complete(self, chosen: dict[int, int], rng: random.Random, wanted: set[_Pair]) -> list[int] | None:
        """A valid row with the `chosen` values that holds many `wanted` pairs; None if there is none."""
        partial = {self.names[i]: self.values[i][value] for i, value in chosen.items()}
        if not self.valid(partial):
            return None
        settings = [i for i in range(len(self.names)) if i not in chosen]
        rng.shuffle(settings)
        # Each step tries the values of one setting, best first; a step with none left goes back to the one before.
        calls = 0
        steps = [self._ranked(settings[0], chosen, rng, wanted)] if settings else []
        while steps and len(chosen) < len(self.names):
            i = settings[len(steps) - 1]
            if not steps[-1]:
                steps.pop()
                if steps:
                    self._drop(settings[len(steps) - 1], chosen, partial)
                continue
            chosen[i] = steps[-1].pop()
            partial[self.names[i]] = self.values[i][chosen[i]]
            calls += 1
            if calls > _SEARCH_LIMIT:
                raise RuntimeError(
                    f"No valid configuration was found in {_SEARCH_LIMIT} steps; let `valid` refuse earlier."
                )
            if not self.valid(partial):
                self._drop(i, chosen, partial)
            elif len(steps) < len(settings):
                steps.append(self._ranked(settings[len(steps)], chosen, rng, wanted))
        return [chosen[i] for i in range(len(self.names))] if len(chosen) == len(self.names) else None

    def _drop(self, i: int, chosen: dict[int, int], partial: Configuration) -> None:
        del chosen[i], partial[self.names[i]]

    def _ranked(self, i: int, chosen: dict[int, int], rng: random.Random, wanted: set[_Pair]) -> list[int]:
        """The values of setting `i`, the one that adds most wanted pairs last."""
        values = list(range(len(self.values[i])))
        rng.shuffle(values)
        if not wanted:
            return values

        def gain(value: int) -> int:
            mine = (i, value)
            return sum(((mine, other) if i < other[0] else (other, mine)) in wanted for other in chosen.items())

        return sorted(values, key=gain)


def _place(values: Sequence[Any], wanted: Any) -> int:
    # True == 1 and 0 == False: values of different types are different values.
    for i, value in enumerate(values):
        if value is wanted or (type(value) is type(wanted) and value == wanted):
            return i
    raise ValueError(f"{wanted!r} is not among the values {values!r}.")

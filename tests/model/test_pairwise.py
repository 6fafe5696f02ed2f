"""The covering arrays from which configurations are drawn."""

import itertools
import random

import pairwise
import pytest

OPTIONS = {
    "hosts": [1, 2, 3, 4],
    "shuffle": [False, True, 1],
    "load": ["sharded", "once", [0]],
    "end": ["drop", "pad"],
    "lanes": [None, 4],
}


def _without_one_host_lists(configuration):
    return not (configuration.get("hosts") == 1 and configuration.get("load") == [0])


def test_every_pair_meets():
    configurations = pairwise.covering(OPTIONS, seed=1)
    for first, second in itertools.combinations(OPTIONS, 2):
        for a, b in itertools.product(OPTIONS[first], OPTIONS[second]):
            assert any(c[first] is a and c[second] is b for c in configurations), (first, a, second, b)
    assert len(configurations) < 4 * 3 * 3  # of 144 combinations
    covered, possible = pairwise.coverage(OPTIONS, configurations)
    sizes = [len(values) for values in OPTIONS.values()]
    assert covered == possible == sum(a * b for a, b in itertools.combinations(sizes, 2))


def test_forbidden_pairs_are_left_out_and_counted():
    configurations = pairwise.covering(OPTIONS, seed=2, valid=_without_one_host_lists)
    assert all(_without_one_host_lists(c) for c in configurations)
    covered, possible = pairwise.coverage(OPTIONS, configurations, _without_one_host_lists)
    assert covered == possible == pairwise.coverage(OPTIONS, configurations)[1] - 1


def test_a_pair_is_impossible_if_only_a_third_setting_forbids_it():
    # Every value of `c` clashes with a=1 or with b=1: a=1 and b=1 never meet, though neither clash names that pair.
    def valid(configuration):
        c = configuration.get("c")
        return not (c == 0 and configuration.get("a") == 1) and not (c == 1 and configuration.get("b") == 1)

    options = {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
    configurations = pairwise.covering(options, seed=0, valid=valid)
    assert all(valid(c) for c in configurations)
    # Of 12 pairs, (a=1, b=1), (a=1, c=0) and (b=1, c=1) cannot occur.
    assert pairwise.coverage(options, configurations, valid) == (9, 9)


def test_what_is_missing_is_seen():
    configurations = pairwise.covering(OPTIONS, seed=3)
    covered, possible = pairwise.coverage(OPTIONS, configurations[:-1])
    assert covered < possible


def test_the_same_seed_gives_the_same_configurations():
    assert pairwise.covering(OPTIONS, seed=4) == pairwise.covering(OPTIONS, seed=4)
    assert pairwise.covering(OPTIONS, seed=4) != pairwise.covering(OPTIONS, seed=5)


def test_one_configuration_is_drawn():
    rng = random.Random(0)
    drawn = [pairwise.any_configuration(OPTIONS, rng, _without_one_host_lists) for _ in range(200)]
    assert all(_without_one_host_lists(c) for c in drawn)
    assert pairwise.coverage(OPTIONS, drawn, _without_one_host_lists)[0] > 50
    with pytest.raises(RuntimeError, match="No configuration is valid"):
        pairwise.any_configuration(OPTIONS, rng, lambda c: False)


def test_one_setting_alone_and_unhashable_values():
    assert pairwise.coverage({"a": [1, 2]}, []) == (0, 0)
    options = {"a": [[0], [1], {}], "b": [{"x": 1}, None]}
    configurations = pairwise.covering(options, seed=0)
    assert pairwise.coverage(options, configurations) == (6, 6)

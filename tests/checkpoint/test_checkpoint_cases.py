"""Random checkpoints against a model in plain numpy: every two values of every two settings meet in some case."""

from __future__ import annotations

import functools
import pathlib
import sys

import checkpoint_cases
import pytest

from meshfeed.testing import HostPool

sys.path.append(str(pathlib.Path(__file__).parents[1] / "model"))

from pairwise import coverage, covering

SEED = 1


@functools.cache
def cases():
    return covering(checkpoint_cases.OPTIONS, SEED, checkpoint_cases.valid)


def test_all_pairs_of_values_meet():
    covered, possible = coverage(checkpoint_cases.OPTIONS, cases(), checkpoint_cases.valid)
    assert covered == possible > 1_000
    # without this, a case that is refused for another reason would count as an error that was expected
    assert {case["fault"] for case in cases()} == set(checkpoint_cases.OPTIONS["fault"])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_cases_in_one_process(tmp_path, part):
    outcomes = set()
    for number, case in list(enumerate(cases()))[part::4]:
        try:
            outcomes.add(checkpoint_cases.play(case, number, tmp_path / str(number)))
        except Exception as error:
            error.add_note(checkpoint_cases.script(case, number))
            raise
    assert {"exact", "older", "error"} <= outcomes


def play_all(directory: str, numbered):
    found = []
    for number, case in numbered:
        try:
            outcome = checkpoint_cases.play(case, number, pathlib.Path(directory, str(number)))
        except Exception as error:
            raise AssertionError(f"case {number}, {case}: {type(error).__name__}: {error}") from error
        found.append(outcome)
    return found


@pytest.mark.multihost
def test_cases_on_real_hosts(tmp_path):
    numbered = [one for one in enumerate(cases()) if checkpoint_cases.valid_on_hosts(one[1])][::4]
    with HostPool(num_hosts=4, devices_per_host=2, timeout_seconds=240) as pool:
        outcomes = [result.value for result in pool.run(play_all, str(tmp_path), numbered)]
    assert len({tuple(outcome) for outcome in outcomes}) == 1, "hosts came to different results"
    assert {"exact", "older", "error"} <= set(outcomes[0])

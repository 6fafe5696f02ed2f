"""Stages that a feed adds: where they begin, what they replace, and what a damaged state of them says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshfeed import SettingsError, StateMismatchError
from meshfeed._src.base.errors import DAMAGED_STATE
from meshfeed._src.order.added_stages import add_stage, check_added, check_stage_weights, merge_stages, parse_added

WEB, CODE = {"web": 1.0}, {"code": 2.0}


def test_an_added_stage_takes_the_place_of_a_given_one() -> None:
    given = ((0, WEB), (10, CODE), (20, WEB))
    assert merge_stages(given, ()) == given
    assert merge_stages(given, ((10, WEB), (5, CODE))) == ((0, WEB), (5, CODE), (10, WEB), (20, WEB))


@pytest.mark.parametrize(("from_step", "first"), [(None, 4), (4, 4), (9, 9)])
def test_a_stage_is_added_in_place_of_those_that_have_not_begun(from_step: Any, first: int) -> None:
    added = ((2, WEB), (4, WEB), (7, WEB))
    assert add_stage(added, 4, from_step, CODE) == ((2, WEB), (first, CODE))


@pytest.mark.parametrize("from_step", [True, False, -1, 1.5, "3", [1]])
def test_a_step_is_an_int_of_at_least_0(from_step: Any) -> None:
    message = f"from_step={from_step!r}; it takes an int of at least 0, or None."
    with pytest.raises(SettingsError, match=re.escape(message)) as caught:
        add_stage((), 0, from_step, WEB)
    assert caught.value.setting == "from_step"


def test_the_first_step_is_a_step() -> None:
    assert add_stage((), 0, 0, WEB) == ((0, WEB),)


def test_a_delivered_step_cannot_change() -> None:
    with pytest.raises(
        SettingsError, match=r"^from_step=3, but the steps before 4 have .* Pass from_step=4 or later"
    ) as e:
        add_stage((), 4, 3, WEB)
    assert e.value.setting == "from_step"


@pytest.mark.parametrize("mixture", [None, {}, [], "damaged", {"added": []}])
def test_a_state_without_added_stages_has_none(mixture: Any) -> None:
    assert parse_added(mixture) == ()


def test_added_stages_are_read_as_they_were_written() -> None:
    assert parse_added({"added": [[0, {"web": 1}], [7, {"code": 2.5, "web": 1}]]}) == (
        (0, WEB), (7, {"code": 2.5, "web": 1.0}),
    )  # fmt: skip


@pytest.mark.parametrize(
    "found",
    [
        [[3, WEB], [3, CODE]], [[4, WEB], [3, CODE]], [[-1, WEB]], [[True, WEB]], [[1.5, WEB]], [[3, WEB, 1]], [[3]], [3],
        None, [[3, None]], [[3, {}]], [[3, {"web": -1}]], [[3, {"web": "x"}]], {"a": 1},
    ],
)  # fmt: skip
def test_damaged_added_stages_are_named(found: Any) -> None:
    with pytest.raises(StateMismatchError) as caught:
        parse_added({"added": found})
    assert (caught.value.field, caught.value.saved) == ("mixture.added", found)
    assert caught.value.current == "a list of [first_step, {name: weight}]"
    assert DAMAGED_STATE in str(caught.value)


def test_stages_are_checked_against_the_mixture() -> None:
    seen = list[Any]()
    check_added(((1, WEB), (2, CODE)), seen.append)
    assert seen == [WEB, CODE]

    def refuse(weights: object) -> None:
        if weights == CODE:
            raise SettingsError("there is no code", setting="weights")

    with pytest.raises(StateMismatchError, match="keep its components among those of the mixture") as caught:
        check_added(((1, WEB), (2, CODE)), refuse)
    assert (caught.value.field, caught.value.saved) == ("mixture.added", [2, CODE])
    assert caught.value.current == "there is no code"


@pytest.mark.parametrize("weights", [[1], 3, None, [("web", 1)]])
def test_weights_of_one_stage_are_a_mapping(weights: Any) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"weights={weights!r}; set_weights takes")) as caught:
        check_stage_weights(weights, ["web"])
    assert caught.value.setting == "weights"


def test_weights_of_one_stage_leave_out_zeros() -> None:
    assert check_stage_weights({"web": 1, "code": 0}, ["web", "code"]) == WEB

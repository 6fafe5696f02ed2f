"""Whether a function takes a keyword, which decides what it is passed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from meshfeed import SettingsError
from meshfeed._src.base.hooks import accepts_keyword, check_function


class Decoder:
    def __call__(self, record: bytes, *, rng: Any) -> None: ...

    def method(self, record: bytes, rng: Any = None) -> None: ...


def named(record: bytes, rng: Any) -> None: ...
def only(record: bytes, *, rng: Any = None) -> None: ...
def positional(rng: Any, /) -> None: ...
def starred(*rng: Any) -> None: ...
def kwargs(record: bytes, **options: Any) -> None: ...
def named_kwargs(record: bytes, **rng: Any) -> None: ...
def other(record: bytes, generator: Any) -> None: ...
@functools.wraps(named)
def wrapped(*args: Any, **options: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "taken", "taken_in_kwargs"),
    [
        (None, False, False), (named, True, True), (only, True, True), (Decoder(), True, True),
        (Decoder().method, True, True), (functools.partial(named, b""), True, True), (wrapped, True, True),
        (positional, False, False), (starred, False, False), (other, False, False), (kwargs, False, True),
        (named_kwargs, False, True), (functools.partial(kwargs, b""), False, True), (dict.get, False, False),
        (int, False, False), (3, False, False),
    ],
)  # fmt: skip
def test_a_parameter_of_that_name_decides(function: Callable[..., Any], taken: bool, taken_in_kwargs: bool) -> None:
    assert accepts_keyword(function, "rng") is taken
    assert accepts_keyword(function, "rng", in_kwargs=True) is taken_in_kwargs


class Callable0:
    def __call__(self) -> None: ...

    def __repr__(self) -> str:
        return "<a Callable object>"


def needs_rng(record: bytes, *, rng: Any) -> None: ...


@pytest.mark.parametrize("function", [named, only, kwargs, needs_rng, Decoder(), str])
def test_a_function_of_a_record_may_draw(function: Callable[..., Any]) -> None:
    check_function(function, "record", "one record", "Map", "function")


@pytest.mark.parametrize("function", [positional.__get__(0), other, lambda record, *, seed: record])
def test_a_function_that_needs_something_else_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(SettingsError, match=r"Map got function=.* cannot be called as function\(record\): ") as raised:
        check_function(function, "record", "one record", "Map", "function")
    assert raised.value.setting == "function"


def test_a_function_that_is_refused_is_shown_with_its_name_and_parameters() -> None:
    with pytest.raises(SettingsError, match=r"function=other\(record: 'bytes', generator: 'Any'\) -> 'None', which"):
        check_function(other, "record", "one record", "Map", "function")
    with pytest.raises(SettingsError, match=r"function=<a Callable object>\(\) -> 'None', which"):
        check_function(Callable0(), "record", "one record", "Map", "function")

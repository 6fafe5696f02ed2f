"""Grain's files of an iterator's state: one ``process_<i>-of-<n>.json`` per process, the state as JSON text.

A state that plain JSON would change (tuples, bytes) is written in the lossless form of :mod:`meshfeed._src.base.exact_json`,
which Grain cannot read, except where the lost types are known: the bytes of a ``grain.DataLoader`` are JSON already, and
Grain's packing keeps pairs under one key, which Grain itself reads back as lists and then continues wrongly.
"""

from __future__ import annotations

import json
from typing import cast

from etils import epath  # pyright: ignore[reportMissingTypeStubs]

from meshfeed._src.base import coordination
from meshfeed._src.base.errors import CheckpointError, StateMismatchError
from meshfeed._src.base.exact_json import decode_value, encode_value
from meshfeed._src.base.types import JsonValue

_SLICES = "remainder_slices"


class MissingIteratorStateError(CheckpointError, FileNotFoundError, ValueError):
    """The checkpoint has no iterator state for this host; nothing is restored. Grain raises a ValueError here."""


def file_name() -> str:
    """Returns the name of this process's file."""
    return f"process_{coordination.process_index()}-of-{coordination.process_count()}.json"


def to_text(state: object, *, of_grain: bool) -> str:
    """Returns the text of a file for what ``get_state`` returned, of one of Grain's iterators or of another.

    Raises:
      TypeError: part of the state has no exact JSON form.
    """
    if isinstance(state, bytes) and of_grain:
        return state.decode()
    encoded = encode_value(state)
    plain = encoded if not of_grain else _as_plain_json(state)
    return json.dumps(plain if encode_value(_decode(plain, of_grain)) == encoded else encoded, indent=4)


def from_text(text: str, path: epath.PathLike, *, of_grain: bool, as_bytes: bool) -> JsonValue:
    """Returns the state in the text of the file ``path``, for an iterator whose ``get_state`` returns bytes, or not.

    Raises:
      StateMismatchError: the text is not JSON.
    """
    try:
        state = _decode(json.loads(text), of_grain)
    except ValueError as error:
        remedy = f"{path} is truncated or damaged: {error}. Restore a different step."
        raise StateMismatchError("state", "no JSON", "JSON", remedy) from None
    return text.encode() if as_bytes and not isinstance(state, bytes) else state


def read_text(path: epath.Path, remedy: str) -> str:
    """Returns the text of a file.

    Raises:
      MissingIteratorStateError: the file does not exist; the message ends with ``remedy``.
    """
    if not path.exists():
        raise MissingIteratorStateError(
            f"{path} does not exist. The iterator was not saved at this step, or by a different number of hosts "
            f"(there are {coordination.process_count()} now); it is unchanged. {remedy}"
        )
    return path.read_text()


def with_tuples(state: JsonValue) -> JsonValue:
    """Makes pairs tuples again: ConcatThenSplitIterDataset compares them with tuples and would resume wrongly."""
    if isinstance(state, list):
        return [with_tuples(item) for item in cast("list[JsonValue]", state)]
    if not isinstance(state, dict):
        return state
    entries = cast("dict[str, JsonValue]", state)
    return {key: _as_tuples(item) if key == _SLICES else with_tuples(item) for key, item in entries.items()}


def _as_tuples(slices: JsonValue) -> JsonValue:
    if isinstance(slices, dict):
        return {key: _as_tuples(item) for key, item in cast("dict[str, JsonValue]", slices).items()}
    return tuple(cast("list[JsonValue]", slices)) if isinstance(slices, list) else slices


def _as_plain_json(state: object) -> JsonValue:
    try:
        return json.loads(json.dumps(state))
    except TypeError:  # such as numpy integers
        return None


def _decode(value: JsonValue, of_grain: bool) -> JsonValue:
    state = decode_value(value)
    is_plain = of_grain and _as_plain_json(state) == value  # the lossless form names its tuples
    return with_tuples(state) if is_plain else state

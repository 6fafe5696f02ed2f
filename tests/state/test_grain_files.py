"""Grain's files of an iterator's state come back as they were, with the types that Grain's iterators compare."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from etils import epath

from meshfeed import StateMismatchError
from meshfeed._src.state import grain_files

OF_GRAIN = {
    "parent": {"next_index": 3},
    "remainder_slices": {"tokens": [(0, 4), (1, 2)], "none": None},
    "buffers": [{"remainder_slices": (5, 6), "deep": [{"remainder_slices": {"x": (1, 2)}}]}],
}


def there_and_back(state: Any, *, of_grain: bool, as_bytes: bool = False) -> Any:
    text = grain_files.to_text(state, of_grain=of_grain)
    return grain_files.from_text(text, "f.json", of_grain=of_grain, as_bytes=as_bytes)


def test_pairs_that_grain_writes_as_lists_are_tuples_again() -> None:
    state = {**OF_GRAIN, "remainder_slices": {"tokens": (0, 4), "none": None}}
    text = grain_files.to_text(state, of_grain=True)
    assert json.loads(text) == json.loads(json.dumps(state)), "Grain itself can read it"
    found = grain_files.from_text(text, "f.json", of_grain=True, as_bytes=False)
    assert found == state
    assert found["buffers"][0]["remainder_slices"] == (5, 6)
    assert grain_files.from_text(text, "f.json", of_grain=False, as_bytes=False) != state


@pytest.mark.parametrize("of_grain", [False, True])
@pytest.mark.parametrize(
    "state",
    [OF_GRAIN, {"n": 3, "of": [1, {"a": None}]}, {"t": (1, (2,))}, b"\xff\x00", {"b": b"x", "f": np.int64(7)}, 5],
)
def test_any_other_state_keeps_its_types(state: Any, of_grain: bool) -> None:
    if state == b"\xff\x00" and of_grain:
        with pytest.raises(UnicodeDecodeError):
            there_and_back(state, of_grain=True)
        return
    found = there_and_back(state, of_grain=of_grain)
    assert found == state
    assert repr(found) == repr(state)


def test_bytes_of_a_data_loader_stay_its_own_json() -> None:
    saved = b'{"last_seen_indices": {"0": 5}}'
    assert grain_files.to_text(saved, of_grain=True) == saved.decode()
    assert there_and_back(saved, of_grain=True, as_bytes=True) == saved
    assert there_and_back({"a": 1}, of_grain=False, as_bytes=True) == b'{\n    "a": 1\n}'
    assert there_and_back(b"x", of_grain=False, as_bytes=True) == b"x"


def test_files_that_are_damaged_or_missing_are_named(tmp_path: pathlib.Path) -> None:
    path = epath.Path(tmp_path) / grain_files.file_name()
    assert path.name == "process_0-of-1.json"
    with pytest.raises(
        grain_files.MissingIteratorStateError, match=r"process_0-of-1\.json does not exist\..* Try again\.$"
    ):
        grain_files.read_text(path, "Try again.")
    path.write_text('{"a": ')
    text = grain_files.read_text(path, "Try again.")
    assert text == '{"a": '
    with pytest.raises(StateMismatchError, match=r"process_0-of-1\.json is truncated or damaged: .* Restore a"):
        grain_files.from_text(text, path, of_grain=True, as_bytes=False)

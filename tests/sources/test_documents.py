"""Sources built over a source that a user wrote: errors of its methods and in its records name the record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.sources import documents
from meshfeed.sources import Buckets, Concat, Map, Mixture, Packed, Padded, Stream, Zip

BAD = 40


class Documents:
    """Of 1 to 7 tokens; the record ``BAD`` raises ``error``."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        if record_id == BAD:
            raise self._error("no such field")
        return {"tokens": np.full(record_id % 7 + 1, record_id, np.int32)}

    def lengths(self) -> np.ndarray:
        return np.arange(64) % 7 + 1

    def fingerprint(self) -> str:
        return "documents"


class Together(Documents):
    def __getitems__(self, record_ids: list[int]) -> list[dict[str, np.ndarray]]:
        return [self[record_id] for record_id in record_ids]


class Measured(Documents):
    lengths = None  # type: ignore[assignment]


def number_of_tokens(record: Any) -> dict[str, np.int32]:
    return {"n": np.int32(len(record["tokens"]))}


def of_zip(record: Any) -> dict[str, np.int32]:
    return number_of_tokens(record["a"])


class Answer(NamedTuple):
    tokens: np.ndarray
    label: np.ndarray


def run_through(source: object, *, shuffle: bool = True) -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    with meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=2, shuffle=shuffle) as feed:
        for _ in feed:
            pass


BUILT: dict[str, Callable[[Any], object]] = {
    "packed": lambda source: Packed(source, 16),
    "padded": lambda source: Padded(source, 8, key="tokens"),
    "buckets": lambda source: Buckets(source, [4, 8]),
    "map": lambda source: Map(source, number_of_tokens),
    "map of zip": lambda source: Map(Zip({"a": source, "b": Documents(KeyError)}), of_zip),
    "concat": lambda source: Padded(Concat([source, source]), 8, key="tokens"),
    "mixture": lambda source: Padded(Mixture({"a": source, "b": source}, weights={"a": 1, "b": 1}), 8, key="tokens"),
}


@pytest.mark.parametrize("name", BUILT)
def test_an_error_of_a_source_names_the_record(name: str) -> None:
    with pytest.raises(KeyError, match="no such field") as info:
        run_through(BUILT[name](Documents(KeyError)))
    assert [note for note in info.value.__notes__ if "reading" in note] == [f"while reading record {BAD}"]


@pytest.mark.parametrize("name", BUILT)
def test_an_error_of_a_source_that_reads_several_names_the_first(name: str) -> None:
    with pytest.raises(KeyError, match="no such field") as info:
        run_through(BUILT[name](Together(KeyError)))
    (note,) = [note for note in info.value.__notes__ if "reading" in note]
    assert note.startswith("while reading ")
    assert "record" in note


@pytest.mark.parametrize("name", BUILT)
def test_stop_iteration_does_not_end_the_data(name: str) -> None:
    with pytest.raises(meshfeed.SourceError, match=f"StopIteration while reading record {BAD};"):
        run_through(BUILT[name](Documents(StopIteration)))


def test_nor_where_records_are_read_for_their_lengths() -> None:
    with pytest.raises(meshfeed.SourceError, match=f"StopIteration while reading record {BAD};"):
        Packed(Measured(StopIteration), 16)
    with pytest.raises(KeyError) as info:
        Packed(Measured(KeyError), 16)
    assert f"while reading record {BAD}" in info.value.__notes__


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (lambda ids: ({"tokens": np.ones(3, np.int32)} for _ in ids), "returned a generator; expected a list"),
        (lambda ids: [{"tokens": np.ones(3, np.int32)}] * (len(ids) + 1), "one per id"),
    ],
)
@pytest.mark.parametrize("name", ["map", "padded"])
def test_getitems_that_returns_something_else_is_a_source_error(name: str, items: Any, words: str) -> None:
    class Odd(Documents):
        def __getitems__(self, record_ids: list[int]) -> Any:
            return items(record_ids)

    with pytest.raises(meshfeed.SourceError, match=words):
        run_through(BUILT[name](Odd(KeyError)))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            (np.ones(3, np.int32), np.ones(3, np.int32)),
            r"a tuple of 2 leaves\. Expected a dict, or the leaf 'tokens' alone",
        ),
        (([1, 2], [3, 4]), "a tuple of 2 leaves"),
        (Answer(np.ones(3, np.int32), np.ones(3, np.int32)), "an? Answer of 2 leaves"),
        ({"tokens": [[1], [1, 2]]}, "ragged rows: .*leaf 'tokens'"),
        ([[1], [1, 2]], "ragged rows: .*leaf 'tokens'"),
        ({"tokens": np.arange(3).astype("datetime64[s]")}, r"leaf 'tokens'.* datetime64\[s\]"),
    ],
)
@pytest.mark.parametrize("name", ["packed", "padded", "buckets", "padded stream"])
def test_a_record_that_is_no_document_is_refused_by_name(name: str, record: Any, words: str) -> None:
    if name == "padded stream":
        source: Any = Padded(Stream(lambda lane, lanes: iter([record] * 4)), 8)
    else:
        source = [record] * 64
    with pytest.raises(meshfeed.SourceError, match=f"record 0[^\\d].*{words}"):
        run_through(BUILT.get(name, lambda source: source)(source), shuffle=False)


def test_large_arrays_lie_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(documents.empty(4, np.int64), np.memmap)
    monkeypatch.setattr(documents, "_MAPPED_BYTES", 31)
    array = documents.empty(4, np.dtype(np.int64))
    assert isinstance(array, np.memmap)
    array[:] = np.arange(4)
    assert (array.dtype, array.tolist()) == (np.int64, [0, 1, 2, 3])


def test_a_tuple_of_numbers_is_a_document() -> None:
    assert Padded([(1, 2, 3)], 4)[0]["tokens"].tolist() == [1, 2, 3, 0]
    assert Packed([(1, 2, 3)], 4)[0]["tokens"].tolist() == [1, 2, 3, 0]


def test_the_same_holds_without_anything_built_over_it() -> None:
    class Odd(Documents):
        def __getitems__(self, record_ids: list[int]) -> Any:
            return (self[record_id] for record_id in record_ids)

    with pytest.raises(meshfeed.SourceError, match="returned a generator"):
        run_through(Odd(KeyError))

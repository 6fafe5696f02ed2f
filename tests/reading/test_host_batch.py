"""Records as arrays: stacking, structures that must be equal, padding and the mask, and refusals word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.trees import num_bytes
from meshfeed._src.reading.host_batch import (
    add_mask,
    join_batches,
    num_rows,
    pad_rows,
    spec_of_batch,
)
from meshfeed._src.reading.stacking import LeafSpec, RecordStack, flatten_record, is_ragged

ALIKE = "All records of a source must have the same structure, shapes and dtypes; pad or cast them in the source."
DECODE = (
    "Pass the source decode= (one record) or decode_batch= (a list of them) to turn bytes into arrays, such as "
    "meshfeed.sources.DecodeExample() for what meshfeed convert wrote."
)
LEAVE_OUT = "Turn it into numbers with decode= or meshfeed.sources.Map, or leave that column out."
NO_DTYPE = "a leaf must be an array or number of a dtype that JAX supports."


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> tuple[str, int | None, int | None]:
    """Message, record id and lane of the error that a call raises."""
    with pytest.raises(SourceError) as caught:
        call(*arguments, **options)
    return str(caught.value), caught.value.record_id, caught.value.lane_index


RECORDS = st.fixed_dictionaries(
    {
        "tokens": hnp.arrays(np.int32, 3),
        "pair": st.tuples(st.integers(-9, 9), st.floats(allow_nan=False)),
        "small": hnp.arrays(np.float16, (2, 1), elements=st.floats(-9, 9, width=16)),
    }
)


@given(st.lists(RECORDS, min_size=1, max_size=6), st.integers(0, 3))
def test_records_are_stacked_as_numpy_stacks_them(records: list[Any], room: int) -> None:
    stack = RecordStack(len(records) + room)
    for number, record in enumerate(records):
        assert stack.count == number
        stack.add(record)
    tree, spec = stack.take()
    wanted = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *records)
    assert jax.tree.structure(tree) == jax.tree.structure(wanted)
    for found, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True):
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(found, leaf)
    assert spec.fits(tree, len(records))
    assert spec_of_batch(tree, len(records), what="a test") == spec
    assert num_rows(tree) == len(records)
    assert num_bytes(tree) == sum(leaf.nbytes for leaf in jax.tree.leaves(wanted))
    assert stack.count == 0, "the stack is empty again"
    stack.add(records[-1])
    again, _ = stack.take()
    assert num_rows(again) == 1


def test_a_stack_copies_each_record_at_once() -> None:
    record, stack = {"x": np.zeros(2)}, RecordStack(2)
    for value in (1, 2):
        record["x"][:] = value
        stack.add(record)
    assert stack.take()[0]["x"].tolist() == [[1, 1], [2, 2]]


def test_a_spec_describes_records_and_makes_batches() -> None:
    _, spec = flatten_record({"x": np.zeros((2, 3), np.int8), "y": [1.5]})
    assert spec.leaves == (LeafSpec("['x']", (2, 3), np.dtype(np.int8)), LeafSpec("['y'][0]", (), np.dtype(np.float64)))
    assert [leaf.describe() for leaf in spec.leaves] == ["['x'] int8[2, 3]", "['y'][0] float64[]"]
    assert LeafSpec("", (), np.dtype(np.int8)).describe() == "(the record) int8[]"
    assert spec.shapes() == {
        "x": jax.ShapeDtypeStruct((2, 3), np.int8), "y": [jax.ShapeDtypeStruct((), np.float64)],
    }  # fmt: skip
    zeros = spec.zeros(4)
    assert (zeros["x"].shape, zeros["x"].any(), zeros["y"][0].tolist()) == ((4, 2, 3), False, [0] * 4)
    assert [leaf.shape for leaf in jax.tree.leaves(spec.empty(4))] == [(4, 2, 3), (4,)]
    assert spec.fits(zeros, 4)
    assert not spec.fits(zeros, 3)
    assert not spec.fits({**zeros, "y": [np.zeros(4, np.float32)]}, 4)
    assert not spec.fits({**zeros, "y": (np.zeros(4),)}, 4)
    assert not spec.fits({**zeros, "y": [np.ma.masked_array(np.zeros(4))]}, 4), "an array of numpy itself"
    assert flatten_record(np.zeros(3, ml_dtypes.bfloat16))[1].zeros(2).dtype == ml_dtypes.bfloat16


RAGGED = np.array([[1, 2], [3]], object)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "record 7 has no leaves: {}; a record must be a pytree of arrays."),
        (
            None,
            "record 7 has no leaves: None; a record must be a pytree of arrays. Return the record from the function that "
            "makes it.",
        ),
        (
            {"x": RAGGED},
            "ragged rows: leaf ['x'] of record 7 holds 2 lists of unequal lengths. Pad or cut them to one length before the "
            "feed.",
        ),
        (
            RAGGED,
            "ragged rows: leaf (the record itself) of record 7 holds 2 lists of unequal lengths. Pad or cut them to one "
            "length before the feed.",
        ),
        ({"x": b"ab"}, f"leaf ['x'] of record 7 is bytes (dtype |S2) of shape (); {NO_DTYPE} {LEAVE_OUT}"),
        (b"", f"leaf (the record itself) of record 7 is bytes (dtype |S1) of shape (); {NO_DTYPE} {DECODE}"),
        ({"x": "ab"}, f"leaf ['x'] of record 7 is str (dtype <U2) of shape (); {NO_DTYPE} {LEAVE_OUT}"),
        (
            {"x": np.array([1], "datetime64[s]")},
            f"leaf ['x'] of record 7 is ndarray (dtype datetime64[s]) of shape (1,); {NO_DTYPE} {LEAVE_OUT}",
        ),
        (
            {"x": np.zeros(2, np.longdouble)},
            f"leaf ['x'] of record 7 is ndarray (dtype {np.dtype(np.longdouble)}) of shape (2,); {NO_DTYPE} {LEAVE_OUT}",
        ),
    ],
)
def test_what_is_no_record_is_refused(record: Any, message: str) -> None:
    assert refusal(flatten_record, record, record_id=7) == (message, 7, None)


def test_errors_name_the_lane_where_there_is_no_record_id() -> None:
    empty = "has no leaves: {}; a record must be a pytree of arrays."
    assert refusal(flatten_record, {}, lane_index=3) == (f"a record of lane 3 {empty}", None, 3)
    assert refusal(flatten_record, {}) == (f"a record {empty}", None, None)


def test_a_leaf_that_numpy_cannot_hold_is_named() -> None:
    class Tensor:
        dtype, shape = "float8", (2, 1)

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("requires grad")

    text = "which numpy cannot hold: requires grad"
    assert refusal(flatten_record, {"x": Tensor()}, record_id=7) == (
        f"leaf ['x'] of record 7 is Tensor (dtype float8) of shape (2, 1), {text}", 7, None,
    )  # fmt: skip
    Tensor.dtype = Tensor.shape = property()  # type: ignore[assignment]
    assert refusal(flatten_record, Tensor(), lane_index=1) == (
        f"leaf (the record itself) of a record of lane 1 is Tensor (dtype unknown) of shape (), {text}", None, 1,
    )  # fmt: skip


def test_ragged_is_what_numpy_makes_of_lists_of_unequal_lengths() -> None:
    assert is_ragged(RAGGED)
    assert is_ragged(np.array([np.zeros(1), np.zeros(2)], object))
    assert not is_ragged(np.array([[1], None, [2, 3]], object))
    assert not is_ragged(np.array([], object))
    assert not is_ragged(np.zeros((2, 2)))


DIFFERS = "{}leaf ['x'] of record 7 is {} of shape {}, but in the first record it was float32 of shape (3,)."


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": np.zeros(3, np.int64)}, DIFFERS.format("", "int64", "(3,)")),
        ({"x": np.zeros(2, np.float32)}, DIFFERS.format("ragged rows: ", "float32", "(2,)")),
        ({"y": np.zeros(3)}, "record 7 has the leaves ['y'] float64[3], but the first record had ['x'] float32[3]."),
    ],
)  # fmt: skip
def test_a_record_that_differs_from_the_first_is_refused_and_not_added(other: Any, message: str) -> None:
    stack = RecordStack(4)
    stack.add({"x": np.zeros(3, np.float32)}, 6)
    use = " For documents of unequal length use meshfeed.sources.Packed, or meshfeed.sources.Padded for streams."
    pack = use if "ragged" in message else ""
    assert refusal(stack.add, other, 7) == (f"{message} {ALIKE}{pack}", 7, None)
    stack.add({"x": np.ones(3, np.float32)}, 8)
    assert stack.take()[0]["x"].tolist() == [[0] * 3, [1] * 3]
    given = RecordStack(1, flatten_record({"x": np.zeros(3, np.float32)})[1], lane_index=2)
    assert refusal(given.add, other)[1:] == (None, 2)


ROWS = "leaf {} of the source is {} of shape {}; its first dimension must be the 2 rows of the batch."
TEXT = f"leaf ['x'] of the batch is ndarray (dtype <U1) of shape (2,); {NO_DTYPE} {LEAVE_OUT}"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "the source returned no leaves: {}; a batch must be a pytree of arrays."),
        ({"x": np.zeros((3, 2))}, ROWS.format("['x']", "float64", "(3, 2)")),
        (
            [np.zeros(3), np.ones(3)],
            ROWS.format("[0]", "float64", "(3,)")
            + " A list is a pytree with a leaf for each item: return numpy.stack(records).",
        ),
        (np.float32(1), ROWS.format("(the batch)", "float32", "()")),
        ({"x": np.array(["a", "b"])}, TEXT),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, message: str) -> None:
    assert refusal(spec_of_batch, batch, 2, what="the source") == (message, None, None)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_joined_batches_are_concatenated(counts: list[int]) -> None:
    rows = np.arange(sum(counts) * 2, dtype=np.int32).reshape(-1, 2)
    batches = [{"x": part} for part in np.split(rows, np.cumsum(counts)[:-1])]
    joined = join_batches(batches, what=lambda number: f"part {number}")
    np.testing.assert_array_equal(joined["x"], rows)
    assert joined["x"].dtype == np.int32
    if len(batches) == 1:
        assert joined is batches[0]
    else:
        assert joined["x"].ctypes.data % 64 == 0
    batches.insert(1, {"x": np.zeros((1, 2))})
    message, _, lane_index = refusal(join_batches, batches, what=lambda number: f"part {number}", lane_index=5)
    assert lane_index == 5
    assert (
        message == f"part 1: records have the leaves ['x'] float64[2], but the first record had ['x'] int32[2]. {ALIKE}"
    )


def test_padding_adds_rows_of_zeros() -> None:
    padded = pad_rows({"x": np.array([[1, 2], [3, 4]], np.int8), "y": np.ones(2, np.float16)}, 4)
    assert padded["x"].tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]
    assert padded["y"].tolist() == [1, 1, 0, 0]
    assert (padded["x"].dtype, padded["y"].dtype) == (np.int8, np.float16)


def test_the_mask_is_one_more_leaf() -> None:
    mask = np.array([True, False])
    batch = {"x": np.zeros(2)}
    masked = add_mask(batch, "real", mask)
    assert (list(masked), masked["real"] is mask, list(batch)) == (["x", "real"], True, ["x"])
    assert refusal(add_mask, (1,), "real", mask)[0] == (
        "mask_key='real' adds a leaf to a dict, but records are tuple; use dict records."
    )
    assert refusal(add_mask, {"real": 0}, "real", mask)[0] == (
        "mask_key='real' is already the name of a leaf of the records; choose a different name."
    )

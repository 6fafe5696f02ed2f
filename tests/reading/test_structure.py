"""How records that differ from the first one are refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from meshfeed._src.base.errors import SourceError
from meshfeed._src.reading.host_batch import spec_of_batch
from meshfeed._src.reading.stacking import RecordStack, flatten_record
from meshfeed._src.reading.structure import check_record, check_spec

ALIKE = "All records of a source must have the same structure, shapes and dtypes; pad or cast them in the source."


def record_spec(record: Any) -> Any:
    return flatten_record(record)[1]


def batch_spec(**leaves: Any) -> Any:
    return spec_of_batch(leaves, 2, what="a test")


def refused_record(first: Any, other: Any) -> str:
    with pytest.raises(SourceError) as caught:
        check_record(record_spec(first), record_spec(other), "record 7", record_id=7)
    assert (caught.value.record_id, caught.value.lane_index) == (7, None)
    return str(caught.value)


def refused_batch(first: Any, other: Any) -> str:
    with pytest.raises(SourceError) as caught:
        check_spec(first, other, what="step 5", lane_index=6)
    assert (caught.value.record_id, caught.value.lane_index) == (None, 6)
    return str(caught.value)


def test_the_structure_of_a_record_is_named_if_nothing_else_differs() -> None:
    check_record(record_spec({"x": (1, 2)}), record_spec({"x": (3, 4)}), "record 7")
    assert refused_record({"x": (1, 2)}, {"x": [1, 2]}) == (
        "record 7 has the leaves ['x'][0] int64[], ['x'][1] int64[], but the first record had ['x'][0] int64[], "
        f"['x'][1] int64[], in {jax.tree.structure({'x': [1, 2]})} and {jax.tree.structure({'x': (1, 2)})}. {ALIKE}"
    )


def test_lists_of_unequal_lengths_are_ragged() -> None:
    lists = {"x": [1, 2], "y": 0}
    assert refused_record(lists, {"x": [1], "y": 0}).startswith(
        "ragged rows: lists of unequal lengths: record 7 has the leaves ['x'][0] int64[], ['y'] int64[], but the "
    )
    assert not refused_record(lists, {"x": [(1,)], "y": 0}).startswith("ragged")
    assert not refused_record(lists, {"x": [1], "z": 0}).startswith("ragged")
    assert refused_batch(batch_spec(x=[np.zeros(2)] * 2), batch_spec(x=[np.zeros(2)])).startswith(
        "ragged rows: lists of unequal lengths: step 5: records have the leaves ['x'][0] float64[], but the first record had"
    )


def test_batches_of_unlike_records_are_refused() -> None:
    spec = batch_spec(x=np.zeros((2, 3), np.int32))
    check_spec(spec, batch_spec(x=np.ones((2, 3), np.int32)), what="step 5")
    leaves = "step 5: records have the leaves ['x'] {}, but the first record had ['x'] int32[3]. " + ALIKE
    for found, prefix, name in (
        (np.zeros((2, 3), np.int64), "", "int64[3]"),
        (np.zeros((2, 4), np.int32), "ragged rows: ", "int32[4]"),
        (np.zeros((2, 4), np.int64), "", "int64[4]"),
    ):
        assert refused_batch(spec, batch_spec(x=found)) == prefix + leaves.format(name)


def test_masked_values_are_refused() -> None:
    """As plain arrays they would hold what the mask hides; files with missing values are often read as masked arrays."""
    whole, hole = np.ma.masked_array([1, 2]), np.ma.masked_array([1, 2], [False, True])
    stack = RecordStack(2)
    stack.add({"x": whole}, 0)
    with pytest.raises(
        SourceError, match=r"\['x'\] of record 7 is a masked array with 1 masked values.*ma.filled"
    ) as caught:
        stack.add({"x": hole}, 7)
    assert (caught.value.record_id, stack.count) == (7, 1)
    with pytest.raises(SourceError, match=r"\['x'\] of the batch is a masked array"):
        batch_spec(x=hole)
    assert batch_spec(x=whole) == batch_spec(x=np.array([1, 2]))

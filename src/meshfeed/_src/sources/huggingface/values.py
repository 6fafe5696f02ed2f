"""Python values of Hugging Face records → numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.types import PyTree


def leave_out(name: str, all_columns: Sequence[str] | Mapping[str, Any]) -> str:
    """The end of an error's fix: how to read a dataset without a column. Empty if no other column remains.

    Args:
      name: the column to leave out.
      all_columns: the columns that may be kept, or a record, whose text and nulls are left out.
    """
    others = [column for column in all_columns if column != name]
    if isinstance(all_columns, Mapping):
        others = [column for column in others if not isinstance(all_columns[column], str | bytes | None)]
    return f", or leave it out: columns={others!r}" if others else ""


def record_to_numpy(
    record: Mapping[str, Any],
    columns: Sequence[str] | None,
    *,
    dtypes: Mapping[str, np.dtype] | None = None,
    record_id: int | None = None,
    lane_index: int | None = None,
) -> dict[str, PyTree]:
    """Converts a record's values to numpy.

    Args:
      record: column name → value.
      columns: the columns to keep; None for all.
      dtypes: column name → dtype, if known.
      record_id: id of the record, for errors.
      lane_index: index of the lane, for errors.

    Raises:
      SourceError: a column is missing, or has text, a null or ragged lists.
    """
    names = list(record) if columns is None else columns
    advised = record if columns is None else columns
    known = dtypes or {}
    result = {}
    for name in names:
        try:
            value = record[name]
        except KeyError:
            raise SourceError(
                f"a record has no column {name!r}; it has {sorted(record)}. Expected the columns {list(names)} in "
                "every record. Correct columns=, or the map() that makes the records.",
                record_id=record_id,
                lane_index=lane_index,
            ) from None
        result[name] = value_to_numpy(
            value, name, advised, dtype=known.get(name), record_id=record_id, lane_index=lane_index
        )
    return result


def value_to_numpy(
    value: Any,
    name: str,
    all_columns: Sequence[str] | Mapping[str, Any],
    *,
    dtype: np.dtype | None = None,
    record_id: int | None = None,
    lane_index: int | None = None,
) -> PyTree:
    """Converts a column's value to an array or a dict of arrays.

    An image becomes a uint8 array as converted by Pillow; audio becomes ``{"array": [samples] or [channels, samples],
    "sampling_rate": int64}``.

    Args:
      value: the value.
      name: the column, for errors.
      all_columns: see :func:`leave_out`.
      dtype: dtype of the array, if known.
      record_id: id of the record, for errors.
      lane_index: index of the lane, for errors.

    Raises:
      SourceError: text, a null, ragged lists, or an object without an array form.
    """
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return value if dtype is None else value.astype(dtype)
    where: dict[str, Any] = {"record_id": record_id, "lane_index": lane_index}
    place = "" if record_id is None else f" in record {record_id:,}"
    if isinstance(value, Mapping):
        return {key: value_to_numpy(item, f"{name}.{key}", all_columns, **where) for key, item in value.items()}
    all_samples = getattr(value, "get_all_samples", None)
    if all_samples is not None:  # datasets' AudioDecoder
        samples = all_samples()
        array = np.asarray(samples.data)
        return {
            "array": array[0] if array.ndim == 2 and array.shape[0] == 1 else array,
            "sampling_rate": np.int64(samples.sample_rate),
        }
    without = leave_out(name, all_columns)
    if isinstance(value, str | bytes | bytearray):
        raise SourceError(
            f"column {name!r} holds {type(value).__name__}{place}, which no device holds. Expected numbers, booleans, "
            f"or lists of them. Turn it into token ids with map(){without}.",
            **where,
        )
    if value is None:
        raise SourceError(
            f"column {name!r} is null{place}. Expected a value in every record. Fill it with map(), drop such records "
            f"with filter(){without}.",
            **where,
        )
    try:
        array = np.asarray(value) if dtype is None else np.asarray(value, dtype)
    except ValueError as error:
        raise SourceError(
            f"ragged rows: column {name!r} has lists of unequal lengths within one record{place} ({error}). Expected "
            "rectangular lists. Pad or cut them with map().",
            **where,
        ) from None
    # The bfloat16 of ml_dtypes has kind "V".
    if array.dtype.kind not in "biuf" and array.dtype.name not in ("bfloat16",):
        raise SourceError(
            f"column {name!r} holds {type(value).__name__} of dtype {array.dtype}{place}, which no device holds. "
            f"Expected numbers, booleans, or lists of them. Convert it with map(){without}.",
            **where,
        )
    return array[()]  # a numpy scalar if it has no dimensions

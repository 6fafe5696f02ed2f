"""What the features of all records hold (how many values, of which size), and the expression that reads them in a feed.

Each output file is measured while it is written; the measures of all files are merged, so the expression fits every record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshfeed._src.convert.example import KIND_NAMES, integers_of, is_list, kind_of, list_lengths
from meshfeed._src.convert.inputs import byte_lengths
from meshfeed._src.sources.decode import BYTES, FLOAT, INT64

if TYPE_CHECKING:
    import pyarrow as pa

Measure = dict[str, Any]
"""What one feature holds, as JSON:

* ``missing``: whether a record has no value of it.
* ``counts``: the least and the largest number of values per record; None if no record has any.
* ``range``: the least and the largest integer, or size in bytes; None for floats and if there is no value.
* ``same``: the values, if they are few integers and the same in all records; else None.
"""

_INT32 = np.iinfo(np.int32)
_MAX_RANK = 8
_TOKENS = 2048
_WINDOWS = 8  # at least so many per file, of a small data set


def measure(columns: Iterable[tuple[str, pa.Array]]) -> dict[str, Measure]:
    """Measures a batch of records, given its features as :func:`meshfeed._src.convert.example.flatten` returns them."""
    return {name: _measure(name, array) for name, array in columns}


def _measure(name: str, array: pa.Array) -> Measure:
    missing = array.null_count > 0
    present = array.drop_null() if missing else array
    if not len(present):
        return {"missing": missing, "counts": None, "range": None, "same": None}
    counts, values = None, present
    if is_list(present.type):
        counts = list_lengths(present, null=0)
        values = present.flatten()
    kind = kind_of(name, values.type)
    numbers = None
    if kind == BYTES:
        numbers = byte_lengths(values)
    elif kind == INT64:
        numbers = integers_of(name, values)
    return _describe(missing, counts, numbers, kind)


def _describe(missing: bool, counts: np.ndarray | None, numbers: np.ndarray | None, kind: int) -> Measure:
    found = [1, 1] if counts is None else [int(counts.min()), int(counts.max())]
    same = None
    if kind == INT64 and numbers is not None and found[0] == found[1] <= _MAX_RANK and found[0]:
        rows = numbers.reshape(-1, found[0])
        same = rows[0].tolist() if (rows == rows[0]).all() else None
    bounds = None if numbers is None or not len(numbers) else [int(numbers.min()), int(numbers.max())]
    return {"missing": missing, "counts": found, "range": bounds, "same": same}


def measure_examples(examples: Sequence[Mapping[str, Any]]) -> dict[str, Measure]:
    """Measures parsed Examples: feature → list of bytes or an array."""
    found: dict[str, Measure] = {}
    for features in examples:
        one = {name: _measure_feature(values) for name, values in features.items()}
        found = merge([found, one]) if found else one
    for name, value in found.items():
        value["missing"] |= any(name not in features for features in examples)
    return found


def _measure_feature(values: Any) -> Measure:
    counts = np.array([len(values)])
    if isinstance(values, list):
        return _describe(False, counts, np.array([len(value) for value in values], np.int64), BYTES)
    is_float = values.dtype.kind == "f"
    return _describe(False, counts, None if is_float else values, FLOAT if is_float else INT64)


def merge(parts: Iterable[Mapping[str, Measure]]) -> dict[str, Measure]:
    """Merges what parts of the records hold. A feature that a part does not name is in none of its records."""
    parts = list(parts)
    names = {name: None for part in parts for name in part}
    return {name: _merge([part.get(name) for part in parts]) for name in names}


def _merge(parts: Sequence[Measure | None]) -> Measure:
    found = [part for part in parts if part is not None]
    held = [part for part in found if part["counts"] is not None]
    same = [part["same"] for part in held]
    return {
        "missing": len(found) < len(parts) or any(part["missing"] for part in found),
        "counts": _bounds([part["counts"] for part in held]),
        "range": _bounds([part["range"] for part in held]),
        "same": same[0] if same and all(one == same[0] for one in same) else None,
    }


def _bounds(pairs: Sequence[list[int] | None]) -> list[int] | None:
    known = [pair for pair in pairs if pair is not None]
    return [min(low for low, _ in known), max(high for _, high in known)] if known else None


# ------------------------------------------------------------------------ the expression


class Reading(NamedTuple):
    """How to read the output files.

    Attributes:
      expression: a Python expression of the source, given ``meshfeed`` and, if it is used, ``numpy``.
      left_out: feature → why it is not read.
      fits: whether a feed can batch what the expression gives.
      example: an entry of DecodeExample that reads one of the features left out, or an empty text.
    """

    expression: str
    left_out: Mapping[str, str]
    fits: bool
    example: str = ""


def reading_of_tokens(pattern: str, num_tokens: int, num_files: int) -> Reading:
    """Returns how to read token files; sequences are short if there are few tokens."""
    length = _TOKENS
    while length > 1 and num_tokens < num_files * length * _WINDOWS:
        length //= 2
    return Reading(f"meshfeed.sources.Tokens({_quote(pattern)}, sequence_length={length})", {}, True)


def reading_of_bytes(pattern: str, name: str, found: Measure | None) -> Reading:
    """Returns how to read records that are the bytes of one column."""
    if found is None or found["range"] is None:
        return Reading(f"meshfeed.sources.ArrayRecord({_quote(pattern)})", {}, False)
    low, high = found["range"]
    if low == high > 0:
        decode = f'decode_batch=meshfeed.sources.DecodeRaw("uint8", {high}, key={_quote(name)})'
    else:
        decode = f"decode=lambda record: {{{_quote(name)}: {_padded('record', high)}}}"
    return Reading(f"meshfeed.sources.ArrayRecord({_quote(pattern)}, {decode})", {}, True)


def reading_of_examples(
    pattern: str, kinds: Mapping[str, Mapping[str, Any]], found: Mapping[str, Measure], image: str | None = None
) -> Reading:
    """Returns how to read Examples: the features that are arrays of one shape in all records.

    If there is none, values are padded with zeros. A feature that a record lacks is always left out. The files in the feature
    ``image`` are decoded.
    """
    read: dict[str, str] = {}
    padded: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name, kind in kinds.items():
        one = found.get(name)
        if name.endswith("/shape") and _shape_of(name.removesuffix("/shape"), found) is not None:
            continue
        as_it_is, why, with_zeros = _entry(kind, one, _shape_of(name, found))
        if as_it_is is not None:
            read[name] = as_it_is
        else:
            left_out[name] = why
        if with_zeros is not None:
            padded[name] = "meshfeed.sources.DecodeImage(224)" if name == image else with_zeros
    if not read:
        read = padded
        left_out = {name: why for name, why in left_out.items() if name not in read}
    examples = sorted((name for name in left_out if name in padded), key=lambda name: name != image)
    example = f"{_quote(examples[0])}: {padded[examples[0]]}" if examples else ""
    entries = ", ".join(f"{_quote(name)}: {value}" for name, value in read.items())
    decode = f"meshfeed.sources.DecodeExample({f'{{{entries}}}' if entries else ''})"
    return Reading(f"meshfeed.sources.ArrayRecord({_quote(pattern)}, decode={decode})", left_out, bool(read), example)


def _shape_of(name: str, found: Mapping[str, Measure]) -> tuple[int, ...] | None:
    """Returns the shape of the arrays of a feature if ``<name>/shape`` holds it, the same one in all records."""
    one, shape = found.get(name), found.get(f"{name}/shape")
    if one is None or shape is None or shape["same"] is None or min(shape["same"]) < 0:
        return None
    return tuple(shape["same"]) if one["counts"] == [math.prod(shape["same"])] * 2 else None


def _entry(
    kind: Mapping[str, Any], one: Measure | None, shape: tuple[int, ...] | None
) -> tuple[str | None, str, str | None]:
    """Returns the entry of DecodeExample, why there is none, and the entry that pads the values."""
    if one is None or one["missing"] or one["counts"] is None:
        return None, "no value in some records", None
    low, high = one["counts"]
    if kind["kind"] == KIND_NAMES[BYTES]:
        if (low, high) != (1, 1):
            return None, "several values of bytes", None
        return None, "bytes", f"lambda value: {_padded('value', one['range'][1])}"
    dtype = "float32" if kind["kind"] == KIND_NAMES[FLOAT] else "int32"
    if one["range"] is not None and not _INT32.min <= one["range"][0] <= one["range"][1] <= _INT32.max:
        return None, "integers of more than 32 bits, which need jax_enable_x64", None
    if low < high:
        pad = f'lambda values: numpy.pad(values, (0, {high} - len(values))).astype("{dtype}")'
        return None, f"{low:,} to {high:,} values", pad
    if not high:
        return None, "no values", None
    if not kind["list"]:
        return f'"{dtype}"', "", None
    return f'("{dtype}", {high if shape is None else shape})', "", None


def _padded(value: str, size: int) -> str:
    return f'numpy.frombuffer({value}.ljust({max(1, size)}, b"\\0"), "uint8")'


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def describe(kind: Mapping[str, Any], one: Measure | None) -> str:
    """Returns the kind of a feature in words, such as ``int64 list, 0 to 4 values``."""
    text = f"{kind['kind']}{' list' if kind['list'] else ''}"
    return ", ".join([text, *_details(kind, one)])


def _details(kind: Mapping[str, Any], one: Measure | None) -> Iterator[str]:
    if one is None or one["counts"] is None:
        return
    low, high = one["counts"]
    if kind["list"]:
        yield f"{low:,} to {high:,} values" if low < high else f"{high:,} value{'' if high == 1 else 's'}"
    if one["missing"]:
        yield "missing in some records"

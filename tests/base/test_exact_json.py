"""What a state holds comes back with the same types and values, or is refused."""

from __future__ import annotations

import collections
import enum
import json
import pathlib
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshfeed._src.base.trees import decode_value, encode_value

RESERVED = ["__tuple__", "__bytes__", "__pairs__", "__array__", "__meshfeed__"]


def identical(left: Any, right: Any) -> bool:
    """Equal in type and value, down to the bits of a float and the order of a dict."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and not isinstance(left, np.generic):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, complex) and not isinstance(left, np.generic):
        return identical(left.real, right.real) and identical(left.imag, right.imag)
    if isinstance(left, np.ndarray | np.generic):
        return (left.dtype.str, left.dtype.name, left.shape, left.tobytes()) == (
            right.dtype.str, right.dtype.name, right.shape, right.tobytes()
        )  # fmt: skip
    if isinstance(left, dict):
        return identical(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(identical, left, right))
    return left == right


def through_json(value: Any) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))


KEYS = st.one_of(
    st.sampled_from(RESERVED), st.text(max_size=5), st.booleans(), st.integers(), st.floats(allow_nan=False)
)
DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(min_len=1, max_len=4),
    hnp.unicode_string_dtypes(min_len=1, max_len=4),
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
SMALL_FLOATS = st.sampled_from([ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray),
    ARRAYS,
    ARRAYS.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0]),
    st.builds(lambda kind, number: kind(number), SMALL_FLOATS, st.integers(-4, 4)),
    st.builds(lambda kind, numbers: np.array(numbers, kind), SMALL_FLOATS, st.lists(st.integers(-4, 4), max_size=3)),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)


@given(VALUES)
@example({"__array__": ["<i4", [1], "00000000"]})
@example({"__array__": 1})
@example({"__meshfeed__": ["scalar", "<i4", "00000000"]})
@example([np.int32(3), np.float16("nan"), np.bool_(True), ml_dtypes.bfloat16(1.5), np.datetime64("NaT", "ns")])
@example([np.str_("a\0"), np.bytes_(b"a\0"), np.float64(1), bytearray(b"x")])
@example([float("nan"), float("-inf"), -0.0, 10**5000, -(2**64), 1j])
@example({True: 1, 2: 3, "1": 4, 1.5: ()})
@example((1, [(), ((2,),)], {"b": 0, "a": (1,)}))
def test_it_comes_back_as_it_was(value: Any) -> None:
    assert identical(through_json(value), value)


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Point(1, 2), "Point"),
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        (enum.IntEnum("Kind", "a")(1), "Kind"),
        ({1, 2}, "set"),
        (np.zeros(2, [("a", "i4")]), "numpy.ndarray"),
        (np.zeros(1, [("a", "i4")])[0], "numpy.void"),
        (np.array([None]), "numpy.ndarray"),
        (np.longdouble(1), "numpy.longdouble"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (object(), "object"),
    ],
)
def test_what_would_come_back_otherwise_is_refused(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"a [\w.]*{name.rpartition('.')[2]} has no exact JSON form"):
        encode_value({"a": [value]})


def test_a_kind_of_a_newer_version_is_refused() -> None:
    with pytest.raises(ValueError, match="Upgrade meshfeed"):
        decode_value({"a": {"__meshfeed__": ["quaternion", 1]}})


def test_what_earlier_versions_wrote_is_read() -> None:
    written = json.loads((pathlib.Path(__file__).parent.parent / "data" / "lane_value_version_1.json").read_text())
    wanted = {
        "tuple": (1, (2.5, "a")),
        "bytes": b"\x00\xff",
        "pairs": {3: "three", "__bytes__": [b""]},
        "array": np.arange(6, dtype=">i2").reshape(2, 3),
        "numbers": [3, 1e300, True, None],
    }
    assert identical(decode_value(written), wanted)

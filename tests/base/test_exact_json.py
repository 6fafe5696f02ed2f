"""What a state holds comes back with the same types and values, or is refused; so do structures of pytrees."""

from __future__ import annotations

import collections
import enum
import json
import pathlib
import struct
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshfeed import SourceError
from meshfeed._src.base.exact_json import decode_value, encode_value, tree_from_json, tree_to_json

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


DTYPES = [np.int32, np.float64, np.bool_, np.uint8, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn]
leaves = st.builds(
    jax.ShapeDtypeStruct, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES).map(np.dtype)
)
keys = st.one_of(st.text(max_size=8), st.sampled_from(["__tuple__", "__bytes__", "__pairs__", "__array__", "tree"]))
trees = st.recursive(
    st.one_of(leaves, st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.integers(0, 9), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(trees)
def test_a_tree_comes_back_from_json_as_it_was(tree: Any) -> None:
    value = json.loads(json.dumps(tree_to_json(tree)))
    back = tree_from_json(value)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert jax.tree.leaves(back) == jax.tree.leaves(tree)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("kind", [lambda x: Pair(x, x), lambda x: collections.OrderedDict(a=x)])
def test_other_nodes_are_an_error_for_the_host_that_needs_them(kind: Any) -> None:
    value = json.loads(json.dumps(tree_to_json({"x": kind(np.zeros(3))})))
    with pytest.raises(SourceError, match=r"only dicts, lists, tuples and None can\. Convert them to dicts"):
        tree_from_json(value)

"""Pytrees described in JSON, for hosts that have no record of their own."""

from __future__ import annotations

import collections
import json
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import ml_dtypes
import numpy as np
import pytest

from meshfeed import SourceError
from meshfeed._src.base.trees import tree_from_json, tree_to_json

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


@hypothesis.given(trees)
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

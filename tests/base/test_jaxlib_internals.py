"""Pytrees without the import of JAX are those of JAX, and JAX is imported where a version of jaxlib has other names."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import jax
import pytest

from meshfeed._src.base import jaxlib_internals

_WITHOUT_JAX = """
import collections, sys
from typing import NamedTuple
import numpy as np
from meshfeed._src.base import exact_json, trees

class Point(NamedTuple):
    x: object
    y: object

plain = {"b": [1, (2, None)], "a": Point(np.zeros(2), {"c": 4}), "d": [], "": np.int32(5)}
special = [collections.OrderedDict(z=1, a=2), collections.defaultdict(int, k=3)]

def seen(tree):
    leaves, structure = trees.flatten(tree)
    mapped = trees.map_leaves(lambda leaf, other: (str(leaf), str(other)), tree, structure.unflatten(range(len(leaves))))
    return repr((leaves, structure, trees.leaves(tree), trees.flatten_with_paths(tree), mapped))

first = seen(plain)
structure = trees.flatten(plain)[1]
assert exact_json.decode_value(exact_json.encode_value(np.ones(3, "bfloat16"))).dtype == "bfloat16"
try:
    trees.flatten({1: 0, "a": 0})
except Exception as error:
    unsorted = f"{type(error).__module__}: {error}"
assert "jax" not in sys.modules, "loaded too early"
both = seen(special)
assert "jax" in sys.modules, "OrderedDict and defaultdict are nodes of JAX alone"
import jax

assert seen(plain) == first
assert structure == jax.tree.structure(plain)
assert trees.leaves(special) == jax.tree.leaves(special) == [1, 2, 3], both
assert [path for path, _ in trees.flatten_with_paths(plain)[0]] == [
    jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(plain)
]
assert trees.flatten_with_paths(special, is_leaf=lambda part: isinstance(part, dict))[0][0] == ("[0]", special[0])
assert "is not a pytree" in unsorted and "use strings" in unsorted
print("same")
"""


def test_trees_are_those_of_jax_which_is_not_imported() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", _WITHOUT_JAX], capture_output=True, text=True, timeout=120, env=env)
    assert ended.stdout == "same\n", ended.stderr


def test_the_names_are_there() -> None:
    assert jaxlib_internals.pytree_registry() is jax.tree_util.default_registry


@pytest.mark.parametrize("missing", ["_jax", "pytree", "default_registry", "flatten", "flatten_with_path"])
def test_without_the_names_jax_is_used(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import jaxlib

    def having(**attributes: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(**{name: value for name, value in attributes.items() if name != missing})

    registry = having(flatten=None, flatten_with_path=None)
    names = vars(having(_jax=having(pytree=having(default_registry=lambda: registry))))
    monkeypatch.setitem(sys.modules, "jaxlib._jax", names.get("_jax"))  # None raises ImportError
    monkeypatch.delattr(jaxlib, "_jax")
    if names:
        monkeypatch.setattr(jaxlib, "_jax", names["_jax"], raising=False)
    assert jaxlib_internals.pytree_registry() is None
    monkeypatch.delitem(sys.modules, "jax")
    assert jaxlib_internals.tree_functions() == (jax.tree_util.tree_flatten, jax.tree_util.tree_flatten_with_path)

"""Joins records of several components into one batch; all components must have the same structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from meshfeed._src.base import hooks, memory
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.reading.host_batch import spec_of_batch
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.sources.checks import is_count
from meshfeed._src.state.state import digest_of

Part = tuple[str, np.ndarray[Any, Any], PyTree]
"""Component name, its rows of the batch (int64[k], ascending), and its records, a pytree of arrays ``[k, ...]``."""


NO_IDS = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Which part of each component is used, and how often.

    Attributes:
      take: component → number of records, or a fraction of them.
      repeat: component → times that it is read per epoch.
    """

    take: dict[str, int | float] = dataclasses.field(default_factory=dict)
    repeat: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, sources: Mapping[str, Any], take: object, repeat: object) -> Parts:
        """Checks the user's ``take`` and ``repeat``.

        Raises:
          SettingsError: one of them is not a mapping of components to numbers in range.
        """
        for setting, value in (("take", take), ("repeat", repeat)):
            if value is not None and not (isinstance(value, Mapping) and value.keys() <= sources.keys()):
                raise SettingsError(
                    f"{setting}={value!r}; it takes {{name: number}} with names among {list(sources)}.", setting=setting
                )
        found = cls(dict(cast("Mapping[str, Any]", take or {})), dict(cast("Mapping[str, Any]", repeat or {})))
        for name, times in found.repeat.items():
            if not is_count(times):
                raise SettingsError(f"repeat[{name!r}]={times!r}; it takes an int of at least 1.", setting="repeat")
        for name, part in found.take.items():
            if wanted := _wrong_take(part, sources[name]):
                raise SettingsError(f"take[{name!r}]={part!r}; {wanted}", setting="take")
        return found

    def length(self, name: str, source: Any) -> int:
        """Number of records of a random-access component that are used."""
        part = self.take.get(name)
        if part is None:
            return len(source)
        return int(part * len(source)) if isinstance(part, float) else part

    def of_lane(self, name: str, lane_index: int, num_lanes: int) -> int | None:
        """Number of records per epoch of one lane of a stream; None for all."""
        part = self.take.get(name)
        return None if part is None else (int(part) + num_lanes - 1 - lane_index) // num_lanes

    def identities(self, components: Mapping[str, Any]) -> dict[str, JsonValue]:
        """Name → identity of each component, with long values replaced by digests: a state holds all of them."""
        used = {"take": self.take, "repeat": self.repeat}
        return {
            name: {key: _short(value) for key, value in source_identity(source).items()}
            | {key: part[name] for key, part in used.items() if name in part}
            for name, source in components.items()
        }


def _short(value: JsonValue) -> JsonValue:
    small = isinstance(value, bool | int | float | None) or (isinstance(value, str) and len(value) <= 16)
    return value if small else digest_of(value)[:8]


def _wrong_take(part: object, source: Any) -> str:
    """What ``take`` of a component takes instead of ``part``; empty if ``part`` is right."""
    if hooks.is_stream(source):
        wanted = "the component is a stream, whose length is unknown, so it takes a number of records of at least 1."
        return "" if is_count(part) else wanted
    number = len(source)
    if (isinstance(part, float) and 0 < part <= 1 and int(part * number)) or (is_count(part) and part <= number):
        return ""
    return f"it takes a number of records from 1 to {number}, or a float above 0 and up to 1.0 that is at least one record."


def caching(source: object) -> hooks.CachesFiles | None:
    """The source if it reads files through a cache, otherwise None."""
    files = hooks.find(source, hooks.CachesFiles)
    return None if files is None or files.cached_files(NO_IDS) is None else files


class Joiner:
    """Joins the components' parts into batches; all parts must match the structure of the first one seen."""

    def __init__(self) -> None:
        self._first: tuple[object, str, PyTree] | None = None  # its structure, its component, and it without rows

    def join(self, parts: Sequence[Part], num_rows: int, *, whole: bool = True) -> PyTree:
        """Joins parts that together cover each row once into one batch ``[num_rows, ...]``.

        Args:
          parts: at least one part.
          num_rows: rows in the batch.
          whole: whether the leaves hold all columns. If not, the parts are compared only with each other.

        Raises:
          SourceError: records of two components differ in structure, shape or dtype; names the components and the leaf.
        """
        first = self._first if whole else None
        flat = []
        for name, rows, tree in parts:
            leaves, treedef = jax.tree.flatten(tree)
            leaves = [np.asarray(leaf) for leaf in leaves]
            # Compared without leaf paths: finding them takes longer than reading a small part.
            structure = treedef, [(leaf.dtype, leaf.shape[1:]) for leaf in leaves]
            if first is None or structure != first[0] or any(leaf.shape[:1] != (len(rows),) for leaf in leaves):
                spec_of_batch(tree, len(rows), what=f"component {name!r}")  # raises if it is not such a batch
                if first is not None:
                    raise SourceError(_difference(name, tree, *first[1:]))
                # Keep 0 rows: errors need the shapes and dtypes, not the data.
                first = structure, name, jax.tree.map(lambda leaf: np.array(leaf[:0]), tree)
            flat.append((rows, leaves, treedef))
        if whole:
            self._first = first
        if len(parts) == 1 and len(parts[0][1]) == num_rows:  # one component fills the batch: no copy
            return parts[0][2]
        outputs = [memory.empty((num_rows, *leaf.shape[1:]), leaf.dtype) for leaf in flat[0][1]]
        for rows, leaves, _ in flat:
            for output, leaf in zip(outputs, leaves, strict=True):
                output[rows] = leaf
        return flat[0][2].unflatten(outputs)


def _difference(name: str, tree: PyTree, other: str, other_tree: PyTree) -> str:
    found, wanted = (
        spec_of_batch(batch, jax.tree.leaves(batch)[0].shape[0], what="a component") for batch in (tree, other_tree)
    )
    remedy = (
        "Records of a mixture must be alike: rename, pad or cast them in the component's decode (nothing is promoted "
        "silently)."
    )
    if name == other:
        who = f"records of component {name!r} differ from its first"
    else:
        who = f"components {name!r} and {other!r} have unlike records"
    here, there = ({leaf.path: leaf for leaf in spec.leaves} for spec in (found, wanted))
    if here.keys() != there.keys():
        return (
            f"{who}: {name!r} has the leaves {', '.join(map(repr, here))}, {other!r} has "
            f"{', '.join(map(repr, there))}. {remedy}"
        )
    for path, leaf in here.items():
        if leaf != there[path]:
            return f"{who}: {leaf.describe()} in {name!r}, {there[path].describe()} in {other!r}. {remedy}"
    return f"{who}: {found.treedef} in {name!r}, {wanted.treedef} in {other!r}. {remedy}"

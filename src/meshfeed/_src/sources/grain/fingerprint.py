"""The fingerprint of a Grain pipeline: its transforms, their settings and its data.

It is the same in every process: it contains no object address, ``hash()`` or folder name. A function is identified by
its name, since its code cannot be compared. Settings that change no record, such as read options, are left out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import grain
import jax
import numpy as np
import xxhash

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.types import JsonValue, RandomAccessSource
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.grain import internals
from meshfeed._src.sources.grain.internals import Node, Records, is_named, private
from meshfeed._src.sources.grain.tree import walk, without_prefetch
from meshfeed._src.state.state import digest_of

_PROBES = 4
_MAX_ITEMS = 64  # longer containers are left out
_MAX_CHOICES = 256  # elements of a mixture whose choice of component enters the digest
_MAX_DATASETS = 1024  # an interleave of more datasets is sampled
_MAX_CHARACTERS = 200  # a longer setting is replaced by its digest
_LEFT_OUT = internals.CHANGE_NO_RECORD | internals.REDUNDANT
_NOT_PLAIN = object()


def describe(dataset: Node) -> dict[str, JsonValue]:
    """``{"pipeline": {"0 SourceMapDataset": {…}, "1 MapMapDataset": {…}, …}}``, sources first."""
    nodes = [node for node in walk(dataset) if not is_named(node, internals.OPTIONS)]
    return {"pipeline": {f"{index} {type(node).__name__}": _settings(node) for index, node in enumerate(nodes)}}


def _settings(node: Node) -> dict[str, JsonValue]:
    settings: dict[str, JsonValue] = {}
    for name, value in sorted(vars(node).items()):
        cached = isinstance(getattr(type(node), name, None), functools.cached_property)  # present only after first use
        plain = _NOT_PLAIN if cached or name in _LEFT_OUT else _plain(value)
        if plain is not _NOT_PLAIN and plain not in (None, [], {}):
            settings[name.lstrip("_")] = plain if len(json.dumps(plain)) <= _MAX_CHARACTERS else digest_of(plain)
    source = internals.source_of(node)
    if source is not None:
        settings["source"] = "the node before" if isinstance(source, grain.MapDataset) else identify(source)
    elif _paths_of(node):
        settings["path" if is_named(node, internals.TFRECORD) else "paths"] = identify_paths(_paths_of(node))
    elif is_named(node, internals.MIX):
        choice = private(node, "selection_map")
        settings["selection"] = digest_of([list(choice[index]) for index in range(min(_MAX_CHOICES, len(choice)))])
    elif is_named(node, internals.INTERLEAVE):
        settings.update(_describe_datasets(private(node, "datasets")))
    elif isinstance(node, grain.MapDataset) and internals.is_unknown(node):
        settings["content"] = _digest_records(node, _spread(len(node)))  # its attributes may not say all
    return settings


def _describe_datasets(datasets: Sequence[Node | None] | Records) -> dict[str, JsonValue]:
    """Datasets of an interleave: their number, the pipeline that makes them, and a digest of their descriptions."""
    count = len(datasets)
    described: dict[str, JsonValue] = {"datasets": count}
    if isinstance(datasets, grain.MapDataset):
        described["made_by"] = describe(datasets)["pipeline"]
        some = range(min(count, 1))
    else:
        some = range(count) if count <= _MAX_DATASETS else _spread(count)
    chosen = [datasets[index] for index in some]
    each = [None if dataset is None else describe(without_prefetch(dataset)) for dataset in chosen]
    return {**described, "content": digest_of(each)}


def _paths_of(node: Node) -> Sequence[str | os.PathLike[str]]:
    """Paths of the files of a Parquet or TFRecord node; empty for other nodes."""
    if is_named(node, internals.PARQUET):
        return private(node, "paths")
    return [private(node, "path")] if is_named(node, internals.TFRECORD) else []


def file_names(dataset: Node) -> list[str]:
    """Paths of the files that a pipeline reads, as far as its nodes and data sources expose them."""
    names: list[object] = []
    for node in walk(dataset):
        source = internals.source_of(node)
        source = source.source if isinstance(source, internals.BatchedSource) else source
        paths = getattr(source, "paths", ())
        names += [*_paths_of(node), *([paths] if isinstance(paths, str | os.PathLike) else paths)]
    return [os.fspath(name) for name in names if isinstance(name, str | os.PathLike)]


def identify(source: Any) -> JsonValue:
    """Identity of a data source: its own fingerprint if it has one, otherwise its files and a digest of 4 records.

    A list of file names is identified by the files alone.
    """
    source = source.source if isinstance(source, internals.BatchedSource) else source
    if callable(getattr(source, "fingerprint", None)) and not isinstance(source, str):
        return source.fingerprint()
    identity: dict[str, JsonValue] = {"type": type(source).__name__}
    count = len(source) if hasattr(source, "__len__") else None
    if count is not None:
        identity["records"] = count
    paths = getattr(source, "paths", None)
    if paths is None and isinstance(source, list | tuple) and _are_paths(source) and all(map(_is_file, source)):
        return {**identity, "files": identify_paths(source)}
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    if _are_paths(paths):
        identity["files"] = identify_paths(paths)
    if count:
        identity["content"] = _digest_records(source, _spread(count))
    return identity


def identify_paths(paths: Sequence[str | bytes | os.PathLike[str]]) -> JsonValue:
    """Identity of files by base name and size, which does not change if the folder is moved."""
    names = [os.fspath(path) for path in paths]
    names = [name.decode() if isinstance(name, bytes) else name for name in names]
    try:
        return file_paths.identify_files(names, file_paths.file_sizes(names, source="Grain"))
    except SourceError:  # a URL whose size needs fsspec, which is missing; Grain reads it by other means
        return file_paths.identify_files(names, [0] * len(names))


def _are_paths(items: object) -> TypeGuard[Sequence[str | os.PathLike[str]]]:
    return isinstance(items, Sequence) and bool(items) and all(isinstance(item, str | os.PathLike) for item in items)


def _is_file(path: str | os.PathLike[str]) -> bool:
    return file_paths.is_url(os.fspath(path)) or os.path.isfile(path)


def _spread(count: int) -> list[int]:
    return [count * probe // _PROBES for probe in range(_PROBES)] if count > _PROBES else list(range(count))


def _digest_records(source: RandomAccessSource, indices: Sequence[int]) -> str:
    digest = xxhash.xxh3_64()
    for index in indices:
        try:
            record = source[index]
        except Exception:  # the feed reports or replaces an unreadable record when it reads it
            digest.update(b"unreadable")
            continue
        leaves, structure = jax.tree_util.tree_flatten(record)
        digest.update(str(structure).encode())
        for leaf in leaves:
            digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: object) -> bytes:
    if isinstance(leaf, bytes | bytearray):
        return bytes(leaf)
    if isinstance(leaf, bool | int | float | str):
        return f"{type(leaf).__name__}:{leaf!r}".encode()
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return f"{leaf.dtype.str}{leaf.shape}".encode() + leaf.tobytes()
    return type(leaf).__name__.encode()  # its repr may hold an address


def _plain(value: object) -> Any:
    """``value`` as JSON that is the same in every process; ``_NOT_PLAIN`` if it has no such form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, type) or hasattr(value, "__code__") or hasattr(value, "__func__"):
        return getattr(value, "__name__", _NOT_PLAIN)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **_without_holes(fields)}
    if isinstance(value, grain.transforms.Map | grain.transforms.RandomMap | grain.transforms.Filter):
        return type(value).__name__
    if isinstance(value, Mapping) and len(value) <= _MAX_ITEMS and all(isinstance(key, str) for key in value):
        return _without_holes({key: _plain(item) for key, item in value.items()})
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        return [item for item in map(_plain, value) if item is not _NOT_PLAIN]
    return type(value).__name__ if callable(value) else _NOT_PLAIN


def _without_holes(items: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in items.items() if item is not _NOT_PLAIN}

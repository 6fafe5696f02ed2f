"""The metadata of arrays that meshfeed stores beside Orbax's files: exact dtypes, chunk digests, the save's identity.

It is stored in the folder ``meshfeed`` inside the arrays' item, so it is copied with them, and plain Orbax ignores it.
While saving, every host writes a part with its digests (``arrays-<process>.json``), and process 0 writes the tree
(``tree.json``). Once all have written, the primary host merges the parts into ``manifest.json`` and removes them. Parts
that were never merged, because a manager other than Orbax's does not finalize, are merged on reading.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

import numpy as np
import xxhash
from etils import epath
from numpy.typing import NDArray

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.types import JsonValue, public
from meshfeed._src.state.files import DamagedStateError, write_json
from meshfeed._src.state.state import digest_of


def digest_of_bytes(data: bytes | memoryview) -> str:
    """Returns the xxh3-64 digest of ``data`` as 16 hex digits."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def digest(values: NDArray[np.generic]) -> str:
    """Returns the digest of ``values``' bytes in row-major order."""
    return digest_of_bytes(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


@public("meshfeed.checkpoint")
class DamagedCheckpointError(DamagedStateError):
    """The stored bytes of a checkpoint differ from those written.

    It is both a :class:`~meshfeed.CheckpointError` and a :class:`~meshfeed.CorruptDataError`.
    """


FOLDER = "meshfeed"
TREE_PART = "tree"
ARRAYS_PART = "arrays-"  # and the process
RESTORE_EARLIER = "Restore an earlier step."

_MANIFEST = "manifest"
_VERSION = 1
_SMALL_FILE_BYTES = 1 << 20
_WRITTEN_LATER = "_CHECKPOINT_METADATA"  # Orbax's Checkpointer rewrites it after all handlers have finished


@dataclasses.dataclass
class Manifest:
    """The merged manifest of one item of arrays.

    Attributes:
      identity: identity of the save that wrote it, or None.
      leaves: parameter name → description of its leaf; see :mod:`meshfeed._src.checkpoint.leaves`.
      digests: parameter name → {cell number: 16 hex digits of xxh3-64}.
      files: path in the item → [size in bytes, digest of the content for small files or None]; {} before merging.
      skeleton: the tree's structure, or None if only a type handler wrote the item.
    """

    identity: dict[str, JsonValue] | None = None
    leaves: dict[str, dict[str, JsonValue]] = dataclasses.field(default_factory=dict)
    digests: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)
    files: dict[str, list[JsonValue]] = dataclasses.field(default_factory=dict)
    skeleton: JsonValue = None


def write_part(item: epath.PathLike, part: str, digests: Mapping[str, Mapping[int, str]], **content: JsonValue) -> None:
    """Writes one file of a manifest.

    Args:
      item: folder of the arrays.
      part: ``ARRAYS_PART`` and the process, or ``TREE_PART``, which only process 0 writes.
      digests: parameter name → {cell number: digest}.
      **content: further fields of :class:`Manifest`. ``leaves`` of arrays are the same on all hosts, and only one host
        per folder writes them.
    """
    folder = epath.Path(item) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    # Normalize first (tuples, keys), because a reader computes the digest of the parsed JSON.
    bare = json.loads(json.dumps({"meshfeed_arrays": _VERSION, "digests": digests, **content}))
    write_json(folder / f"{part}.json", {**bare, "digest": digest_of(bare)})


def read_json(path: epath.Path) -> JsonValue:
    """Returns the content of a JSON file; raises DamagedCheckpointError if it is not JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: not JSON ({error}). {RESTORE_EARLIER}", path=str(path)) from None


def _read_part(path: epath.Path) -> dict[str, JsonValue]:
    content = read_json(path)
    digest = content.pop("digest", None) if isinstance(content, dict) else None
    if digest is None or digest_of(content) != digest:
        text = f"{path}: its digest does not match its content. {RESTORE_EARLIER}"
        raise DamagedCheckpointError(text, path=str(path))
    version = content.get("meshfeed_arrays", _VERSION + 1)
    if version > _VERSION:
        raise CheckpointError(
            f"{path}: has format {version}, but this version of meshfeed reads up to {_VERSION}. Upgrade meshfeed."
        )
    return content


def read_manifest(item: epath.PathLike) -> Manifest | None:
    """Reads the manifest of an item of arrays; returns None for an item that plain Orbax wrote.

    Raises:
      DamagedCheckpointError: a part differs from what was written.
      CheckpointError: a newer version of meshfeed wrote it.
    """
    folder = epath.Path(item) / FOLDER
    paths = [path for path in folder.iterdir() if path.name.endswith(".json")] if folder.exists() else []
    joined = [path for path in paths if path.stem == _MANIFEST]
    manifest = Manifest()
    for path in joined or sorted(paths, key=lambda path: path.name):
        content = _read_part(path)
        manifest.identity = content.get("identity") or manifest.identity
        manifest.skeleton = content.get("skeleton") or manifest.skeleton
        manifest.leaves.update(content.get("leaves", {}))
        manifest.files.update(content.get("files", {}))
        for name, cells in content.get("digests", {}).items():
            manifest.digests.setdefault(name, {}).update({int(cell): digest for cell, digest in cells.items()})
    manifest.files.pop(_WRITTEN_LATER, None)
    return manifest if paths else None


def join_parts(item: epath.PathLike, chunks: Mapping[str, list[int]]) -> None:
    """Merges the parts of all hosts into one file. One process calls it once all hosts have written."""
    item = epath.Path(item)
    manifest = read_manifest(item)
    if manifest is None:
        return
    for name, chunk in chunks.items():
        manifest.leaves[name]["chunk"] = chunk
    manifest.digests = {name: dict(sorted(cells.items())) for name, cells in manifest.digests.items()}
    manifest.files = _describe_files(item)
    parts = [path for path in (item / FOLDER).iterdir() if path.stem == TREE_PART or path.name.startswith(ARRAYS_PART)]
    # Write before removing the parts: readers prefer the merged file, so a crash in between loses nothing.
    write_part(item, _MANIFEST, **vars(manifest))
    for path in parts:
        path.unlink()


def _describe_files(item: epath.Path) -> dict[str, list[JsonValue]]:
    """Returns the sizes of an item's files (without the manifest's), and digests of small files without array data."""
    found: dict[str, list[JsonValue]] = {}
    folders = [item]
    while folders:
        for path in folders.pop().iterdir():
            relative = path.relative_to(item).as_posix()
            if not path.is_dir():
                size = path.stat().length
                # OCDBT keeps array data in folders "d"; the digests of chunks cover it.
                small = size <= _SMALL_FILE_BYTES and "d" not in relative.split("/")[:-1]
                found[relative] = [size, digest_of_bytes(path.read_bytes()) if small else None]
            elif relative != FOLDER:
                folders.append(path)
    return found


def file_problems(item: epath.Path, manifest: Manifest, *, content: bool) -> Iterator[tuple[epath.Path, str]]:
    """Yields (path, difference) for each file of an item that differs from what was written."""
    for name, (size, digest) in manifest.files.items():
        path = item / name
        found = path.stat().length if path.exists() else None
        if found is None:
            yield path, "is missing"
        elif found != size:
            yield path, f"has {found} bytes, but {size} bytes were saved"
        elif content and digest is not None and digest_of_bytes(path.read_bytes()) != digest:
            yield path, "has a different digest from the saved file"

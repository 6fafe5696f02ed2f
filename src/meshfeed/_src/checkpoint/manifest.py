"""What meshfeed stores about arrays beside Orbax's own files: exact dtypes, chunk digests, and the save's identity.

It is stored in the folder ``meshfeed`` inside the arrays' item, so it is copied with them, and plain Orbax ignores it.
While saving, every host writes a part with its digests (``arrays-<process>.json``), and process 0 writes the tree
(``tree.json``). Once all have written, the primary host merges the parts into ``manifest.json`` and removes them. Parts
that were never merged, because a manager other than Orbax's does not finalize, are merged on reading.

The error for damaged checkpoints, which is both a checkpoint error and a data error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import xxhash
from etils import epath

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.types import public
from meshfeed._src.state.files import DamagedStateError, write_json
from meshfeed._src.state.state import digest_of


@public("meshfeed.checkpoint")
class DamagedCheckpointError(DamagedStateError):
    """The stored bytes of a checkpoint differ from those written.

    It is both a :class:`~meshfeed.CheckpointError` and a :class:`~meshfeed.CorruptDataError`.
    """


def as_checkpoint_error(kind: str, message: str, *, step: int | None = None) -> CheckpointError:
    """Returns the error that all hosts raise for a failure reported by one of them."""
    if kind == "damaged":
        return DamagedCheckpointError(message, step=step)
    return CheckpointError(message, step=step)


FOLDER = "meshfeed"
_MANIFEST = "manifest.json"
_TREE = "tree.json"
_ARRAYS = "arrays-"
_VERSION = 1
SMALL_FILE_BYTES = 1 << 20
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

    identity: dict[str, Any] | None = None
    leaves: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    digests: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)
    files: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    skeleton: Any = None


def _write(item: epath.Path, name: str, content: Mapping[str, Any]) -> None:
    folder = item / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    # Normalize first (tuples, keys), because a reader computes the digest of the parsed JSON.
    bare = json.loads(json.dumps({"meshfeed_arrays": _VERSION, **content}))
    write_json(folder / name, {**bare, "digest": digest_of(bare)})


def write_arrays_part(
    item: Any, process: int, leaves: Mapping[str, Any], digests: Mapping[str, Mapping[int, str]]
) -> None:
    """Writes one host's part. ``leaves`` is the same on all hosts, and only one host per folder passes it."""
    text = {name: {str(cell): digest for cell, digest in cells.items()} for name, cells in digests.items()}
    _write(epath.Path(item), f"{_ARRAYS}{process}.json", {"leaves": leaves, "digests": text})


def write_tree_part(
    item: Any,
    identity: Mapping[str, Any] | None,
    leaves: Mapping[str, Any],
    digests: Mapping[str, Mapping[int, str]],
    skeleton: Any,
) -> None:
    """Writes the tree's structure and its non-array leaves. Only process 0 calls it."""
    text = {name: {str(cell): digest for cell, digest in cells.items()} for name, cells in digests.items()}
    content = {"identity": identity, "leaves": leaves, "digests": text, "skeleton": skeleton}
    _write(epath.Path(item), _TREE, content)


def _read(path: epath.Path) -> dict[str, Any]:
    remedy = "The checkpoint is damaged; restore an earlier step."
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: not JSON ({error}). {remedy}", path=str(path)) from None
    bare = {key: value for key, value in content.items() if key != "digest"} if isinstance(content, dict) else {}
    if not isinstance(content, dict) or digest_of(bare) != content.get("digest"):
        raise DamagedCheckpointError(f"{path}: its digest does not match its content. {remedy}", path=str(path))
    if bare.get("meshfeed_arrays", _VERSION + 1) > _VERSION:
        raise CheckpointError(
            f"{path}: format {bare.get('meshfeed_arrays')}, this version reads up to {_VERSION}. Upgrade meshfeed."
        )
    return bare


def read_manifest(item: Any) -> Manifest | None:
    """Reads the manifest of an item of arrays; returns None for an item that plain Orbax wrote.

    Raises:
      DamagedCheckpointError: a part differs from what was written.
      CheckpointError: a newer version of meshfeed wrote it.
    """
    folder = epath.Path(item) / FOLDER
    if not folder.exists():
        return None
    paths = [path for path in folder.iterdir() if path.name.endswith(".json")]
    joined = [path for path in paths if path.name == _MANIFEST]
    manifest = Manifest()
    for path in joined or sorted(paths, key=lambda path: path.name):
        content = _read(path)
        manifest.identity = content.get("identity") or manifest.identity
        manifest.leaves.update(content.get("leaves", {}))
        manifest.files.update(content.get("files", {}))
        manifest.skeleton = content.get("skeleton", manifest.skeleton)
        for name, cells in content.get("digests", {}).items():
            manifest.digests.setdefault(name, {}).update({int(cell): digest for cell, digest in cells.items()})
    manifest.files.pop(_WRITTEN_LATER, None)
    return manifest if paths else None


def join_parts(item: Any, chunks: Mapping[str, list[int]]) -> None:
    """Merges the parts of all hosts into one file. One process calls it once all hosts have written.

    Args:
      item: folder of the arrays.
      chunks: shape of the stored chunks by parameter name, where known.
    """
    item = epath.Path(item)
    manifest = read_manifest(item)
    if manifest is None:
        return
    for name, chunk in chunks.items():
        if name in manifest.leaves:
            manifest.leaves[name]["chunk"] = chunk
    content = {
        "identity": manifest.identity,
        "leaves": manifest.leaves,
        "digests": {name: {str(c): d for c, d in sorted(cells.items())} for name, cells in manifest.digests.items()},
        "files": describe_files(item),
        "skeleton": manifest.skeleton,
    }
    parts = [path for path in (item / FOLDER).iterdir() if path.name.startswith(_ARRAYS) or path.name == _TREE]
    # Write before removing the parts: readers prefer the merged file, so a crash in between loses nothing.
    _write(item, _MANIFEST, content)
    for path in parts:
        path.unlink()


def file_digest(path: epath.Path) -> str:
    """Returns the xxh3-64 digest of a file's bytes, as 16 hex digits."""
    return f"{xxhash.xxh3_64_intdigest(path.read_bytes()):016x}"


def describe_files(item: epath.Path) -> dict[str, list[Any]]:
    """Returns the sizes of an item's files (without the manifest's), and digests of small files without array data."""
    sizes: dict[str, list[Any]] = {}
    folders = [item]
    while folders:
        for path in folders.pop().iterdir():
            relative = path.relative_to(item).as_posix()
            if path.is_dir():
                if relative != FOLDER:
                    folders.append(path)
            else:
                size = path.stat().length
                # OCDBT keeps array data in folders "d"; the digests of chunks cover it.
                small = size <= SMALL_FILE_BYTES and "d" not in relative.split("/")[:-1]
                sizes[relative] = [size, file_digest(path) if small else None]
    return sizes

"""What is known about stored arrays beside Orbax's own files: exact dtypes, digests of chunks, and the save's identity.

It lies in the folder ``meshfeed`` of the arrays' item, so that it travels with them, and plain Orbax does not look
there. While saving, every host writes what it knows (``arrays-<process>.json``: its digests) and process 0 the tree
(``tree.json``); when all have written, the primary host joins them in ``manifest.json`` and removes the parts. Parts
that were never joined (another manager than Orbax's, which does not finalize) are joined when they are read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import xxhash
from etils import epath

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint.errors import DamagedCheckpointError
from meshfeed._src.state.files import write_json
from meshfeed._src.state.state import digest_of

FOLDER = "meshfeed"
_MANIFEST = "manifest.json"
_TREE = "tree.json"
_ARRAYS = "arrays-"
_VERSION = 1
SMALL_FILE_BYTES = 1 << 20
_WRITTEN_LATER = "_CHECKPOINT_METADATA"  # by Orbax's Checkpointer, again after all handlers have finished


@dataclasses.dataclass
class Manifest:
    """Joined knowledge about one item of arrays.

    Attributes:
      identity: of the save that wrote it, or None.
      leaves: parameter name → what its leaf was; see :mod:`meshfeed._src.checkpoint.leaves`.
      digests: parameter name → {cell number: 16 hex digits of xxh3-64}.
      files: path in the item → [size in bytes, digest of the content for small files or None]; {} before it was joined.
      skeleton: the tree's structure, or None where only a type handler wrote.
    """

    identity: dict[str, Any] | None = None
    leaves: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    digests: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)
    files: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    skeleton: Any = None


def _write(item: epath.Path, name: str, content: Mapping[str, Any]) -> None:
    folder = item / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    bare = json.loads(json.dumps({"meshfeed_arrays": _VERSION, **content}))
    write_json(folder / name, {**bare, "digest": digest_of(bare)})


def write_arrays_part(
    item: Any, process: int, leaves: Mapping[str, Any], digests: Mapping[str, Mapping[int, str]]
) -> None:
    """Writes what one host knows of the arrays; ``leaves`` is the same on all, and given by one host in a folder."""
    text = {name: {str(cell): digest for cell, digest in cells.items()} for name, cells in digests.items()}
    _write(epath.Path(item), f"{_ARRAYS}{process}.json", {"leaves": leaves, "digests": text})


def write_tree_part(
    item: Any,
    identity: Mapping[str, Any] | None,
    leaves: Mapping[str, Any],
    digests: Mapping[str, Mapping[int, str]],
    skeleton: Any,
) -> None:
    """Writes the tree's structure and its leaves that are no arrays; process 0 calls it."""
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
    """The manifest of an item of arrays; None for one that plain Orbax wrote.

    Raises:
      DamagedCheckpointError: a part is not what was written.
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
    """Joins the parts of all hosts in one file; one process calls it, when all have written.

    Args:
      item: folder of the arrays.
      chunks: shapes of the stored chunks by parameter name, for those that are known.
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
    _write(item, _MANIFEST, content)
    for path in parts:
        path.unlink()


def file_digest(path: epath.Path) -> str:
    """xxh3-64 of a file's bytes."""
    return f"{xxhash.xxh3_64_intdigest(path.read_bytes()):016x}"


def describe_files(item: epath.Path) -> dict[str, list[Any]]:
    """Sizes of all files of an item beside the manifest's own, and digests of those that hold no values."""
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
                small = size <= SMALL_FILE_BYTES and "d" not in relative.split("/")[:-1]
                sizes[relative] = [size, file_digest(path) if small else None]
    return sizes

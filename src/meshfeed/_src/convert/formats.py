"""Recognizes the format of what is to be converted, lists its files, and downloads those at URLs.

Both passes read an input, the second one from places in its middle, and libraries of some formats read local files only.
An input at a URL is therefore downloaded once, in blocks that are retried on their own, into the folder of the job.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.settings import Retry
from meshfeed._src.convert.example import TFRecords
from meshfeed._src.convert.inputs import Input
from meshfeed._src.convert.lines import Csv, JsonLines, TextLines
from meshfeed._src.convert.readers import (
    IMAGES,
    Datasets,
    ImageFolder,
    Mds,
    ParquetFiles,
    WebDatasets,
    image_names,
    select_images,
)
from meshfeed._src.sources.files.direct import RemoteBytes
from meshfeed._src.sources.files.download import Download, Downloads
from meshfeed._src.sources.files.formats import compression_of, reader_hint, uncompressed_name
from meshfeed._src.sources.files.manifest import NAME, is_meshfeeds
from meshfeed._src.sources.files.paths import (
    absolute,
    expand_paths,
    file_info,
    format_name,
    is_url,
    open_file_system,
    read_file,
    remote_errors,
    url_of,
    version_of,
    without_query,
)

_TIMEOUT_SECONDS = 30.0  # without an answer, before the request is sent again


_KINDS = (Csv, Datasets, ImageFolder, JsonLines, Mds, ParquetFiles, TextLines, TFRecords, WebDatasets)
FORMATS: dict[str, type[Input]] = {kind.name: kind for kind in _KINDS}
_EXTENSIONS = {
    "arrow": "huggingface",
    "csv": "csv",
    "jsonl": "jsonl",
    "json": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "tar": "webdataset",
    "tfrecord": "tfrecord",
    "tfrecords": "tfrecord",
    "tsv": "csv",
    "txt": "text",
}
_ARRAY_RECORD = ("array_record", "arrayrecord")
_READ_AS_IT_IS = ("bin", "idx", "npy")
_SHARDED = re.compile(r"\.(tfrecords?)-\d+-of-\d+$")  # TFDS puts the number after the extension
_POSITION = re.compile(r"process_\d+(-of-\d+)?\.json")
_FOLDERS = ("huggingface", "images", "mds")
_LISTED = 5
_MAGIC = re.compile(r"[*?\[]")


def recognize(data: Sequence[str], named: str | None) -> tuple[str, list[str]]:
    """Returns the format of the inputs, and the files or folders to read, in order.

    Args:
      data: paths, globs, folders and URLs of them. The files of a folder or glob are sorted by name.
      named: the format, if the user named it.

    Raises:
      SourceError: an input is missing or empty, its format is unknown, or inputs have different formats.
      OSError: the store of a URL does not answer.
    """
    found = [item for name in data for item in _expand(name, named)]
    formats: dict[str, str] = {}
    for kind, path in found:
        formats.setdefault(kind, path)
    if len(formats) > 1:
        shown = ", ".join(f"{kind} ({path})" for kind, path in formats.items())
        raise SourceError(
            f"the inputs have different formats: {shown}. Expected one. Convert each to a folder of its own."
        )
    kind = next(iter(formats))
    paths = [path for _, path in found]
    twice = [path for path, count in collections.Counter(paths).items() if count > 1]
    if twice:
        raise SourceError(f"{twice[0]} is given twice; its records would be written twice. Name it once.")
    if kind == "images" and len(paths) > 1:
        raise SourceError(
            f"convert takes one folder of images and got {len(paths)}: {', '.join(paths[:_LISTED])}. Pass the folder that "
            "contains them: its subfolders are the classes. Or convert each to a folder of its own."
        )
    return kind, paths


def _expand(name: str, named: str | None) -> list[tuple[str, str]]:
    """Returns the format and path of each input that a path, a glob, a folder or a URL names."""
    if is_url(name):
        return _expand_url(name, named)
    path = absolute(name)
    matches = sorted(glob.glob(path)) if not os.path.exists(path) else []
    if matches and all(os.path.isdir(match) for match in matches):
        return [item for match in matches for item in _expand(match, named)]
    if os.path.basename(path) == "index.json":
        path = os.path.dirname(path)
    if os.path.isdir(path):
        return _expand_folder(_local_folder(path), named)
    return _expand_files(name, named)


def _expand_files(name: str, named: str | None) -> list[tuple[str, str]]:
    files = [file for file in expand_paths(name, source="convert") if not file.endswith(".meshfeed-index")]
    if not files:
        raise SourceError(
            f"{name} names only indexes that meshfeed.sources.WebDataset has saved. Name the archives beside them."
        )
    return [(named or _format_of(file), file) for file in files]


def _expand_url(url: str, named: str | None) -> list[tuple[str, str]]:
    path = without_query(url)
    if _MAGIC.search(path.split("/", 3)[-1]):  # without the host, which may be an IPv6 address in brackets
        return _expand_files(url, named)
    if path.endswith("/index.json"):
        url = url.rpartition("/")[0]
    names = list(remote_files(url))
    if names == [""]:
        return [(named or _format_of(url), url)]
    files = [name for name in names if "/" not in name]
    folders = sorted({name.partition("/")[0] for name in names if "/" in name})
    return _expand_folder(_Folder(url.rstrip("/"), files, folders, lambda: select_images(names)), named)


@dataclasses.dataclass(frozen=True)
class _Folder:
    """A local or remote folder: its path, what is directly in it, and a function that returns the images in it."""

    path: str
    files: Sequence[str]
    folders: Sequence[str]
    images: Callable[[], Sequence[str]]


def _local_folder(path: str) -> _Folder:
    names = sorted(os.listdir(path))
    files = [name for name in names if os.path.isfile(os.path.join(path, name))]
    folders = [name for name in names if os.path.isdir(os.path.join(path, name))]
    lost = next((name for name in names if name[0] != "." and not os.path.exists(os.path.join(path, name))), None)
    if lost is not None:
        raise SourceError(
            f"{os.path.join(path, lost)} is a link to {os.readlink(os.path.join(path, lost))}, which does not exist, so its "
            "records would be missing without a word. Copy that file too, or remove the link."
        )
    return _Folder(path, files, folders, lambda: image_names(path))


def _format_of(path: str) -> str:
    if _POSITION.fullmatch(os.path.basename(without_query(path))):
        raise SourceError(f"{path} is a position that another loader saved. Use: meshfeed import-position.")
    extension = _extension(path)
    if extension in _ARRAY_RECORD:
        raise SourceError(f"{path} is an ArrayRecord file already. Read it with meshfeed.sources.ArrayRecord.")
    if extension in _READ_AS_IT_IS:
        raise SourceError(
            f"{path} need not be converted: meshfeed.sources.Tokens reads it as it is.{reader_hint(path)}"
        )
    if f".{extension}" in IMAGES:
        raise SourceError(
            f"{path} is one image. Pass the folder that contains the images: its subfolders, if it has any, are the classes."
        )
    if extension not in _EXTENSIONS:
        raise SourceError(
            f"the format of {path} is unknown. Expected a file name that ends in one of "
            f"{', '.join('.' + known for known in sorted(_EXTENSIONS))}. Name the format with --format: "
            f"{', '.join(FORMATS)}."
        )
    return _EXTENSIONS[extension]


def _extension(path: str) -> str:
    """Returns the extension that names the format: that of the content if the file is compressed."""
    name = os.path.basename(format_name(uncompressed_name(path))).lower()
    sharded = _SHARDED.search(name)
    return sharded[1] if sharded else name.rpartition(".")[2]


def _expand_folder(folder: _Folder, named: str | None) -> list[tuple[str, str]]:
    path, files = folder.path, folder.files
    if "dataset_dict.json" in files:
        splits = folder.folders
        raise SourceError(
            f"{path} is a Hugging Face dataset with the splits {list(splits)}. Convert one at a time, such as "
            f"{os.path.join(path, splits[0]) if splits else path}."
        )
    if named in _FOLDERS:
        return [(str(named), path)]
    if "state.json" in files and "dataset_info.json" in files:
        return [("huggingface", path)]
    if "index.json" in files:
        return [("mds", path)]
    return _files_in(folder, named)


def _files_in(folder: _Folder, named: str | None) -> list[tuple[str, str]]:
    path = folder.path
    files = [name for name in folder.files if name[0] not in "._" and not _is_manifest(path, name)]
    if named is not None and files:
        return [(named, os.path.join(path, name)) for name in files]
    known = [name for name in files if compression_of(name) is not None or _extension(name) in _EXTENSIONS]
    if known:
        return [(_format_of(os.path.join(path, name)), os.path.join(path, name)) for name in known]
    if named is None and folder.images():
        return [("images", path)]
    if ready := next((name for name in files if _extension(name) in _ARRAY_RECORD + _READ_AS_IT_IS), None):
        return [(_format_of(os.path.join(path, ready)), path)]  # which raises
    names = sorted([*folder.files, *folder.folders])
    what = f"It holds {', '.join(names[:_LISTED])}{', …' if len(names) > _LISTED else ''}" if names else "It is empty"
    raise SourceError(
        f"the folder {path} holds no data that convert can read. {what}. Expected files, a Hugging Face dataset, an MDS "
        "folder, or images. Name files with a glob, and their format with --format."
    )


def _is_manifest(path: str, name: str) -> bool:
    return name == NAME and is_meshfeeds(read_file(os.path.join(path, name), source="convert"))


class RemoteInput(NamedTuple):
    """A file at a URL.

    Attributes:
      url: its URL.
      num_bytes: its size.
      version: see :func:`meshfeed._src.sources.files.paths.version_of`.
    """

    url: str
    num_bytes: int
    version: str


def remote_files(url: str) -> dict[str, RemoteInput]:
    """Returns the files of a folder by their path in it, in order; a file is the only one, without a name.

    Raises:
      SourceError: there is no such file or folder, or the server does not report a size; names it.
      OSError: the store does not answer.
    """
    info = file_info(url, "convert", None, fresh=True)
    if info.get("type") != "directory":
        return {"": _remote_input(url, info)}
    file_system, folder = open_file_system(url, "convert")
    with remote_errors(url, "convert"):
        found = file_system.find(folder, detail=True)
    start = len(folder.rstrip("/")) + 1
    files = {
        path[start:]: _remote_input(url_of(path, file_system, url, folder), found[path])
        for path in sorted(map(str, found))
    }
    # Some stores list a folder as an object without content.
    files = {name: file for name, file in files.items() if file.num_bytes or name[-1:] not in ("", "/")}
    _check_names(url, list(files))
    return files


def _check_names(url: str, names: Sequence[str]) -> None:
    """Raises SourceError unless names of objects are paths of different files below a folder."""
    known = set(names)
    for name in names:
        both = known.intersection(map(str, pathlib.PurePosixPath(name).parents))
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name:
            what = "which is no path below that folder"
        elif both:
            what = f"and {min(both)!r} too, which cannot be both a file and a folder"
        else:
            continue
        raise SourceError(f"{url} contains the object {name!r}, {what}. Rename it, or copy the data to a local disk.")


def _remote_input(url: str, info: dict[str, object]) -> RemoteInput:
    size = info.get("size")
    if not isinstance(size, int):
        raise SourceError(f"convert: the server does not report the size of {url}. Copy the file to a local disk.")
    return RemoteInput(url, size, version_of(info))


def download(url: str, target: pathlib.Path) -> None:
    """Downloads a file, or a folder with all that is in it.

    Raises:
      SourceError: it does not exist, or changes meanwhile; names it.
      OSError: it cannot be read after several attempts, or the disk is full.
    """
    downloads = Downloads(Retry(), _TIMEOUT_SECONDS)
    before = remote_files(url)
    for name, file in before.items():
        path = target / name if name else target
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as out:
            if file.num_bytes:
                downloads.run(
                    Download(RemoteBytes(file.url, file.num_bytes, "", "ShardCache"), out.fileno(), lambda: 0.0)
                )
            os.fsync(out.fileno())
    if remote_files(url) != before:
        raise SourceError(f"{url} changed while it was downloaded. Start the conversion again once it is complete.")

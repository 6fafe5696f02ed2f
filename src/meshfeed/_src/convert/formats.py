"""Recognizes the format of what is to be converted, and lists its files."""

from __future__ import annotations

import glob
import importlib
import os
import re
from collections.abc import Sequence

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.convert.images import image_names
from meshfeed._src.convert.inputs import Input
from meshfeed._src.sources.files.compression import compression_of
from meshfeed._src.sources.files.paths import expand_paths, is_url

FORMATS = {  # name → module and class, imported when needed: some need JAX, which takes long in each worker
    "csv": "csv_files.Csv",
    "huggingface": "tables.Datasets",
    "images": "images.ImageFolder",
    "jsonl": "text_files.JsonLines",
    "mds": "mds.Mds",
    "parquet": "tables.ParquetFiles",
    "text": "text_files.TextLines",
    "tfrecord": "tfrecord.TFRecords",
    "webdataset": "webdataset.WebDatasets",
}
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
_SHARDED = re.compile(r"\.(tfrecords?)-\d+-of-\d+$")  # TFDS puts the number after the extension
_POSITION = re.compile(r"process_\d+(-of-\d+)?\.json")
_FOLDERS = ("huggingface", "images", "mds")
_LISTED = 5


def open_format(name: str, columns: Sequence[str] | None) -> Input:
    """Returns what reads a format."""
    module, _, kind = FORMATS[name].partition(".")
    return getattr(importlib.import_module(f"meshfeed._src.convert.{module}"), kind)(columns)


def recognize(data: Sequence[str], named: str | None) -> tuple[str, list[str]]:
    """Returns the format of the inputs, and the files or folders to read, in order.

    Args:
      data: paths, globs and folders. The files of a folder or glob are sorted by name.
      named: the format, if the user named it.

    Raises:
      SourceError: an input is missing or empty, its format is unknown, or inputs have different formats.
      SettingsError: an input is a URL.
    """
    urls = [name for name in data if is_url(name)]
    if urls:
        raise SettingsError(
            f"convert reads local files and got {urls[0]!r}. Copy the data to a local or shared disk, or mount the bucket.",
            setting="data",
        )
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
    twice = next((path for path in paths if paths.count(path) > 1), None) if len(set(paths)) < len(paths) else None
    if twice is not None:
        raise SourceError(f"{twice} is given twice; its records would be written twice. Name it once.")
    if kind == "images" and len(paths) > 1:
        raise SourceError(
            f"convert takes one folder of images and got {len(paths)}: {', '.join(paths[:_LISTED])}. Pass the folder that "
            "contains them: its subfolders are the classes. Or convert each to a folder of its own."
        )
    return kind, paths


def _expand(name: str, named: str | None) -> list[tuple[str, str]]:
    """Returns format and path of what a path, a glob or a folder stands for."""
    path = os.path.abspath(os.path.expanduser(name))
    matches = sorted(glob.glob(path)) if not os.path.exists(path) else []
    if matches and all(os.path.isdir(match) for match in matches):
        return [item for match in matches for item in _expand(match, named)]
    if os.path.isdir(path):
        return _expand_folder(path, named)
    if os.path.basename(path) == "index.json":
        return _expand_folder(os.path.dirname(path), named)
    files = expand_paths(name, source="convert")
    return [(named or _format_of(file), file) for file in files if not file.endswith(".meshfeed-index")]


def _format_of(path: str) -> str:
    name = os.path.basename(path).lower()
    if compression_of(name) is not None:
        name = name.rpartition(".")[0]
    sharded = _SHARDED.search(name)
    if _POSITION.fullmatch(name):
        raise SourceError(f"{path} is a position that another loader saved. Use: meshfeed import-position.")
    extension = sharded[1] if sharded else name.rpartition(".")[2]
    if extension in ("array_record", "arrayrecord"):
        raise SourceError(f"{path} is an ArrayRecord file already. Read it with meshfeed.sources.ArrayRecord.")
    if extension not in _EXTENSIONS:
        raise SourceError(
            f"the format of {path} is unknown. Expected a file name that ends in one of "
            f"{', '.join('.' + known for known in sorted(_EXTENSIONS))}. Name the format with --format: "
            f"{', '.join(sorted(FORMATS))}."
        )
    return _EXTENSIONS[extension]


def _expand_folder(path: str, named: str | None) -> list[tuple[str, str]]:
    names = sorted(os.listdir(path))
    if "dataset_dict.json" in names:
        splits = [name for name in names if os.path.isdir(os.path.join(path, name))]
        raise SourceError(
            f"{path} is a Hugging Face dataset with the splits {splits}. Convert one at a time, such as "
            f"{os.path.join(path, splits[0]) if splits else path}."
        )
    if named in _FOLDERS:
        return [(str(named), path)]
    if "state.json" in names and "dataset_info.json" in names:
        return [("huggingface", path)]
    if "index.json" in names:
        return [("mds", path)]
    return _files_in(path, names, named)


def _files_in(path: str, names: Sequence[str], named: str | None) -> list[tuple[str, str]]:
    files = [name for name in names if os.path.isfile(os.path.join(path, name)) and name[0] not in "._"]
    if named is not None and files:
        return [(named, os.path.join(path, name)) for name in files]
    known = [name for name in files if compression_of(name) is not None or _known(name)]
    if known:
        return [(_format_of(os.path.join(path, name)), os.path.join(path, name)) for name in known]
    if named is None and image_names(path):
        return [("images", path)]
    what = f"It holds {', '.join(names[:_LISTED])}{', …' if len(names) > _LISTED else ''}" if names else "It is empty"
    raise SourceError(
        f"the folder {path} holds no data that convert can read. {what}. Expected files, a Hugging Face dataset, an MDS "
        "folder, or images. Name files with a glob, and their format with --format."
    )


def _known(name: str) -> bool:
    lower = name.lower()
    return lower.rpartition(".")[2] in _EXTENSIONS or _SHARDED.search(lower) is not None

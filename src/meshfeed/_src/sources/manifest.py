"""Makes the manifest of files that are there already."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.base.types import JsonValue, RandomAccessSource
from meshfeed._src.sources import parquet
from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record.source import ArrayRecord
from meshfeed._src.sources.documents import lengths_of
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.formats import source_of
from meshfeed._src.sources.files.manifest import (
    NAME,
    DataManifest,
    FileEntry,
    Lengths,
    digest_file,
    is_manifest,
    read_manifest,
    write_manifest,
)
from meshfeed._src.sources.files.shards import need_cache
from meshfeed._src.sources.tokens import files as token_files
from meshfeed._src.sources.tokens.source import LENGTHS_KEY, Tokens
from meshfeed._src.sources.webdataset import source as webdataset

SOURCES = ("ArrayRecord", "Parquet", "Tokens", "WebDataset")


def make_manifest(
    paths: file_paths.Paths,
    output: str | None = None,
    *,
    source: str | None = None,
    lengths: str | None = None,
    dtype: DTypeLike | None = None,
    eod: int | None = None,
    digests: bool = True,
) -> DataManifest:
    """Looks at each file, and writes the manifest.

    Args:
      paths: a path, a glob, or a list of them.
      output: path of the manifest; by default, ``manifest.json`` in the folder of the files.
      source: the source that reads the files, one of ``SOURCES``; by default, found by the name of the first file.
      lengths: leaf whose length is listed for each record, for :class:`meshfeed.sources.Packed`. Reads all records.
      dtype: integer dtype of token files without a header; with ``lengths``, that of the tokens that ArrayRecord records
        consist of.
      eod: token that ends a document; lists the lengths of the documents of token files. Reads all tokens.
      digests: whether to read the files for their digests.

    Returns:
      The manifest.

    Raises:
      SettingsError: if the source is not known, the files are in several folders and there is no ``output``, or the
        source has no such lengths.
      SourceError: if there are no files, or a file cannot be read; names it.
      CorruptDataError: if a file is damaged; names it.
    """
    names = [name for name in file_paths.expand_paths(paths, source="manifest") if not is_manifest(name)]
    source = source or source_of(names[0])
    if source not in SOURCES:
        raise SettingsError(
            f"{names[0]} is read by {source or 'no source, to judge by its name'}. Expected files for {', '.join(SOURCES)}: "
            "pass --source, or convert other formats with meshfeed convert. MDS data sets have an index of their own.",
            setting="source",
        )
    names = _SELECT.get(source, list)(names)
    if any(file_paths.is_url(name) for name in names):
        raise SettingsError(
            f"the manifest of {names[0]} cannot be written: all of a file is read for its digest. Write the manifest of the "
            "local files before they are uploaded, and upload it with them.",
            setting="paths",
        )
    need_cache(names, None, source=source)
    inspect = _inspector(source, dtype)
    output = output or _default_output(names)
    files = file_paths.in_threads(lambda name: _finished(inspect(name), digests), names)
    made = _made(output, files)
    write_manifest(output, source, files, made=made)
    if lengths is not None or eod is not None:
        write_manifest(output, source, files, lengths=_lengths(output, source, lengths, dtype, eod), made=made)
    return read_manifest(output)


def _made(output: str, files: Sequence[FileEntry]) -> JsonValue:
    """What an earlier manifest of the same files says about how they were made."""
    try:
        earlier = read_manifest(output)
    except (SourceError, CorruptDataError, OSError):
        return None
    listed = [(file.path, file.num_bytes, file.digest) for file in earlier.files]
    found = [(file.path, file.num_bytes, file.digest or old[2]) for file, old in zip(files, listed, strict=False)]
    return earlier.made if listed == found and len(files) == len(listed) else None


_SELECT: dict[str, Callable[[list[str]], list[str]]] = {
    "Tokens": token_files.token_files,
    "WebDataset": webdataset.archives,
}


def _inspector(source: str, dtype: DTypeLike | None) -> Callable[[str], FileEntry]:
    if source == "ArrayRecord":
        return lambda name: readers.inspect_file(name).entry()
    if source == "Parquet":
        return lambda name: parquet.inspect(name, None).entry()
    if source == "WebDataset":
        return lambda name: webdataset.inspect(name, None).entry()
    wanted = None if dtype is None else np.dtype(dtype)
    return lambda name: token_files.inspect(name, wanted, None).entry()


def _finished(entry: FileEntry, digests: bool) -> FileEntry:
    return dataclasses.replace(entry, digest=digest_file(entry.path) if digests else None)


def _default_output(names: list[str]) -> str:
    folders = {file_paths.split(name)[0] for name in names}
    if len(folders) > 1:
        raise SettingsError(
            f"the files are in {len(folders):,} folders, such as {min(folders)} and {max(folders)}. Pass --output, or write "
            "a manifest per folder.",
            setting="output",
        )
    return folders.pop() + NAME


def _lengths(
    manifest: str, source: str, key: str | None, dtype: DTypeLike | None, eod: int | None
) -> dict[str, Lengths]:
    if source == "Tokens":
        documents = Tokens.documents(manifest, dtype=dtype, eod=eod)
        return {LENGTHS_KEY: Lengths(documents.lengths(), documents.documents_per_file(), eod)}
    if key is None:
        raise SettingsError(f"eod={eod} is for token files, and these are for {source}. Pass --lengths.", setting="eod")
    return {key: Lengths(lengths_of(_documents(manifest, source, key, dtype), lambda record: len(record[key])))}


def _documents(manifest: str, source: str, key: str, dtype: DTypeLike | None) -> RandomAccessSource:
    """Returns a source of dicts with the leaf ``key``."""
    if source == "Parquet":
        return parquet.Parquet(manifest, [key])
    if source == "ArrayRecord" and dtype is not None:
        return ArrayRecord(manifest, lambda record: {key: np.frombuffer(record, dtype)})
    raise SettingsError(
        f"--lengths {key} of files for {source}. Expected Parquet files with that column, token files, or ArrayRecord files "
        "of bare tokens with --dtype. Write the manifest from Python for other encodings.",
        setting="lengths",
    )

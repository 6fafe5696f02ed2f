"""Makes the manifest of files that are there already, of any format; ``files/manifest.py`` reads and writes manifests."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, shorten
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources import parquet, webdataset
from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record.source import ArrayRecord
from meshfeed._src.sources.decode import parse_example
from meshfeed._src.sources.documents import lengths_of
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import digest_remote
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
from meshfeed._src.sources.files.shard import Shard, need_cache
from meshfeed._src.sources.tokens import formats as token_formats
from meshfeed._src.sources.tokens.files import LENGTHS_KEY
from meshfeed._src.sources.tokens.source import Tokens

WORKERS = 16
"""Files that are read at once."""

_INSPECT: dict[str, Callable[[str, np.dtype[Any] | None], Shard]] = {
    "ArrayRecord": lambda name, _: readers.inspect(name, None),
    "Parquet": lambda name, _: parquet.inspect(name, None),
    "Tokens": lambda name, dtype: token_formats.inspect(name, dtype, None),
    "WebDataset": lambda name, _: webdataset.inspect(name, None),
}
_SELECT: dict[str, Callable[[list[str]], list[str]]] = {
    "Tokens": token_formats.token_files,
    "WebDataset": webdataset.archives,
}


def make_manifest(
    paths: file_paths.Paths,
    output: str | None = None,
    *,
    source: str | None = None,
    lengths: str | None = None,
    dtype: DTypeLike | None = None,
    eod: int | None = None,
    digests: bool = True,
    workers: int = WORKERS,
) -> DataManifest:
    """Looks at each file, and writes the manifest.

    Args:
      paths: a path, a glob, a URL supported by fsspec, or a list of them.
      output: path or URL of the manifest; by default, ``manifest.json`` in the folder of the files.
      source: the source that reads the files: ArrayRecord, Parquet, Tokens or WebDataset. By default, found by the name of
        the first file.
      lengths: leaf whose length is listed for each record, for :class:`meshfeed.sources.Packed`. Reads all records.
      dtype: integer dtype of token files without a header; with ``lengths``, that of the tokens that ArrayRecord records,
        or a feature of bytes in them, consist of.
      eod: token that ends a document; lists the lengths of the documents of token files. Reads all tokens.
      digests: whether to read the files for their digests. Those of Google Cloud Storage and Azure come from the store.
      workers: files that are read at once.

    Returns:
      The manifest.

    Raises:
      SettingsError: if the source is not known, the files are in several folders or on an HTTP server and there is no
        ``output``, or the source has no such lengths.
      SourceError: if there are no files, or a file cannot be read; names it.
      CorruptDataError: if a file is damaged; names it.
    """
    names = [name for name in file_paths.expand_paths(paths, source="manifest") if not is_manifest(name)]
    source = source or source_of(names[0])
    if source not in _INSPECT:
        raise SettingsError(
            f"{names[0]} is read by {source or 'no source, to judge by its name'}. Expected files for {', '.join(_INSPECT)}: "
            "pass --source, or convert other formats with meshfeed convert. MDS data sets have an index of their own.",
            setting="source",
        )
    dtype = None if dtype is None else _numbers(dtype, "iu" if source == "Tokens" else "iuf")
    names = _SELECT.get(source, list)(names)
    need_cache(names, None, source=source)
    output = output or _default_output(names)
    if file_paths.is_http(output):  # before the files are read
        raise SettingsError(
            f"output={output!r} cannot be written: an HTTP server only serves files. Name a path or a URL of a bucket.",
            setting="output",
        )
    files = file_paths.in_threads(lambda name: _describe(name, source, dtype, digests), names, workers)
    made = _made(output, files)
    wanted = {}
    if lengths is not None or eod is not None:
        with tempfile.TemporaryDirectory() as folder:  # or an error would leave a manifest without the lengths it had
            write_manifest(f"{folder}/{NAME}", source, files)
            wanted = _lengths(f"{folder}/{NAME}", source, lengths, dtype, eod)
    write_manifest(output, source, files, lengths=wanted, made=made)
    return read_manifest(output)


def _numbers(dtype: DTypeLike, kinds: str) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.kind not in kinds:
        raise SettingsError(f"dtype={dtype!r}. Expected that of the tokens, such as uint16.", setting="dtype")
    return found


def _made(output: str, files: Sequence[FileEntry]) -> JsonValue:
    """Returns what an earlier manifest of the same files has about how they were made."""
    try:
        earlier = read_manifest(output)
    except (SourceError, CorruptDataError, OSError):
        return None
    listed = [(file.path, file.num_bytes, file.digest) for file in earlier.files]
    # Files that were written again are not those that the earlier manifest describes. Digests count if they were asked for.
    found = [(file.path, file.num_bytes, file.digest or old[2]) for file, old in zip(files, listed, strict=False)]
    return earlier.made if listed == found and len(files) == len(listed) else None


def _describe(name: str, source: str, dtype: DTypeLike | None, digests: bool) -> FileEntry:
    """Looks at a file; reads all of it for its digest."""
    shard = _INSPECT[source](name, None if dtype is None else np.dtype(dtype))
    if not digests:
        return shard.entry()
    digest = digest_remote(shard.remote) if file_paths.is_url(name) else digest_file(name)
    return dataclasses.replace(shard.entry(), digest=digest)


def _default_output(names: list[str]) -> str:
    folders = {file_paths.split(name)[0] for name in names}
    if len(folders) > 1:
        raise SettingsError(
            f"the files are in {len(folders):,} folders, such as {min(folders)} and {max(folders)}. Pass --output, or write "
            "a manifest per folder.",
            setting="output",
        )
    folder = folders.pop()
    if file_paths.is_http(folder):
        raise SettingsError(
            f"the manifest of {names[0]} cannot be written beside the files: an HTTP server only serves files. Pass --output "
            "with a path, and put the manifest there yourself, or pass its path to the source.",
            setting="output",
        )
    return folder + NAME


def _lengths(
    manifest: str, source: str, key: str | None, dtype: DTypeLike | None, eod: int | None
) -> dict[str, Lengths]:
    if source == "Tokens":
        documents = Tokens.documents(manifest, dtype=dtype, eod=eod)
        return {LENGTHS_KEY: Lengths(documents.lengths(), documents.documents_per_file(), eod)}
    if key is None:
        raise SettingsError(f"eod={eod} is for token files, and these are for {source}. Pass --lengths.", setting="eod")
    if source == "Parquet":
        return {key: Lengths(lengths_of(parquet.Parquet(manifest, [key]), functools.partial(_length, key=key)))}
    if source == "ArrayRecord":
        records = ArrayRecord(manifest)
        return {key: Lengths(lengths_of(records, _measure(records, key, dtype)))}
    raise _no_lengths(source, key)


def _length(record: Mapping[str, Any], key: str) -> int:
    """The length of a list in a record of Parquet."""
    value = record[key]
    if not isinstance(value, list | np.ndarray) or not np.ndim(value):
        what = "no value" if value is None else f"{shorten(str(value), 40)}, which is no list"
        raise SourceError(f"--lengths {key}: it has {what}. Expected a column of lists, whose lengths are counted.")
    return len(value)


def _no_lengths(source: str, key: str) -> SettingsError:
    return SettingsError(
        f"--lengths {key} of files for {source}. Expected Parquet files with that column, token files, or ArrayRecord files "
        "of tf.train.Example, or of bare tokens with --dtype. Write the manifest from Python for other encodings.",
        setting="lengths",
    )


def _measure(source: ArrayRecord, key: str, dtype: DTypeLike | None) -> Callable[[bytes], int]:
    """Returns a function of a record: the length of the feature ``key``, or of bare tokens."""
    width = None if dtype is None else np.dtype(dtype).itemsize
    if not _is_example(source.read_raw([0])[0]):
        if width is None:
            raise _no_lengths("ArrayRecord", key)
        return lambda record: len(np.frombuffer(record, dtype))
    return lambda record: _feature_length(record, key, width)


def _is_example(record: bytes) -> bool:
    try:
        return bool(parse_example(record))
    except ValueError:
        return False


def _feature_length(record: bytes, key: str, width: int | None) -> int:
    """Returns the number of values of a feature of an Example; of one value of bytes, its items of ``width`` bytes.

    Raises:
      ValueError: the record is not an Example with that feature, or its bytes are not items of that width.
    """
    values = parse_example(record, (key,)).get(key)
    if values is None:
        raise ValueError(f"it has no feature {key!r}. It has {sorted(parse_example(record))}; pass one of these.")
    if not isinstance(values, list) or len(values) != 1:
        return len(values)
    if width is None or len(values[0]) % width:
        raise ValueError(
            f"the feature {key!r} holds {len(values[0]):,} bytes. Pass --dtype, the dtype of the array that they are."
        )
    return len(values[0]) // width

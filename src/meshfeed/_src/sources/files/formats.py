"""Formats and compressions by file name: the source that reads a file, what to pass to the feed, and decompression."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import re
import shutil
from collections.abc import Callable
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from meshfeed._src.base.errors import CorruptDataError, MeshfeedError, SourceError
from meshfeed._src.sources.files.paths import format_name

# The header of llm.c's token files: its bytes, and (magic number, version) → dtype. Here, because `meshfeed convert` writes
# them, and starts sooner without sources/tokens.
LLM_C_BYTES = 1024
LLM_C_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


class _Format(NamedTuple):
    """What files with some extension are.

    Attributes:
      what: the kind of file, for errors.
      reader: what to pass to the feed.
      source: the class in ``meshfeed.sources`` that reads them; None if a library does.
    """

    what: str
    reader: str
    source: str | None = None


_LOAD = "datasets.load_dataset({format!r}, data_files={path!r}, split='train')"
_ARRAY_RECORD = _Format("an ArrayRecord file", "meshfeed.sources.ArrayRecord({path!r}, decode=…)", "ArrayRecord")
_JSON = _Format("a JSON file", _LOAD.replace("{format!r}", "'json'"))
_TFRECORD = _Format(
    "a TFRecord file",
    "meshfeed.sources.TFData(open), where open(lane_index, num_lanes) makes a tf.data.Dataset, or convert it with meshfeed "
    "convert, which needs no TensorFlow",
)
_TAR = _Format("a tar archive", "meshfeed.sources.WebDataset({path!r}, decode=…)", "WebDataset")
_FOLDER = (
    "meshfeed.sources.Map(meshfeed.sources.Folder({folder}), decode), where decode turns a record, the path and bytes of a "
    "file, into arrays"
)
_DECODED = " (meshfeed.sources.DecodeImage decodes the bytes of an image)"
_IMAGE = _Format("an image", f"{_FOLDER.format(folder='folder')}{_DECODED}", "Folder")
_ZARR = _Format("a zarr array", "meshfeed.sources.TensorStore({path!r})", "TensorStore")

_FORMATS = {  # by file name extension
    "array_record": _ARRAY_RECORD,
    "arrayrecord": _ARRAY_RECORD,
    "arrow": _Format("an Arrow file", "datasets.Dataset.from_file({path!r})"),
    "bin": _Format("a file of tokens", "meshfeed.sources.Tokens({path!r}, sequence_length, dtype=…)", "Tokens"),
    "csv": _Format("a CSV file", _LOAD.replace("{format!r}", "'csv'")),
    "idx": _Format("a Megatron index", "meshfeed.sources.Tokens({path!r}, sequence_length)", "Tokens"),
    "json": _JSON,
    "jsonl": _JSON,
    "mds": _Format(
        "a shard of Mosaic Streaming", "meshfeed.sources.MDS(folder), with the folder of its index.json", "MDS"
    ),
    "npy": _Format(
        "a numpy file",
        "meshfeed.sources.Memory(numpy.load({path!r}, mmap_mode='r')), or meshfeed.sources.Tokens({path!r}, "
        "sequence_length) if it holds one run of tokens",
        "Tokens",
    ),
    "parquet": _Format("a Parquet file", "meshfeed.sources.Parquet({path!r})", "Parquet"),
    **dict.fromkeys(("jpeg", "jpg", "png", "webp"), _IMAGE),
    **dict.fromkeys(("tar", "tbz", "tbz2", "tgz", "txz", "tzst"), _TAR),
    "tfrecord": _TFRECORD,
    "tfrecords": _TFRECORD,
    "txt": _Format("a text file", _LOAD.replace("{format!r}", "'text'")),
    "zarr": _ZARR,
    "zarr3": _ZARR,
}
_EXTENSION = re.compile(rf"\.({'|'.join(sorted(_FORMATS, key=len, reverse=True))})(?=$|[.-])", re.IGNORECASE)


def _format_of(name: str) -> _Format | None:
    base = os.path.basename(format_name(name).rstrip("/"))
    extensions = _EXTENSION.findall(base)  # "x.array_record-00000-of-00016", "x.csv.gz"
    return _FORMATS[extensions[-1].lower()] if extensions else None


def source_of(path: str) -> str | None:
    """Returns the name of the class in ``meshfeed.sources`` that reads a file, by its name; None if there is none."""
    found = _format_of(path)
    return None if found is None else found.source


def names_other_format(path: str, source: str) -> bool:
    """Whether the last extension of a name, except of a compression, is that of a format that ``source`` does not read."""
    found = _FORMATS.get(uncompressed_name(path).rpartition(".")[2].lower())
    return found is not None and found.source != source


def reader_hint(path: object, *, unless: str = "") -> str:
    """Returns a sentence that names the file format and what to pass to the feed, with a leading space.

    Empty if the format is unknown, if ``path`` is no path, glob, URL or list of them (its first item counts), or if the
    source named ``unless`` reads such files.
    """
    if isinstance(path, list | tuple) and path:
        path = path[0]
    if not isinstance(path, str | os.PathLike):
        return ""
    name = os.fspath(path)
    found = _format_of(name)
    if found is None or found.source == unless:
        return ""
    return f" Its name suggests {found.what}: pass {found.reader.format(path=name)}."


def folder_hint(path: str | os.PathLike[str]) -> str:
    """Returns what to pass to the feed for a local folder, by the first of its files of a known format.

    The sentence has a leading space, and is empty if ``path`` is no folder or has no files.
    """
    folder = os.fspath(path)
    if os.path.isfile(os.path.join(folder, "state.json")) and os.path.isfile(os.path.join(folder, "dataset_info.json")):
        return f" It is a dataset that save_to_disk wrote: pass datasets.load_from_disk({folder!r})."
    walk = itertools.islice(os.walk(folder), _FOLDERS_LOOKED_AT)
    files = [os.path.join(where, name) for where, _, names in walk for name in sorted(names)]
    if not files:
        return ""
    of_a_format = [file for file in files if _format_of(file) is not None]
    known = next((file for file in of_a_format if _format_of(file) is not _JSON), next(iter(of_a_format), None))
    found = None if known is None else _format_of(known)
    if known is None or found is None or found is _IMAGE:
        return f" It is a folder: pass {_FOLDER.format(folder=repr(folder))}{_DECODED if found else ''}."
    pattern = os.path.join(os.path.dirname(known), f"*{os.path.splitext(known)[1]}")
    return f" It is a folder, with {found.what} in it: pass {found.reader.format(path=pattern)}."


_FOLDERS_LOOKED_AT = 100
_CHUNK_BYTES = 1 << 20
_COMPRESSIONS = {"gz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zstd", "zstd": "zstd", "br": "br", "snappy": "snappy"}
_MAGIC_BYTES = {
    b"\x1f\x8b": "gzip (.gz)",
    b"BZh": "bzip2 (.bz2)",
    b"\xfd7zXZ\0": "xz (.xz)",
    b"\x28\xb5\x2f\xfd": "zstd (.zst)",
    b"\x04\x22\x4d\x18": "lz4",
}
_TARS = {"tgz": "gz", "tbz": "bz2", "tbz2": "bz2", "txz": "xz", "tzst": "zstd"}  # extensions of compressed archives


def compression_of(name: str) -> str | None:
    """Returns the compression that the last extension of a file name denotes, or None."""
    extension = format_name(name).rsplit(".", 1)[-1].lower()
    return _COMPRESSIONS.get(extension) or _TARS.get(extension)


def compression_in(head: bytes) -> str | None:
    """Returns the compression of a file that begins with ``head``, for messages; None if there is none."""
    return next((name for magic, name in _MAGIC_BYTES.items() if head.startswith(magic)), None)


def uncompressed_name(name: str) -> str:
    """Returns the name of the content of a compressed file; the name itself if the file is not compressed."""
    stem, _, extension = format_name(name).rpartition(".")
    return f"{stem}.tar" if extension.lower() in _TARS else stem if compression_of(name) else name


def decompress(compression: str, source: str, target: str, num_bytes: int | None, *, what: str) -> None:
    """Decompresses a file into another, which exists; its former content is dropped. ``what`` is the file in errors.

    ``num_bytes``, the size of the content, is checked if given.

    Raises:
      CorruptDataError: if the compressed bytes are damaged, or the content has a different size.
      SourceError: if the library for this compression is not installed, or snappy's framing format was used.
      OSError: if the disk is full, or a file cannot be read.
    """
    try:
        with open(source, "rb") as stored, open(target, "r+b") as out:
            out.truncate(0)
            if compression == "snappy":
                packed, codec = stored.read(), _library("pyarrow", what).Codec("snappy")
                out.write(codec.decompress(packed, num_bytes or _snappy_size(packed, what)).to_pybytes())
            elif compression in _DECODERS:
                name, make_decoder = _DECODERS[compression]
                _write_members(functools.partial(make_decoder, _library(name, what)), stored, out)
            else:
                if not os.fstat(stored.fileno()).st_size:  # which both libraries take for no content
                    raise EOFError("it is empty")
                with _open(compression, stored, what) as content:
                    shutil.copyfileobj(content, out, _CHUNK_BYTES)
    except (MeshfeedError, MemoryError):
        raise
    except Exception as error:  # whatever the libraries raise for bytes that they do not accept
        if isinstance(error, OSError) and error.errno is not None:  # damage has no number
            raise
        raise _damaged(what, compression, error) from error
    found = os.path.getsize(target)
    if num_bytes is not None and found != num_bytes:
        raise _damaged(what, compression, f"{found:,} bytes instead of {num_bytes:,}")


def _snappy_size(packed: bytes, what: str) -> int:
    """Returns the size of the content, a varint with which a block of snappy begins."""
    if packed.startswith(b"\xff\x06\0\0sNaPpY"):
        raise SourceError(
            f"{what} is in the framing format of snappy, of which only single blocks are read. Compress the content with "
            "zstd or gzip instead, or decompress it."
        )
    size = 0
    for number, byte in enumerate(packed[:5]):
        size |= (byte & 127) << 7 * number
        if byte < 128:
            return size
    raise EOFError("it does not begin with a size")


def _write_members(make_decoder: Callable[[], Any], stored: BinaryIO, out: BinaryIO) -> None:
    """Writes the content of all members of a file; zeros after a member are padding.

    The files of bz2 and lzma end without an error at the first member that is damaged.
    """
    decoder, content = make_decoder(), b""
    while content := content or stored.read(_CHUNK_BYTES):
        if decoder.eof:
            content = content.lstrip(b"\0")
            if not content:
                continue
            decoder = make_decoder()
        out.write(decoder.decompress(content, _CHUNK_BYTES))
        while not (decoder.needs_input or decoder.eof):
            out.write(decoder.decompress(b"", _CHUNK_BYTES))
        content = decoder.unused_data
    if not decoder.eof:
        raise EOFError("it ends within a member")


def _damaged(what: str, compression: str, error: object) -> CorruptDataError:
    return CorruptDataError(
        f"{what} cannot be decompressed ({compression}: {error}). Its bytes are not those that were written. Write or copy "
        "it again.",
        path=what,
    )


def _library(name: str, what: str) -> ModuleType:
    """Imports a library when it is needed: pyarrow is large, and a Python may be built without the others."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = "Run: pip install pyarrow." if name == "pyarrow" else "Use a Python that was built with it."
        raise SourceError(f"{what} is compressed, which needs {name}. {hint}") from error


def _open(compression: str, stored: BinaryIO, what: str) -> Any:
    """Returns a readable file of the decompressed content."""
    if compression == "gz":
        return _library("gzip", what).open(stored)
    return _library("pyarrow", what).CompressedInputStream(stored, {"br": "brotli"}.get(compression, compression))


_DECODERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bz2": ("bz2", lambda library: library.BZ2Decompressor()),
    "xz": ("lzma", lambda library: library.LZMADecompressor(library.FORMAT_XZ)),
}

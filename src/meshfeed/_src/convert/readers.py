"""Formats that a library or one of our sources reads: Parquet, Hugging Face datasets, tar archives, MDS, and images."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError, missing_package
from meshfeed._src.convert.inputs import Input, Scan, align, binary, flags, integers, stamp, to_bytes, walk, with_types
from meshfeed._src.sources.files import tar
from meshfeed._src.sources.files.manifest import digest_of
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed._src.sources.files.parquet import ParquetFile
from meshfeed._src.sources.files.paths import name_bytes
from meshfeed._src.sources.files.shard_cache import ShardCache
from meshfeed._src.sources.files.spans import read_spans

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from meshfeed._src.sources.mds import MDS

_ARROW_FILE = b"ARROW1"
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_BLOCK_BYTES = 8 << 20  # of samples that are read together, if all have the same size
_BLOCK_ROWS = 1000


def _row_blocks(start: int, stop: int, rows: int) -> Iterator[range]:
    return (range(low, min(low + rows, stop)) for low in range(start, stop, rows))


def _rows_at_once(num_records: int, num_bytes: int) -> int:
    """Returns the number of records to read together, given the number of all and their size together."""
    return max(1, min(_BLOCK_ROWS, _BLOCK_BYTES * num_records // max(num_bytes, 1)))


class _Labelled(Input):
    """A format in which Hugging Face datasets may have stored the names of the classes that numbers stand for."""

    def scan_of(self, num_records: int, stored: pa.Schema) -> Scan:
        """Returns what a file with a schema holds."""
        classes = {name: list(_classes(feature, name)) for name, feature in _features(stored).items()}
        named = {name: found for name, found in classes.items() if found}
        return Scan(num_records, plain(with_content(stored)), more={"class_names": named} if named else None)

    def check_scans(self, paths: Sequence[str], scans: Sequence[Scan], columns: Sequence[str]) -> None:
        """See :class:`Input`: the same number must stand for the same class in all files."""
        known: dict[tuple[str, int], tuple[str, str]] = {}
        for path, scan in zip(paths, scans, strict=True):
            declared = (scan.more or {}).get("class_names", {})
            chosen = [(name, *one) for name in columns for one in declared.get(name, ())]
            for name, place, classes in chosen:
                for number, found in enumerate(classes):
                    before, first = known.setdefault((place, number), (found, path))
                    if found != before:
                        raise SourceError(
                            f"{path}: {number} in the column {name!r} stands for the class {found!r}, and in {first} for "
                            f"{before!r}. Write both with the same classes (Dataset.cast), convert them separately, or leave "
                            "the column out with --columns."
                        )


def _classes(feature: object, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the place and the names of the classes that a feature declares."""
    if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
        if feature.get("names"):  # some state only how many there are
            yield name, list(feature["names"])
    elif isinstance(feature, dict):
        for key, part in feature.items():
            yield from _classes(part, name if key == "feature" and "_type" in feature else f"{name}/{key}")  # a list
    elif isinstance(feature, list):  # how earlier versions stored a list
        yield from _classes(feature[0] if feature else None, name)


class ParquetFiles(_Labelled):
    """Rows of Parquet files."""

    name = "parquet"

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        with ParquetFile(path) as file:
            return self.scan_of(file.metadata.num_rows, file.schema)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        with ParquetFile(path) as file:
            names = [name for name in schema.names if name in file.schema.names]
            for first, batch in file.batches(start, stop, names):
                batch = content_of_files(batch, file.schema, path, first, None)
                yield align(batch, plain(batch.schema), first)


def plain(schema: pa.Schema) -> pa.Schema:
    """Returns a schema with the type of the values of dictionaries, and plain text and bytes in place of views.

    Arrow lacks many functions of both, and joins neither with the plain type of another file.
    """
    import pyarrow as pa

    def change(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if pa.types.is_string_view(kind):
            return pa.large_string()
        return pa.large_binary() if pa.types.is_binary_view(kind) else kind

    return with_types(schema, change)


class Datasets(_Labelled):
    """Hugging Face datasets: folders that ``save_to_disk`` wrote, and Arrow files."""

    name = "huggingface"

    def num_bytes(self, path: str) -> int:
        """See :class:`Input`."""
        if os.path.isfile(path):
            return super().num_bytes(path)
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.endswith(".arrow"))

    def files(self, path: str) -> Iterable[str]:
        """See :class:`Input`."""
        return [path] if os.path.isfile(path) else (os.path.join(path, name) for name in sorted(walk(path)))

    def _open(self, path: str) -> datasets.Dataset:
        try:
            import datasets
        except ImportError as error:
            raise missing_package(f"reading {path}", error, "hf") from error
        _check_state(path)
        _check_stream(path)
        try:
            found = datasets.Dataset.from_file(path) if os.path.isfile(path) else datasets.load_from_disk(path)
        except Exception as error:  # whatever Arrow, json and datasets raise for a damaged folder
            raise CorruptDataError(
                f"{path} cannot be opened as a Hugging Face dataset: {error}. Save it again with save_to_disk.",
                path=path,
            ) from error
        assert isinstance(found, datasets.Dataset)  # formats.py refuses a folder of several splits
        return found.with_format("arrow")

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        dataset = self._open(path)
        return self.scan_of(len(dataset), dataset.features.arrow_schema)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        dataset = self._open(path)
        declared = dataset.features.arrow_schema
        folder = os.path.dirname(path) if os.path.isfile(path) else path
        for rows in _row_blocks(start, stop, _rows_at_once(scan.num_records, self.num_bytes(path))):
            first = rows.start
            table: pa.Table = dataset[rows.start : rows.stop]  # type: ignore[assignment]  # formatted as Arrow
            for batch in table.select([name for name in schema.names if name in table.column_names]).to_batches():
                batch = content_of_files(batch, declared, path, first, folder)
                yield align(batch, plain(batch.schema), first)
                first += batch.num_rows


def _check_stream(path: str) -> None:
    """Raises SourceError for a file of Arrow that is no stream, which is all that the library reads."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
            raise SourceError(
                f"{path} is an Arrow file with a footer, as Feather is. Expected a stream of Arrow, as Hugging Face datasets "
                "writes it. Write the table as Parquet: "
                "pyarrow.parquet.write_table(pyarrow.feather.read_table(FILE), 'FILE.parquet')."
            )


def _check_state(path: str) -> None:
    """Raises CorruptDataError if a folder of a dataset lists files outside of it."""
    if os.path.isfile(path):
        return
    state = os.path.join(path, "state.json")
    try:
        with open(state, "rb") as file:
            names = [str(one["filename"]) for one in json.load(file)["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return  # the library's own errors say more
    for name in names:
        _check_inside(name, state)


def _check_inside(name: str, index: str) -> None:
    if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise CorruptDataError(
            f"{index} lists the file {name!r}, which is outside of its folder. Expected a name in the folder. Copy the data "
            "again from where it came.",
            path=index,
        )


_FILE_TYPES = ("Audio", "Image", "Pdf", "Video")


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Returns the features that Hugging Face datasets has stored in the metadata of a schema; none if there are none."""
    try:
        return dict(json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"])
    except (ValueError, KeyError, TypeError):
        return {}


def _replace(array: pa.Array, feature: object, read: Callable[[pa.StructArray], pa.Array]) -> pa.Array:
    """Returns an array with ``read(part)`` in place of the parts that the feature declares as files."""
    import pyarrow as pa

    if not isinstance(feature, dict) or not pa.types.is_struct(array.type):
        return array
    fields = [field.name for field in array.type]
    if feature.get("_type") in _FILE_TYPES:
        return read(array) if sorted(fields) == ["bytes", "path"] else array
    children = [_replace(part, feature.get(name), read) for name, part in zip(fields, array.flatten(), strict=True)]
    return pa.StructArray.from_arrays(children, names=fields) if fields else array


def with_content(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of :func:`content_of_files`."""
    import pyarrow as pa

    features = _features(schema)
    kinds = [
        _replace(pa.nulls(0, field.type), features.get(field.name), lambda array: array.field("bytes")).type
        for field in schema
    ]
    return pa.schema(list(zip(schema.names, kinds, strict=True)))


def content_of_files(
    batch: pa.RecordBatch, schema: pa.Schema, path: str, first_record: int, folder: str | None
) -> pa.RecordBatch:
    """Returns a batch with bytes in place of images and sounds, which Hugging Face stores in place or as paths.

    Args:
      batch: rows.
      schema: the schema of their file, with the metadata that declares such columns. Any other struct stays a struct.
      path: the file, for messages.
      first_record: number of the first row in it.
      folder: files in this folder may be read; None for no file.

    Raises:
      SourceError: a path has no content beside it, and is outside of the folder or does not exist.
    """
    import pyarrow as pa

    features = _features(schema)
    if not any(isinstance(features.get(name), dict) for name in batch.schema.names):
        return batch

    def read(array: pa.StructArray) -> pa.Array:
        contents, paths = (array.flatten()[array.type.get_field_index(name)] for name in ("bytes", "path"))
        outside = np.flatnonzero(flags(contents.is_null()) & flags(paths.is_valid())).tolist()
        if not outside:
            return contents
        values = to_bytes(contents)
        present = flags(contents.is_valid()).tolist()
        for row in outside:
            values[row] = _file_inside(paths[row].as_py(), folder, f"{path}, record {first_record + row:,}")
            present[row] = True
        held = [value if one else None for value, one in zip(values, present, strict=True)]
        return binary(held).cast(contents.type)

    arrays = [
        _replace(array, features.get(name), read) for name, array in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _file_inside(name: str, folder: str | None, place: str) -> bytes:
    """Returns the content of a file that a record names: data may come from anywhere, so of its own folder only."""
    if folder is not None and "\0" not in name:
        top = os.path.realpath(folder)
        found = os.path.realpath(os.path.join(top, name))
        if found.startswith(f"{top}/") and os.path.isfile(found):
            with open(found, "rb") as file:
                return file.read()
    raise SourceError(
        f"{place}: the content of the file {name!r} is not in the data, and no such file is in the "
        "folder of a Hugging Face dataset. "
        "convert reads no other files. Save the data with the files in it: embed_table_storage, or dataset.save_to_disk "
        "where the files are."
    )


class WebDatasets(Input):
    """Samples of tar archives: the key, and the bytes of each file by its extension."""

    name = "webdataset"

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        import pyarrow as pa

        index = tar.scan(Descriptor(path), path)
        tar.save(index, self._saved(path), stamp(path))
        names = sorted(index.names()) if len(index.sizes) else []
        odd = next((name for name in names if not _is_utf8(name)), None)
        if odd is not None:
            raise SourceError(
                f"{path} has a file with the extension {odd!r}, which cannot be the name of a feature. Rename the file, and "
                "write the archive again."
            )
        return Scan(index.num_samples, pa.schema([(name, pa.large_binary()) for name in ["__key__", *names]]))

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        import pyarrow as pa

        archive = Descriptor(path)
        index = tar.load(self._saved(path), stamp(path)) or tar.scan(archive, path)
        for block in _row_blocks(start, stop, _rows_at_once(scan.num_records, archive.num_bytes)):
            rows = np.array(block)
            samples = index.records(rows, read_spans(archive, *index.bounds(rows)), path)
            for sample in samples:
                sample["__key__"] = sample["__key__"].encode("utf-8", "surrogateescape")
            columns = [binary([sample.get(name) for sample in samples]) for name in schema.names]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _saved(self, path: str) -> pathlib.Path:
        """Returns the path of the index, so that each output file need not read all headers again."""
        return self.kept / f"{digest_of(name_bytes(path))}{tar.SUFFIX}"


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Mds(Input):
    """Samples of Mosaic Streaming's MDS. JSON becomes text; images stay the bytes of their files."""

    name = "mds"

    def num_bytes(self, path: str) -> int:
        """See :class:`Input`."""
        return sum(shard["raw_data"]["bytes"] for shard in _mds_shards(path))

    def files(self, path: str) -> Iterable[str]:
        """See :class:`Input`."""
        kinds = ("raw_data", "zip_data")
        names = [shard[kind]["basename"] for shard in _mds_shards(path) for kind in kinds if shard.get(kind)]
        paths = [os.path.join(path, name) for name in ["index.json", *names]]
        return (one for one in paths if os.path.exists(one))

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        import pyarrow as pa

        with self._opened(path) as source:  # checks the index
            first, count = source[0], len(source)
        shard = _mds_shards(path)[0]
        encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        kinds = {name: _mds_type(name, encodings[name], first[name]) for name in self.columns or first if name in first}
        fields = [(name, kinds.get(name, pa.null())) for name in sorted(first)]
        return Scan(count, pa.schema(fields), more=encodings)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        import pyarrow as pa

        with self._opened(path, [name for name in schema.names if name in scan.more]) as source:
            for block in _row_blocks(start, stop, _rows_at_once(scan.num_records, self.num_bytes(path))):
                rows = source.__getitems__(block)
                arrays = []
                for name, kind in zip(schema.names, schema.types, strict=True):
                    values = [_mds_value(row.get(name), scan.more.get(name)) for row in rows]
                    try:
                        _check_dtypes([row[name].dtype for row in rows if isinstance(row.get(name), np.ndarray)], kind)
                        arrays.append(pa.array(values, kind))
                    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                        raise SourceError(
                            f"{path}: column {name!r} of the records {block[0]} to {block[-1]} holds values that differ from "
                            f"record 0 in type or rank: {error}. Leave the column out with --columns."
                        ) from error
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    @contextlib.contextmanager
    def _opened(self, path: str, columns: Sequence[str] | None = None) -> Iterator[MDS]:
        """Opens a data set; shards that are stored compressed are unpacked into a temporary folder of the job."""
        from meshfeed._src.sources.mds import MDS  # which other conversions need not load

        with contextlib.ExitStack() as stack:
            cache = None
            if any(shard.get("zip_data") for shard in _mds_shards(path)):
                folder = tempfile.TemporaryDirectory(prefix="mds.", suffix=".part", dir=self.scratch)
                cache = ShardCache(stack.enter_context(folder))
            yield stack.enter_context(contextlib.closing(MDS(path, columns, image_bytes=True, cache=cache)))


def _mds_shards(path: str) -> list[dict[str, Any]]:
    index = os.path.join(path, "index.json")
    try:
        with open(index, "rb") as file:
            shards = json.load(file)["shards"]
        _ = [shard["raw_data"]["bytes"] for shard in shards]
        parts = [shard[kind] for shard in shards for kind in ("raw_data", "zip_data") if shard.get(kind)]
        names = [str(part["basename"]) for part in parts]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{index} is no index of MDS shards ({type(error).__name__}: {error}). Copy it again. If the data has another "
            "format, name its files with a glob.",
            path=index,
        ) from error
    for name in names:
        _check_inside(name, index)
    return shards


def _mds_type(name: str, encoding: str, value: object) -> pa.DataType:
    """Returns the Arrow type of a column, by its encoding or its first value."""
    import pyarrow as pa

    if encoding == "json" or isinstance(value, str) or encoding == "str_decimal":
        return pa.large_string()
    if isinstance(value, bytes):
        return pa.large_binary()
    if isinstance(value, np.ndarray | np.generic):
        kind = pa.from_numpy_dtype(value.dtype)
        for _ in range(np.ndim(value)):
            kind = pa.list_(kind)
        return kind
    if isinstance(value, list):
        raise SourceError(
            f"the column {name!r} holds lists ({encoding}), which convert does not read. Choose other columns with --columns."
        )
    return pa.float64() if isinstance(value, float) else pa.int64()


def _check_dtypes(dtypes: Iterable[np.dtype[Any]], kind: pa.DataType) -> None:
    """Raises ArrowInvalid if a type does not hold the values of arrays, each of which may have a dtype of its own."""
    import pyarrow as pa

    while pa.types.is_list(kind):
        kind = kind.value_type
    for dtype in set(dtypes):
        holds = np.dtype(kind.to_pandas_dtype())
        alike = {dtype.kind, holds.kind} <= set("iu") or dtype.kind == holds.kind
        if not alike or not np.can_cast(dtype, holds):
            raise pa.ArrowInvalid(f"one holds {dtype}, and record 0 holds {holds}")


def _mds_value(value: object, encoding: str | None) -> object:
    if encoding == "json":
        return json.dumps(value, ensure_ascii=False)
    if encoding == "str_decimal":
        return str(value)
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value


class ImageFolder(Input):
    """Images in a folder. Each subfolder is a class, numbered in order of name."""

    name = "images"

    def num_bytes(self, path: str) -> int:
        """See :class:`Input`."""
        return sum(os.path.getsize(name) for name in self.files(path))

    def files(self, path: str) -> Iterable[str]:
        """See :class:`Input`."""
        return (os.path.join(path, name) for name in image_names(path))

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        import pyarrow as pa

        names = image_names(path)
        folders = {name.split("/", 1)[0] for name in names if "/" in name}
        if folders and not all("/" in name for name in names):
            stray = next(name for name in names if "/" not in name)
            raise SourceError(
                f"{path} has images in subfolders, which are classes, and outside of them: {stray}. Move it."
            )
        classes = sorted(folders | empty_folders(path)) if folders else []
        fields = [("filename", pa.large_binary()), ("image", pa.large_binary())]
        fields += [("label", pa.int64())] if classes else []
        return Scan(len(names), pa.schema(fields), more={"names": names, "classes": classes})

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        import pyarrow as pa

        labels = {name: number for number, name in enumerate(scan.more["classes"])}
        names: Sequence[str] = scan.more["names"]
        for block in _row_blocks(start, stop, 16):
            rows = names[block.start : block.stop]
            columns = {
                "filename": binary([os.fsencode(name) for name in rows]),
                "image": binary([_content(path, name) for name in rows]),
                "label": integers(np.array([labels.get(name.split("/", 1)[0], 0) for name in rows])),
            }
            yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def image_names(path: str) -> list[str]:
    """Returns the images in a folder and its subfolders, relative to it, sorted."""
    return select_images(walk(path))


def empty_folders(path: str) -> set[str]:
    """Returns the names of the folders in a folder that hold nothing: classes without an image, which are numbered too."""
    with os.scandir(path) as entries:
        return {
            entry.name for entry in entries if entry.name[0] != "." and entry.is_dir() and not os.listdir(entry.path)
        }


def select_images(names: Iterable[str]) -> list[str]:
    """Returns the paths that end in the name of an image, sorted; nothing hidden, nor what is in a hidden folder."""
    return sorted(
        name for name in names if name.lower().endswith(IMAGES) and not any(part[0] == "." for part in name.split("/"))
    )


def _content(path: str, name: str) -> bytes:
    with open(os.path.join(path, name), "rb") as file:
        return file.read()

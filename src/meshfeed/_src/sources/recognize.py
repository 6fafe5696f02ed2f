"""Maps objects of other libraries, and whatever is passed to the feed, to sources.

``as_source`` recognizes a class by its name and package, without importing the package: an object of a package that was
never imported cannot exist. ``Grain`` and ``HuggingFace`` import their library when they are called.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base import trees
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames, missing_package
from meshfeed._src.base.types import public
from meshfeed._src.sources.checks import is_count
from meshfeed._src.sources.files.formats import folder_hint, reader_hint
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.memory import Memory

if TYPE_CHECKING:
    from meshfeed._src.sources.grain.datasets import GrainRecords, GrainStream
    from meshfeed._src.sources.huggingface.stream import HuggingFaceStream
    from meshfeed._src.sources.huggingface.table import HuggingFaceRows, HuggingFaceTable

_TAKES = """\
- random access: a list or another Sequence of records, anything with __len__ and __getitem__ (torch datasets, TFDS data
  sources), a Grain MapDataset, a Hugging Face Dataset, a dict or tuple of equally long numpy arrays (Memory);
- streams: a Grain IterDataset, a Hugging Face IterableDataset, meshfeed.sources.Stream(open), anything with
  open(lane_index, num_lanes);
- batches of this host: a tf.data.Dataset, a Grain or torch DataLoader, any other iterable of pytrees of arrays
  (HostBatches);
- files: meshfeed.sources.ArrayRecord(paths), Folder, MDS, Parquet, TensorStore, TFDS, Tokens or WebDataset."""

_DATASETS = {"grain": ("MapDataset", "IterDataset"), "datasets": ("Dataset", "IterableDataset")}
_TABLES = {
    "pandas": "meshfeed.sources.Memory({name: frame[name].to_numpy() for name in frame})",
    "polars": "meshfeed.sources.Memory({name: frame[name].to_numpy() for name in frame.columns})",
    "pyarrow": "datasets.Dataset(table)",
}


@public("meshfeed.sources")
@hides_own_frames
def as_source(obj: Any) -> Any:
    """Converts ``obj`` to a source.

    A list of arrays is a Sequence, so each array is one record. A tuple, a dict or another pytree of equally long
    arrays has one record per row.

    Args:
      obj: any of the kinds of object that the error message lists.

    Returns:
      A random-access source (``__len__`` and ``__getitem__``), a stream source (``open``) or ``HostBatches``.

    Raises:
      SourceError: ``obj`` is not a supported kind; the message lists them.
    """
    if isinstance(obj, str | bytes | os.PathLike):
        raise _refused_path(obj)
    # Otherwise a list of paths would count as a Sequence of records.
    if isinstance(obj, list | tuple) and reader_hint(obj):
        raise _refused_path(obj[0])
    if inspect.isclass(obj) or inspect.isroutine(obj):
        raise _refused(obj, "Call it first, or pass a function open(lane_index, num_lanes) to Stream.")
    # Libraries first: their datasets also look like sequences, streams or iterables.
    found = _by_library(obj)
    if found is not None:
        return found
    if isinstance(obj, list | tuple | Mapping):
        _refuse_sources(obj)
    return obj if _is_ours(obj) or _is_stream(obj) else _by_interface(obj)


def _refuse_sources(obj: Sequence[Any] | Mapping[Any, Any]) -> None:
    """Raises SourceError for a list or dict of sources, which would count as records or as arrays."""
    first = next(iter(obj.values() if isinstance(obj, Mapping) else obj), None)
    if _is_ours(first) or any(_is_a(first, package, *names) for package, names in _DATASETS.items()):
        also = "Zip(sources) to join record i of each" if isinstance(obj, Mapping) else "Concat(sources) to append them"
        raise _refused(
            obj,
            "It holds sources. Pass meshfeed.sources.Mixture({name: source, …}, weights={name: weight, …}) to draw records "
            f"from all of them, or meshfeed.sources.{also}.",
        )


def _by_interface(obj: Any) -> object:
    """The source for an object that is known only by its methods."""
    if isinstance(obj, set | frozenset):
        raise _refused(obj, "A set has no order, so no two hosts would agree on it. Pass sorted(…).")
    if _is_arrays(obj):
        return Memory(obj)
    if isinstance(obj, Mapping):
        # As an iterable, it would feed its keys.
        leaves, _ = trees.flatten_with_paths(obj)
        if leaves and not leaves[0][0]:  # the mapping itself, such as numpy's of an .npz file or h5py's of an HDF5 file
            raise _refused(
                obj, "JAX does not take it for a dict. Pass {name: numpy.asarray(arrays[name]) for name in arrays}."
            )
        wrong = (f"leaf {path} is {leaf!r:.40}" for path, leaf in leaves if not _is_array(leaf))
        raise _refused(
            obj,
            "A mapping is taken as a dict of equally long numpy arrays, but "
            f"{next(wrong, 'it has no leaves')}. Convert its values to arrays.",
        )
    # torch's IterableDataset inherits a __getitem__ that only raises.
    if hasattr(obj, "__len__") and hasattr(obj, "__getitem__") and not _is_a(obj, "torch", "IterableDataset"):
        return obj
    if hasattr(obj, "__iter__") or hasattr(obj, "__next__"):
        return HostBatches(obj)
    if hasattr(obj, "__getitem__"):
        raise _refused(obj, "It has __getitem__ and no __len__. Add a __len__ that returns the number of records.")
    raise _refused(obj)


def describe_source(source: object) -> str:
    """A short description of a source, such as ``ArrayRecord(12 files, 1,000,000 records)``.

    Does not call the repr of a source that is not one of meshfeed's: the repr of a list or dataset may contain or read
    all of its data.
    """
    try:
        if _is_ours(source):
            return repr(source)
        count = f"({len(source):,} records)" if isinstance(source, Sized) else ""
    except Exception:  # a repr never raises
        count = ""
    return f"{type(source).__name__}{count}"


def _by_library(obj: Any) -> object:
    """The source for an object of a supported library; None for other objects."""
    if _is_a(obj, "grain", *_DATASETS["grain"]):
        return Grain(obj)
    if _is_a(obj, "datasets", *_DATASETS["datasets"]):
        return HuggingFace(obj)
    if _is_a(obj, "datasets", "DatasetDict", "IterableDatasetDict") and isinstance(obj, Mapping):
        splits = ", ".join(map(repr, obj))
        raise _refused(obj, f"It holds the splits {splits}. Pass one of them, such as dataset['train'].")
    if _is_a(obj, "tensorflow_datasets", "DatasetBuilder"):
        raise _refused(obj, "Pass meshfeed.sources.TFDS(builder, split='train').")
    if (
        _is_a(obj, "grain", "DataLoader", "DatasetIterator", "DataLoaderIterator")
        or _is_a(obj, "torch", "DataLoader")
        or _is_a(obj, "tensorflow", "DatasetV2")
    ):
        return HostBatches(obj)
    for package, remedy in _TABLES.items():
        if _is_a(obj, package, "DataFrame", "LazyFrame", "Table", "RecordBatch"):
            raise _refused(obj, f"A table's __getitem__ returns columns, not records. Pass {remedy}.")
    return None


@public("meshfeed.sources")
@hides_own_frames
def Grain(dataset: object) -> GrainRecords | GrainStream | HostBatches:
    """A Grain pipeline as a source.

    A ``grain.MapDataset`` is random access: the feed shuffles it, and it resumes exactly on any number of hosts. A
    MapDataset with ``filter`` or ``flat_map``, and any ``grain.IterDataset``, is split into lanes at its sources and
    also resumes exactly on any number of hosts. A ``grain.DataLoader`` yields host batches and resumes exactly on the
    same number of hosts.

    Args:
      dataset: a ``grain.MapDataset``, ``grain.IterDataset``, ``grain.DataLoader`` or ``grain.DatasetIterator``.

    Returns:
      A random-access source, a stream or host batches.

    Raises:
      SourceError: ``dataset`` is none of these, is an empty MapDataset, or cannot be split into lanes; the message then
        names the node and shows how to write ``Stream(open)``.
    """
    import grain

    if isinstance(dataset, grain.DataLoader | grain.DatasetIterator):
        return HostBatches(dataset)
    if isinstance(dataset, grain.MapDataset):
        from meshfeed._src.sources.grain.datasets import GrainRecords
        from meshfeed._src.sources.grain.lanes import sparse_node

        if sparse_node(dataset) is None:
            return GrainRecords(dataset)
        dataset = dataset.to_iter_dataset()
    if isinstance(dataset, grain.IterDataset):
        from meshfeed._src.sources.grain.datasets import GrainStream

        return GrainStream(dataset)
    raise SourceError(
        f"Grain got a {type(dataset).__name__}. Expected a grain.MapDataset, grain.IterDataset or grain.DataLoader. A "
        "data source such as grain.sources.ArrayRecordDataSource can be passed to the feed as it is, or wrapped: "
        f"grain.MapDataset.source(data_source).{reader_hint(dataset)}"
    )


@public("meshfeed.sources")
@hides_own_frames
def HuggingFace(  # named like a class, but returns one of several
    dataset: object, columns: Sequence[str] | None = None, shuffle_buffer: int = 0
) -> HuggingFaceTable | HuggingFaceRows | HuggingFaceStream:
    """A Hugging Face dataset as a source.

    A map-style ``datasets.Dataset`` is random access: the feed shuffles it, and it resumes exactly on any number of
    hosts. A streaming ``datasets.IterableDataset`` is split into lanes below ``map``, by files, then row groups, then
    row ranges.

    Args:
      dataset: a ``datasets.Dataset`` or ``datasets.IterableDataset`` of one split.
      columns: names of the columns of a record; None for all.
      shuffle_buffer: for streams only: size of the shuffle buffer in records, over all lanes. With the feed's seed,
        each lane shuffles its files and windows of ``shuffle_buffer // num_lanes`` records (at least 2). It moves no
        rows into or out of a ``take`` or ``skip`` of the dataset. 0 keeps the stored order.

    Returns:
      A random-access source for a map-style dataset, a stream for a streaming one.

    Raises:
      SettingsError: ``columns`` or ``shuffle_buffer`` is invalid.
      SourceError: datasets is not installed; or ``dataset`` is not a dataset, is empty, or is a stream that cannot
        resume exactly. A feed raises it for columns of text; ``Map`` passes them to its function.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing_package("HuggingFace", error, "hf") from error

    _check_columns(columns)
    if not is_count(shuffle_buffer, 0):
        raise SettingsError(
            f"shuffle_buffer is {shuffle_buffer!r}; expected a number of records, 0 for none.", setting="shuffle_buffer"
        )
    if isinstance(dataset, dict):  # DatasetDict, IterableDatasetDict
        raise SourceError(
            f"HuggingFace got a dict of splits, {sorted(dataset)}. Expected one: pass dataset[{sorted(dataset)[0]!r}]."
            if dataset
            else "HuggingFace got an empty dict of splits. Expected one split."
        )
    if isinstance(dataset, datasets.Dataset):
        if shuffle_buffer:
            raise SettingsError(
                f"shuffle_buffer={shuffle_buffer} is for streams, and this dataset is read at random. Use the feed's "
                "shuffle=True, which shuffles all of it.",
                setting="shuffle_buffer",
            )
        return _open_table(dataset, columns)
    if isinstance(dataset, datasets.IterableDataset):
        from meshfeed._src.sources.huggingface.stream import HuggingFaceStream

        return HuggingFaceStream(dataset, columns, int(shuffle_buffer))
    raise SourceError(
        f"HuggingFace got a {type(dataset).__name__}. Expected a datasets.Dataset or datasets.IterableDataset, such as "
        f"load_dataset(name, split='train').{reader_hint(dataset)}"
    )


def _check_columns(columns: object) -> None:
    if columns is None:
        return
    names = columns if isinstance(columns, Collection) and not isinstance(columns, str) else [None]
    if not all(isinstance(name, str) for name in names):
        raise SettingsError(
            f"columns is {columns!r}; expected a list of column names, or None for all.", setting="columns"
        )
    if not names:
        raise SettingsError("columns is empty; expected at least one name, or None for all.", setting="columns")


def _open_table(dataset: Any, columns: Sequence[str] | None) -> HuggingFaceTable | HuggingFaceRows:
    from meshfeed._src.sources.huggingface.table import HuggingFaceRows, HuggingFaceTable

    if not len(dataset):
        raise SourceError(f"the dataset has 0 records (columns {dataset.column_names}). Expected at least one.")
    if dataset.format["type"] == "custom":
        return HuggingFaceRows(dataset, columns)
    stored, form = list(dataset.column_names), dataset.format
    if columns is None:
        columns = [name for name in stored if form["output_all_columns"] or name in form["columns"]]
    if missing := [name for name in columns if name not in stored]:
        raise SettingsError(f"unknown columns {missing}; the dataset has {stored}.", setting="columns")
    return HuggingFaceTable(dataset, columns)


def _is_a(obj: object, package: str, *names: str) -> bool:
    """Whether ``obj`` is an instance of a class defined in ``package`` with one of these names, or of a subclass."""
    return any(base.__name__ in names and base.__module__.partition(".")[0] == package for base in type(obj).__mro__)


def _is_ours(obj: object) -> bool:
    # @public sets __module__ to the module that exports the class.
    return f"{type(obj).__module__}.".startswith(("meshfeed.sources.", "meshfeed._src.sources."))


def _is_stream(obj: object) -> bool:
    """Whether ``obj`` has ``open(lane_index, num_lanes)``."""
    opener = getattr(obj, "open", None)
    if not callable(opener):
        return False
    try:
        inspect.signature(opener).bind(0, 1)
    except (TypeError, ValueError):
        return False
    return True


def _is_arrays(obj: object) -> bool:
    """Whether ``obj`` is a pytree of arrays, whose rows Memory checks; a list is a Sequence of records instead."""
    if isinstance(obj, list | Iterator) or _is_a(obj, "torch", "Dataset"):
        return False
    leaves = trees.flatten(obj)[0]
    return bool(leaves) and all(map(_is_array, leaves))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) or (
        hasattr(leaf, "__array__") and hasattr(leaf, "dtype") and bool(getattr(leaf, "shape", ()))
    )


def _refused_path(path: str | bytes | os.PathLike[str]) -> SourceError:
    remedy = (
        reader_hint(path)
        or folder_hint(os.fsdecode(path))
        or (
            " Pass a source such as meshfeed.sources.ArrayRecord(path), or a dataset of Grain, Hugging Face or TFDS opened "
            "on it."
        )
    )
    return SourceError(f"got the path {os.fspath(path)!r} as a source, and a feed reads records, not paths.{remedy}")


def _refused(obj: object, remedy: str = "") -> SourceError:
    named: Any = obj if hasattr(obj, "__qualname__") else type(obj)  # a class or function that was passed uncalled
    builtin = named is not obj and named.__module__ == "builtins"
    kind = named.__qualname__ if builtin else f"{named.__module__}.{named.__qualname__}"
    return SourceError(f"cannot feed from a {kind}. {remedy + chr(10) if remedy else ''}Supported:\n{_TAKES}")

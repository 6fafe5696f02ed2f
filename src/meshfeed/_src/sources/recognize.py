"""Maps the object passed to the feed to a source.

Recognizes a class by its name and package, without importing the package: an object of a package that was never
imported cannot exist.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import jax
import numpy as np

from meshfeed._src.base.errors import SourceError, hides_own_frames
from meshfeed._src.base.types import public
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.memory import Memory

_TAKES = """\
- random access: a list or another Sequence of records, anything with __len__ and __getitem__ (torch datasets, TFDS data
  sources), a Grain MapDataset, a Hugging Face Dataset, a dict or tuple of equally long numpy arrays (Memory);
- streams: a Grain IterDataset, a Hugging Face IterableDataset, meshfeed.sources.Stream(open), anything with
  open(lane_index, num_lanes);
- batches of this host: a tf.data.Dataset, a Grain or torch DataLoader, any other iterable of pytrees of arrays
  (HostBatches);
- files: meshfeed.sources.ArrayRecord(paths), MDS, Parquet, TensorStore, TFDS, Tokens or WebDataset."""

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
        raise _refused(obj, "Call it first, or give a function open(lane_index, num_lanes) to Stream.")
    # Libraries first: their datasets also look like sequences, streams or iterables.
    found = _by_library(obj)
    if found is not None:
        return found
    if _is_ours(obj) or _is_stream(obj):
        return obj
    if isinstance(obj, set | frozenset):
        raise _refused(obj, "A set has no order, so no two hosts would agree on it. Pass sorted(…).")
    if _is_arrays(obj):
        return Memory(obj)
    if isinstance(obj, Mapping):
        raise _refused(obj, "A mapping is taken as a dict of equally long numpy arrays; convert its values to arrays.")
    # torch's IterableDataset inherits a __getitem__ that only raises.
    if hasattr(obj, "__len__") and hasattr(obj, "__getitem__") and not _is_a(obj, "torch", "IterableDataset"):
        return obj
    if hasattr(obj, "__iter__") or hasattr(obj, "__next__"):
        return HostBatches(obj)
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


def _by_library(obj: Any) -> Any:
    """The source for an object of a supported library; None for other objects."""
    if _is_a(obj, "grain", "MapDataset", "IterDataset"):
        from meshfeed._src.sources.grain.source import Grain

        return Grain(obj)
    if _is_a(obj, "datasets", "Dataset", "IterableDataset"):
        from meshfeed._src.sources.huggingface.source import HuggingFace

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
            raise _refused(obj, f"A table's __getitem__ gives columns, not records. Pass {remedy}.")
    return None


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
    leaves = jax.tree.leaves(obj)
    return bool(leaves) and all(map(_is_array, leaves))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) or (
        hasattr(leaf, "__array__") and hasattr(leaf, "dtype") and bool(getattr(leaf, "shape", ()))
    )


def _refused_path(path: str | bytes | os.PathLike[str]) -> SourceError:
    remedy = reader_hint(path) or (
        " Pass a source such as meshfeed.sources.ArrayRecord(path), or a dataset of Grain, Hugging Face or TFDS opened "
        "on it."
    )
    return SourceError(f"got the path {os.fspath(path)!r} as a source, and a feed reads records, not paths.{remedy}")


def _refused(obj: object, remedy: str = "") -> SourceError:
    named: Any = obj if hasattr(obj, "__qualname__") else type(obj)  # a class or function that was passed uncalled
    builtin = named is not obj and named.__module__ == "builtins"
    kind = named.__qualname__ if builtin else f"{named.__module__}.{named.__qualname__}"
    return SourceError(f"cannot feed from a {kind}. {remedy + chr(10) if remedy else ''}Supported:\n{_TAKES}")

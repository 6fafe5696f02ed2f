"""Hugging Face datasets, map-style and streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.types import public
from meshfeed._src.sources.checks import is_count
from meshfeed._src.sources.files.formats import reader_hint

if TYPE_CHECKING:
    from meshfeed._src.sources.huggingface.lanes import HuggingFaceStream
    from meshfeed._src.sources.huggingface.table import HuggingFaceRows, HuggingFaceTable


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
        each lane shuffles its files and windows of ``shuffle_buffer // num_lanes`` records (at least 2). 0 keeps the
        stored order.

    Returns:
      A random-access source for a map-style dataset, a stream for a streaming one.

    Raises:
      SettingsError: ``columns`` or ``shuffle_buffer`` is invalid.
      SourceError: ``dataset`` is not a dataset, is empty, or is a stream that cannot resume exactly. A feed raises it for
        columns of text; ``Map`` passes them to its function.
    """
    import datasets

    if isinstance(columns, str) or (columns is not None and not all(isinstance(name, str) for name in columns)):
        raise SettingsError(
            f"columns is {columns!r}; expected a list of column names, or None for all.", setting="columns"
        )
    if columns is not None and not list(columns):
        raise SettingsError("columns is empty; expected at least one name, or None for all.", setting="columns")
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
        from meshfeed._src.sources.huggingface.lanes import HuggingFaceStream

        return HuggingFaceStream(dataset, columns, int(shuffle_buffer))
    raise SourceError(
        f"HuggingFace got a {type(dataset).__name__}. Expected a datasets.Dataset or datasets.IterableDataset, such as "
        f"load_dataset(name, split='train').{reader_hint(dataset)}"
    )


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

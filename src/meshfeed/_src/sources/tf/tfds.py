"""TensorFlow Datasets: ArrayRecord as random access without TensorFlow, TFRecord as lanes through tf.data."""

from __future__ import annotations

import os
from typing import Any

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.names import public
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.tf.records import TFDSRecords
from meshfeed._src.sources.tf.shards import TFDSShards


@public("meshfeed.sources")
@hides_own_frames
def TFDS(  # named like a class, but returns one of two
    name_or_builder: Any, split: str, data_dir: str | os.PathLike[str] | None = None, decode: Any = None
) -> TFDSRecords | TFDSShards:
    """A prepared dataset of TensorFlow Datasets as a source.

    A dataset prepared as ArrayRecord is random access and needs no TensorFlow. A dataset prepared as TFRecord is read
    as lanes: lane i of L reads shards i, i + L, …, and the remaining shards are split by rows. Both yield the same
    records.

    Args:
      name_or_builder: a ``tfds.core.DatasetBuilder``, the name of a dataset (``"mnist"``, ``"c4/en:3.0.1"``), or the
        folder of a prepared dataset, which contains ``dataset_info.json``.
      split: name of a split, or a slice of one such as ``"train[:90%]"``.
      data_dir: folder of prepared datasets, if a name is given; None for the default of tfds.
      decode: ``decode(record: bytes) -> pytree`` for the serialized examples, which may take ``rng=``; or decoders as
        tfds takes them (``tfds.decode.PartialDecoding``, a dict). None decodes with the dataset's features.

    Returns:
      A random-access source for ArrayRecord, a stream for TFRecord.

    Raises:
      SourceError: tensorflow_datasets is missing, or the dataset is not prepared, has no such split, or is in a
        different format.
      SettingsError: ``split`` is not a string.
    """
    if not isinstance(split, str):
        raise SettingsError(
            f"split is {split!r}; expected the name of one split or a slice of it, such as 'train' or 'train[:90%]'.",
            setting="split",
        )
    builder = _open_builder(name_or_builder, data_dir)
    info = builder.info
    if not info.splits:
        raise SourceError(
            f"the dataset {info.full_name} is not prepared in {builder.data_dir}. Expected its files there. Prepare "
            "it: builder.download_and_prepare(file_format='array_record'), or give data_dir=."
        )
    builder = _prefer_array_record(builder)
    try:
        instructions = builder.info.splits[split].file_instructions
    except (KeyError, ValueError) as error:
        raise SourceError(
            f"the dataset {info.full_name} has no split {split!r} ({error}). Expected one of {sorted(info.splits)}, or "
            "a slice of one."
        ) from None
    if not instructions:
        raise SourceError(f"the split {split!r} of {info.full_name} has 0 records. Expected at least one.")
    file_format = builder.info.file_format.name
    if file_format == "ARRAY_RECORD":
        return TFDSRecords(builder, split, instructions, decode)
    if file_format == "TFRECORD":
        return TFDSShards(builder, split, instructions, decode)
    raise SourceError(
        f"the dataset {info.full_name} is prepared as {file_format}. Expected array_record or tfrecord. Prepare it "
        "again: builder.download_and_prepare(file_format='array_record')."
    )


def _open_builder(name_or_builder: Any, data_dir: Any) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise SourceError(
            f"TFDS needs tensorflow_datasets, which cannot be imported: {error}. Install it: "
            "pip install tensorflow-datasets."
        ) from error

    if isinstance(name_or_builder, tfds.core.DatasetBuilder):
        return name_or_builder
    if not isinstance(name_or_builder, str | os.PathLike):
        raise SourceError(
            f"TFDS got a {type(name_or_builder).__name__}. Expected a tfds builder, the name of a dataset, or the "
            "folder of a prepared one."
        )
    name = os.fspath(name_or_builder)
    if os.path.isfile(os.path.join(name, "dataset_info.json")):
        return tfds.builder_from_directory(name)
    try:
        return tfds.builder(name, **({} if data_dir is None else {"data_dir": os.fspath(data_dir)}))
    except tfds.core.DatasetNotFoundError:
        where = "the default data_dir" if data_dir is None else repr(os.fspath(data_dir))
        raise SourceError(
            f"no dataset {name!r} is prepared in {where}, and tfds knows none of that name. Expected a name, or a "
            "folder that holds dataset_info.json."
        ) from None
    except ValueError as error:  # raised by tfds for a path
        raise SourceError(
            f"{name!r} is neither the name of a dataset nor the folder of a prepared one, which holds "
            f"dataset_info.json (beside its shards: <data_dir>/<name>/<version>).{reader_hint(name)}"
        ) from error


def _prefer_array_record(builder: Any) -> Any:
    """The builder for the ArrayRecord files if the dataset is also prepared in that format, otherwise ``builder``."""
    import tensorflow_datasets as tfds

    wanted = tfds.core.file_adapters.FileFormat.ARRAY_RECORD  # pyright: ignore[reportAttributeAccessIssue] # loaded late
    if builder.info.file_format != wanted and wanted in builder.info.available_file_formats():
        return tfds.builder_from_directory(builder.data_dir, file_format=wanted)
    return builder

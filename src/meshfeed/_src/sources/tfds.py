"""TensorFlow Datasets: ArrayRecord as random access without TensorFlow, TFRecord as lanes through tf.data."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshfeed._src.base.errors import (
    CorruptDataError,
    SettingsError,
    SourceError,
    StateMismatchError,
    hides_own_frames,
    missing_package,
)
from meshfeed._src.base.hooks import accepts_keyword
from meshfeed._src.base.rng import philox
from meshfeed._src.base.types import JsonValue, Record, public
from meshfeed._src.sources.array_record.source import ArrayRecord
from meshfeed._src.sources.checks import stopped
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.files.stream import CUT_BY_FILES, CUT_EVENLY, FileCut, Piece, cut_files
from meshfeed._src.sources.selection import Ranges, View
from meshfeed._src.sources.tf_internals import import_tensorflow

if TYPE_CHECKING:
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.utils.shard_utils import FileInstruction

Builder: TypeAlias = "tfds.core.DatasetBuilder"
Decode: TypeAlias = "Callable[..., Record] | tfds.decode.PartialDecoding | Mapping[str, object] | None"


def record_decoder(builder: Builder, decode: Decode) -> Callable[..., Record]:
    """A function that decodes the bytes of a serialized example into a record."""
    if callable(decode):
        return decode
    features: Any = builder.info.features
    decoders: Any = decode
    if hasattr(decode, "extract_features"):  # PartialDecoding: a subset of the features and their decoders
        features, decoders = decoders.extract_features(features), decoders.decoders
    # The numpy parser of tfds needs no TensorFlow and works for both file formats.
    return functools.partial(features.deserialize_example_np, decoders=decoders)


class _Split:
    """A split of a prepared dataset; ``instructions`` are its files, with the rows of each."""

    def __init__(self, builder: Builder, split: str, instructions: Sequence[FileInstruction], decode: Decode) -> None:
        self.identity = {"kind": "tfds", "dataset": builder.info.full_name, "split": split}
        self.decoder = record_decoder(builder, decode)
        self.paths = [str(instruction.filename) for instruction in instructions]
        self.rows = np.asarray([instruction.examples_in_shard for instruction in instructions])  # of each whole file
        self.starts = np.asarray([instruction.skip for instruction in instructions])
        # In tfds, take == -1 means all rows after the skipped ones.
        takes = [len_ - i.skip if i.take == -1 else i.take for len_, i in zip(self.rows, instructions, strict=True)]
        if min(takes) < 0:
            raise SourceError(
                f"the split {split!r} of {builder.info.full_name} ends before it begins. Give the lower bound first."
            )
        self.stops = self.starts + np.asarray(takes, np.int64)
        self.first_ids = np.cumsum([0, *takes])  # id in the split of each file's first record

    def __repr__(self) -> str:
        return f"TFDS({self.identity['dataset']!r}, {self.identity['split']!r}, {int(self.first_ids[-1]):,} records)"


class TFDSRecords(View):
    """A split of a dataset prepared as ArrayRecord: record i is example i of the split, a view of its files' records."""

    def __init__(self, split: _Split) -> None:
        records = ArrayRecord(split.paths, decode=split.decoder)
        found = records.shard_lengths()
        if (wrong := np.flatnonzero(found != split.rows)).size:
            file = wrong[0]
            raise _damaged(split.paths[file], f"has {found[file]:,} records, and tfds counts {split.rows[file]:,}")
        first = np.cumsum(split.rows) - split.rows  # of each file, in the concatenated files
        super().__init__(records, Ranges(first + split.starts, first + split.stops), "split", split.identity)
        self._split, self._records = split, records

    def __repr__(self) -> str:
        return repr(self._split)

    def fingerprint(self) -> JsonValue:
        """Identity: dataset, version, split, files, number of records, and a digest of some records."""
        return {**self._records.fingerprint(), **self._split.identity, "records": len(self)}


def _damaged(path: str, what: str, lane_index: int | None = None) -> CorruptDataError:
    message = f"{path} {what}. Expected what tfds wrote. Prepare the dataset again."
    return CorruptDataError(message, path=path, lane_index=lane_index)


_RECORDS_AT_ONCE = 32  # records per call of the tf.data iterator


class TFDSShards(_Split):
    """A split of a dataset prepared as TFRecord, read as lanes; see :class:`_Split`."""

    _version = CUT_EVENLY

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0, first_id: int = 0) -> TFDSLane:
        """The records of lane ``lane_index`` of ``num_lanes``, from the beginning, in the same order in every epoch.

        ``epoch``, ``seed`` and ``first_id`` only seed the ``rng`` of ``decode``.
        """
        return TFDSLane(self, self._cut(lane_index, num_lanes, self._version), lane_index, epoch, seed, first_id)

    def _cut(self, lane_index: int, num_lanes: int, version: int) -> FileCut:
        bounds = zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        parts = [Piece(index, start, stop) for index, (start, stop) in enumerate(bounds)]
        return cut_files(parts, lane_index, num_lanes, lambda index: [int(self.rows[index])], version)

    def cut_version(self, num_lanes: int) -> int:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`."""
        return CUT_EVENLY if self._cut(0, num_lanes, CUT_EVENLY).unit == "even" else CUT_BY_FILES

    def with_cut(self, version: int) -> TFDSShards:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`."""
        other = copy.copy(self)
        other._version = version
        return other

    def lane_lengths(self, num_lanes: int) -> list[int]:
        """See :class:`meshfeed._src.base.hooks.CountsLanes`."""
        cuts = [self._cut(lane, num_lanes, self._version) for lane in range(num_lanes)]
        return [sum((piece.stop or 0) - piece.start for piece in cut.pieces) for cut in cuts]

    def fingerprint(self) -> JsonValue:
        """Identity: dataset, version, split, files and number of records."""
        files = file_paths.identify_files(self.paths, file_paths.file_sizes(self.paths, source="TFDS"))
        return {**self.identity, "files": files, "rows": int(self.first_ids[-1])}


class TFDSLane:
    """One lane: ranges of TFRecord files with known lengths, so its state is just the piece and the row."""

    def __init__(self, split: TFDSShards, cut: FileCut, lane_index: int, epoch: int, seed: int, first_id: int) -> None:
        self._split, self._cut, self._lane_index, self._epoch, self._seed = split, cut, lane_index, epoch, seed
        self._first_id = first_id
        self._with_rng = accepts_keyword(split.decoder, "rng")
        self._offsets = (split.first_ids[:-1] - split.starts).tolist()  # id in the split minus row in the file
        self._piece = self._row = 0  # index of the piece, and its rows already returned
        self._raw: Iterator[bytes] | None = None
        self._error: BaseException | None = None

    def __iter__(self) -> TFDSLane:
        return self

    def __next__(self) -> Record:
        if self._error is not None:
            raise self._error.with_traceback(None)
        try:
            while self._piece < len(self._cut.pieces):
                piece = self._cut.pieces[self._piece]
                if piece.file_row(self._row) == piece.stop:
                    self._piece, self._row, self._raw = self._piece + 1, 0, None
                    continue
                if self._raw is None:
                    self._raw = self._open_piece(piece, self._row)
                raw = self._next_raw(self._raw, piece)
                self._row += 1
                return self._decode_one(raw, piece)
        except Exception as error:
            self._error = error
            raise
        raise StopIteration

    def get_state(self) -> JsonValue:
        """State after the last record returned."""
        return {"cut": self._cut.unit, "piece": self._piece, "row": self._row}

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken.

        Raises:
          StateMismatchError: the files were split differently.
        """
        if state["cut"] != self._cut.unit or state["piece"] > len(self._cut.pieces):
            raise StateMismatchError(
                f"lanes.{self._lane_index}.cut",
                state["cut"],
                self._cut.unit,
                "Pass the files and the split that the state was saved with.",
            )
        self._piece, self._row, self._raw, self._error = state["piece"], state["row"], None, None

    def close(self) -> None:
        """Closes the file."""
        self._raw = None

    def _open_piece(self, piece: Piece, done: int) -> Iterator[bytes]:
        assert piece.stop is not None
        first = piece.file_row(done)
        files = import_tensorflow().data.TFRecordDataset(self._split.paths[piece.file_index])
        records = files.skip(first).take(piece.stop - first)
        # skip() reads past the records before `first`, since TFRecord files have no index.
        for batch in records.batch(_RECORDS_AT_ONCE):  # one iterator call costs more than one record
            yield from batch.numpy().tolist()

    def _next_raw(self, raw: Iterator[bytes], piece: Piece) -> bytes:
        errors, path, row = import_tensorflow().errors, self._split.paths[piece.file_index], piece.file_row(self._row)
        try:
            return next(raw)
        except StopIteration:
            what = f"ends before record {row:,}, and tfds counts {piece.stop:,}"
        except errors.DataLossError as error:
            what = f"is damaged at record {row:,} or a little after ({error.message})"
        except errors.NotFoundError as error:
            raise FileNotFoundError(f"lane {self._lane_index}: {path} no longer exists: {error.message}") from error
        except (errors.UnavailableError, errors.AbortedError, errors.DeadlineExceededError) as error:
            raise OSError(f"lane {self._lane_index}: reading {path} failed: {error.message}") from error
        raise _damaged(path, what, self._lane_index)

    def _decode_one(self, raw: bytes, piece: Piece) -> Record:
        record_id = piece.file_row(self._row - 1) + self._offsets[piece.file_index]
        extra = {"rng": philox(self._seed, self._epoch, self._first_id + record_id)} if self._with_rng else {}
        try:
            return self._split.decoder(raw, **extra)
        except StopIteration as error:
            what = f"decode, for record {record_id:,} of lane {self._lane_index},"
            raise stopped(what, record_id=record_id, lane_index=self._lane_index) from error
        except Exception as error:
            error.add_note(f"while decoding record {record_id:,} of {self._split.paths[piece.file_index]}")
            raise


@public("meshfeed.sources")
@hides_own_frames
def TFDS(  # named like a class, but returns one of two
    name_or_builder: Builder | str | os.PathLike[str],
    split: str,
    data_dir: str | os.PathLike[str] | None = None,
    decode: Decode = None,
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
            "it: builder.download_and_prepare(file_format='array_record'), or pass data_dir=."
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
    file_format = getattr(builder.info.file_format, "name", None)
    if file_format == "ARRAY_RECORD":
        return TFDSRecords(_Split(builder, split, instructions, decode))
    if file_format == "TFRECORD":
        return TFDSShards(builder, split, instructions, decode)
    raise SourceError(
        f"the dataset {info.full_name} is prepared as {file_format}. Expected array_record or tfrecord. Prepare it "
        "again: builder.download_and_prepare(file_format='array_record')."
    )


def _open_builder(
    name_or_builder: Builder | str | os.PathLike[str], data_dir: str | os.PathLike[str] | None
) -> Builder:
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise missing_package("TFDS", error, "tfds") from error

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
        more: Any = {} if data_dir is None else {"data_dir": os.fspath(data_dir)}
        return tfds.builder(name, **more)
    except tfds.core.DatasetNotFoundError:
        where = "the default data_dir" if data_dir is None else repr(os.fspath(data_dir))
        raise SourceError(
            f"no dataset {name!r} is prepared in {where}, and tfds has no dataset of that name. Expected a name, or "
            "a folder with a dataset_info.json."
        ) from None
    except ValueError as error:  # raised by tfds for a path
        raise SourceError(
            f"{name!r} is neither the name of a dataset nor the folder of a prepared one, which holds "
            f"dataset_info.json (beside its shards: <data_dir>/<name>/<version>).{reader_hint(name)}"
        ) from error


def _prefer_array_record(builder: Builder) -> Builder:
    """The builder for the ArrayRecord files if the dataset is also prepared in that format, otherwise ``builder``."""
    import tensorflow_datasets as tfds

    # The other formats are read in order, through TensorFlow.
    wanted = tfds.core.file_adapters.FileFormat.ARRAY_RECORD  # pyright: ignore[reportAttributeAccessIssue] # loaded late
    in_one_folder = all(split.filename_template for split in builder.info.splits.values())
    if builder.info.file_format != wanted and wanted in builder.info.available_file_formats() and in_one_folder:
        builder = tfds.builder_from_directory(builder.data_dir)  # the caller's own stays as it is
        builder.info.set_file_format(wanted, override=True, override_if_initialized=True)
    return builder

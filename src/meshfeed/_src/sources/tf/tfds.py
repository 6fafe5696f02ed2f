"""TensorFlow Datasets: ArrayRecord as random access without TensorFlow, TFRecord as lanes through tf.data."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.hooks import accepts_keyword
from meshfeed._src.base.rng import philox
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.base.types import JsonValue, Record, public
from meshfeed._src.sources.array_record.source import ArrayRecord
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.files.stream import FileCut, Piece, cut_files

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

Builder: TypeAlias = "tfds.core.DatasetBuilder"
Decode: TypeAlias = "Callable[..., Record] | tfds.decode.PartialDecoding | Mapping[str, object] | None"


class Instruction(Protocol):
    """The rows of one file of a split, as tfds describes them."""

    @property
    def filename(self) -> str | os.PathLike[str]: ...

    @property
    def skip(self) -> int: ...

    @property
    def take(self) -> int: ...

    @property
    def examples_in_shard(self) -> int: ...


def record_decoder(builder: Builder, decode: Decode) -> Callable[..., Record]:
    """A function that decodes the bytes of a serialized example into a record.

    Args:
      builder: the dataset's builder.
      decode: a function of the bytes, decoders as tfds takes them, or None for the dataset's features.
    """
    if callable(decode):
        return decode
    features: Any = builder.info.features
    decoders: Any = decode
    if hasattr(decode, "extract_features"):  # PartialDecoding: a subset of the features and their decoders
        features, decoders = decoders.extract_features(features), decoders.decoders
    # The numpy parser of tfds needs no TensorFlow and works for both file formats.
    return functools.partial(features.deserialize_example_np, decoders=decoders)


def files_of(instructions: Sequence[Instruction]) -> list[str]:
    """Paths of the files that a split reads."""
    return [str(instruction.filename) for instruction in instructions]


class TFDSRecords:
    """A split of a dataset prepared as ArrayRecord: record i is example i of the split.

    Args:
      builder: builder of the prepared dataset.
      split: name of the split, or a slice of one.
      instructions: the files of the split, with the rows of each (tfds FileInstruction).
      decode: see :func:`record_decoder`.
    """

    decode_batch = None

    def __init__(self, builder: Builder, split: str, instructions: Sequence[Instruction], decode: Decode) -> None:
        self._name = builder.info.full_name
        self._split = split
        self._records = ArrayRecord(files_of(instructions))
        self.decode = record_decoder(builder, decode)
        # In tfds, take == -1 means all rows after the skipped ones.
        takes = [
            instruction.examples_in_shard if instruction.take == -1 else instruction.take
            for instruction in instructions
        ]
        shards = np.cumsum([0, *(instruction.examples_in_shard for instruction in instructions)])
        self._starts = np.cumsum([0, *takes])
        # Per file: id in the concatenated files minus id in the split.
        self._shift = shards[:-1] + np.asarray([instruction.skip for instruction in instructions]) - self._starts[:-1]

    def __repr__(self) -> str:
        return f"TFDS({self._name!r}, {self._split!r}, {len(self):,} records)"

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Record ``record_id``, decoded."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[Record]:
        """Several records, decoded, in the order of ``record_ids``."""
        return [self.decode(record) for record in self.read_raw(np.asarray(record_ids, np.int64))]

    def read_raw(self, record_ids: np.ndarray | Sequence[int]) -> list[bytes]:
        """Serialized examples, in the order of ``record_ids``.

        Args:
          record_ids: int64[n], in any order, repeats allowed.

        Raises:
          IndexError: an id is not in [0, len).
          CorruptDataError: stored bytes are damaged; names the file and the record.
        """
        return self._records.read_raw(self._in_files(np.asarray(record_ids, np.int64)))

    def file_of(self, record_id: int) -> str:
        """Path of the file that holds a record."""
        return self._records.file_of(int(self._in_files(np.asarray([record_id]))[0]))

    def fingerprint(self) -> JsonValue:
        """Identity: dataset, version, split, files, number of records, and a digest of some records."""
        return {
            **self._records.fingerprint(),
            "kind": "tfds",
            "dataset": self._name,
            "split": self._split,
            "records": len(self),
        }

    def close(self) -> None:
        """Closes the files."""
        self._records.close()

    def _in_files(self, ids: np.ndarray) -> np.ndarray:
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise IndexError(f"record id {worst} is out of range: the split has {len(self):,} records")
        return ids + self._shift[np.searchsorted(self._starts, ids, side="right") - 1]


_RECORDS_AT_ONCE = 32  # records per call of the tf.data iterator


class TFDSShards:
    """A split of a dataset prepared as TFRecord, read as lanes.

    Args:
      builder: builder of the prepared dataset.
      split: name of the split, or a slice of one.
      instructions: the files of the split, with the rows of each (tfds FileInstruction).
      decode: see :func:`record_decoder`.
    """

    def __init__(self, builder: Builder, split: str, instructions: Sequence[Instruction], decode: Decode) -> None:
        self._name = builder.info.full_name
        self._split = split
        self._paths = files_of(instructions)
        self._decode = record_decoder(builder, decode)
        self._rows = [int(instruction.examples_in_shard) for instruction in instructions]
        self._parts = []
        for index, instruction in enumerate(instructions):
            rows = self._rows[index]
            stop = rows if instruction.take == -1 else instruction.skip + instruction.take
            self._parts.append(Piece(index, instruction.skip, stop))
        self._first_ids = np.cumsum([0, *(part.stop - part.start for part in self._parts if part.stop is not None)])

    def __repr__(self) -> str:
        return f"TFDS({self._name!r}, {self._split!r}, {int(self._first_ids[-1]):,} records)"

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0, seed: int = 0) -> TFDSLane:
        """The records of lane ``lane_index`` of ``num_lanes``, from the beginning, in the same order in every epoch.

        ``epoch`` and ``seed`` only seed the ``rng`` of ``decode``.
        """
        cut = cut_files(self._parts, lane_index, num_lanes, lambda index: [self._rows[index]])
        first_ids = [int(self._first_ids[piece.file_index]) for piece in cut.pieces]
        starts = [self._parts[piece.file_index].start for piece in cut.pieces]
        offsets = [first - start for first, start in zip(first_ids, starts, strict=True)]
        return TFDSLane(self._paths, cut, offsets, self._decode, lane_index, epoch, seed)

    def fingerprint(self) -> JsonValue:
        """Identity: dataset, version, split, files and number of records."""
        return {
            "kind": "tfds",
            "dataset": self._name,
            "split": self._split,
            "files": file_paths.identify_files(self._paths, file_paths.file_sizes(self._paths, source="TFDS")),
            "rows": int(self._first_ids[-1]),
        }


class TFDSLane:
    """One lane: ranges of TFRecord files with known lengths, so its state is just the piece and the row.

    Args:
      paths: paths of the files.
      cut: the pieces of the files that the lane reads.
      offsets: per piece, the id in the split minus the row in the file.
      decode: decodes bytes into a record.
      lane_index: index of the lane, for errors.
      epoch: the feed's epoch, for ``rng=``.
      seed: the feed's seed, for ``rng=``.
    """

    def __init__(
        self,
        paths: Sequence[str],
        cut: FileCut,
        offsets: Sequence[int],
        decode: Callable[..., Record],
        lane_index: int,
        epoch: int,
        seed: int,
    ) -> None:
        self._paths = paths
        self._cut = cut
        self._offsets = offsets
        self._decode = decode
        self._with_rng = accepts_keyword(decode, "rng")
        self._lane_index = lane_index
        self._epoch = epoch
        self._seed = seed
        self._piece = 0
        self._row = 0  # rows of the piece already returned
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
                record_id = piece.file_row(self._row) + self._offsets[self._piece]
                self._row += 1
                return self._decode_one(raw, record_id)
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
        import tensorflow as tf

        assert piece.stop is not None
        first = piece.file_row(done)
        records = tf.data.TFRecordDataset(self._paths[piece.file_index]).skip(first).take(piece.stop - first)
        for batch in records.batch(_RECORDS_AT_ONCE):  # one iterator call costs more than one record
            yield from batch.numpy().tolist()

    def _next_raw(self, raw: Iterator[bytes], piece: Piece) -> bytes:
        import tensorflow as tf

        path, row = self._paths[piece.file_index], piece.file_row(self._row)
        try:
            return next(raw)
        except StopIteration:
            what = f"ends before record {row:,}, and tfds counts {piece.stop:,}"
        except tf.errors.DataLossError as error:
            what = f"is damaged at record {row:,} or a little after ({error.message})"
        except tf.errors.NotFoundError as error:
            raise FileNotFoundError(f"lane {self._lane_index}: {path} is gone: {error.message}") from error
        except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError) as error:
            raise OSError(f"lane {self._lane_index}: reading {path} failed: {error.message}") from error
        raise CorruptDataError(
            f"{path} {what}. Expected what tfds wrote. Prepare the dataset again.",
            path=path,
            lane_index=self._lane_index,
        )

    def _decode_one(self, raw: bytes, record_id: int) -> Record:
        extra = {"rng": philox(self._seed, self._epoch, record_id)} if self._with_rng else {}
        try:
            return self._decode(raw, **extra)
        except StopIteration as error:
            raise SourceError(
                f"decode raised StopIteration at record {record_id:,}; that is no end of the data. Raise ValueError "
                "for a bad record.",
                record_id=record_id,
                lane_index=self._lane_index,
            ) from error
        except Exception as error:
            error.add_note(f"while decoding record {record_id:,} of {self._name_of()}")
            raise

    def _name_of(self) -> str:
        return self._paths[self._cut.pieces[self._piece].file_index]


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
    file_format = getattr(builder.info.file_format, "name", None)
    if file_format == "ARRAY_RECORD":
        return TFDSRecords(builder, split, instructions, decode)
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
        more: Any = {} if data_dir is None else {"data_dir": os.fspath(data_dir)}
        return tfds.builder(name, **more)
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


def _prefer_array_record(builder: Builder) -> Builder:
    """The builder for the ArrayRecord files if the dataset is also prepared in that format, otherwise ``builder``."""
    import tensorflow_datasets as tfds

    wanted = tfds.core.file_adapters.FileFormat.ARRAY_RECORD  # pyright: ignore[reportAttributeAccessIssue] # loaded late
    if builder.info.file_format != wanted and wanted in builder.info.available_file_formats():
        return tfds.builder_from_directory(builder.data_dir, file_format=wanted)
    return builder

"""Records of a TFDS split in TFRecord files, as lanes through tf.data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError, StateMismatchError
from meshfeed._src.base.rng import philox
from meshfeed._src.base.types import JsonValue, Record
from meshfeed._src.reading.records import accepts_keyword
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.stream import FileCut, Piece, cut_files
from meshfeed._src.sources.tf.records import files_of, record_decoder

_RECORDS_AT_ONCE = 32  # records per call of the tf.data iterator


class TFDSShards:
    """A split of a dataset prepared as TFRecord, read as lanes.

    Args:
      builder: builder of the prepared dataset.
      split: name of the split, or a slice of one.
      instructions: the files of the split, with the rows of each (tfds FileInstruction).
      decode: see :func:`record_decoder`.
    """

    def __init__(self, builder: Any, split: str, instructions: Sequence[Any], decode: Any) -> None:
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
        decode: Any,
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

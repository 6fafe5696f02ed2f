"""Records of a TFDS split in ArrayRecord files, by id."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.types import JsonValue, Record
from meshfeed._src.sources.array_record.source import ArrayRecord


def record_decoder(builder: Any, decode: Any) -> Callable[..., Record]:
    """A function that decodes the bytes of a serialized example into a record.

    Args:
      builder: the dataset's builder.
      decode: a function of the bytes, decoders as tfds takes them, or None for the dataset's features.
    """
    if decode is not None and callable(decode):
        return decode
    features = builder.info.features
    if decode is not None and hasattr(
        decode, "extract_features"
    ):  # tfds.decode.PartialDecoding: a subset of the features and their decoders
        features, decode = decode.extract_features(features), decode.decoders
    return functools.partial(_decode_features, features, decode)


def _decode_features(features: Any, decoders: Any, record: bytes) -> Record:
    # The numpy parser of tfds needs no TensorFlow and works for both file formats.
    return features.deserialize_example_np(record, decoders=decoders)


def files_of(instructions: Sequence[Any]) -> list[str]:
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

    def __init__(self, builder: Any, split: str, instructions: Sequence[Any], decode: Any) -> None:
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

    def __getitem__(self, record_id: Any) -> Record:
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

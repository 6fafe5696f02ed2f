"""A Grain MapDataset as a random-access source."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.types import JsonValue, Record
from meshfeed._src.sources.grain import fingerprint as grain_fingerprint
from meshfeed._src.sources.grain import tree as grain_tree

_ENDLESS = 1 << 62  # the most records that a feed can number; repeat() without a count has twice as many


class GrainRecords:
    """Elements of a ``grain.MapDataset`` by index; resumes exactly on any number of hosts.

    Reads several records at once if the underlying data source has ``__getitems__``, as
    ``grain.sources.ArrayRecordDataSource`` does. Never reads elements beyond the first epoch: the feed's ``shuffle``,
    ``seed`` and ``num_epochs`` order the records, and each epoch has the same ones.

    Args:
      dataset: a ``grain.MapDataset`` without ``filter`` or ``flat_map``.

    Raises:
      SourceError: the dataset is empty, or ends in a batch() whose last batch is short.
    """

    decode = None
    decode_batch = None

    def __init__(self, dataset: Any) -> None:
        self._given = dataset
        self._length = min(len(dataset), _ENDLESS)
        if not self._length:
            raise SourceError(f"the Grain dataset {dataset} has no elements. Expected at least one.")
        grain_tree.check_batched(dataset)
        grain_tree.warn_batched(dataset)
        self._dataset = grain_tree.copy_tree(dataset, grain_tree.batched_sources)
        _ = getattr(self._dataset, "_stats", None)  # Grain sets this up on first use, which is not thread-safe

    def __repr__(self) -> str:
        return f"Grain({len(self):,} records)"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, record_id: Any) -> Record:
        """Element ``record_id``.

        Raises:
          IndexError: ``record_id`` is not in [0, len).
          SourceError: the element is missing.
        """
        return self.__getitems__([record_id])[0]

    def __getitems__(self, record_ids: Sequence[int] | np.ndarray) -> Sequence[Record]:
        """Several elements, in the order of ``record_ids``.

        Raises:
          IndexError: an id is not in [0, len).
          SourceError: an element is missing.
        """
        indices = [operator.index(record_id) for record_id in record_ids]
        for index in indices:
            if not 0 <= index < self._length:
                raise IndexError(f"record id {index} is out of range: the source has {self._length:,} records")
        records = grain_tree.read_many(self._dataset, indices)
        for index, record in zip(indices, records, strict=True):
            if record is None:
                raise SourceError(
                    f"element {index} of the Grain dataset {self._given} is None, which means missing. Expected a "
                    "record for every index. Pass dataset.to_iter_dataset(), which leaves missing elements out.",
                    record_id=index,
                )
        return records

    def file_names(self) -> list[str]:
        """Paths of the files that the pipeline reads."""
        return grain_fingerprint.file_names(self._given)

    def fingerprint(self) -> JsonValue:
        """Identity: number of records, the transforms with their settings, and the underlying data."""
        return {"kind": "grain", "records": self._length, **grain_fingerprint.describe(self._given)}

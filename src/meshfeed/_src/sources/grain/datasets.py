"""A Grain MapDataset as a random-access source, and an IterDataset as a stream of lanes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import numpy as np

from meshfeed._src.base.errors import MeshfeedError, SourceError, StateMismatchError
from meshfeed._src.base.types import JsonValue, Record
from meshfeed._src.sources.checks import check_ids
from meshfeed._src.sources.grain import cut, fingerprint, internals, tree
from meshfeed._src.sources.grain.internals import GrainIterator, Pipeline, Records

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

    def __init__(self, dataset: Records) -> None:
        self._given = dataset
        self._length = min(len(dataset), _ENDLESS)
        if not self._length:
            raise SourceError(f"the Grain dataset {dataset} has no elements. Expected at least one.")
        tree.check_batched(dataset)
        tree.warn_batched(dataset)
        self._dataset = tree.copy_tree(dataset, tree.batched_sources)
        internals.set_up(self._dataset)

    def __repr__(self) -> str:
        return f"Grain({len(self):,} records)"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Element ``record_id``.

        Raises:
          IndexError: ``record_id`` is not in [0, len).
          SourceError: the element is missing.
        """
        return self.__getitems__([record_id])[0]

    def __getitems__(self, record_ids: Sequence[SupportsIndex] | np.ndarray) -> Sequence[Record]:
        """Several elements, in the order of ``record_ids``.

        Raises:
          IndexError: an id is not in [0, len).
          SourceError: an element is missing.
        """
        indices = [operator.index(record_id) for record_id in record_ids]
        check_ids(indices, self._length)
        records = internals.read_many(self._dataset, indices)
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
        return fingerprint.file_names(self._given)

    def fingerprint(self) -> JsonValue:
        """Identity: number of records, the transforms with their settings, and the underlying data."""
        return {"kind": "grain", "records": self._length, **fingerprint.describe(self._given)}


class GrainStream:
    """A ``grain.IterDataset``, split into lanes at its sources.

    Args:
      dataset: the pipeline; it is not modified.

    Raises:
      SourceError: the pipeline batches and shards by itself.
    """

    def __init__(self, dataset: Pipeline) -> None:
        self._dataset = tree.without_prefetch(dataset)
        tree.warn_batched(self._dataset)
        cut.check(self._dataset, 1)
        # Grain's rebatch yields an empty batch when it resumes from a state saved at the end.
        self._exact = not any(internals.is_named(node, internals.REBATCH) for node in tree.walk(self._dataset))

    def __repr__(self) -> str:
        return f"Grain({type(self._dataset).__name__})"

    def check_lanes(self, num_lanes: int) -> None:
        """Checks that the pipeline can be split into lanes whose records have one shape; reads no data.

        Raises:
          SourceError: a node cannot be split into ``num_lanes`` lanes (the message shows how to write
            ``Stream(open)``), or the pipeline ends in a ``batch()`` whose last batch is known to be short in some lane.
        """
        cut.check(self._dataset, num_lanes)
        tree.check_batched(self._dataset, num_lanes)

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0) -> GrainLane | StatefulGrainLane:
        """Lane ``lane_index`` of ``num_lanes``, from the beginning.

        A later epoch shuffles a MapDataset as Grain's ``repeat`` does, and reseeds ``random_map``.

        Raises:
          SourceError: a node cannot be split into ``num_lanes`` lanes; the message shows how to write ``Stream(open)``.
        """
        place = cut.Place(lane_index, num_lanes, epoch, num_lanes, (lane_index, epoch))
        dataset = cut.cut(self._dataset, place)
        iterator = dataset.__iter__()
        stateful = self._exact and _has_state(iterator)
        return (StatefulGrainLane if stateful else GrainLane)(dataset, iterator, lane_index)

    def file_names(self) -> list[str]:
        """Paths of the files that the pipeline reads."""
        return fingerprint.file_names(self._dataset)

    def fingerprint(self) -> JsonValue:
        """Identity: the transforms with their settings, except prefetching, and the underlying data."""
        return {"kind": "grain_stream", **fingerprint.describe(self._dataset)}


class GrainLane:
    """One lane of a :class:`GrainStream`."""

    def __init__(self, dataset: Pipeline, iterator: GrainIterator, lane_index: int) -> None:
        self._dataset, self._iterator, self._lane_index = dataset, iterator, lane_index
        self._ended = False

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        for record in () if self._ended else self._iterator:
            if record is not None:  # to_iter_dataset(allow_nones=True) yields None for missing elements
                return record
        self._ended = True  # some Grain iterators would start over
        raise StopIteration

    def close(self) -> None:
        """Discards data read ahead; the threads end when the last lane is closed."""
        self._iterator.close()


class StatefulGrainLane(GrainLane):
    """One lane of a :class:`GrainStream`; its state is Grain's own."""

    def get_state(self) -> JsonValue:
        """State after the last record returned; it may contain tuples."""
        return self._iterator.get_state()

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken.

        Raises:
          StateMismatchError: the pipeline rejects the state.
        """
        iterator = self._dataset.__iter__()  # a used iterator may keep elements, as Grain's flat_map does
        try:
            iterator.set_state(copy.deepcopy(state))  # Grain keeps a reference to the state and modifies it
        except (MeshfeedError, OSError):
            raise
        except Exception as error:
            raise StateMismatchError(
                f"lanes.{self._lane_index}",
                state,
                f"a pipeline that refuses it: {type(error).__name__}: {error}",
                "Pass the pipeline, the data and the version of Grain that the state was saved with.",
            ) from error
        self._iterator.close()
        self._iterator, self._ended = iterator, False


def _has_state(iterator: GrainIterator) -> bool:
    try:
        iterator.get_state()
    except (NotImplementedError, AttributeError):  # a user's iterator without state
        return False
    return True

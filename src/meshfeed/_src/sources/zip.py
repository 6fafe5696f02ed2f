"""Several random-access sources side by side."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SourceError, hides_own_frames
from meshfeed._src.base.rng import philox
from meshfeed._src.base.types import ColumnSlices, JsonValue, PyTree, Record, RecordIds, Rngs, public
from meshfeed._src.order.permutation import derive_key
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import SourceReader, file_of, reads_columns, wants_rng
from meshfeed._src.sources.built import AllRecords
from meshfeed._src.sources.checks import check_ids, check_lengths
from meshfeed._src.sources.documents import read_drawn, read_items
from meshfeed._src.sources.joined import caching
from meshfeed._src.sources.lists import plain_records
from meshfeed._src.sources.recognize import describe_source

_OWN_NUMBERS = 134  # purpose of a derived key: each source's decoder draws numbers of its own


@public("meshfeed.sources")
class Zip(AllRecords):
    """Puts sources side by side: record i is ``{name: record i of each source}``.

    With ``shuffle="shards"``, the files of the first source that has files determine the order.

    Args:
      sources: name → random-access source, or any object that the feed accepts as such; all of one length.

    Raises:
      SourceError: there is no source, two differ in length, or one is a stream or groups its records, as Buckets does;
        names the sources.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Memory, Zip
      >>> source = Zip({"image": Memory(np.zeros((3, 2))), "label": Memory(np.arange(3))})
      >>> source[2]["image"].shape, int(source[2]["label"])
      ((2,), 2)
    """

    kind = "zip"
    fresh_arrays = True  # SourceReader copies memory that a source may reuse

    @hides_own_frames
    def __init__(self, sources: Mapping[str, object]) -> None:
        if not isinstance(sources, Mapping) or not sources or not all(isinstance(name, str) for name in sources):
            raise SourceError(f"Zip got {sources!r:.80}. Expected a dict of at least one source, name → source.")
        self._sources = {name: plain_records(source, "Zip") for name, source in sources.items()}
        check_lengths(
            {repr(name): len(source) for name, source in self._sources.items()},
            "the sources of Zip",
            " Select the records to keep with Subset.",
        )
        self._readers = {name: SourceReader(source) for name, source in self._sources.items()}
        self._random = [name for name, source in self._sources.items() if wants_rng(source)]
        self.wants_rng = bool(self._random)
        self.reads_columns = all(map(reads_columns, self._sources.values()))

    def _below(self) -> Iterable[Any]:
        return self._sources.values()

    def __repr__(self) -> str:
        return f"Zip({', '.join(f'{name}: {describe_source(source)}' for name, source in self._sources.items())})"

    def __len__(self) -> int:
        return len(next(iter(self._sources.values())))

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, Record]:
        """Record ``record_id`` of every source."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, Record]]:
        """Several records, in the order of ``record_ids``."""
        ids = np.asarray(record_ids, np.int64)
        check_ids(ids, len(self))
        columns = [read_items(source, ids) for source in self._sources.values()]
        return [dict(zip(self._sources, record, strict=True)) for record in zip(*columns, strict=True)]

    def read_drawn(self, record_ids: RecordIds, rngs: Rngs) -> list[dict[str, Record]]:
        """See :class:`meshfeed._src.base.hooks.DrawnItemsReader`."""
        check_ids(record_ids, len(self))
        columns = [
            read_drawn(source, record_ids, self._own_rngs(name, rngs) or ()) for name, source in self._sources.items()
        ]
        return [dict(zip(self._sources, record, strict=True)) for record in zip(*columns, strict=True)]

    def element_shapes(self) -> PyTree:
        """Pytree of ``jax.ShapeDtypeStruct`` of one record; only if ``reads_columns``."""
        return {name: source.element_shapes() for name, source in self._sources.items()}

    def read_batch(
        self, record_ids: RecordIds | Sequence[int], columns: ColumnSlices | None = None, rngs: Rngs | None = None
    ) -> dict[str, PyTree]:
        """Reads records, decoded and stacked.

        Args:
          record_ids: int64[n], in any order, repeats allowed.
          columns: leaf path → slices of the dimensions after the first; only if every source reads columns.
          rngs: one generator per record, for decoders that take ``rng=``. Each source draws from one of its own.

        Returns:
          Name → pytree of arrays ``[n, ...]``.

        Raises:
          IndexError: an id is not in [0, len).
          Any error that a source raises, with a note naming it.
        """
        ids = np.asarray(record_ids, np.int64)
        check_ids(ids, len(self))
        batch: dict[str, PyTree] = {}
        for name, reader in self._readers.items():
            prefix = f"[{name!r}]"
            own = None if columns is None else {p[len(prefix) :]: s for p, s in columns.items() if p.startswith(prefix)}
            try:
                batch[name] = reader.read(ids, self._own_rngs(name, rngs), columns=own)
            except Exception as error:
                error.add_note(f"in source {name!r} of Zip")
                raise
        return batch

    def _own_rngs(self, name: str, rngs: Rngs | None) -> Rngs | None:
        """Generators of which no other source gets a number."""
        if rngs is None or name not in self._random:
            return None
        return [_derived(rng, sorted(self._sources).index(name)) for rng in rngs]

    def cached_files(self, record_ids: RecordIds) -> list[hooks.CachedFile] | None:
        """The files that hold these records and are read through a cache; None if no source has one."""
        cached = [found for found in map(caching, self._sources.values()) if found is not None]
        return [file for source in cached for file in source.cached_files(record_ids) or ()] if cached else None

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        found = [
            source.ask_disk(record_ids) for source in map(hooks.on_disk, self._sources.values()) if source is not None
        ]
        return any(found) if found else None

    def file_of(self, record_id: int) -> str | None:
        """The files that hold a record, or None if unknown."""
        found = {name: file_of(source, record_id) for name, source in self._sources.items()}
        return ", ".join(f"{name}: {path}" for name, path in found.items() if path) or None

    @property
    def shard_lengths(self) -> Callable[[], RecordIds]:
        """Number of records in each file of the first source that has files."""
        sharded = (hooks.find(source, hooks.Sharded) for source in self._sources.values())
        return next((source.shard_lengths for source in sharded if source is not None), None) or _no_hook("files")

    @property
    def lengths(self) -> Callable[[], np.ndarray]:
        """The lengths of all records; only if the sources that know theirs know the same."""
        found = self._known_lengths
        return (lambda: found) if found is not None else _no_hook("lengths")

    @functools.cached_property
    def _known_lengths(self) -> np.ndarray | None:
        known = [hooks.find(source, hooks.KnowsLengths) for source in self._sources.values()]
        found = [np.asarray(source.lengths()) for source in known if source is not None]
        alike = len(found) == len(known) and all(np.array_equal(found[0], other) for other in found[1:])
        return found[0] if alike else None

    def unconverted(self) -> Zip:
        """The same records as they are stored, if the sources convert them."""
        return Zip({name: hooks.unconverted(source) for name, source in self._sources.items()})

    def fingerprint(self) -> JsonValue:
        """Identity: those of all sources, by name."""
        return {"sources": {name: source_identity(source) for name, source in self._sources.items()}}


def _no_hook(what: str) -> Any:
    raise AttributeError(f"no source of Zip has {what}")


def _derived(rng: np.random.Generator, number: int) -> np.random.Generator:
    # Not a jump, as for the function of Map: that of a Map below would draw the same numbers.
    state: Any = rng.bit_generator.state["state"]
    seed, epoch = state["key"].tolist()
    return philox(derive_key(seed, _OWN_NUMBERS, number), epoch, int(state["counter"][3]))

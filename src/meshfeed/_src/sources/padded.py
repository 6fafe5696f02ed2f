"""Pads records of unequal length to one length, with a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.base.types import PyTree, Record, public
from meshfeed._src.reading.host_batch import RecordStack
from meshfeed._src.sources.checks import checked_count
from meshfeed._src.sources.map import Map, MappedRecords, MappedStream


@public("meshfeed.sources")
@hides_own_frames
def Padded(  # named like a class, as Map is
    source: object,
    length: int,
    *,
    key: str | Sequence[str] = "tokens",
    mask_key: str | None = "mask",
    pad_value: float = 0,
    long: str = "raise",
) -> MappedRecords | MappedStream:
    """Pads the records of any source to one length.

    A record is a dict. Its leaf ``key``, ``[n, ...]`` with 0 <= n <= ``length``, becomes ``[length, ...]`` of the same dtype,
    and the leaf ``mask_key``, bool ``[length]``, is True for its n entries. Other leaves stay as they are. A bare array is
    treated as ``{key: array}``.

    Args:
      source: records, random access or a stream, or any object that the feed accepts as such.
      length: entries of a padded leaf, at least 1.
      key: the leaf to pad, or several of one length per record, such as ``("tokens", "loss_mask")``.
      mask_key: name of the mask, or None for no mask.
      pad_value: value of the entries that are added to the first leaf of ``key``; those of the others are 0.
      long: what becomes of a longer record: ``"raise"`` raises an error, ``"truncate"`` keeps its first ``length`` entries.

    Returns:
      A random-access source if ``source`` is one, otherwise a stream source.

    Raises:
      SettingsError: a setting is out of range; names the keyword.
      SourceError: ``source`` is not a source of records. Reads raise it for a record without the leaves ``key``, with
        leaves of different lengths, or longer than ``length``.
    """
    if long not in ("raise", "truncate"):
        raise SettingsError(f"long={long!r}; it takes 'raise' or 'truncate'.", setting="long")
    return Map(source, Pad(key, mask_key, pad_value, checked_count(length, "length"), long == "truncate"), batched=True)


class Pad:
    """Stacks records padded to one length.

    Args:
      key, mask_key, pad_value: see :func:`Padded`.
      length: entries of a padded leaf.
      truncates: whether longer records are cut.
      what: what ``length`` is, for errors.

    Raises:
      SettingsError: a setting is out of range; names the keyword.
    """

    fresh_arrays = True

    def __init__(
        self, key: object, mask_key: object, pad_value: object, length: int, truncates: bool, what: str = "length"
    ) -> None:
        keys = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, Sequence) else ()
        if not keys or not all(isinstance(name, str) and name for name in keys) or len(set(keys)) < len(keys):
            raise SettingsError(f"key={key!r}; it takes the name of a leaf, or several different ones.", setting="key")
        if mask_key is not None and not (isinstance(mask_key, str) and mask_key and mask_key not in keys):
            raise SettingsError(
                f"mask_key={mask_key!r}; it takes the name of a new leaf, or None for no mask.", setting="mask_key"
            )
        if not isinstance(pad_value, bool | int | float | np.number):
            raise SettingsError(f"pad_value={pad_value!r}; it takes a number.", setting="pad_value")
        self.keys, self._mask_key, self._pad_value = keys, mask_key, pad_value
        self._length, self._truncates, self._what = length, truncates, what

    def __call__(self, records: Sequence[Record]) -> dict[str, PyTree]:
        """Returns the records, at least one, as arrays ``[n, length, ...]``."""
        return self.to(records, self._length)

    def length_of(self, record: Record) -> int:
        """Returns the number of entries of a record.

        Raises:
          SourceError: it lacks a leaf of ``key``, or has leaves of different lengths.
        """
        return len(self._leaves(record)[self.keys[0]])

    def to(self, records: Sequence[Record], length: int) -> dict[str, PyTree]:
        """Returns records padded to ``length`` in new arrays.

        Raises:
          SourceError: a record is longer, lacks a leaf of ``key``, or differs from the others.
        """
        stack, padded, mask = RecordStack(len(records)), {}, memory.empty((len(records), length), np.bool_)
        for row, record in enumerate(records):
            leaves = self._leaves(record)
            count = len(leaves[self.keys[0]])
            if count > length and not self._truncates:
                raise SourceError(
                    f"a record has {count:,} entries in the leaf {self.keys[0]!r}, and {self._what} is {length:,}. Pass a "
                    f"larger {self._what}, or long='truncate'."
                )
            count = min(count, length)
            for name in self.keys:
                out = padded.get(name)
                if out is None:
                    out = padded[name] = self._filled(name, (len(records), length), leaves[name])
                if out.dtype != leaves[name].dtype or out.shape[2:] != leaves[name].shape[1:]:
                    raise _differs(name, leaves[name], out)
                out[row, :count] = leaves[name][:count]
            mask[row, :count], mask[row, count:] = True, False
            if isinstance(record, Mapping) and len(record) > len(self.keys):
                stack.add({key: leaf for key, leaf in record.items() if key not in self.keys})
        batch = {**(stack.take()[0] if stack.count else {}), **padded}
        return batch if self._mask_key is None else {**batch, self._mask_key: mask}

    def _filled(self, name: str, shape: tuple[int, int], leaf: np.ndarray) -> np.ndarray:
        value = self._pad_value if name == self.keys[0] else 0
        with np.errstate(invalid="ignore"):
            filling = np.array([value]).astype(leaf.dtype)
        if filling[0] != value and not np.isnan(value):
            raise SettingsError(
                f"pad_value={value!r} is not a value of the leaf {name!r}, which is {leaf.dtype}.", setting="pad_value"
            )
        out = memory.empty((*shape, *leaf.shape[1:]), leaf.dtype)
        out[...] = filling[0]
        return out

    def _leaves(self, record: Record) -> dict[str, np.ndarray]:
        """The leaves to pad, of one length."""
        if not isinstance(record, Mapping):
            record = {self.keys[0]: record}
        if self._mask_key in record:
            raise SourceError(f"records have the leaf {self._mask_key!r} already. Pass a different mask_key.")
        missing = [name for name in self.keys if name not in record]
        if missing:
            raise SourceError(f"a record has the leaves {sorted(record)}, and not {missing[0]!r}. Pass key=.")
        leaves = {name: np.asarray(record[name]) for name in self.keys}
        for name, leaf in leaves.items():
            if leaf.dtype.kind in "OSU" or not leaf.ndim or len(leaf) != len(leaves[self.keys[0]]):
                raise SourceError(
                    f"the leaf {name!r} of a record is {leaf.dtype} of shape {leaf.shape}. Expected numbers of shape "
                    "[n, ...], with the same n for every leaf of key=. Turn text into numbers with Map."
                )
        return leaves


def _differs(name: str, leaf: np.ndarray, out: np.ndarray) -> SourceError:
    return SourceError(
        f"the leaf {name!r} of a record is {leaf.dtype} of shape {leaf.shape}, that of another record {out.dtype} with "
        f"entries of shape {out.shape[2:]}. Expected records that differ in length only. Cast them with Map."
    )

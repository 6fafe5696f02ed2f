"""Lays pieces of documents out as rows: tokens, segment ids and positions, and the entries that belong to segments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import RecordIds
from meshfeed._src.order.packing import Pieces, expand
from meshfeed._src.sources.checks import checked_count, is_count
from meshfeed._src.sources.sequence_order import sequence_order


@dataclasses.dataclass(frozen=True)
class Entries:
    """Entries of one leaf that belong to pieces.

    Attributes:
      counts: int64[pieces], the entries of each piece.
      values: [sum of counts, ...], one after the other.
    """

    counts: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class RowLayout:
    """How pieces become rows of ``length`` tokens.

    Attributes:
      length: tokens per row.
      key: name of the leaf of tokens.
      segment_ids, positions: names of the leaves that are added.
      pad_id: token on padding.
      align: each piece begins at a multiple of this.
      bos_id: token before each piece, or None.
      cumulative_lengths: name of a leaf of the starts of segments, or None.
      max_segments: most pieces in a row, or None.
      sequence_order: kind and number of shards of the order of the tokens of a row, or None to leave them.
      side: leaf of entries → most entries in a row.
    """

    length: int
    key: str
    segment_ids: str
    positions: str
    pad_id: int
    align: int
    bos_id: int | None
    max_segments: int | None
    cumulative_lengths: str | None
    sequence_order: tuple[str, int] | None
    side: Mapping[str, int]

    @property
    def before(self) -> int:
        """Tokens before each piece."""
        return 0 if self.bos_id is None else 1

    @functools.cached_property
    def order(self) -> RecordIds | None:
        """The order of the tokens of a row, int64[length]; None to leave them."""
        if self.sequence_order is None:
            return None
        kind, shards = self.sequence_order
        return sequence_order(kind, self.length, shards)

    def limits(self) -> dict[str, Any]:
        """The settings that change rows if they are set, without ``side``."""
        names = ("max_segments", "bos_id", "cumulative_lengths")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.align > 1:
            found["align"] = self.align
        if self.sequence_order is not None:
            found["sequence_order"] = list(self.sequence_order)
        return found

    @functools.cached_property
    def added(self) -> frozenset[str]:
        """Names of the leaves that rows have beside those of the documents."""
        return self.named.union(added for name in self.side for added in _added(name))

    @property
    def named(self) -> frozenset[str]:
        """Those of them whose names are settings."""
        names = [self.segment_ids, self.positions, *([self.cumulative_lengths] if self.cumulative_lengths else [])]
        return frozenset(names)

    def lay_out(
        self, pieces: Pieces, leaves: Mapping[str, np.ndarray], entries: Mapping[str, Entries]
    ) -> dict[str, np.ndarray]:
        """Returns rows in new memory.

        Args:
          pieces: of each row, at least one.
          leaves: the values of pieces, one after the other, [tokens, ...].
          entries: those of each leaf of ``side``.
        """
        gaps = self.align > 1 or self.bos_id is not None
        rows = self._with_gaps(pieces, leaves) if gaps else self._end_to_end(pieces, leaves)
        if self.order is not None:
            rows = {name: _reordered(leaf, self.order) for name, leaf in rows.items()}
        if self.cumulative_lengths is not None:
            rows[self.cumulative_lengths] = self._cumulative(pieces)
        for name, found in entries.items():
            rows |= self._entries(name, pieces, found)
        return rows

    def _end_to_end(self, pieces: Pieces, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rows of pieces without anything between them; several times as fast as :meth:`_with_gaps`."""
        number, size = len(pieces.splits) - 1, self.length
        ends = np.concatenate([[0], np.cumsum(pieces.lengths)])[pieces.splits]  # tokens before each row
        filled = np.diff(ends)
        # Padding is a segment of its own, the last of its row.
        lengths = np.insert(pieces.lengths, pieces.splits[1:], size - filled)
        first = pieces.splits[:-1] + np.arange(number)
        segment = np.arange(len(lengths)) - np.repeat(first, np.diff(pieces.splits) + 1) + 1
        segment[pieces.splits[1:] + np.arange(number)] = 0
        begins = (np.cumsum(lengths) - lengths).astype(np.int32)
        segment_ids, positions = (memory.empty((number, size), np.int32) for _ in range(2))
        segment_ids.reshape(-1)[:] = np.repeat(segment.astype(np.int32), lengths)
        np.subtract(np.arange(number * size, dtype=np.int32), np.repeat(begins, lengths), out=positions.reshape(-1))
        rows = list(zip(range(number), ends[:-1].tolist(), filled.tolist(), strict=True))
        short = [row for row in rows if row[2] < size]
        for row, _, count in short:
            positions[row, count:] = 0
        found = {}
        for name, values in leaves.items():
            out, values = self._empty(name, pieces, values)
            # Full rows are the values as they are, in one copy.
            if not short:
                out.reshape(-1, *values.shape[1:])[:] = values
            else:
                for row, start, count in rows:
                    out[row, :count] = values[start : start + count]
                    out[row, count:] = self.pad_id if name == self.key else 0
            found[name] = out
        return {**found, self.segment_ids: segment_ids, self.positions: positions}

    def _with_gaps(self, pieces: Pieces, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        number, before = len(pieces.splits) - 1, self.before
        row, segment, begins = self._places(pieces)
        _, piece, within = expand(pieces.lengths + before)
        at = (row * self.length + begins)[piece] + within
        is_token = within >= before
        found = {}
        for name, values in leaves.items():
            out, values = self._empty(name, pieces, values)
            out[...] = self.pad_id if name == self.key else 0
            flat = out.reshape(-1, *values.shape[1:])
            flat[at[is_token]] = values
            if before and name == self.key:
                flat[at[~is_token]] = self.bos_id
            found[name] = out
        for name, values in ((self.segment_ids, segment[piece]), (self.positions, within)):
            out = found[name] = memory.empty((number, self.length), np.int32)
            out[...] = 0
            out.reshape(-1)[at] = values
        return found

    def _places(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The row of each piece, its segment id, and its first place in the row; int64[pieces] each."""
        taken = -(-(pieces.lengths + self.before) // self.align) * self.align
        _, row, segment = expand(np.diff(pieces.splits))
        begins = np.cumsum(taken) - taken
        return row, segment + 1, begins - begins[pieces.splits[:-1]][row]

    def _cumulative(self, pieces: Pieces) -> np.ndarray:
        assert self.max_segments is not None
        row, segment, begins = self._places(pieces)
        last = pieces.splits[1:] - 1
        out = memory.empty((len(last), self.max_segments + 1), np.int32)
        out[...] = (begins + pieces.lengths + self.before)[last][:, None]
        out[row, segment - 1] = begins
        return out

    def _entries(self, name: str, pieces: Pieces, found: Entries) -> dict[str, np.ndarray]:
        number, most = len(pieces.splits) - 1, self.side[name]
        _, row, segment = expand(np.diff(pieces.splits))
        _, piece, _ = expand(found.counts)  # of each entry
        before = np.concatenate([[0], np.cumsum(found.counts)])[pieces.splits[:-1]]  # entries before each row
        at = np.arange(len(piece)) - before[row[piece]]
        out = memory.zeros((number, most, *found.values.shape[1:]), found.values.dtype)
        mask, of_segment = memory.zeros((number, most), np.bool_), memory.zeros((number, most), np.int32)
        out[row[piece], at] = found.values
        mask[row[piece], at] = True
        of_segment[row[piece], at] = segment[piece] + 1
        return {name: out, **dict(zip(_added(name), (mask, of_segment), strict=True))}

    def shard_costs(self, pieces: Pieces) -> np.ndarray:
        """Returns the pairs of tokens of causal attention in each shard of a zigzag order, int64[rows, shards]."""
        assert self.sequence_order is not None
        shards = self.sequence_order[1]
        _, _, begins = self._places(pieces)
        bounds = np.arange(2 * shards + 1) * (self.length // (2 * shards))
        # A token attends to those before it in its piece and to itself.
        tokens = np.clip(bounds - begins[:, None], 0, (pieces.lengths + self.before)[:, None])
        chunks = np.add.reduceat(np.diff(tokens * (tokens + 1) // 2, axis=1), pieces.splits[:-1], axis=0)
        return chunks[:, :shards] + chunks[:, : shards - 1 : -1]

    def _empty(self, name: str, pieces: Pieces, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a leaf, not yet filled, and its values as they are to be."""
        dtype = np.dtype(np.int32) if name == self.key else values.dtype
        out = memory.empty((len(pieces.splits) - 1, self.length, *values.shape[1:]), dtype)
        return out, _as_tokens(values, pieces) if name == self.key else values


def _added(name: str) -> tuple[str, str]:
    """Names of the leaves beside a leaf of ``side``: its mask, and the segments of its entries."""
    return f"{name}_mask", "_".join([name, "segment"])


def _reordered(leaf: np.ndarray, order: RecordIds) -> np.ndarray:
    out = memory.empty(leaf.shape, leaf.dtype)
    np.take(leaf, order, axis=1, out=out, mode="clip")  # "raise" goes through a second buffer
    return out


def _as_tokens(values: np.ndarray, pieces: Pieces) -> np.ndarray:
    limits = np.iinfo(np.int32)
    if not np.can_cast(values.dtype, np.int32) and values.size:
        worst = int(np.argmax(values) if int(values.max()) > limits.max else np.argmin(values))
        if not limits.min <= int(values[worst]) <= limits.max:
            document = int(pieces.documents[np.searchsorted(np.cumsum(pieces.lengths), worst, side="right")])
            message = f"document {document} holds the token {values[worst]}, which does not fit into int32."
            raise SourceError(message, record_id=document)
    return values


def checked_layout(**given: Any) -> RowLayout:
    """Returns a layout with the settings of ``Packed`` that concern rows; ``length`` is known to be valid.

    Raises:
      SettingsError: a setting is out of range, or two leaves have one name; names the keyword.
    """
    length = given["length"]
    for name, token in (("pad_id", given["pad_id"]), ("bos_id", given["bos_id"])):
        if (name == "pad_id" or token is not None) and (not is_count(token, -(1 << 31)) or token >= 1 << 31):
            raise SettingsError(f"{name}={token!r}; it takes a token, an int32.", setting=name)
        given[name] = None if token is None else int(token)
    for name in ("max_segments", "align"):
        given[name] = None if given[name] is None and name == "max_segments" else checked_count(given[name], name)
    if length % given["align"]:
        raise SettingsError(
            f"align={given['align']} does not divide sequence_length={length:,}. Pass a divisor, or another length.",
            setting="align",
        )
    if given["bos_id"] is not None and length < 3:
        raise SettingsError(
            f"bos_id={given['bos_id']} leaves too little of {length} tokens. Pass a sequence_length of at least 3.",
            setting="bos_id",
        )
    if given["cumulative_lengths"] is not None and given["max_segments"] is None:
        raise SettingsError(
            f"cumulative_lengths={given['cumulative_lengths']!r} is a leaf of max_segments + 1 numbers. Pass max_segments.",
            setting="cumulative_lengths",
        )
    given["sequence_order"] = _checked_order(given["sequence_order"], length)
    given["side"] = _checked_side(given["side"])
    _check_names(given)
    return RowLayout(**given)


def _checked_order(setting: object, length: int) -> tuple[str, int] | None:
    if setting is None:
        return None
    if not isinstance(setting, tuple | list) or len(setting) != 2:
        raise SettingsError(
            f"sequence_order={setting!r}; it takes a kind and a number of shards, such as ('zigzag', 4).",
            setting="sequence_order",
        )
    try:
        sequence_order(setting[0], length, setting[1])
    except SettingsError as error:
        raise SettingsError(f"sequence_order={setting!r}: {error}", setting="sequence_order") from None
    return setting[0], int(setting[1])


def _checked_side(setting: object) -> dict[str, int]:
    if not isinstance(setting, Mapping) or not all(isinstance(name, str) and name for name in setting):
        raise SettingsError(
            f"side={setting!r}; it takes a dict of leaves and the most entries of each, such as {{'images': 8}}.",
            setting="side",
        )
    for most in setting.values():
        if not is_count(most) or most >= 1 << 31:
            raise SettingsError(
                f"side={setting!r}; a number of entries is an int of at least 1, and less than 2**31.", setting="side"
            )
    return {name: int(most) for name, most in setting.items()}


def _check_names(given: Mapping[str, Any]) -> None:
    names = [(setting, given[setting]) for setting in ("key", "segment_ids", "positions", "cumulative_lengths")]
    names += [("side", leaf) for name in given["side"] for leaf in (name, *_added(name))]
    taken: set[object] = set()
    for setting, name in names:
        if setting == "cumulative_lengths" and name is None:
            continue
        if not isinstance(name, str) or not name or name in taken:
            what = "it takes the name of a leaf of its own" if setting != "side" else f"rows have another leaf {name!r}"
            raise SettingsError(f"{setting}={given[setting]!r}; {what}.", setting=setting)
        taken.add(name)

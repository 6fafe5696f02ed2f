"""Documents of unequal length as sequences of one length, read at random."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, Unpack

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.settings import ShardShuffle, shard_shuffle
from meshfeed._src.base.types import JsonValue, RecordIds, public
from meshfeed._src.order import permutation
from meshfeed._src.order.blocks import Packing, PackingStats, SequenceOrder
from meshfeed._src.order.limits import VERSION as LIMITS_VERSION
from meshfeed._src.order.packing import Budget, PackingMethod, Pieces
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import file_of
from meshfeed._src.sources.built import BuiltRecords
from meshfeed._src.sources.checks import check_choice, check_ids, is_count
from meshfeed._src.sources.documents import (
    as_array,
    digest_of_lengths,
    documents_of,
    in_record,
    leaves_by_name,
    lengths_of_leaves,
    read_items,
)
from meshfeed._src.sources.rows import Entries, checked_layout

_OF_STREAM = "Pack streams with Grain's packing, or convert them to files that are read at random."


@public("meshfeed.sources")
class Packed(BuiltRecords):
    """Packs documents into sequences of one length, as a random-access source.

    A record is ``{key: int32[L], segment_ids: int32[L], positions: int32[L]}``: the tokens of one or more documents,
    1, 2, … for the parts of documents in the sequence (0 on padding), and the index of each token in its part (0 on
    padding). Other leaves of the documents with one value per token, such as loss masks, travel with the tokens.

    Documents are packed in blocks of ``block`` consecutive documents. With ``shuffle=True`` the feed permutes the
    documents within each block, and the blocks, differently in each epoch; every token of the epoch still comes exactly
    once. The sequence at a place of the stream follows from the documents' lengths, the seed and the place alone, so a
    state is one number, and resuming takes no longer at the end of an epoch than at its start.

    By shards, the documents of a window of shards are packed together, and a lane reads one window after the other.

    In a ``Mixture``, a view or a ``Map``, the sequences are those of the documents in order, and what is built over them
    shuffles sequences. Over a ``Mixture``, a sequence holds documents of several components: an epoch reads every component
    in full, with exact shares in every block of the mixture.

    Limits of a kernel or a model may be set: on segments, on where they begin, and on entries of other leaves, such as
    images. With ``max_segments`` or ``side``, the same documents of equal size exchange their places between epochs, and
    ``"split"`` cuts a document at the end of a sequence where that saves padding, instead of putting documents end to end.

    Args:
      source: random-access documents, or any object that the feed accepts as such: dicts with the leaf ``key`` of shape
        ``[tokens]``, or bare arrays. ``Tokens.documents`` and other sources with ``lengths()`` know the lengths; all
        others are read once when the source is created.
      sequence_length: L, tokens per sequence.
      key: leaf that holds the tokens.
      method: ``"split"`` puts the documents of a block end to end and cuts every L tokens, so only the last sequence of a
        block is padded. ``"fit"`` cuts no document that fits into a sequence: best fit, from the longest to the shortest.
      block: documents per block.
      pad_id: token on padding.
      long: the treatment of a document of more than L tokens: ``"split"`` cuts it, ``"truncate"`` keeps its first L
        tokens, ``"drop"`` leaves it out.
      segment_ids: name of the leaf of segment ids, such as MaxText's ``"inputs_segmentation"``.
      positions: name of the leaf of positions, such as MaxText's ``"inputs_position"``.
      max_segments: most segments in a sequence, or None.
      align: each segment begins at a multiple of this number, which divides L; the gap before it is padding.
      bos_id: token put before each part of a document, at position 0, or None. It counts towards L; other leaves are 0 there.
      cumulative_lengths: name of a leaf int32 ``[max_segments + 1]``, as kernels for variable lengths take it: where each
        segment begins, and then the end of the last one, repeated. Counts tokens in the order before ``sequence_order``.
      sequence_order: ``(kind, n)`` puts all leaves ``[L, …]`` into the order of :func:`sequence_order` for n shards of the
        sequence axis, or None.
      side: ``{leaf: most}``, leaves of the documents with any number of entries, ``[m, …]``, such as images. A sequence has
        at most ``most`` of them: ``leaf`` ``[most, …]``, in order, zeros on padding; ``<leaf>_mask`` bool ``[most]``; and
        ``<leaf>_segment`` int32 ``[most]``, the segment of each, 0 on padding. The entries of a document that is cut
        are with its first part. ``stored_lengths(leaf)`` of the source, such as from a manifest, gives their numbers;
        otherwise the documents are read once. ``long="drop"`` also leaves out documents with too many entries.

    Raises:
      SettingsError: a setting is out of range, or ``source`` has lengths that depend on random numbers; names the keyword.
      SourceError: the source is not random access, its documents have no leaf ``key`` with one dimension, no token is
        left, or a document has more entries than fit in a sequence, or entries but no token; names the document.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Packed
      >>> class Documents:
      ...     def __len__(self):
      ...         return 6
      ...     def __getitem__(self, record_id):
      ...         return {"tokens": np.full(record_id + 1, record_id, np.int32)}
      ...     def lengths(self):
      ...         return np.arange(1, 7)
      >>> source = Packed(Documents(), sequence_length=8)
      >>> source[0]["tokens"].shape
      (8,)
    """

    kind = "packed"
    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self,
        source: object,
        sequence_length: int,
        *,
        key: str = "tokens",
        method: str = "split",
        block: int = 65_536,
        pad_id: int = 0,
        long: str = "split",
        segment_ids: str = "segment_ids",
        positions: str = "positions",
        max_segments: int | None = None,
        align: int = 1,
        bos_id: int | None = None,
        cumulative_lengths: str | None = None,
        sequence_order: tuple[str, int] | None = None,
        side: Mapping[str, int] | None = None,
    ) -> None:
        check_choice(method, "method", "split", "fit")
        check_choice(long, "long", "split", "truncate", "drop")
        for name, number in (("sequence_length", sequence_length), ("block", block)):
            if not is_count(number) or number >= 1 << 31:
                raise SettingsError(f"{name}={number!r}; it takes an int of at least 1.", setting=name)
        self._rows = checked_layout(
            length=int(sequence_length),
            key=key,
            segment_ids=segment_ids,
            positions=positions,
            pad_id=pad_id,
            align=align,
            bos_id=bos_id,
            max_segments=max_segments,
            cumulative_lengths=cumulative_lengths,
            sequence_order=sequence_order,
            side={} if side is None else side,
        )
        self._source = documents_of(source, "Packed", _OF_STREAM)
        self._key, self._length = key, int(sequence_length)
        self._settings: dict[str, Any] = {"method": method, "block": int(block), "long": long}
        lengths, *counts = lengths_of_leaves(self._source, self._measured, key, list(self._rows.side))
        budgets = [Budget(number, most) for number, most in zip(counts, self._rows.side.values(), strict=True)]
        self._check_entries(lengths, budgets)
        rows = self._rows
        how = PackingMethod(self._length, method, long, rows.max_segments, rows.align, rows.before, budgets)
        self._packing = Packing(lengths, how, block=int(block))
        if not self._packing.num_sequences:
            raise SourceError(
                f"Packed: the {len(self._source):,} document(s) leave no token to pack into sequences of "
                f"{self._length:,} with long={long!r}. Check the documents and the key {key!r}."
            )
        self._planned: Packing | None = None

    def _check_entries(self, lengths: np.ndarray, budgets: Sequence[Budget]) -> None:
        """Checks that sequences can hold the entries of every document that is not dropped."""
        if self._settings["long"] == "drop":
            return
        for (name, most), budget in zip(self._rows.side.items(), budgets, strict=True):
            wrong = np.flatnonzero((budget.counts > most) | ((budget.counts > 0) & (lengths == 0)))
            if not len(wrong):
                continue
            document = int(wrong[0])
            count = int(budget.counts[document])
            if count > most:
                reason = f"its leaf {name!r} has {count:,} entries, and a sequence holds at most {most:,}"
                remedy = f"Pass a larger number in side={{{name!r}: …}}"
            else:
                reason = f"its leaf {name!r} has {count:,} entries, and it has no token, so no segment"
                remedy = "Give it tokens"
            others = f" {len(wrong) - 1:,} more documents are like it." if len(wrong) > 1 else ""
            raise in_record(
                self._source,
                document,
                SourceError(f"{reason}.{others} {remedy}, or leave out such documents with long='drop'."),
            )

    def __repr__(self) -> str:
        return f"Packed({self._source!r}, {len(self):,} sequences of {self._length:,} tokens)"

    def __len__(self) -> int:
        """Number of sequences of one epoch."""
        return self._packing.num_sequences

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, np.ndarray]:
        """Sequence ``record_id`` of the documents in order."""
        return {name: leaf[0] for name, leaf in self.read_batch([operator.index(record_id)]).items()}

    def read_batch(self, record_ids: RecordIds | Sequence[int]) -> dict[str, np.ndarray]:
        """Reads sequences.

        Args:
          record_ids: int64[n], in any order, repeats allowed.

        Returns:
          Dict of arrays ``[n, L]``, and ``[n, most, …]`` of the leaves of ``side``, in new memory.

        Raises:
          IndexError: an id is not in [0, len).
          SourceError: a document's length is not what it was, or its leaves do not have one value per token.
        """
        ids = np.asarray(record_ids, np.int64)
        self._check_ids(ids)
        pieces = self._packing.pieces_at(ids)
        return self._rows.lay_out(pieces, *self._read(pieces))

    def row_lengths(self, record_ids: RecordIds) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lengths of all segments of sequences, and the first segment of each sequence; reads nothing."""
        pieces = self._packing.pieces_at(np.asarray(record_ids, np.int64))
        return pieces.lengths + self._packing.method.before, pieces.splits

    @property
    def num_sequence_shards(self) -> int | None:
        """Shards of the sequence axis if their work is unequal, as in the order "zigzag"; otherwise None."""
        kind, shards = self._rows.sequence_order or ("striped", 1)
        return shards if kind == "zigzag" else None

    def shard_costs(self, record_ids: RecordIds) -> np.ndarray:
        """Returns the work of causal attention in each shard of the sequence axis, int64[n, shards]; reads nothing."""
        return self._rows.shard_costs(self._packing.pieces_at(np.asarray(record_ids, np.int64)))

    def stats(self, epoch: int = 0) -> PackingStats:
        """Returns padding and cut documents of an epoch; goes through all lengths, and reads no document.

        Before a feed shuffles the source, of the documents in order.
        """
        return self._packing.stats(epoch)

    def with_order(self, *, shuffle: bool | int | str | ShardShuffle, seed: int) -> Packed:
        """Returns the source with documents in the order of a feed.

        Raises:
          SettingsError: ``shuffle`` is a number of records.
        """
        by_shards, packing = shard_shuffle(shuffle), self._packing
        if shuffle is False or (by_shards is not None and self._shards is None):
            return self
        if by_shards is not None and self._shards is not None:
            packing = packing.by_windows(self._shards.shard_lengths(), by_shards.window_shards, seed)
        elif shuffle is True:
            packing = packing.shuffled(seed)
        else:
            raise SettingsError(
                f"shuffle={shuffle!r}, but packed documents are shuffled within the blocks of Packed(block="
                f"{self._settings['block']}). Pass shuffle=True, and block= to Packed.",
                setting="shuffle",
            )
        other = object.__new__(ShuffledPacked)
        other.__dict__.update(self.__dict__, _packing=packing, _planned=None)
        return other

    @property
    def _shards(self) -> hooks.Sharded | None:
        return hooks.find(self._source, hooks.Sharded)

    @property
    def shard_lengths(self) -> Callable[[], RecordIds]:
        """Number of sequences whose block begins in each file; only if the documents are in files."""
        sharded = self._shards
        if sharded is None:
            raise AttributeError("the documents are not in files")
        return lambda: self._packing.in_shards(sharded.shard_lengths())

    def fingerprint(self) -> JsonValue:
        """Identity: documents, all lengths, and how they are packed."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> JsonValue:
        of_packing = {"sequence_length": self._length, "key": self._key, "pad_id": self._rows.pad_id, **self._settings}
        # Settings that are not set are left out, so the identity is that of states saved before there were any.
        names = {"segment_ids": self._rows.segment_ids, "positions": self._rows.positions}
        if any(name != usual for usual, name in names.items()):
            of_packing |= names
        if limits := self._limits():
            of_packing["limits"] = {"version": LIMITS_VERSION, **limits}
        lengths = digest_of_lengths(self._packing.lengths)
        return {"source": source_identity(self._source), "lengths": lengths, "packing": of_packing}

    def _limits(self) -> dict[str, JsonValue]:
        """The settings of limits that are set."""
        found: dict[str, JsonValue] = dict(self._rows.limits())
        if self._rows.side:
            counts = [digest_of_lengths(budget.counts) for budget in self._packing.method.budgets]
            found["side"] = [[*item, digest] for item, digest in zip(self._rows.side.items(), counts, strict=True)]
        return found

    def file_of(self, record_id: int) -> str | None:
        """Returns the file of the first document of a sequence."""
        pieces = self._packing.pieces_at(np.array([record_id], np.int64))
        return file_of(self._source, int(pieces.documents[0]))

    def cached_files(self, record_ids: RecordIds) -> Sequence[hooks.CachedFile] | None:
        """Returns the files that hold the documents of sequences and are read through a cache; None without one."""
        source = hooks.find(self._source, hooks.CachesFiles)
        if source is None:
            return None
        if not len(record_ids):
            return source.cached_files(record_ids)
        if self._planned is None:
            self._planned = self._packing.copy()  # keeps the blocks to come apart from those being read
        return source.cached_files(np.unique(self._planned.pieces_at(record_ids).documents))

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`: asks for the documents of sequences."""
        source = hooks.on_disk(self._source)
        if source is None or not len(record_ids):
            return None if source is None else False
        return source.ask_disk(np.unique(self._packing.pieces_at(record_ids).documents))

    def _check_ids(self, ids: RecordIds) -> None:
        check_ids(ids, len(self))

    def _read(self, pieces: Pieces) -> tuple[dict[str, np.ndarray], dict[str, Entries]]:
        """The tokens and other leaves of pieces, one after the other, and the entries that belong to them."""
        slices = hooks.find(self._source, hooks.SlicesReader)
        if slices is not None and not self._rows.side:
            leaves = slices.read_slices(pieces.documents, pieces.starts, pieces.lengths)
            _check_key(leaves, self._key)
            self._check_added(leaves)
            return leaves, {}
        # A document may have several pieces in a batch.
        documents, which = np.unique(pieces.documents, return_inverse=True)
        found = [
            self._leaves_of(*item) for item in zip(documents.tolist(), read_items(self._source, documents), strict=True)
        ]
        entries = {name: [leaves.pop(name) for leaves in found] for name in self._rows.side}
        for document, leaves in zip(documents.tolist(), found, strict=True):
            self._check(document, leaves, found[0])
        bounds = list(
            zip(which.tolist(), pieces.starts.tolist(), (pieces.starts + pieces.lengths).tolist(), strict=True)
        )
        in_pieces = {name: np.concatenate([found[i][name][low:high] for i, low, high in bounds]) for name in found[0]}
        budgets = self._packing.method.budgets
        return in_pieces, {
            name: self._entries(name, budget, leaves, pieces, which)
            for (name, leaves), budget in zip(entries.items(), budgets, strict=True)
        }

    def _entries(
        self, name: str, budget: Budget, leaves: Sequence[np.ndarray], pieces: Pieces, which: np.ndarray
    ) -> Entries:
        """The entries of a leaf of ``side`` that belong to pieces: those of a document belong to its first one."""
        counts = np.where(pieces.starts == 0, budget.counts[pieces.documents].astype(np.int64), 0)
        like = self._entries_like[name]
        parts = [like]
        for piece in np.flatnonzero(pieces.starts == 0).tolist():
            leaf, document = leaves[which[piece]], int(pieces.documents[piece])
            if len(leaf) != counts[piece]:
                raise SourceError(
                    f"leaf {name!r} of document {document} has {len(leaf):,} entries, and had {counts[piece]:,} when the "
                    "source was created. Documents must not change.",
                    record_id=document,
                )
            if not len(leaf):  # an empty list has no dtype and shape of entries
                continue
            if leaf.dtype != like.dtype or leaf.shape[1:] != like.shape[1:]:
                raise SourceError(
                    f"an entry of leaf {name!r} of document {document} is {leaf.dtype}{list(leaf.shape[1:])}, that of "
                    f"another document {like.dtype}{list(like.shape[1:])}. Bring all to one shape and dtype with Map.",
                    record_id=document,
                )
            parts.append(leaf)
        return Entries(counts, np.concatenate(parts))

    @functools.cached_property
    def _entries_like(self) -> dict[str, np.ndarray]:
        """No entries of each leaf of ``side``, [0, …], like those of the first document that has some."""
        found = {}
        for name, budget in zip(self._rows.side, self._packing.method.budgets, strict=True):
            document = np.array([np.argmax(budget.counts > 0)])
            found[name] = self._leaves(read_items(self._source, document)[0])[name][:0].copy()
        return found

    def _leaves_of(self, document: int, record: object) -> dict[str, np.ndarray]:
        try:
            return self._leaves(record)
        except SourceError as error:
            raise in_record(self._source, document, error) from error

    def _leaves(self, record: object) -> dict[str, np.ndarray]:
        leaves = _leaves(record, self._key)
        self._check_added(leaves)
        for name in self._rows.side:
            leaf = leaves.get(name)
            if leaf is None:
                raise SourceError(f"a document has the leaves {sorted(leaves)}, and not {name!r}, which side= names.")
            if leaf.ndim == 0 or leaf.dtype.kind in "OSU":
                raise SourceError(
                    f"leaf {name!r} of a document is {leaf.dtype} of shape {leaf.shape}. Expected numbers of shape "
                    "[entries, …], as side= says. Decode the entries with Map."
                )
        return leaves

    def _check_added(self, leaves: Mapping[str, object]) -> None:
        if not self._rows.added.isdisjoint(leaves):
            name = min(self._rows.added & leaves.keys())
            own = (
                "that with Packed(segment_ids=…, positions=…), or the documents' "
                if name in self._rows.named
                else "it "
            )
            raise SourceError(f"documents have the leaf {name!r}, which Packed writes itself. Rename {own}with Map.")

    def _measured(self, record: object) -> tuple[int, ...]:
        """The number of tokens, and of entries of each leaf of ``side``."""
        leaves = self._leaves(record)
        return len(leaves[self._key]), *(len(leaves[name]) for name in self._rows.side)

    def _check(self, document: int, leaves: dict[str, np.ndarray], first: dict[str, np.ndarray]) -> None:
        wanted = int(self._packing.lengths[document])
        for name in {**first, **leaves}:
            leaf, other = leaves.get(name), first.get(name)
            if leaf is None or other is None:
                raise SourceError(
                    f"document {document} and another one differ in the leaf {name!r}.", record_id=document
                )
            if leaf.ndim == 0 or len(leaf) != wanted:
                raise SourceError(
                    f"leaf {name!r} of document {document} has shape {leaf.shape}, and the document {wanted} tokens. "
                    "Expected one value per token. Leave other leaves out, such as with Map.",
                    record_id=document,
                )
            if leaf.dtype != other.dtype or leaf.shape[1:] != other.shape[1:]:
                raise SourceError(
                    f"leaf {name!r} of document {document} is {leaf.dtype}{list(leaf.shape[1:])} per token, that of "
                    f"another document {other.dtype}{list(other.shape[1:])}.",
                    record_id=document,
                )


class ShuffledPacked(Packed):
    """A :class:`Packed` in the order of a feed: the record id of a sequence is ``epoch * len + place``."""

    first_record_id = 0

    @property
    def shard_lengths(self) -> Callable[[], RecordIds]:
        """Number of sequences of each window of shards."""
        return lambda: self._packing.counts

    def make_order(self, **settings: Unpack[hooks.OrderSettings]) -> SequenceOrder:
        """Returns the order of the sequences: of their ids as they are, or of windows of shards in lanes."""
        shuffle, num_lanes = settings["shuffle"], settings["num_lanes"] or 1
        by_shards = shuffle if isinstance(shuffle, ShardShuffle) else None
        if by_shards is not None:
            self._packing = self._packing.keeping(2 * num_lanes)  # a batch has rows of one or two windows of each lane
        return SequenceOrder(
            self._packing.counts,
            settings["seed"],
            settings["num_epochs"],
            shuffle=by_shards,
            num_lanes=num_lanes,
            segments=settings["segments"],
        )

    def check_record_ids(self, record_ids: RecordIds) -> None:
        """Raises SourceError for a negative id; every other id is a place in some epoch."""
        for record_id in record_ids[record_ids < 0].tolist():
            raise SourceError(f"record id {record_id} is not a place in the stream.", record_id=record_id)

    def replacement_id(self, seed: int, epoch: int, record_id: int, attempt: int) -> int:
        """Returns the id of another sequence of the same epoch."""
        epoch, place = divmod(record_id, len(self))
        return epoch * len(self) + permutation.replacement_id(seed, epoch, place, attempt, len(self))

    def _check_ids(self, ids: RecordIds) -> None:
        self.check_record_ids(ids)


def _check_key(record: Mapping[str, object], key: str) -> None:
    if key not in record:
        raise SourceError(f"a document has the leaves {sorted(record)}, and not {key!r}. Pass key= to Packed.")


def _leaves(record: object, key: str) -> dict[str, np.ndarray]:
    """The leaves of a document as arrays; a bare array is its tokens."""
    record = leaves_by_name(record, key)
    _check_key(record, key)
    leaves = {name: as_array(leaf, f"leaf {name!r} of a document") for name, leaf in record.items()}
    tokens = leaves[key]
    if tokens.size == 0 and tokens.dtype.kind == "f":  # numpy's dtype of an empty list
        leaves[key] = tokens = tokens.astype(np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise SourceError(
            f"leaf {key!r} of a document is {tokens.dtype} of shape {tokens.shape}. Expected integers of shape [tokens]. "
            "Turn text into token ids with Map."
        )
    return leaves

"""Documents with images and clips, and what their packed rows must be, for several tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshfeed.sources import sequence_order

BOS = -7
ALL: dict[str, Any] = {
    "max_segments": 5,
    "align": 4,
    "bos_id": BOS,
    "cumulative_lengths": "starts",
    "sequence_order": ("zigzag", 2),
    "side": {"images": 8, "clips": 3},
    "pad_id": -1,
}
"""All limits at once."""


class Documents:
    """Document d has tokens d * 1000 + 1, …, their squares, images [d, i] and clips d + 1.

    Args:
      lengths, images, clips: of each document.
      stored: whether the numbers of images and clips are known.
    """

    def __init__(self, lengths: list[int], images: list[int], clips: list[int], stored: bool = True) -> None:
        self._counts = {"tokens": lengths, "images": images, "clips": clips}
        self.reads = 0
        if stored:
            self.stored_lengths = lambda key: np.array(self._counts[key], np.uint8)

    def __len__(self) -> int:
        return len(self._counts["tokens"])

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        self.reads += 1
        length, images, clips = (counts[record_id] for counts in self._counts.values())
        tokens = record_id * 1000 + 1 + np.arange(length)
        return {
            "tokens": tokens,
            "squares": tokens.astype(np.float32) ** 2,
            "images": np.stack([np.full(images, record_id, np.uint16), np.arange(images, dtype=np.uint16)], 1),
            "clips": np.full((clips, 2, 1), record_id + 1, np.float16),
        }

    def fingerprint(self) -> Any:
        return {"kind": "documents"}


def some_documents(number: int, most: int = 4, seed: int = 0, **options: Any) -> Documents:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(2.2, 1.2, number).astype(int) + 1, 60).tolist()
    images = np.where(rng.random(number) < 0.5, 0, rng.integers(0, most + 1, number)).tolist()
    return Documents(lengths, images, rng.integers(0, 2, number).tolist(), **options)


def check_rows(rows: dict[str, np.ndarray], documents: Documents, length: int, epochs: int = 1, **limits: Any) -> None:
    """What the settings promise, from the rows alone: every token and every image once, with its own text."""
    align, bos_id, most = limits.get("align", 1), limits.get("bos_id"), limits.get("side", {})
    before = 0 if bos_id is None else 1
    kind, shards = limits.get("sequence_order") or ("striped", 1)
    undo = np.argsort(sequence_order(kind, length, shards))
    seen_tokens: list[int] = []
    seen_images: list[tuple[int, int]] = []
    for row in range(len(rows["tokens"])):
        tokens, segments, positions, squares = (
            rows[name][row][undo] for name in ("tokens", "segment_ids", "positions", "squares")
        )
        number = int(segments.max())
        assert number >= 1
        assert limits.get("max_segments") is None or number <= limits["max_segments"]
        begins, ends, firsts = [], [], {}
        for segment in range(1, number + 1):
            at = np.flatnonzero(segments == segment)
            begins.append(int(at[0]))
            ends.append(int(at[-1]) + 1)
            np.testing.assert_array_equal(at, np.arange(at[0], at[-1] + 1))
            assert at[0] % align == 0
            assert at[0] == (-(-ends[-2] // align) * align if segment > 1 else 0)
            np.testing.assert_array_equal(positions[at], np.arange(len(at)))
            assert not before or (tokens[at[0]] == bos_id and squares[at[0]] == 0)
            piece = tokens[at[before:]]
            assert len(piece)
            np.testing.assert_array_equal(np.diff(piece), 1)
            assert piece[0] // 1000 == piece[-1] // 1000
            np.testing.assert_array_equal(squares[at[before:]], piece.astype(np.float32) ** 2)
            seen_tokens += piece.tolist()
            if piece[0] % 1000 == 1:
                firsts[segment] = int(piece[0]) // 1000
        padding = segments == 0
        assert (tokens[padding] == -1).all()
        assert not positions[padding].any()
        assert not squares[padding].any()
        if limits.get("cumulative_lengths"):
            starts = [*begins, *[ends[-1]] * (limits["max_segments"] + 1 - number)]
            assert rows[limits["cumulative_lengths"]][row].tolist() == starts
        for name in most:
            mask, of_segment, entries = (rows[f"{name}{suffix}"][row] for suffix in ("_mask", "_segment", ""))
            count = int(mask.sum())
            assert mask.shape == of_segment.shape == entries.shape[:1] == (most[name],)
            assert mask.dtype == np.bool_
            assert of_segment.dtype == np.int32
            assert mask[:count].all()
            assert not of_segment[count:].any()
            assert not entries[count:].any()
            expected = [
                (segment, i) for segment, document in firsts.items() for i in range(documents._counts[name][document])
            ]
            assert of_segment[:count].tolist() == [segment for segment, _ in expected]
            if name == "images":
                pairs = [(firsts[segment], i) for segment, i in expected]
                assert [tuple(entry) for entry in entries[:count].tolist()] == pairs
                seen_images += pairs
            else:
                assert entries[:count, 0, 0].tolist() == [firsts[s] + 1 for s, _ in expected]
    lengths, images = documents._counts["tokens"], documents._counts["images"]
    every = [d * 1000 + 1 + i for d, n in enumerate(lengths) for i in range(n)]
    assert sorted(seen_tokens) == sorted(every * epochs)
    if "images" in most:
        assert sorted(seen_images) == sorted([(d, i) for d, n in enumerate(images) for i in range(n)] * epochs)

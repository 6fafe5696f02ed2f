"""The table of docs/decisions/orders.md: what works over what, in which order, tried out.

``python tests/model/combination_table.py`` writes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "streams"))

from stream_parts import rows_of_host, settings_of

import meshfeed
from meshfeed._src.feed.parts import make_stream
from meshfeed.sources import (
    Buckets,
    Concat,
    HostBatches,
    Join,
    Map,
    Memory,
    Mixture,
    Packed,
    Padded,
    Sample,
    Stream,
    Subset,
    Zip,
    random_split,
)

PAGE = Path(__file__).parents[2] / "docs/decisions/orders.md"
BEGIN, END = "<!-- written by tests/model/combination_table.py -->\n", "<!-- end of the table -->\n"

SIZE = 4


class Records:
    """Records of 4 tokens in 4 files."""

    def __init__(self, count: int = 40) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        return {"tokens": np.arange(SIZE, dtype=np.int32) + SIZE * record_id}

    def shard_lengths(self) -> np.ndarray:
        return np.full(4, self._count // 4)

    def fingerprint(self) -> Any:
        return {"records": self._count}


def _negated(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "tokens": -record["tokens"]}


def _random(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"tokens": record["tokens"] + rng.integers(0, 9, SIZE, np.int32)}


def _lane(lane_index: int, num_lanes: int) -> Any:
    del num_lanes
    return iter([{"tokens": np.arange(SIZE, dtype=np.int32) + lane_index}] * 8)


def _mixture(a: Any, b: Any, stages: bool = False) -> Any:
    weights = {"a": 2, "b": 1}
    return Mixture({"a": a, "b": b}, [(0, weights), (3, {"a": 1, "b": 1})] if stages else weights, 6)


def _key(record: dict[str, Any]) -> int:
    return int(record["tokens"][0]) % 4


OTHERS = Memory({"k": np.arange(4), "y": np.arange(4)})

BELOW: dict[str, Callable[[], Any]] = {
    "files": Records,
    "view": lambda: Subset(Records(), slice(2, None, 2)),
    "reversed view": lambda: Subset(Records(), slice(None, None, -1)),
    "`Sample`": lambda: Sample(Records(), 60),
    "`Map`": lambda: Map(Records(), _negated),
    "`Map` with `rng`": lambda: Map(Records(), _random),
    "`Padded`": lambda: Padded(Records(), 6, mask_key="below"),
    "`Packed`": lambda: Packed(Records(), 8, block=16, segment_ids="s", positions="p"),
    "`Buckets`": lambda: Buckets(Records(), (4, 8), mask_key="below"),
    "`Mixture`": lambda: _mixture(Records(), Records(24)),
    "staged `Mixture`": lambda: _mixture(Records(), Records(24), stages=True),
    "stream": lambda: Stream(_lane),
    "`Mixture` with a stream": lambda: _mixture(Records(), Stream(_lane)),
    "host batches": lambda: HostBatches([{"tokens": np.zeros((4, SIZE), np.int32)}] * 4),
}

OVER: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "nothing": lambda below: below(),
    "`Subset`": lambda below: Subset(below(), slice(1, None)),
    "`Sample`": lambda below: Sample(below(), 50),
    "`random_split`": lambda below: random_split(below(), {"a": 0.8, "b": 0.2}, by="shard")["a"],
    "`Concat`": lambda below: Concat([below(), below()]),
    "`Zip`": lambda below: Zip({"a": below(), "b": below()}),
    "`Join`": lambda below: Join(below(), OTHERS, key=_key, other_key="k", into="other"),
    "`Map`": lambda below: Map(below(), _negated),
    "`Padded`": lambda below: Padded(below(), 12),
    "`Packed` split": lambda below: Packed(below(), 8, block=16),
    "`Packed` fit": lambda below: Packed(below(), 8, method="fit", block=16),
    "`Buckets`": lambda below: Buckets(below(), (4, 12)),
    "`Mixture`": lambda below: _mixture(below(), below()),
}

ORDERS: dict[str, Any] = {
    "False": False,
    "True": True,
    "4": 4,
    '"shards"': "shards",
    "affinity": meshfeed.ShardShuffle(affinity=True),
}

REASONS: dict[str, tuple[str, str]] = {
    "a": (
        "got a (Stream|StreamMixture), which is read in order",
        "A stream has no record ids: no record can be selected, and no place of a packed or grouped stream computed.",
    ),
    "b": ("weights of the mixture change at step", "Weights change at steps, and only the feed's records have steps."),
    "c": (
        "records differ in shape from batch to batch",
        "A batch of `Buckets` has one shape, which is decided last: its records cannot be packed, zipped or grouped again.",
    ),
    "d": (
        "packed documents are shuffled within the blocks of Packed",
        "With a number of records: packing shuffles within its own blocks of documents, `Packed(block=…)`.",
    ),
    "e": (
        "function takes rng=, so their lengths may differ",
        "Random numbers may change a record's length in every epoch; apply the function afterwards.",
    ),
    "f": (
        "HostBatches|is host batches|batches of this host|of host batches",
        "A host's own batches are read in their order by the feed alone.",
    ),
    "g": (
        "a stream cannot be shuffled as a whole",
        "With any `shuffle`: a stream has the order in which it is opened. `Mixture(shuffle=…)` shuffles the random-access "
        "components of a mixture with a stream.",
    ),
    "h": (
        "got a Sample, which has records of a file several times",
        "Parts by shards of a `Sample` would share files.",
    ),
    "i": (
        "needs a source whose files|whose records are not in files",
        "By shards: the view leaves the order of the files, so its shards do not follow one another.",
    ),
    "j": (
        "reads records before they are decoded at random",
        "`Join` reads records as they are stored; decode them at random afterwards.",
    ),
}


def attempt(over: str, below: str, order: str) -> str:
    """Reads two batches; returns "" if that works, otherwise the letter of the reason.

    Raises:
      AssertionError: the error is not one of :data:`REASONS`.
    """
    try:
        source = OVER[over](BELOW[below])
        settings = settings_of(shuffle=ORDERS[order], num_epochs=2, global_batch_size=4)
        stream: Any = make_stream(source, settings, None)  # type: ignore[arg-type]
        reader = stream.open_reader(stream.start(), rows_of_host([0], 0), hosts_agree=False)
        for _ in range(2):
            reader.next()
        reader.close()
    except meshfeed.MeshfeedError as error:
        for letter, (pattern, _) in REASONS.items():
            if re.search(pattern, str(error)):
                return letter
        raise AssertionError(f"{over} over {below} by {order} is refused without a known reason: {error}") from error
    return ""


def table() -> str:
    """The table as Markdown."""
    lines = [f"| over ↓ | {' | '.join(BELOW)} |", "|---" * (len(BELOW) + 1) + "|"]
    used: set[str] = set()
    for over in OVER:
        cells = []
        for below in BELOW:
            refused = {order: attempt(over, below, order) for order in ORDERS}
            letters = sorted(set(refused.values()) - {""})
            used |= set(letters)
            cells.append(" ".join((["✓"] if "" in refused.values() else []) + letters))
        lines.append(f"| {over} | {' | '.join(cells)} |")
    assert used == REASONS.keys(), f"reasons that refuse nothing: {sorted(REASONS.keys() - used)}"
    reasons = [f"- **{letter}** {reason}" for letter, (_, reason) in REASONS.items()]
    return "\n".join([*lines, "", *reasons, ""])


def main() -> None:
    """Writes the table into the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

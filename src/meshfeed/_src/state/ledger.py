"""The ledgers of replaced records: which ones, why, and at which step, for each host and up to a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from meshfeed._src.base import coordination
from meshfeed._src.state.state import FeedState

MAX_LISTED = 16_384  # over all hosts, so that a state with every ledger stays below a megabyte
MAX_REASONS = 256  # of them with the reason, which takes most of the space


@dataclasses.dataclass(frozen=True)
class Ledgers:
    """Replaced records in delivered batches.

    A host only appends to its own ledger. Past its share of the bound it counts further records instead of listing them.

    Attributes:
      listed: process index → ``[record id, epoch, reason, step]``; the reason is empty past :data:`MAX_REASONS`.
      num_unlisted: process index → how many more records that host replaced.
    """

    listed: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    num_unlisted: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_state(cls, state: FeedState) -> Self:
        """The ledgers that a state holds."""
        return cls(state.skipped or {}, state.num_unlisted or {})

    def state_fields(self) -> dict[str, Any]:
        """The fields of :class:`~meshfeed._src.state.state.FeedState` that hold them."""
        listed = {host: list(entries) for host, entries in self.listed.items()}
        return {"skipped": listed or None, "num_unlisted": dict(self.num_unlisted) or None}

    def after(self, bad: Sequence[tuple[int, int, str]], step: int) -> Ledgers:
        """The ledgers after a batch.

        Args:
          bad: ``(record id, epoch, reason)`` of the records that this host replaced in it.
          step: index of the batch.
        """
        if not bad:
            return self
        host, num_hosts = str(coordination.process_index()), coordination.process_count()
        mine = self.listed.get(host, ())
        room = max(1, MAX_LISTED // num_hosts) - len(mine)
        reasons = max(1, MAX_REASONS // num_hosts) - len(mine)
        new = [
            [record_id, epoch, reason if place < reasons else "", step]
            for place, (record_id, epoch, reason) in enumerate(bad[: max(0, room)])
        ]
        left_out = len(bad) - len(new)
        unlisted = {host: self.num_unlisted.get(host, 0) + left_out} if left_out else {}
        return Ledgers({**self.listed, host: [*mine, *new]} if new else self.listed, {**self.num_unlisted, **unlisted})


def count_skipped(state: FeedState) -> int:
    """Bad records replaced before a state, over all hosts; from the ledgers if the state has no count."""
    if state.num_skipped is not None:
        return state.num_skipped
    return len({tuple(entry[i] for i in (0, 1, 3)) for entries in (state.skipped or {}).values() for entry in entries})

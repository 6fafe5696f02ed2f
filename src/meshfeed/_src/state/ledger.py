"""Ledgers of replaced records: ids, reasons and steps, per host and bounded in size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from meshfeed._src.base import coordination
from meshfeed._src.state.state import FeedState

MAX_LISTED = 16_384  # over all hosts; keeps a state with all ledgers below 1 MB
MAX_REASONS = 256  # entries with a reason, over all hosts; reasons take most of the space


@dataclasses.dataclass(frozen=True)
class Ledgers:
    """Replaced records in delivered batches.

    A host appends only to its own ledger. Beyond its share of the limit, it counts records instead of listing them.

    Attributes:
      listed: process index → list of ``[record id, epoch, reason, step]``; reasons beyond :data:`MAX_REASONS` are
        empty.
      num_unlisted: process index → number of further records that the host replaced.
    """

    listed: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    num_unlisted: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_state(cls, state: FeedState) -> Self:
        """Returns the ledgers of a state."""
        return cls(state.skipped or {}, state.num_unlisted or {})

    def state_fields(self) -> dict[str, Any]:
        """Returns the ledgers as fields of :class:`~meshfeed._src.state.state.FeedState`."""
        listed = {host: list(entries) for host, entries in self.listed.items()}
        return {"skipped": listed or None, "num_unlisted": dict(self.num_unlisted) or None}

    def after(self, bad: Sequence[tuple[int, int, str]], step: int) -> Ledgers:
        """Returns the ledgers after a batch.

        Args:
          bad: ``(record id, epoch, reason)`` of each record that this host replaced in the batch.
          step: step of the batch.
        """
        if not bad:
            return self
        host, num_hosts = str(coordination.process_index()), coordination.process_count()
        mine = self.listed.get(host, ())
        room = max(1, MAX_LISTED // num_hosts) - len(mine)  # equal shares need no communication
        reasons = max(1, MAX_REASONS // num_hosts) - len(mine)
        new = [
            [record_id, epoch, reason if number < reasons else "", step]
            for number, (record_id, epoch, reason) in enumerate(bad[: max(0, room)])
        ]
        left_out = len(bad) - len(new)
        unlisted = {host: self.num_unlisted.get(host, 0) + left_out} if left_out else {}
        return Ledgers({**self.listed, host: [*mine, *new]} if new else self.listed, {**self.num_unlisted, **unlisted})


def count_skipped(state: FeedState) -> int:
    """Number of records replaced on all hosts up to a state; counted from the ledgers if the state has no count."""
    if state.num_skipped is not None:
        return state.num_skipped
    # Hosts that hold the same rows list the same records, so entries are compared without the host and the reason.
    return len({tuple(entry[i] for i in (0, 1, 3)) for entries in (state.skipped or {}).values() for entry in entries})

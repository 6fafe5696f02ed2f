"""The audit of a run that was killed and continued: every record once, every repeated step the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

Rows = Mapping[int, int]
"""Row of the global batch → record id; padded rows are left out."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one host delivered of one step: the incarnation of the job, the step, and the rows that it holds."""

    incarnation: int
    step: int
    rows: Rows


def audit(seen: Iterable[Seen], expected: set[int]) -> dict[str, int]:
    """Checks the log of all hosts and incarnations.

    A step that was delivered again after a kill must hold the same rows; over all steps each expected record must have
    been delivered exactly once.

    Returns:
      Figures: steps, records, and steps that were delivered again.

    Raises:
      AssertionError: a record lost or repeated, or a step that changed.
    """
    steps: dict[int, dict[int, int]] = {}
    incarnations: dict[int, set[int]] = {}
    for entry in seen:
        known = steps.setdefault(entry.step, {})
        incarnations.setdefault(entry.step, set()).add(entry.incarnation)
        for row, record in entry.rows.items():
            assert known.setdefault(row, record) == record, (
                f"step {entry.step}, row {row}: record {known[row]} and, in incarnation {entry.incarnation}, {record}"
            )
    assert sorted(steps) == list(range(len(steps))), f"steps are missing: {sorted(set(range(max(steps))) - set(steps))}"
    delivered = [record for step in sorted(steps) for record in steps[step].values()]
    repeated = (
        {record for record in delivered if delivered.count(record) > 1}
        if len(set(delivered)) < len(delivered)
        else set()
    )
    assert not repeated, f"repeated: {sorted(repeated)[:20]}"
    assert set(delivered) == expected, (
        f"lost: {sorted(expected - set(delivered))[:20]}, never asked for: {sorted(set(delivered) - expected)[:20]}"
    )
    again = sum(len(times) > 1 for times in incarnations.values())
    return {"steps": len(steps), "records": len(delivered), "steps_again": again}

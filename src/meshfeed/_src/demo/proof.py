"""The checks of the demo: pure functions of the JSON lines written by the hosts, independent of the feed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class Step:
    """One training step, merged over all hosts.

    Attributes:
      record_ids: record ids by row.
      rows: maps a row to the digest of its bytes on the devices.
      loss: loss on the first host that logged the step.
    """

    record_ids: list[int]
    rows: dict[int, str]
    loss: float

    @property
    def whole(self) -> bool:
        """Whether every row was logged by some host."""
        return sorted(self.rows) == list(range(len(self.record_ids)))

    @property
    def content(self) -> tuple[list[int], list[str]]:
        """Record ids and row digests, in row order."""
        return self.record_ids, [self.rows[row] for row in sorted(self.rows)]


@dataclasses.dataclass
class JobLog:
    """Log of a job, merged over its hosts.

    Attributes:
      restored: step from which the job resumed; 0 if it started from the beginning.
      steps: steps by number; the last steps of a killed job may lack rows.
      problems: descriptions of disagreements between hosts.
    """

    restored: int
    steps: dict[int, Step]
    problems: list[str]


def read_job(paths: Sequence[pathlib.Path]) -> JobLog:
    """Merges the logs of all hosts; ignores a partial last line, which a killed host may leave."""
    restored: set[int] = set()
    steps: dict[int, Step] = {}
    problems: list[str] = []
    for host, path in enumerate(paths):
        content = path.read_bytes() if path.exists() else b""
        for text in content[: content.rfind(b"\n") + 1].splitlines():
            line: dict[str, Any] = json.loads(text)
            if "restored" in line:
                restored.add(line["restored"])
                continue
            number = line["step"]
            step = steps.setdefault(number, Step(line["record_ids"], {}, line["loss"]))
            if step.record_ids != line["record_ids"]:
                problems.append(f"host {host} has different record ids in step {number}")
            for row, digest in line["rows"].items():
                if step.rows.setdefault(int(row), digest) != digest:
                    problems.append(f"host {host} has different bytes in row {row} of step {number}")
    if len(restored) != 1:
        problems.append(f"hosts resumed from different steps: {sorted(restored)}")
    return JobLog(min(restored, default=0), steps, problems)


def effective(jobs: Sequence[JobLog]) -> dict[int, Step]:
    """Returns the steps that count: a job supersedes earlier steps after the one from which it resumed."""
    steps: dict[int, Step] = {}
    for job in jobs:
        steps = {number: step for number, step in steps.items() if number <= job.restored} | job.steps
    return dict(sorted(steps.items()))


def ids_digest(steps: Mapping[int, Step]) -> str:
    """Returns the SHA-256 digest of the record ids of all steps, in order."""
    ids = [record_id for step in steps.values() for record_id in step.record_ids]
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()


def batches_digest(steps: Mapping[int, Step]) -> str:
    """Returns the SHA-256 digest of all global batches: of the row digests, in row order, step by step."""
    rows = [digest for step in steps.values() for digest in step.content[1]]
    return hashlib.sha256("".join(rows).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the proof: what is checked, whether it holds, and the figures."""

    name: str
    holds: bool
    detail: str


def prove(reference: JobLog, jobs: Sequence[JobLog], records: Sequence[bytes], num_steps: int) -> list[Check]:
    """Compares the killed and resumed run with the uninterrupted one, and with the files, read without meshfeed."""
    steps, wanted = effective(jobs), effective([reference])
    problems = [problem for job in [reference, *jobs] for problem in job.problems]
    numbers = list(range(1, num_steps + 1))
    whole = [number for number in numbers if number in steps and steps[number].whole]
    again, differing = _replayed(jobs)
    right, rows = _rows_like_the_files(steps, records)
    delivered = [record for step in steps.values() for record in step.record_ids]
    epoch = delivered[: len(records)]
    once = len(set(epoch))
    whether = {True: "identical to the uninterrupted run", False: "different from the uninterrupted run"}
    same_ids = ids_digest(steps) == ids_digest(wanted)
    same_batches = batches_digest(steps) == batches_digest(wanted)
    complete = list(steps) == numbers and len(whole) == num_steps and list(wanted) == numbers
    of_corpus = ": each record of the corpus once" if once == len(records) else f", of {len(records):,} in the corpus"
    first_wrong = f"; the first that was not is step {differing[0]}" if differing else ""
    reproduced = f"{again - len(differing):,} of the {again:,} steps lost to the kills were reproduced exactly"
    agree = "all hosts agree on the ids and on every row that several of them hold"
    return [
        Check("steps", complete, f"{len(whole):,} of {num_steps:,} are complete"),
        Check("record ids", same_ids, whether[same_ids]),
        Check("batches", same_batches, whether[same_batches]),
        Check("files", right == rows, f"{right:,} of {rows:,} rows equal the record with their id"),
        Check(
            "epoch",
            once == len(epoch),
            f"{once:,} distinct records among the first {len(epoch):,} delivered{of_corpus}",
        ),
        Check("replayed", not differing, f"{reproduced}{first_wrong}"),
        Check("hosts", not problems, problems[0] if problems else agree),
    ]


def _replayed(jobs: Sequence[JobLog]) -> tuple[int, list[int]]:
    """Counts the steps that the next job replayed, and lists those whose content differs."""
    pairs = [
        (index, step, later.steps[index])
        for job, later in itertools.pairwise(jobs)
        for index, step in job.steps.items()
        if index > later.restored and step.whole and index in later.steps and later.steps[index].whole
    ]
    return len(pairs), [index for index, step, again in pairs if step.content != again.content]


def _rows_like_the_files(steps: Mapping[int, Step], records: Sequence[bytes]) -> tuple[int, int]:
    digests = [hashlib.sha256(record).hexdigest()[:32] for record in records]
    right = rows = 0
    for step in steps.values():
        for row, record in enumerate(step.record_ids):
            rows += 1
            right += 0 <= record < len(digests) and step.rows.get(row) == digests[record]
    return right, rows

"""Looks at the files of a store once per job: the hosts divide them, and exchange what they found.

Sources are created on every host, usually at about the same time, but nothing guarantees it: a host may be late, create
other sources, or none. So a host never depends on the others. It waits for them about as long as looking at their files
itself would take, and then does that.

Host h of H looks at files h, h + H, h + 2H, …, and publishes what it found; the lowest host joins the parts and publishes
the whole. Files are exchanged in blocks, each a :class:`~meshfeed._src.base.reduction.Reduction`, which keeps values below
about 1 MB. The keys contain a digest of the names, and how often this process has looked at the same names.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import KeyValueStore
from meshfeed._src.base.failure import Failure
from meshfeed._src.base.reduction import Reduction, leave
from meshfeed._src.base.types import JsonValue

VARIABLE = "MESHFEED_SHARED_LOOKUP"
"""``0`` in the environment: every host looks at every file."""

_BLOCK_FILES = 8192
_MIN_WAIT_SECONDS, _MAX_WAIT_SECONDS = 10.0, 60.0
_log = logging.getLogger("meshfeed.sources.lookup")

Look = Callable[[Sequence[int]], list[JsonValue]]
"""Looks at files, given their numbers; returns what is in each as JSON. Raises for the first that cannot be read."""


class _Job(NamedTuple):
    """The hosts that look.

    Attributes:
      store: the job's key-value store.
      prefix: prefix of the keys.
      host: this process.
      num_hosts: number of processes.
    """

    store: KeyValueStore
    prefix: str
    host: int
    num_hosts: int


def look_together(names: Sequence[str], source: str, look: Look) -> list[JsonValue]:
    """Returns what is in each file, as JSON; looks at about ``len(names) / num_hosts`` of them here.

    Args:
      names: URLs of the files, in the same order on all hosts.
      source: name of the source.
      look: looks at some of them.

    Raises:
      Exception: if a file cannot be read, the same on all hosts: that of the lowest host that met one.
    """
    job = _job(names, source)
    if job is None:
        return look(range(len(names)))
    try:
        blocks = _exchange(job, len(names), look)
    except Exception as error:  # of the key-value store; failures of files are values
        _log.warning("hosts cannot exchange what they found in files (%s); looking at all %d here", error, len(names))
        return look(range(len(names)))
    finally:
        leave(job.store, job.prefix, job.num_hosts)
    return [file for block in blocks for file in _unpack(block)]


def _job(names: Sequence[str], source: str) -> _Job | None:
    """Returns the job if there is something to divide among its hosts."""
    found, store = coordination.place_in_job(), coordination.key_value_store()
    if found is None or store is None or found[1] < 2 or len(names) < 2 or os.environ.get(VARIABLE) == "0":
        return None
    digest = xxhash.xxh3_128_hexdigest("\n".join([source, *names]).encode())
    return _Job(store, f"meshfeed/files/{digest}/{coordination.next_use(f'files/{digest}')}", *found)


def _exchange(job: _Job, num_files: int, look: Look) -> list[JsonValue]:
    """Returns the files of each block, or a failure, for :func:`_unpack`."""
    started = time.monotonic()
    mine = range(job.host, num_files, job.num_hosts)
    try:
        found, failure = dict(zip(mine, look(mine), strict=True)), None
    except Exception as error:
        found, failure = dict[int, JsonValue](), Failure.exact(error)
    alone = (time.monotonic() - started) * job.num_hosts
    wait_seconds = min(max(alone, _MIN_WAIT_SECONDS), _MAX_WAIT_SECONDS)

    blocks = [range(first, min(first + _BLOCK_FILES, num_files)) for first in range(0, num_files, _BLOCK_FILES)]
    rounds = [
        Reduction(job.store, f"{job.prefix}/{number}", range(job.num_hosts), job.host) for number in range(len(blocks))
    ]
    for reduction, block in zip(
        rounds, blocks, strict=True
    ):  # a failure is part of every block: the first one ends it all
        files = [found[number] for number in block if number in found]
        reduction.publish(_pack(files) if failure is None else {"failure": failure.to_json()})
    deadline = time.monotonic() + wait_seconds
    return [
        _join(job, reduction, block, look, deadline, wait_seconds)
        for reduction, block in zip(rounds, blocks, strict=True)
    ]


def _join(job: _Job, reduction: Reduction, block: range, look: Look, deadline: float, wait_seconds: float) -> JsonValue:
    """Returns the files of one block, or the failure of a host that looked at some of them."""
    if reduction.is_reducer:
        return reduction.announce(_complete(job, reduction, block, look, deadline))["result"]
    # The lowest host may have to look at the files of late hosts first.
    announcement = reduction.wait(deadline + wait_seconds)
    return announcement["result"] if announcement is not None else _complete(job, reduction, block, look, 0.0)


def _complete(job: _Job, reduction: Reduction, block: range, look: Look, deadline: float) -> JsonValue:
    """Joins what the hosts publish until a deadline, and looks at the files of those that do not."""
    values = reduction.collect(deadline)
    failures = [(host, value["failure"]) for host, value in values.items() if "failure" in value]
    if failures:
        return {"failure": min(failures)[1]}
    late = [host for host in range(job.num_hosts) if host not in values]
    missing = [number for number in block if number % job.num_hosts in late]
    if missing:
        _log.warning(
            "%s did not look at their part of %d files in time; looking at them here. Create the source on all hosts, or "
            "set %s=0",
            coordination.format_hosts(late), len(block), VARIABLE,
        )  # fmt: skip
    try:
        found = dict(zip(missing, look(missing), strict=True)) if missing else {}
    except Exception as error:
        return {"failure": Failure.exact(error).to_json()}
    for host, value in values.items():
        numbers = [number for number in block if number % job.num_hosts == host]
        found |= zip(numbers, _unpack(value), strict=True)
    return _pack([found[number] for number in block])


def _pack(files: Sequence[JsonValue]) -> JsonValue:
    """Returns files as JSON; the last item of most is the same and is stored once."""
    details: dict[str, int] = {}
    rows = [[*file[:-1], details.setdefault(json.dumps(file[-1]), len(details))] for file in files]
    return {"rows": rows, "details": [json.loads(text) for text in details]}


def _unpack(value: JsonValue) -> list[JsonValue]:
    if "failure" in value:
        raise Failure.from_json(value["failure"]).exception()
    return [[*row[:-1], value["details"][row[-1]]] for row in value["rows"]]

"""Random combinations of sources and orders on real processes: each host compares its own shards with the definitions."""

from __future__ import annotations

import logging
import pathlib
import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import compositions
import numpy as np

import meshfeed
from meshfeed.testing import HostPool, HostRunError

HOSTS = 4
_AT_ONCE, _SECONDS_EACH = 10, 20.0


def play_on_host(numbers: Sequence[int]) -> list[tuple[int, str]]:
    """What each host runs: returns what is wrong, by number."""
    import jax

    logging.disable(logging.WARNING)
    failures: list[tuple[int, str]] = []
    for number in numbers:
        node, settings = compositions.draw(number)
        try:
            whole = compositions._read(node, settings, 1)
            compositions._check(node, settings, whole)
            for count in (1, 2, HOSTS):  # devices: one of each host; the other hosts follow
                compare(node, settings, whole, jax.devices()[:count], random.Random(number).randint(0, len(whole)))
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-3:])
            failures.append((number, f"{node.text} with {settings}: {text}"))
    return failures


def compare(node: Any, settings: dict[str, Any], whole: list[Any], devices: Sequence[Any], step: int) -> None:
    """Compares this host's shards of a feed over devices with all rows, and again after a resume at a step.

    Raises:
      AssertionError: they differ.
    """
    import jax
    from jax.sharding import AxisType

    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    state, keywords = None, compositions.keywords_of(settings)
    for first, stop in ((0, step), (step, len(whole))):
        with meshfeed.Feed(node.make(None), mesh, prefetch=0, timeout_seconds=60, **keywords) as feed:
            if state is not None:
                feed.set_state(state)
            for number in range(first, stop):
                _check_shards(next(feed), whole[number], f"step {number} on {len(devices)} devices")
            state = feed.get_state()
            assert stop < len(whole) or next(feed, None) is None, f"more than {len(whole)} steps"


def _check_shards(batch: Any, rows: list[Any], what: str) -> None:
    import jax

    leaves, structure = jax.tree.flatten(batch)
    for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
        start, stop, _ = shards[0].index[0].indices(len(rows))
        found = compositions._rows_of(jax.tree.unflatten(structure, [np.asarray(shard.data) for shard in shards]))
        assert found == rows[start:stop], f"{what}, rows {start} to {stop}"


def run(count: int, seed: int, tell: Callable[[str], None] = lambda text: print(text, flush=True)) -> int:
    """Plays combinations on 1, 2 and 4 real hosts; prints the progress and what fails, and returns how many did."""
    failures: dict[int, str] = {}
    numbers = list(range(seed, seed + count))
    with HostPool(HOSTS, 1, env={"PYTHONPATH": str(pathlib.Path(__file__).parent)}) as hosts:
        for first in range(0, count, _AT_ONCE):
            now = numbers[first : first + _AT_ONCE]
            try:
                for result in hosts.run(
                    "real_compositions:play_on_host", now, timeout_seconds=_SECONDS_EACH * len(now), grace_seconds=5
                ):
                    failures |= {number: f"host {result.host}: {text}" for number, text in result.value}
            except (HostRunError, TimeoutError) as error:
                failures[now[0]] = f"one of {now} hangs or dies: {str(error)[:4000]}"
            tell(f"{first + len(now)} of {count} combinations on real processes, {len(failures)} failed")
    for number, text in failures.items():
        tell(f"--- combination {number} fails on real processes: {text}")
    return len(failures)

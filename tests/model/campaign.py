"""Thousands of configurations: plays them, shrinks what fails, and prints it as a script."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import multiprocessing
import pprint
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pairwise
import real_hosts
import simulated_hosts
from configurations import (
    BAD_LANES,
    CACHED,
    DEFAULTS,
    KILLED,
    LATE,
    OPTIONS,
    PLANNED,
    REAL,
    SIMULATED,
    WEIGHTED_LANES,
    WEIGHTED_RECORDS,
    Case,
    valid,
    valid_in_campaigns,
    valid_on_real_hosts,
)

Config = dict[str, Any]
_SHRINK_SECONDS = 120.0
_TOLD_EVERY = 100


def draw(options: dict[str, list[Any]], seed: int, count: int, valid: Callable[[Config], bool] = valid) -> list[Config]:
    """Configurations in which every two values of every two settings meet, then random ones, ``count`` in all."""
    found = pairwise.covering(options, seed, valid)[:count]
    rng = random.Random(seed)
    return found + [pairwise.any_configuration(options, rng, valid) for _ in range(count - len(found))]


def of_ci() -> list[Config]:
    """Configurations for simulated hosts in which every two values of every two settings meet.

    They meet again for mixtures that get other weights, since what was delivered then depends on much at once, for lanes with
    bad records, for a cache, for files that lanes ask for ahead, and for hosts that are killed or late.
    """
    again = (WEIGHTED_LANES, WEIGHTED_RECORDS, BAD_LANES, CACHED, PLANNED, KILLED, LATE)
    return pairwise.covering(SIMULATED, 1, valid) + [one for of in again for one in pairwise.covering(of, 1, valid)]


def failure(config: Config, folder: str, *, here: bool = False) -> str | None:
    """What is wrong with a configuration on simulated hosts, or on one host, which is here; None if nothing is."""
    try:
        if here:
            real_hosts.play_here(Case(config, folder), folder)
        else:
            simulated_hosts.play(Case(config, folder))
    except AssertionError as error:
        return str(error) or "an assertion failed"
    except Exception:
        return traceback.format_exc(limit=-6)
    return None


def failures(configs: Sequence[Config], folder: str, num_processes: int = 3) -> list[str]:
    """What is wrong with configurations on simulated hosts, in processes: hosts mostly wait for one another.

    Returns:
      At most one text per process, each with a script that plays the configuration.
    """
    shares = [configs[first::num_processes] for first in range(num_processes)]
    # Spawned, since JAX's threads do not survive a fork.
    with concurrent.futures.ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        found = pool.map(_first_failure, shares, itertools.repeat(folder))
        return [
            f"{one[1]}\n{script(share[one[0]], real=False)}"
            for share, one in zip(shares, found, strict=True)
            if one is not None
        ]


def _first_failure(configs: Sequence[Config], parent: str) -> tuple[int, str] | None:
    folder = tempfile.mkdtemp(dir=parent)  # each process writes the sources' files for itself
    with simulated_hosts.simulation():
        for number, config in enumerate(configs):
            if (text := failure(config, folder)) is not None:
                return number, text
    return None


def shrunk(config: Config, fails: Callable[[Config], bool], seconds: float = _SHRINK_SECONDS) -> Config:
    """The failing configuration with as many settings at their defaults, or at simpler values, as still fail."""
    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for simpler in _simpler(config):
            if time.monotonic() > end:
                return config
            if valid(simpler) and fails(simpler):
                config, changed = simpler, True
                break
    return config


def _simpler(config: Config) -> Iterator[Config]:
    """The configuration with one setting changed, the largest simplifications first."""
    for name, default in DEFAULTS.items():
        if config.get(name, default) is not default:
            yield {**config, name: default}
    for name in ("records", "hosts", "resume_hosts", "taken", "prefetch", "num_lanes"):
        if config[name] is not DEFAULTS[name]:
            for value in OPTIONS[name][: OPTIONS[name].index(config[name])]:
                yield {**config, name: value}


def script(config: Config, *, real: bool) -> str:
    """A program that plays one configuration; run it in the repository's root."""
    changed = {name: value for name, value in config.items() if value is not DEFAULTS[name]}
    play = (
        "with real_hosts.pool() as hosts:\n    print(real_hosts.play_all(hosts, [config], folder) or 'as the model says')"
        if real
        else "with simulated_hosts.simulation():\n    print(campaign.failure(config, folder) or 'as the model says')"
    )
    return (
        "import sys, tempfile\n\nsys.path[:0] = ['tests/model', 'tests/chaos']\n"
        "import campaign, configurations, real_hosts, simulated_hosts\n\n"
        f"config = {{**configurations.DEFAULTS, **{pprint.pformat(changed, width=100, sort_dicts=False)}}}\n"
        f"folder = tempfile.mkdtemp()\n{play}\n"
    )


def run(simulated_count: int, real_count: int, seed: int, seconds: float = 1e9, most_shrunk: int = 5) -> int:
    """Plays configurations and prints the progress and what fails.

    Returns:
      The number that failed.
    """
    end = time.monotonic() + seconds
    failed = 0
    with tempfile.TemporaryDirectory(prefix="meshfeed-model-") as folder:
        if simulated_count:
            drawn = draw(SIMULATED, seed, simulated_count, valid_in_campaigns)
            failed += _run_simulated(drawn, folder, end, most_shrunk)
        if real_count:
            # Processes of processes are slow to start.
            with_workers = draw(REAL, seed, max(1, real_count // 20), valid_on_real_hosts)
            without = draw({**REAL, "num_workers": [0]}, seed, real_count - len(with_workers), valid_on_real_hosts)
            failed += _run_real(without + with_workers, folder, end, most_shrunk)
    return failed


def _run_simulated(configs: list[Config], folder: str, end: float, most_shrunk: int) -> int:
    kinds: collections.Counter[str] = collections.Counter()
    played: list[Config] = []
    failed = 0
    with simulated_hosts.simulation():
        for config in configs:
            if time.monotonic() > end:
                break
            played.append(config)
            if (text := failure(config, folder)) is not None:
                failed += 1
                kinds[config["source"]] += 1
                if failed <= most_shrunk:
                    small = shrunk(config, lambda c: failure(c, folder) is not None)
                    print(f"--- fails: {failure(small, folder) or text}\n{script(small, real=False)}", flush=True)
                else:
                    print(f"--- fails: {text[:400]}\n{config}", flush=True)
            if len(played) % _TOLD_EVERY == 0:
                print(f"{len(played)} of {len(configs)} configurations on simulated hosts, {failed} failed", flush=True)
    covered, possible = pairwise.coverage(SIMULATED, played, valid_in_campaigns)
    print(f"simulated: {len(played)} configurations, {covered} of {possible} pairs, {failed} failed {dict(kinds)}")
    return failed


def _run_real(configs: list[Config], folder: str, end: float, most_shrunk: int) -> int:
    with real_hosts.pool() as hosts:
        failures = real_hosts.play_all(
            hosts, configs, folder, seconds_each=15, end=end, tell=lambda text: print(text, flush=True)
        )

        def fails(config: Config) -> bool:
            return bool(real_hosts.play_all(hosts, [config], tempfile.mkdtemp(dir=folder)))

        for count, (number, text) in enumerate(failures.items()):
            small = configs[number] if count >= most_shrunk else shrunk(configs[number], fails)
            print(f"--- fails on real processes: {text}\n{script(small, real=True)}", flush=True)
    covered, possible = pairwise.coverage(REAL, configs, valid_on_real_hosts)
    print(f"real: {len(configs)} configurations, {covered} of {possible} pairs, {len(failures)} failed")
    return len(failures)


def _tell(text: str) -> None:
    print(text, flush=True)

"""``scripts/chaos``: plays random failures and proves from the logs that every record was delivered exactly once."""

from __future__ import annotations

import argparse
import collections
import logging
import math
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any

# The store of the cache's tests, the cases of checkpoints and conversions, and the draw of a configuration.
sys.path += [str(pathlib.Path(__file__).parents[1] / name) for name in ("sources", "checkpoint", "convert", "model")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("NPROC", "16")  # two threads per device, see meshfeed._src.testing.hosts.cpu_environment

import campaign
import checkpoint_cases
import compositions
import convert_cases
import real
import real_compositions
import resharded
import shared_cache
import simulated
from pairwise import any_configuration
from scenario import draw


def play_checkpoint(seed: int) -> str:
    """Plays a random checkpoint and returns its outcome; prints a program that plays it again if it fails."""
    case = any_configuration(checkpoint_cases.OPTIONS, random.Random(seed), checkpoint_cases.valid)
    with tempfile.TemporaryDirectory() as directory:
        try:
            return checkpoint_cases.play(case, seed, pathlib.Path(directory))
        except Exception:
            print(checkpoint_cases.script(case, seed))
            raise


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario; the others follow")
    parser.add_argument("--real", type=int, default=40, help="scenarios on real processes")
    parser.add_argument("--simulated", type=int, default=160, help="scenarios on simulated hosts")
    parser.add_argument("--reshard", type=int, default=0, help="hosts of a job are killed, and the others continue")
    parser.add_argument("--caches", type=int, default=50, help="kills of a process that shares a shard cache")
    parser.add_argument("--checkpoints", type=int, default=100, help="checkpoints that are damaged and restored")
    parser.add_argument("--conversions", type=int, default=100, help="conversions with kills and changes of the input")
    parser.add_argument("--compositions", type=int, default=0, help="sources and orders against plain definitions")
    parser.add_argument("--real-compositions", type=int, default=0, help="the same on 1, 2 and 4 real processes")
    parser.add_argument("--configurations", type=int, default=0, help="against the reference model, on simulated hosts")
    parser.add_argument("--real-configurations", type=int, default=0, help="the same on real processes")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further scenario after this time")
    return parser.parse_args(arguments)


def play(kind: str, seed: int, scenario: Any, totals: collections.Counter[str]) -> None:
    """Plays a scenario and counts what happened in it."""
    if kind == "conversions":
        with tempfile.TemporaryDirectory() as folder:
            totals.update(convert_cases.play(scenario, pathlib.Path(folder)))
    elif kind == "compositions":
        node, settings = compositions.play(seed, (1, 2, 4))
        by_shards = not isinstance(settings["shuffle"], int)
        totals.update({f"with {node.levels + 1} levels": 1, "by shards": int(by_shards)})
    elif kind == "simulated":
        totals.update(simulated.play(scenario))
    elif kind == "checkpoints":
        totals[play_checkpoint(seed)] += 1
    elif kind == "caches":
        trial = shared_cache.play(seed)
        totals.update(kills=1, kills_in_mid_download=trial.in_mid_download, shards_fetched=trial.fetched)
        totals["most_seconds_to_end"] = max(totals["most_seconds_to_end"], math.ceil(trial.seconds))
    else:
        outcome = real.play(scenario)
        totals.update(outcome.figures)
        totals.update(kills=outcome.kills, restarts=outcome.restarts)


def play_reshards(number: int, first_seed: int, until: float) -> list[str]:
    """Plays scenarios of hosts that are killed while the others continue; prints and returns those that failed."""
    totals: collections.Counter[str] = collections.Counter()
    seconds: dict[str, list[float]] = {"planned": [], "noticed": []}
    failed: list[str] = []
    for seed in range(first_seed, first_seed + number):
        if time.monotonic() > until:
            break
        plan = resharded.draw_plan(seed)
        try:
            outcome = resharded.play(plan)
        except Exception:
            failed.append(f"reshard {seed}")
            print(f"--- reshard scenario {seed}: {plan}")
            traceback.print_exc()
            continue
        totals.update(outcome.figures, kills=outcome.kills, scenarios=1)
        seconds["planned"] += outcome.planned
        seconds["noticed"] += outcome.noticed
    if number:
        print("reshard: " + ", ".join(f"{value:,} {name}" for name, value in sorted(totals.items())))
        for kind, times in seconds.items():
            if times:
                shown = f"median {statistics.median(times):.2f}, worst {max(times):.2f}, of {len(times)}"
                print(f"seconds from a kill to the next batch on each other host, {kind}: {shown}", flush=True)
    return failed


def main() -> int:
    """Plays scenarios until their number or the time is used up; 1 if any failed."""
    options = options_of()
    logging.disable(logging.WARNING)
    begun = time.monotonic()
    failed: list[str] = []
    if options.configurations or options.real_configurations:
        wrong = campaign.run(options.configurations, options.real_configurations, options.seed, options.seconds)
        failed += ["configurations"] * wrong
    failed += ["real compositions"] * real_compositions.run(options.real_compositions, options.seed)
    failed += play_reshards(options.reshard, options.seed, begun + options.seconds)
    for kind in ("compositions", "simulated", "real", "caches", "checkpoints", "conversions"):
        totals: collections.Counter[str] = collections.Counter()
        for seed in range(options.seed, options.seed + vars(options)[kind]):
            if time.monotonic() - begun > options.seconds:
                break
            scenario = convert_cases.draw(seed) if kind == "conversions" else draw(seed)
            try:
                play(kind, seed, scenario, totals)
                totals["scenarios"] += 1
            except Exception:
                failed.append(f"{kind} {seed}")
                print(f"--- {kind} scenario {seed}: {scenario}")
                traceback.print_exc()
                if kind == "conversions":
                    print(f"--- a script that plays it again:\n{convert_cases.script(scenario)}")
        print(f"{kind}: " + ", ".join(f"{value:,} {name}" for name, value in sorted(totals.items())), flush=True)
    print(f"{len(failed)} failed{': ' + ', '.join(failed) if failed else ''} in {time.monotonic() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())

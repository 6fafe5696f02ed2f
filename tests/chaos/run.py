"""``scripts/chaos``: plays random failures and proves from the logs that every record was delivered exactly once."""

from __future__ import annotations

import argparse
import collections
import logging
import os
import time
import traceback

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import real
import simulated
from scenario import draw


def main() -> int:
    """Plays scenarios until their number or the time is used up; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario; the others follow")
    parser.add_argument("--real", type=int, default=40, help="scenarios on real processes")
    parser.add_argument("--simulated", type=int, default=160, help="scenarios on simulated hosts")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further scenario after this time")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    begun = time.monotonic()
    failed: list[str] = []
    for kind, count in (("simulated", options.simulated), ("real", options.real)):
        totals: collections.Counter[str] = collections.Counter()
        for seed in range(options.seed, options.seed + count):
            if time.monotonic() - begun > options.seconds:
                break
            scenario = draw(seed)
            try:
                if kind == "simulated":
                    totals.update(simulated.play(scenario))
                else:
                    outcome = real.play(scenario)
                    totals.update(outcome.figures)
                    totals.update(kills=outcome.kills, restarts=outcome.restarts)
                totals["scenarios"] += 1
            except Exception:
                failed.append(f"{kind} {seed}")
                print(f"--- {kind} scenario {seed}: {scenario}")
                traceback.print_exc()
        print(f"{kind}: " + ", ".join(f"{value:,} {name}" for name, value in sorted(totals.items())), flush=True)
    print(f"{len(failed)} failed{': ' + ', '.join(failed) if failed else ''} in {time.monotonic() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())

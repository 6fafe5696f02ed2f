"""Plays the configurations of CI on simulated hosts once per mutant; ``scripts/mutate-by-model`` makes the mutants.

Which mutant runs is read from the environment at each call, so a fork of one process that has imported everything is enough.
"""

from __future__ import annotations

import argparse
import logging
import os
import pathlib
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.update(MUTANT_UNDER_TEST="", JAX_PLATFORMS="cpu")

import campaign
import grain  # noqa: F401  slow to import
import pairwise
import pandas as pd  # noqa: F401  which pyarrow imports
import simulated_hosts
from configurations import SIMULATED, valid

_SECONDS = 600
SLOW = ("late", "unopened", "leaves")


def plays_all(configs: list[campaign.Config], folder: str) -> bool:
    """Whether the feeds of all configurations are as the model says."""
    with simulated_hosts.simulation():
        for config in configs:
            text = campaign.failure(config, folder)
            if text is not None:
                print(f"{text}\n{config}", flush=True)
                return False
    return True


def start(name: str, configs: list[campaign.Config], folder: str, log: pathlib.Path) -> int:
    """Plays all configurations with a mutant in a child process; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    os.environ["MUTANT_UNDER_TEST"] = name
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        os._exit(0 if plays_all(configs, folder) else 1)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(2)


def main() -> None:
    """Writes the exit status for each mutant, 0 for one that nothing noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", type=pathlib.Path, help="file of mutants")
    parser.add_argument("logs", type=pathlib.Path, help="folder of logs and results")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    # Those that wait come last.
    configs = sorted(pairwise.covering(SIMULATED, 1, valid), key=lambda config: config["fault"] in SLOW)
    with tempfile.TemporaryDirectory() as folder:
        if not plays_all(configs, folder):
            raise SystemExit("the configurations fail without a mutant")
    waiting = [name for name in options.names.read_text().split() if not (options.logs / f"{name}.simulated").exists()]
    running: dict[int, tuple[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < options.processes:
                name = waiting.pop(0)
                running[start(name, configs, folder, options.logs / f"{name}.log")] = name, time.monotonic()
            for pid, (name, since) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    (options.logs / f"{name}.simulated").write_text(f"{os.waitstatus_to_exitcode(status)}\n")
                elif time.monotonic() - since > _SECONDS:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


if __name__ == "__main__":
    main()

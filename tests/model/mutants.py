"""Plays the configurations of CI on simulated hosts once per mutant; ``scripts/mutate-by-model`` makes the mutants.

Which mutant runs is read from the environment at each call, so a fork of one process that has imported everything is enough.
A first round without mutants records which functions each configuration calls: a mutant is played with those alone that call
its function, the quickest first, because it cannot change the others.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.update(MUTANT_UNDER_TEST="", JAX_PLATFORMS="cpu")

import campaign
import driver
import grain  # noqa: F401  slow to import
import mutmut.mutation.trampoline as trampoline
import pandas as pd  # noqa: F401  which pyarrow imports
import simulated_hosts

_SECONDS = 600


def plays_all(configs: Sequence[campaign.Config], folder: str) -> bool:
    """Whether the feeds of all configurations are as the model says; what fails because a host waits must do so twice."""
    with simulated_hosts.simulation():
        for config in configs:
            text = campaign.failure(config, folder)
            if text is not None and ("StalledError" in text or "hang" in text):
                text = campaign.failure(config, folder)
            if text is not None:
                print(f"{text}\n{config}", flush=True)
                return False
    return True


def called(configs: Sequence[campaign.Config], folder: str) -> list[tuple[int, float, list[str]]]:
    """The number of each configuration, the seconds that it takes, and the mutated functions that it calls."""
    found, hits = [], set[str]()
    driver.TIMEOUT_SECONDS, simulated_hosts.JOIN_SECONDS = 120.0, 300.0  # nothing stalls, however busy the machine is
    os.environ["MUTANT_UNDER_TEST"] = "stats"
    trampoline.record_trampoline_hit = lambda name, caller=None: hits.add(name)
    with simulated_hosts.simulation():
        for number, config in enumerate(configs):
            start = time.monotonic()
            text = campaign.failure(config, folder)
            if text is not None:
                print(f"left out, since it fails without a mutant: {text}\n{config}", flush=True)
            else:
                found.append((number, time.monotonic() - start, sorted(hits)))
            hits.clear()
    os.environ["MUTANT_UNDER_TEST"] = ""
    return found


def start(name: str, configs: Sequence[campaign.Config], folder: str, log: pathlib.Path) -> int:
    """Plays configurations with a mutant in a child process; returns its id."""
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
    parser.add_argument("--most", type=int, default=10**9, help="configurations for a mutant; fewer may miss it")
    options = parser.parse_args()
    configs = campaign.of_ci()
    waiting = [name for name in options.names.read_text().split() if not (options.logs / f"{name}.simulated").exists()]
    running: dict[int, tuple[str, float]] = {}
    calls_of = options.logs / "called.json"
    with tempfile.TemporaryDirectory() as folder:
        if not calls_of.exists():  # in a child, because a process with threads of its own should not be forked
            if not (pid := os.fork()):
                calls_of.write_text(json.dumps(called(configs, folder)))
                os._exit(0)
            if os.waitpid(pid, 0)[1]:
                raise SystemExit("the configurations fail without a mutant")
        calls = sorted(json.loads(calls_of.read_text()), key=lambda one: one[1])
        while waiting or running:
            while waiting and len(running) < options.processes:
                name = waiting.pop(0)
                function = name.rpartition("__mutmut_")[0]
                calling = [configs[number] for number, _, functions in calls if function in functions]
                mine = calling[:: -(-len(calling) // options.most) or 1]
                running[start(name, mine, folder, options.logs / f"{name}.log")] = name, time.monotonic()
            for pid, (name, since) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    (options.logs / f"{name}.simulated").write_text(f"{os.waitstatus_to_exitcode(status)}\n")
                    print(f"{os.waitstatus_to_exitcode(status)} {time.monotonic() - since:4.0f} s {name}", flush=True)
                elif time.monotonic() - since > _SECONDS:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


if __name__ == "__main__":
    main()

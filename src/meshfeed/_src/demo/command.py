"""The ``meshfeed demo`` command: checks dependencies, prepares the folder and runs the demo."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import shutil
import signal
import sys
import tempfile

from meshfeed import MeshfeedError, SettingsError
from meshfeed._src.demo.demo import QUICK, Demo, Plan, broken


def run_demo(num_steps: int | None, directory: str | None, how: str | None, *, quick: bool = False) -> bool:
    """Runs the demo on the terminal.

    Args:
      num_steps: number of training steps; None for that of the plan.
      directory: folder for all output; None for a temporary folder, removed if all checks pass.
      how: fault to inject, a key of :data:`meshfeed._src.demo.demo.BREAKS`, or None.
      quick: whether to run :data:`meshfeed._src.demo.demo.QUICK`.

    Returns:
      Whether all checks pass.

    Raises:
      SettingsError: if the folder is not empty.
      MeshfeedError: if a library is missing or a host failed.
    """
    missing = [name for name in ("rich", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        raise MeshfeedError(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}.")
    from rich.console import Console

    folder = pathlib.Path(directory or tempfile.mkdtemp(prefix="meshfeed-demo-")).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"--directory {folder} is not empty; name a new folder.", setting="directory")
    plan = QUICK if quick else Plan()
    if num_steps is not None:
        plan = dataclasses.replace(plan, num_steps=num_steps, save_every=max(2, num_steps // 10))
    if how is not None:
        plan = broken(plan, how)
    # On SIGTERM, unwind the stack: this kills the hosts and restores the terminal.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    holds = False
    try:
        holds = Demo(plan, folder, Console()).run()  # without a terminal, rich uses $COLUMNS or 80 columns
    finally:
        signal.signal(signal.SIGTERM, before)
        if holds and directory is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"Corpus, checkpoints and logs are in {folder}", file=sys.stderr)
    return holds

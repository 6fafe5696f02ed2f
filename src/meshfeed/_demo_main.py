"""Where the demo runs and what it needs before it can."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import shutil
import signal
import sys
import tempfile
from typing import Any

from meshfeed import MeshfeedError, SettingsError
from meshfeed._demo import Demo, Plan, broken


def run_demo(num_steps: int, directory: str | None, how: str | None) -> bool:
    """Runs the demo on the terminal.

    Args:
      num_steps: of the training.
      directory: where everything stays; None: a temporary folder, which is removed if all went well.
      how: a key of :data:`meshfeed._demo.BREAKS`, or None.

    Returns:
      Whether everything that was to be shown holds.

    Raises:
      SettingsError: the folder holds something.
      MeshfeedError: a library is missing, or a host failed.
    """
    missing = [name for name in ("rich", "optax") if importlib.util.find_spec(name) is None]
    if missing:
        raise MeshfeedError(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}.")
    folder = pathlib.Path(directory or tempfile.mkdtemp(prefix="meshfeed-demo-")).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"--directory {folder} is not empty; name a new folder.", setting="directory")
    plan = dataclasses.replace(Plan(), num_steps=num_steps, save_every=max(2, num_steps // 10))
    if how is not None:
        plan = broken(plan, how)
    # a terminated demo unwinds, and so kills its hosts and restores the terminal
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    holds = False
    try:
        holds = Demo(plan, folder, _console()).run()
    finally:
        signal.signal(signal.SIGTERM, before)
        if holds and directory is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"Corpus, checkpoints and logs are in {folder}", file=sys.stderr)
    return holds


def _console() -> Any:
    from rich.console import Console

    console = Console()
    # to a file or a pipe: wide enough that no line is cut or wrapped
    return console if console.is_terminal else Console(width=160)

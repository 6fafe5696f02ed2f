"""A program whose standard streams are closed (``2>&-``), so that Python's ``sys.stderr`` is None."""

from __future__ import annotations

import pathlib
import subprocess
import sys

PROGRAM = """
import sys

assert sys.stdin is sys.stdout is sys.stderr is None
import jax
import numpy as np

import meshfeed
from meshfeed._src.sources.files import download

download.FillBar()
mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
source = meshfeed.sources.Map({"x": np.arange(64)}, lambda record: record)
with meshfeed.Feed(source, mesh, global_batch_size=16, num_workers=1) as feed:
    state = next(feed)
    with meshfeed.checkpoint.Checkpointer(sys.argv[1]) as checkpoints:
        checkpoints.save(1, state, feed)
        checkpoints.wait()
        step, _ = checkpoints.restore(state, feed)
sys.exit(100 + step)
"""


def test_workers_and_checkpoints_need_no_standard_streams(tmp_path: pathlib.Path) -> None:
    shell = 'exec "$@" <&- >&- 2>&-'
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "checkpoints")]
    ended = subprocess.run(["sh", "-c", shell, "sh", *program], check=False, timeout=120)
    assert ended.returncode == 101

"""What `import meshfeed` costs: none of the heavy libraries, and little time on top of JAX."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshfeed import Feed, sources

HEAVY = [
    "orbax",
    "tensorstore",
    "grain",
    "array_record",
    "datasets",
    "tensorflow",
    "tensorflow_datasets",
    "fsspec",
    "pyarrow",
    "rich",
    "click",
    "torch",
    "pytest",
    "hypothesis",
    "matplotlib",
    "prometheus_client",
    "tensorboardX",
]

_SCRIPT = """
import importlib, json, sys, time
import jax
before = set(sys.modules)
start = time.perf_counter()
if len(sys.argv) > 2:
    exec(sys.argv[2])
for name in sys.argv[1].split():
    importlib.import_module(name)
seconds = time.perf_counter() - start
print(json.dumps({"modules": sorted(set(sys.modules) - before), "seconds": seconds}))
"""


def _run(script: str, *arguments: str) -> dict[str, object]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def _import(names: str, code: str = "") -> dict[str, object]:
    return _run(_SCRIPT, names, code)


def _heavy(modules: object) -> list[str]:
    assert isinstance(modules, list)
    return [name for name in HEAVY if any(module.partition(".")[0] == name for module in modules)]


FEED = """
sys.modules.update(dict.fromkeys(("bz2", "lzma")))  # a Python may be built without them
import numpy as np
import meshfeed
mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
with meshfeed.MultiHostDataLoadIterator({"x": np.arange(8)}, mesh, global_batch_size=2, shuffle=True) as feed:
    feed.set_state(feed.get_state())
    assert len(list(feed)) == 4
    assert "meshfeed._src.pictures.drawing" not in sys.modules
    feed.plan()
    assert "meshfeed._src.pictures.drawing" in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", ["meshfeed", "meshfeed meshfeed.testing"])
def test_import_loads_nothing_heavy(names: str, record_property: pytest.RecordProperty) -> None:
    loaded = _import(names)
    assert "meshfeed" in loaded["modules"]  # pyright: ignore[reportOperatorIssue]
    assert not _heavy(loaded["modules"])
    record_property("seconds", loaded["seconds"])
    print(f"import {names}: {float(str(loaded['seconds'])) * 1000:.1f} ms on top of jax")  # shown with -s or -rP


@pytest.mark.slow
def test_a_feed_from_memory_loads_nothing_heavy_either() -> None:
    assert not _heavy(_import("", FEED)["modules"])


def test_the_command_line_starts_without_jax() -> None:
    """Help, completion and errors of usage come at once, and conversions start in half a second."""
    code = "import sys, meshfeed._src.cli.main, meshfeed._src.convert.run; print({'jax', 'pyarrow'} & set(sys.modules))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert ended.stdout == "set()\n", ended.stderr


_HELP = """
import contextlib, io, json, sys
from meshfeed._src.cli.main import main
shown = {}
for name in ["", *main.commands]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main([*name.split(), "--help"], standalone_mode=False)
    shown[name] = text.getvalue()
print(json.dumps({"shown": shown, "modules": sorted(sys.modules)}))
"""


def test_help_of_every_command_loads_neither_jax_nor_a_heavy_library() -> None:
    found = _run(_HELP)
    shown, modules = found["shown"], found["modules"]
    assert isinstance(shown, dict)
    assert isinstance(modules, list)
    assert {"", "plan", "convert", "verify", "doctor"} <= set(shown)
    assert all(text.startswith("Usage: ") and "--help" in text for text in shown.values())
    assert {"click"} == {*_heavy(modules), *({"jax", "jaxlib", "scipy", "msgpack", "ray"} & set(modules))}


@pytest.mark.slow
def test_the_check_sees_a_heavy_library() -> None:
    assert "click" in _heavy(_import("click")["modules"])


def test_workers_read_and_decode_without_jax(tmp_path: pathlib.Path) -> None:
    """Its import takes most of the start of a process, and 40 MB."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    pq.write_table(pa.table({"x": range(64)}), tmp_path / "a.parquet")

    def note(_: object) -> dict[str, object]:
        assert np.dtype("bfloat16").itemsize == 2, "as in a process that has loaded JAX"
        return {"jax": np.bool_("jax" in sys.modules), "worker": np.bool_(__name__ not in sys.modules)}

    def open_lane(lane_index: int, num_lanes: int) -> Iterator[object]:
        return map(note, itertools.count(lane_index, num_lanes))

    rows = sources.Map(sources.Memory({"x": np.arange(64)}), note)
    parquet = sources.Map(sources.Parquet(tmp_path / "a.parquet"), note)
    for source in (
        sources.Mixture({"rows": rows, "parquet": parquet}, weights={"rows": 1, "parquet": 1}),
        sources.ShuffleBuffer(sources.Stream(open_lane), 16),
    ):
        with Feed(source, mesh, global_batch_size=16, num_workers=1) as feed:
            for batch in itertools.islice(feed, 2):
                assert not np.asarray(batch["jax"]).any()
                assert np.asarray(batch["worker"]).all()

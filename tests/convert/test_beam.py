"""The same tasks as an Apache Beam pipeline. Beam has an environment of its own: scripts/test-beam."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import formats
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshfeed
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings

pytest.importorskip("apache_beam")
RUNNERS = [("DirectRunner", []), ("DirectRunner", ["--direct_running_mode=multi_threading", "--direct_num_workers=2"])]


@pytest.mark.parametrize(("runner", "options"), RUNNERS)
def test_the_same_bytes(runner: str, options: list[str], tmp_path: pathlib.Path) -> None:
    from meshfeed._src.convert.run import RunInBeam

    data = formats.jsonl(tmp_path)
    for name, engine in (("here", run_here), ("beam", RunInBeam(runner, options))):
        convert(data, str(tmp_path / name), Settings(shards=5), engine)
    here, beam = (formats.content_of(tmp_path / name) for name in ("here", "beam"))
    assert len(here) == 6
    assert beam == here


def test_the_same_bytes_at_a_url(tmp_path: pathlib.Path) -> None:
    """The DirectRunner's workers are threads of this process, so they see its files in memory."""
    fsspec = pytest.importorskip("fsspec")
    from meshfeed._src.convert.run import RunInBeam

    data = formats.jsonl(tmp_path)
    convert(data, str(tmp_path / "here"), Settings(shards=5), run_here)
    convert(data, "memory://bucket/out", Settings(shards=5), RunInBeam("DirectRunner"))
    files = fsspec.filesystem("memory")
    found = {path.rpartition("/")[2]: files.cat_file(path) for path in files.find("/bucket/out")}
    assert found == formats.content_of(tmp_path / "here")
    pq.write_table(pa.table({"x": [[1, None]]}), tmp_path / "a.parquet")
    with pytest.raises(meshfeed.SourceError, match=r"a.parquet, record 0: column 'x' holds a list with a null"):
        convert([str(tmp_path / "a.parquet")], "memory://bucket/other", Settings(), RunInBeam("DirectRunner"))
    assert not files.find("/bucket/other")


@pytest.fixture(scope="module")
def job_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Beam's portable job server in a process of its own: pipelines reach it as protos, as they reach Flink and Prism."""
    port_file = tmp_path_factory.mktemp("server") / "port"
    module = "apache_beam.runners.portability.local_job_service_main"
    server = subprocess.Popen([sys.executable, "-m", module, "--port_file", str(port_file)])
    while not (port_file.exists() and port_file.read_text()):
        assert server.poll() is None
        time.sleep(0.05)
    yield f"localhost:{port_file.read_text()}"
    server.terminate()
    server.wait()


def test_workers_of_a_job_server_write_the_same_bytes(job_server: str, tmp_path: pathlib.Path) -> None:
    """The workers are processes that the server's side starts; they share nothing with this one but the disk."""
    from meshfeed._src.convert.run import RunInBeam

    worker = f"{sys.executable} -m apache_beam.runners.worker.sdk_worker_main"
    options = [f"--job_endpoint={job_server}", "--environment_type=beam:env:harness_subprocess_python:v1"]
    engine = RunInBeam("PortableRunner", [*options, f"--environment_config={worker}"])
    data = formats.jsonl(tmp_path)
    convert(data, str(tmp_path / "here"), Settings(shards=5), run_here)
    convert(data, str(tmp_path / "beam"), Settings(shards=5), engine)
    here, beam = (formats.content_of(tmp_path / name) for name in ("here", "beam"))
    assert beam == here

    pq.write_table(pa.table({"x": [[1, None]]}), tmp_path / "a.parquet")
    with pytest.raises(meshfeed.SourceError, match=r"a.parquet, record 0: column 'x' holds a list with a null"):
        convert([str(tmp_path / "a.parquet")], str(tmp_path / "out"), Settings(), engine)
    assert not (tmp_path / "out").exists()


def test_errors_are_those_of_the_task(tmp_path: pathlib.Path) -> None:
    from meshfeed._src.convert.run import RunInBeam

    pq.write_table(pa.table({"x": [[1, None]]}), tmp_path / "a.parquet")
    with pytest.raises(meshfeed.SourceError, match=r"a.parquet, record 0: column 'x' holds a list with a null"):
        convert([str(tmp_path / "a.parquet")], str(tmp_path / "out"), Settings(), RunInBeam("DirectRunner"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(meshfeed.SettingsError, match="--runner NoSuch: "):
        RunInBeam("NoSuch")

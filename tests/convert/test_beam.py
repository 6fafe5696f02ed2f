"""The same tasks as an Apache Beam pipeline. Beam has an environment of its own: scripts/test-beam."""

from __future__ import annotations

import pathlib

import formats
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshfeed
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.settings import Settings

pytest.importorskip("apache_beam")
RUNNERS = [("DirectRunner", []), ("DirectRunner", ["--direct_running_mode=multi_threading", "--direct_num_workers=2"])]


@pytest.mark.parametrize(("runner", "options"), RUNNERS)
def test_the_same_bytes(runner: str, options: list[str], tmp_path: pathlib.Path) -> None:
    from meshfeed._src.convert.beam import RunInBeam

    data = formats.jsonl(tmp_path)
    for name, engine in (("here", run_here), ("beam", RunInBeam(runner, options))):
        convert(data, str(tmp_path / name), Settings(shards=5), engine)
    here, beam = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("here", "beam"))
    assert len(here) == 6
    assert beam == here


def test_errors_are_those_of_the_task(tmp_path: pathlib.Path) -> None:
    from meshfeed._src.convert.beam import RunInBeam

    pq.write_table(pa.table({"x": [[1, None]]}), tmp_path / "a.parquet")
    with pytest.raises(meshfeed.SourceError, match=r"^record 0: the list in column 'x' holds a null"):
        convert([str(tmp_path / "a.parquet")], str(tmp_path / "out"), Settings(), RunInBeam("DirectRunner"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(meshfeed.SettingsError, match="--runner NoSuch: "):
        RunInBeam("NoSuch")

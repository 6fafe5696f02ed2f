"""The rows of the page of measurements: run one by one, kept, repeated when asked; and the page that is made of them."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from benchmarks import _page, _rows
from benchmarks._measure import Table
from benchmarks._rows import ROWS, Row, read_file, run_rows

ROOT = pathlib.Path(__file__).parent.parent.parent
QUICK = Row("quick", "_fake", "--fail 0", 0.1, "none")
FAILS = Row("fails", "_fake", "--fail 1", 0.1)

FAKE = """
import argparse, pathlib, sys
from benchmarks._measure import Table, main
def measure(options):
    counter = pathlib.Path(__file__).with_suffix(".count")
    counter.write_text(str(int(counter.read_text() or 0) + 1 if counter.exists() else 1))
    yield Table("a title", [{"way": "meshfeed", "n": int(counter.read_text())}], bars="n")
    if options.fail:
        raise ValueError("broke")
if __name__ == "__main__":
    main("fake", measure, lambda parser: parser.add_argument("--fail", type=int))
"""


@pytest.fixture
def figures(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    package = tmp_path / "benchmarks"
    package.mkdir()
    for name in ("_measure.py",):
        (package / name).write_text((ROOT / "benchmarks" / name).read_text())
    (package / "_fake.py").write_text(FAKE)
    monkeypatch.setattr(_rows, "FOLDER", package)
    return tmp_path / "figures.json"


def rows_of(path: pathlib.Path) -> dict:
    (rows,) = read_file(path).values()
    return rows


def test_rows_are_run_once_and_again_when_asked(figures: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_rows(figures, rows=[QUICK]) == []
    first = rows_of(figures)["quick"]
    assert first["tables"][0]["rows"] == [{"way": "meshfeed", "n": 1}]
    assert first["machine"]["cores"]
    assert first["command"] == "scripts/bench _fake --fail 0"
    assert run_rows(figures, rows=[QUICK]) == []
    assert "--again quick repeats it" in capsys.readouterr().out
    assert rows_of(figures)["quick"] == first
    run_rows(figures, rows=[QUICK], again=["quick"])
    assert rows_of(figures)["quick"]["tables"][0]["rows"][0]["n"] == 2


def test_a_row_that_fails_is_recorded_stops_no_other_and_is_repeated(figures: pathlib.Path) -> None:
    assert run_rows(figures, rows=[FAILS, QUICK]) == ["fails"]
    rows = rows_of(figures)
    assert "ValueError: broke" in rows["fails"]["error"]
    assert rows["fails"]["tables"][0]["title"] == "a title"  # what it had measured
    assert rows["quick"]["error"] == ""
    assert run_rows(figures, rows=[FAILS, QUICK]) == ["fails"]
    assert rows_of(figures)["fails"]["tables"][0]["rows"][0]["n"] == 3


def test_minutes_leave_rows_for_the_next_run(figures: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_rows(figures, rows=[Row("long", "_fake", "--fail 0", 5.0)], minutes=1) == []
    assert "long: left for the next run" in capsys.readouterr().out
    assert not figures.exists()


def test_other_machines_keep_their_rows(figures: pathlib.Path) -> None:
    figures.write_text(json.dumps({"machines": {"another": {"quick": {"error": ""}}}}))
    run_rows(figures, rows=[QUICK])
    machines = read_file(figures)
    assert machines.pop("another") == {"quick": {"error": ""}}
    assert "quick" in next(iter(machines.values()))


def test_every_row_names_a_benchmark_and_is_on_the_page() -> None:
    named = re.findall(r"<!-- row: ([\w-]+) -->", _page.TEMPLATE.read_text())
    assert sorted(named) == sorted(row.name for row in ROWS)
    for row in ROWS:
        assert (ROOT / "benchmarks" / f"{row.benchmark}.py").exists()


def test_the_page_is_made_of_the_file() -> None:
    assert _page.PAGE.read_text() == _page.make_page(), "run scripts/bench --page"


def test_tables_are_on_the_page_as_they_were_measured() -> None:
    page = _page.PAGE.read_text()
    for rows in read_file(_page.FIGURES).values():
        for figures in rows.values():
            for table in figures["tables"]:
                assert Table(**table).markdown().split("\n", 2)[2] in page
            assert figures["machine"]["time"] in page

"""meshfeed bench: it measures what it says it does. How fast is not a test's business."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from click.testing import CliRunner

from meshfeed._src.cli import bench as cli_bench
from meshfeed._src.cli import main

pytest.importorskip("array_record")


def test_rows_are_cut_and_padded() -> None:
    rows = cli_bench.FixedBytes(3)([b"abcd", b"e", b""])["bytes"]
    assert rows.dtype == np.uint8
    assert rows.tolist() == [[97, 98, 99], [101, 0, 0], [0, 0, 0]]


def test_figures_of_own_files(tmp_path: pathlib.Path) -> None:
    with cli_bench.example_files(200, 64) as paths:
        assert len(paths) == 2
        arguments = ["bench", *paths, "--steps", "4", "--global-batch-size", "16", "--step-ms", "1", "--json"]
        result = CliRunner().invoke(main.main, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert not any(pathlib.Path(path).exists() for path in paths)
    assert (figures["records"], figures["record_bytes"], figures["global_batch_size"]) == (200, 64, 16)
    assert figures["bytes_per_second"] == figures["records_per_second"] * 64
    assert 0 < figures["records_per_second"] < figures["paced_records_per_second"] == 16 / 0.001
    assert (figures["step_seconds"], figures["share_of_bare"]) == (0.001, None)
    assert 0 <= figures["stall_fraction"] <= 1
    assert set(figures["seconds_per_batch"]) == {"read", "decode", "transfer", "wait"}


def test_the_report_in_words() -> None:
    with cli_bench.example_files(64, 32) as paths:
        result = CliRunner().invoke(main.main, ["bench", *paths, "--steps", "2", "--global-batch-size", "8"])
    assert result.output.startswith("64 records of 32 bytes, batches of 8 to 8 cpu devices\n")
    assert "the loop waits" not in result.output
    assert "paced" not in result.output


def test_the_report_says_what_the_simulated_step_paced() -> None:
    with cli_bench.example_files(64, 32) as paths:
        arguments = ["bench", *paths, "--steps", "2", "--global-batch-size", "8", "--step-ms", "2"]
        lines = CliRunner().invoke(main.main, arguments).output.splitlines()
    assert lines[1] == (
        "the feed is paced by simulated steps of 2 ms, which limits it to 4,000 records/s; without --step-ms it runs at "
        "full speed"
    )
    assert lines[2].startswith("feed ")
    assert lines[2].endswith("(paced)")
    assert lines[3].endswith("(reading and decoding alone, not paced)")
    assert lines[-1].startswith("the loop waits for data ")


def test_wrong_values_are_refused(tmp_path: pathlib.Path) -> None:
    with cli_bench.example_files(64, 32) as paths:
        result = CliRunner().invoke(main.main, ["bench", *paths, "--global-batch-size", "13"])
    assert result.exit_code == 2
    assert "13" in result.output
    missing = CliRunner().invoke(main.main, ["bench", str(tmp_path / "none-*.array_record")])
    assert missing.exit_code == 1
    assert "none-" in missing.output


@pytest.mark.parametrize("milliseconds", ["nan", "inf", "3600001"])
def test_a_step_that_never_ends_is_refused(milliseconds: str) -> None:
    result = CliRunner().invoke(main.main, ["bench", "--step-ms", milliseconds])
    assert (result.exit_code, "Expected at most 3,600,000, an hour" in result.output) == (2, True)


def test_the_report_of_made_up_figures() -> None:
    figures = {
        "records": 1000, "record_bytes": 2048, "global_batch_size": 64, "devices": 4, "platform": "cpu",
        "seconds_per_batch": {"read": 0.00125, "wait": 0.5}, "paced_records_per_second": None, "step_seconds": 0.0,
        "bytes_per_second": 2.5e6, "records_per_second": 1220.7, "bare_records_per_second": 98765.4,
        "stall_fraction": 0.25,
    }  # fmt: skip
    assert list(cli_bench.report(figures)) == [
        "1,000 records of 2,048 bytes, batches of 64 to 4 cpu devices",
        "feed                1,221 records/s         2.5 MB/s",
        "bare loop          98,765 records/s  (reading and decoding alone)",
        "per batch: read 1.25 ms, wait 500.00 ms",
    ]
    paced = figures | {"paced_records_per_second": 4000.0, "step_seconds": 0.016}
    lines = list(cli_bench.report(paced))
    assert lines[1].startswith("the feed is paced by simulated steps of 16 ms, which limits it to 4,000 records/s;")
    assert lines[-1] == "the loop waits for data 25.0% of the time"

"""A conversion that is killed continues; a folder is used by one conversion at a time, and only by the same one."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import formats
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshfeed
from meshfeed._src.convert import destination
from meshfeed._src.convert import run as convert_run
from meshfeed._src.convert.destination import Disk, _count
from meshfeed._src.convert.job import JOB, Conversion, Phase
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings
from meshfeed._src.sources.manifest import make_manifest


class Stopped(Exception):
    """What ends a run between two tasks."""


class StopAfter:
    """An engine that ends the run after some tasks, as a kill does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        for number in numbers:
            if not self.count:
                raise Stopped
            self.count -= 1
            run_here(directory, phase, [number])


def test_a_task_that_fails_elsewhere_leaves_its_message(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(number: int) -> None:
        raise meshfeed.SourceError(f"record {number} is odd")

    (tmp_path / ".convert" / "failures").mkdir(parents=True)
    monkeypatch.setattr(convert_run, "task_of", lambda directory, phase: fails)
    with pytest.raises(meshfeed.SourceError, match="record 3 is odd"):
        convert_run._run_task(3, str(tmp_path), "scan")  # type: ignore[arg-type]
    assert json.loads((tmp_path / ".convert" / "failures" / "00003.json").read_text()) == "record 3 is odd"
    monkeypatch.setattr(convert_run, "task_of", lambda directory, phase: str)
    assert convert_run._run_task(4, str(tmp_path), "scan") == 4  # type: ignore[arg-type]


def test_the_results_in_a_folder_are_counted() -> None:
    assert _count(["0.json", "1.json", "1.json.part", "x.JSON"]) == 2


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_run_that_ended_anywhere_continues(tmp_path: pathlib.Path) -> None:
    data = formats.jsonl(tmp_path)
    convert(data, str(tmp_path / "whole"), Settings(shards=3), run_here)
    for count in range(6):  # 2 scans, 3 output files
        out = str(tmp_path / f"out{count}")
        try:
            convert(data, out, Settings(shards=3), StopAfter(count))
        except Stopped:
            assert count < 5
            assert pathlib.Path(out).exists() == (count > 2)  # before the first output file, nothing is left
        else:
            assert count == 5
        result = convert(data, out, Settings(shards=3), StopAfter(5 if count < 3 else 5 - count))
        assert result.was_complete == (count == 5)
        assert formats.content_of(pathlib.Path(out)) == formats.content_of(tmp_path / "whole")


@pytest.mark.parametrize("to", ["../out", "~/out", "moved"])
def test_the_manifest_names_files_relative_to_itself(
    to: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a copy of the folder would be read from where it was, and a bucket could not be read at all."""
    data = formats.parquet(tmp_path)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    if to == "moved":  # while it was not complete
        with pytest.raises(Stopped):
            convert(data, str(tmp_path / "begun"), Settings(shards=3), StopAfter(3))
        (tmp_path / "begun").rename(tmp_path / "work" / "moved")
    convert(data, to, Settings(shards=3), run_here)
    (tmp_path / "work" / "moved" if to == "moved" else tmp_path / "out").rename(tmp_path / "elsewhere")
    listed = json.loads((tmp_path / "elsewhere" / "manifest.json").read_text())["files"]
    assert [row[0] for row in listed] == [f"data-{number:05}-of-00003.array_record" for number in range(3)]
    assert len(meshfeed.sources.ArrayRecord(f"{tmp_path}/elsewhere/manifest.json")) == formats.COUNT


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_source_says_that_a_conversion_is_not_complete(
    place: str, memory: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or a job that starts too early would train on some of the files without a word."""
    data, out = formats.parquet(tmp_path), str(tmp_path / "out") if place == "disk" else "memory://bucket/out"
    with pytest.raises(Stopped):
        convert(data, out, Settings(shards=3), StopAfter(4))
    assert len(meshfeed.sources.ArrayRecord(f"{out}/*.array_record")) == formats.COUNT * 2 // 3
    (line,) = [one.getMessage() for one in caplog.records if "complete" in one.getMessage()]
    assert re.match("ArrayRecord: the conversion to .*/out/ is not complete, so records may be missing.", line)
    caplog.clear()
    convert(data, out, Settings(shards=3), run_here)
    assert len(meshfeed.sources.ArrayRecord(f"{out}/*.array_record")) == formats.COUNT
    assert not caplog.records


def test_a_folder_belongs_to_one_conversion(tmp_path: pathlib.Path) -> None:
    data = formats.parquet(tmp_path)
    out = str(tmp_path / "out")
    with pytest.raises(Stopped):
        convert(data, out, Settings(shards=3), StopAfter(3))
    with pytest.raises(
        meshfeed.SettingsError, match="unfinished conversion with --shards 3, and this one is with --shards 4"
    ):
        convert(data, out, Settings(shards=4), run_here)
    with pytest.raises(
        meshfeed.SettingsError, match="unfinished conversion of another input, or of files that have changed"
    ):
        convert([f"{tmp_path}/a.parquet"], out, Settings(shards=3), run_here)

    def convert_again(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        convert(data, out, Settings(shards=3), run_here)

    with pytest.raises(meshfeed.SettingsError, match="another process is converting to"):
        convert(data, out, Settings(shards=3), convert_again)
    convert(data, out, Settings(shards=3), run_here)
    before = formats.content_of(pathlib.Path(out))
    assert convert(data, out, Settings(shards=3), StopAfter(0)).was_complete
    for settings, there, here in (
        (Settings(shards=2), "with --shards 3", "with --shards 2"),
        (
            Settings(columns=["text", "label"], compression="none"),
            "without --columns, with --compression zstd, with --shards 3",
            "with --columns text,label, with --compression none, without --shards",
        ),
    ):
        with pytest.raises(
            meshfeed.SettingsError,
            match=f"the result of a conversion {there}, and this one is {here}. Name a new folder, or remove what it holds.",
        ):
            convert(data, out, settings, run_here)
    with pytest.raises(meshfeed.SettingsError, match="the result of a conversion of another input"):
        convert([f"{tmp_path}/a.parquet"], out, Settings(shards=3), run_here)
    assert formats.content_of(pathlib.Path(out)) == before
    for digests in (True, False):  # a manifest that is written again still says what made the files
        make_manifest(f"{out}/*.array_record", digests=digests)
        assert convert(data, out, Settings(shards=3), StopAfter(0)).was_complete
    with pytest.raises(meshfeed.SettingsError, match=r"holds \d+ other files"):
        convert(data, str(tmp_path), Settings(), run_here)


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize("shards", [1, 2])
def test_another_run_that_completes_just_before_this_one_begins(
    shards: int, place: str, memory: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of both would otherwise be in the folder."""
    kind, to = {
        "disk": (destination.Disk, str(tmp_path / "out")),
        "bucket": (destination.Bucket, "memory://bucket/out"),
    }[place]
    data, lock = formats.jsonl(tmp_path), kind.lock

    def lock_late(self: Any) -> Any:
        monkeypatch.setattr(kind, "lock", lock)
        convert(data, to, Settings(shards=1), run_here)
        return self.lock()

    monkeypatch.setattr(kind, "lock", lock_late)
    if shards == 1:
        assert convert(data, to, Settings(shards=1), run_here).was_complete
    else:
        with pytest.raises(meshfeed.SettingsError, match="the result of a conversion with --shards 1, and this one is"):
            convert(data, to, Settings(shards=shards), run_here)
    assert sorted(destination.destination_of(to).sizes()) == ["data-00000-of-00001.array_record", "manifest.json"]


def test_a_lock_of_a_folder_that_was_removed_is_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has opened the state of another one, which then completes and removes it."""
    flock = fcntl.flock

    def complete_first(number: int, how: int) -> None:
        os.rmdir(tmp_path / "out" / destination.FOLDER)
        flock(number, how)

    monkeypatch.setattr(fcntl, "flock", complete_first)
    with pytest.raises(meshfeed.SettingsError, match="another process is converting to"):
        convert(formats.jsonl(tmp_path), str(tmp_path / "out"), Settings(), run_here)


def test_a_full_disk(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"x": [os.urandom(5000)] * 100}), tmp_path / "a.parquet")
    ended = subprocess.run(
        [sys.executable, "-m", "meshfeed", "convert", "a.parquet", "--to", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: cannot write the output: ")
    assert ended.stderr.endswith("After correcting this, run the same command again to continue.\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_killed_with_workers_and_interrupted(tmp_path: pathlib.Path) -> None:
    rows = [{"text": f"document {i} " * 20, "tokens": list(range(i % 50))} for i in range(3000)] * 20
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2000)
    command = [sys.executable, "-m", "meshfeed", "convert", "a.parquet", "--shards", "12", "--to"]
    subprocess.run([*command, "whole", "--workers", "1"], cwd=tmp_path, check=True, capture_output=True)
    killed = tmp_path / "killed"
    for number in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(
            [*command, "killed", "--workers", "2"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        before = len(list(killed.glob("data-*")))
        while len(list(killed.glob("data-*"))) == before and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, number)
        _, error = process.communicate(timeout=60)
        if process.returncode:  # it may have been complete
            assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
            if number == signal.SIGINT:
                assert error == b"Interrupted. Run the same command again to continue.\n"
                assert not list((killed / ".convert").rglob("*.part"))
    subprocess.run([*command, "killed", "--workers", "1"], cwd=tmp_path, check=True, capture_output=True)
    assert formats.content_of(killed) == formats.content_of(tmp_path / "whole")
    assert (
        b'["data-00011-of-00012.array_record", ' in formats.content_of(killed)["manifest.json"]
    )  # relative to the folder


@pytest.mark.slow
def test_a_conversion_imports_neither_jax_nor_pandas(tmp_path: pathlib.Path) -> None:
    """Each takes longer to import than the rest of the command. The last line of the report opens the files."""
    data = [*formats.parquet(tmp_path), *formats.jsonl(tmp_path)]
    script = """
import sys
from meshfeed._src.cli.main import main
for number, path in enumerate(sys.argv[2:]):
    main(["convert", path, "--to", f"{sys.argv[1]}/{number}", "--workers", str(2 - number % 2)], standalone_mode=False)
print({name.partition(".")[0] for name in sys.modules} & {"jax", "pandas"})
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *data], check=True, capture_output=True, text=True
    )
    assert ended.stdout.endswith("set()\n")
    sources = [line.partition("Read it with: ")[2] for line in ended.stdout.splitlines() if "Read it with: " in line]
    assert [len(eval(source, {"meshfeed": meshfeed})) for source in sources] == [formats.COUNT, 30, formats.COUNT - 30]
    assert eval(sources[1], {"meshfeed": meshfeed})[0]["label"].tolist() == -3
    assert "  label: int64\n  text: bytes\n  tokens: int64 list, 0 to 4 values\n  weight: float\n" in ended.stdout


def test_files_that_a_power_failure_left_empty_are_written_again(tmp_path: pathlib.Path) -> None:
    data = formats.parquet(tmp_path)
    convert(data, str(tmp_path / "whole"), Settings(shards=3), run_here)
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        convert(data, str(out), Settings(shards=3), StopAfter(4))  # 2 scans, 2 output files
    for name in ("entries/00001.json", "scans/00000.json"):
        (out / ".convert" / name).write_bytes(b"")
    convert(data, str(out), Settings(shards=3), StopAfter(3))
    assert formats.content_of(out) == formats.content_of(tmp_path / "whole")


@pytest.mark.parametrize("name", ["discard_plan", "ask_for_all_types"])
def test_killed_while_it_turns_to_the_types_of_all_blocks(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"pad": "p" * 1000} for _ in range(1200)] + [{"pad": "", "late": "x"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"{tmp_path}/a.jsonl"], str(tmp_path / "out"), Settings(columns=["late"]), run_here

    def kill(_: object) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(convert_run if name == "discard_plan" else Conversion, name, kill)
        patch.setattr(convert_run, "_is_empty", lambda *_: False)  # a kill leaves the job as it is
        with pytest.raises(Stopped):
            convert(*arguments)
    assert list(convert(*arguments).features) == ["late"]


def test_what_an_interrupted_removal_left_is_of_no_other_job(tmp_path: pathlib.Path) -> None:
    for name, count in (("a", 3), ("b", 5)):
        pq.write_table(pa.table({name: range(count)}), tmp_path / f"{name}.parquet")
    out = tmp_path / "out"

    def kill(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        run_here(directory, phase, numbers)
        if phase == "write":
            shutil.copytree(out / ".convert", tmp_path / "left", ignore=shutil.ignore_patterns("job.json"))

    convert([f"{tmp_path}/a.parquet"], str(out), Settings(), kill)
    shutil.rmtree(out)
    out.mkdir()
    (tmp_path / "left").rename(out / ".convert")
    result = convert([f"{tmp_path}/b.parquet"], str(out), Settings(), run_here)
    assert (result.num_records, list(result.features)) == (5, ["b"])


def test_a_run_that_was_killed_after_its_manifest_is_complete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = formats.parquet(tmp_path), tmp_path / "out"

    def remove_some(disk: Disk) -> None:
        for name in ("scans", "entries", "plan.json"):
            (disk.work / name).rename(tmp_path / name)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "clear", remove_some)
        with pytest.raises(Stopped):
            convert(data, str(out), Settings(shards=3), run_here)
    before = files_of(out)
    with pytest.raises(meshfeed.SettingsError, match="the result of a conversion with --shards 3"):
        convert(data, str(out), Settings(shards=2), run_here)
    (out / ".convert" / "job.json").unlink()  # removed too before the kill
    with pytest.raises(meshfeed.SettingsError, match="the result of a conversion with --shards 3"):
        convert(data, str(out), Settings(shards=2), run_here)
    assert convert(data, str(out), Settings(shards=3), StopAfter(0)).was_complete
    assert formats.content_of(out) == before


def test_a_complete_conversion_without_one_of_its_files_is_not_called_complete(tmp_path: pathlib.Path) -> None:
    data, out = formats.parquet(tmp_path), tmp_path / "out"
    convert(data, str(out), Settings(shards=3), run_here)
    shard = sorted(out.glob("data-*"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(meshfeed.SettingsError, match=f"its file {shard} has [0-9,]+ bytes instead of .* convert again"):
        convert(data, str(out), Settings(shards=3), StopAfter(0))
    shard.unlink()
    with pytest.raises(meshfeed.SettingsError, match=f"its file {shard} is missing. Put it back, or remove what the"):
        convert(data, str(out), Settings(shards=3), StopAfter(0))
    shard.write_bytes(content)
    assert convert(data, str(out), Settings(shards=3), StopAfter(0)).was_complete


def test_a_manifest_that_was_being_written_at_the_kill_is_removed(tmp_path: pathlib.Path) -> None:
    data, out = formats.parquet(tmp_path), tmp_path / "out"
    with pytest.raises(Stopped):
        convert(data, str(out), Settings(shards=3), StopAfter(4))
    (out / "manifest.json.0123456789abcdef.part").touch()
    convert(data, str(out), Settings(shards=3), run_here)
    assert sorted(path.name for path in out.iterdir())[-1] == "manifest.json"


def test_the_list_of_inputs_is_not_read_for_each_of_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a conversion of 10,000 small files takes the square of that."""
    for number in range(20):
        (tmp_path / f"{number:02}.jsonl").write_text('{"a": 1}\n')
    read, names = Disk.read, []

    def counted(disk: Disk, name: str) -> bytes | None:
        names.append(name)
        return read(disk, name)

    monkeypatch.setattr(Disk, "read", counted)
    convert([str(tmp_path / "*.jsonl")], str(tmp_path / "out"), Settings(), run_here)
    assert names.count(JOB) < 10

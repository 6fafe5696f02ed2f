"""Output at URLs: the same bytes as on a disk, also after kills, errors of the store and a second run beside the first."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import convert_cases
import formats
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_servers import S3, forget_clients, running

import meshfeed
from meshfeed._src.base import stores
from meshfeed._src.convert import destination
from meshfeed._src.convert import job as convert_job
from meshfeed._src.convert.formats import download
from meshfeed._src.convert.job import Conversion, Phase
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings


class Stopped(Exception):
    """What ends a run between two tasks."""


@pytest.fixture
def s3() -> Iterator[S3]:
    with running(S3) as store:
        yield store


def stored(files: Any, folder: str) -> dict[str, bytes]:
    return {path.removeprefix(f"{folder}/"): files.cat_file(path) for path in files.find(folder)}


def local_content(data: Sequence[str], folder: pathlib.Path, settings: Settings) -> dict[str, bytes]:
    convert(data, str(folder), settings, run_here)
    return formats.content_of(folder)


def left_here() -> list[pathlib.Path]:
    """Files in the local folder for what is in work."""
    return [path for path in pathlib.Path(tempfile.gettempdir()).glob("meshfeed-convert-*/*") if path.exists()]


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [("csv", "example"), ("jsonl", "tokens"), ("tfrecord", "example"), ("webdataset", "example"), ("images", "bytes")],
)
def test_the_same_bytes_as_on_a_disk(kind: str, encoding: str, memory: Any, tmp_path: pathlib.Path) -> None:
    case = {
        "format": kind,
        "encoding": encoding,
        "rows": "few",
        "shards": 3,
        "compression": "zstd",
        "gzip": kind == "csv",
    }
    world = convert_cases.World({**case, "inputs": 1, "workers": 1, "change": "none", "seed": 0}, tmp_path / "in")
    arguments = world.arguments()
    data, settings = arguments["data"], Settings(**arguments["settings"])
    wanted = local_content(data, tmp_path / "local", settings)
    result = convert(data, "memory://bucket/out/", settings, run_here)
    assert stored(memory, "/bucket/out") == wanted
    assert (result.directory, result.num_records) == ("memory://bucket/out/", len(world.expected()))
    assert convert(data, "memory://bucket/out", settings, run_here).was_complete
    assert not left_here()


def test_a_run_that_ended_anywhere_continues(memory: Any, tmp_path: pathlib.Path) -> None:
    data = formats.jsonl(tmp_path)
    wanted = local_content(data, tmp_path / "local", Settings(shards=3))

    def stopping(count: int):
        left = count

        def run(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
            nonlocal left
            for number in numbers:
                if not left:
                    raise Stopped
                left -= 1
                run_here(directory, phase, [number])

        return run

    for count in range(5):  # 2 scans, 3 output files
        url = f"memory://bucket/out{count}"
        with pytest.raises(Stopped):
            convert(data, url, Settings(shards=3), stopping(count))
        assert bool(stored(memory, f"/bucket/out{count}")) == (
            count > 2
        )  # before the first output file, nothing is left
        if count > 2:
            with pytest.raises(
                meshfeed.SettingsError, match="unfinished conversion with --shards 3, and this one is with"
            ):
                convert(data, url, Settings(shards=2), run_here)
        convert(data, url, Settings(shards=3), stopping(5 if count < 3 else 5 - count))
        assert stored(memory, f"/bucket/out{count}") == wanted
    assert not left_here()


def test_an_object_that_is_not_the_one_that_was_written_is_written_again(memory: Any, tmp_path: pathlib.Path) -> None:
    data = formats.parquet(tmp_path)
    wanted = local_content(data, tmp_path / "local", Settings(shards=3))
    written: list[list[int]] = []

    def run(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        if phase == "write":
            written.append(list(numbers))
        run_here(directory, phase, numbers)
        if phase == "write" and len(written) == 1:
            raise Stopped

    with pytest.raises(Stopped):
        convert(data, "memory://bucket/out", Settings(shards=3), run)
    names = sorted(path for path in memory.find("/bucket/out") if "/data-" in path)
    content = memory.cat_file(names[0])
    memory.pipe_file(names[0], bytes(len(content)))  # of the same size
    memory.rm_file(names[2])
    convert(data, "memory://bucket/out", Settings(shards=3), run)
    assert written == [[0, 1, 2], [0, 2]]
    assert stored(memory, "/bucket/out") == wanted


def test_types_that_are_found_late(memory: Any, tmp_path: pathlib.Path) -> None:
    rows = [{"pad": "p" * 1000, "n": 1} for _ in range(1200)] + [{"pad": "", "n": 1.5}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, settings = [f"{tmp_path}/a.jsonl"], Settings(shards=2)
    wanted = local_content(data, tmp_path / "local", settings)
    convert(data, "memory://bucket/out", settings, run_here)
    assert stored(memory, "/bucket/out") == wanted


def test_a_url_that_holds_something_else(memory: Any, tmp_path: pathlib.Path) -> None:
    data = formats.parquet(tmp_path)
    memory.pipe_file("/bucket/other/x", b"1")
    with pytest.raises(meshfeed.SettingsError, match=r"the folder memory://bucket/other holds 1 other file\. Name"):
        convert(data, "memory://bucket/other", Settings(), run_here)
    with pytest.raises(meshfeed.SettingsError, match="--to memory://bucket/other/x is a file"):
        convert(data, "memory://bucket/other/x", Settings(), run_here)
    convert(data, "memory://bucket/out", Settings(shards=2), run_here)
    with pytest.raises(
        meshfeed.SettingsError, match="the result of a conversion with --shards 2, and this one is with"
    ):
        convert(data, "memory://bucket/out", Settings(shards=3), run_here)
    before = stored(memory, "/bucket/out")
    memory.pipe_file("/bucket/out/data-00001-of-00002.array_record", b"1")
    with pytest.raises(meshfeed.SettingsError, match=r"out/data-00001-of-00002.array_record has 1 bytes instead of"):
        convert(data, "memory://bucket/out", Settings(shards=2), run_here)
    assert stored(memory, "/bucket/out").keys() == before.keys()


def test_the_run_that_started_last_owns_the_job(memory: Any, tmp_path: pathlib.Path) -> None:
    data, url = formats.parquet(tmp_path), "memory://bucket/out"
    wanted = local_content(data, tmp_path / "local", Settings(shards=3))

    def with_another(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        run_here(directory, phase, numbers)
        if phase == "write":
            with pytest.raises(meshfeed.SettingsError, match="another process is converting to memory://bucket/out"):
                convert(data, url, Settings(shards=3), run_here)  # on this machine
            owner = {"host": "elsewhere", "pid": 7, "time": 0, "id": "x"}
            memory.pipe_file("/bucket/out/.convert/owner.json", json.dumps(owner).encode())

    with pytest.raises(
        meshfeed.SettingsError, match="process 7 on elsewhere has started to convert to memory://bucket/out"
    ):
        convert(data, url, Settings(shards=3), with_another)
    assert memory.exists("/bucket/out/.convert/job.json")  # that of the other one
    convert(data, url, Settings(shards=3), run_here)
    assert stored(memory, "/bucket/out") == wanted


def test_a_local_folder_of_another_user_is_not_used(
    memory: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link with the name of the folder: anybody may create one in a temporary folder that all users share."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / f"meshfeed-convert-{os.getuid()}"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(meshfeed.SettingsError, match=rf"^{link} belongs to another user\. Set TMPDIR to") as caught:
        convert(formats.parquet(tmp_path), "memory://bucket/out", Settings(), run_here)
    assert caught.value.setting == "to"
    assert not any((tmp_path / "elsewhere").iterdir())


def test_copies_of_inputs_are_those_of_the_job(memory: Any, tmp_path: pathlib.Path) -> None:
    """A killed job's local copies are not taken for the input of the next job at the same URL."""
    for count in (10, 20):
        memory.pipe_file("/bucket/a.csv", b"n\n" + b"1\n" * count)

        def killed(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
            run_here(directory, phase, numbers)
            raise Stopped

        with pytest.raises(Stopped):
            convert(["memory://bucket/a.csv"], "memory://bucket/out", Settings(), killed)
        assert left_here()  # with the download
        if count == 10:
            memory.rm("/bucket/out", recursive=True)
    assert convert(["memory://bucket/a.csv"], "memory://bucket/out", Settings(), run_here).num_records == 20


def test_names_in_the_copy_of_a_folder_are_those_of_the_input(memory: Any, tmp_path: pathlib.Path) -> None:
    """A class is not taken for what a killed task left."""
    for number in range(6):
        memory.pipe_file(f"/bucket/images/{('a', 'b.part')[number % 2]}/{number}.png", b"%d" % number)
    arguments = ["memory://bucket/images"], str(tmp_path / "out"), Settings(shards=3)

    def stop(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        run_here(directory, phase, numbers[:1])
        if phase == "write":
            raise Stopped

    with pytest.raises(Stopped):
        convert(*arguments, stop)
    assert convert(*arguments, run_here).num_records == 6


@pytest.mark.parametrize("kind", ["folder", "compressed"])
def test_tasks_that_begin_together_on_another_machine(
    kind: str, memory: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs a copy of the same input, which the machine that scanned it had."""
    if kind == "folder":
        for number in range(40):
            memory.pipe_file(f"/bucket/images/{'ab'[number % 2]}/{number}.png", b"%d" % number)
        data = ["memory://bucket/images"]
    else:
        lines = "".join(json.dumps({"i": number}) + "\n" for number in range(40))
        memory.pipe_file("/bucket/a.jsonl.gz", gzip.compress(lines.encode()))
        data = ["memory://bucket/a.jsonl.gz"]
    arguments = data, "memory://bucket/out", Settings(shards=9)
    downloads: list[str] = []

    def stop(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        run_here(directory, phase, numbers[:1])
        if phase == "write":
            raise Stopped

    def all_at_once(directory: str, phase: Phase, numbers: Sequence[int]) -> None:
        begin = threading.Barrier(max(1, len(numbers)))

        def task(number: int) -> None:
            one = Conversion(directory)
            begin.wait(60)
            (one.scan if phase == "scan" else one.write)(number)

        with concurrent.futures.ThreadPoolExecutor(len(numbers) or 1) as pool:
            list(pool.map(task, numbers))

    def slowly(url: str, target: pathlib.Path) -> None:
        downloads.append(url)
        download(url, target)
        time.sleep(0.2)

    for machine in ("one", "other"):
        (tmp_path / machine).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "one"))
    with pytest.raises(Stopped):
        convert(*arguments, stop)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    monkeypatch.setattr(convert_job, "download", slowly)
    assert convert(*arguments, all_at_once).num_records == 40
    assert downloads == data


# ------------------------------------------------------------------------ S3


def same_in_s3(s3: S3, folder: str, wanted: dict[str, bytes]) -> None:
    """Raises AssertionError unless the folder holds what is wanted, and no upload is left unfinished."""
    found = {key: s3.client.get_object(Bucket="meshfeed", Key=key)["Body"].read() for key in s3.keys(f"{folder}/")}
    assert found == {f"{folder}/{name}": content for name, content in wanted.items()}
    assert s3.uploads() == []


@pytest.mark.slow
def test_the_command_with_workers(s3: S3, tmp_path: pathlib.Path) -> None:
    data = formats.jsonl(tmp_path)
    wanted = local_content(data, tmp_path / "local", Settings(shards=3))
    command = [sys.executable, "-m", "meshfeed", "convert", *data, "--shards", "3", "--to", f"{s3.root}/out"]
    ended = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "s3://meshfeed/out: 3 files, " in ended.stdout
    same_in_s3(s3, "out", wanted)
    source = ended.stdout.partition("Read it with: ")[2].splitlines()[0]
    assert len(eval(source, {"meshfeed": meshfeed})) == formats.COUNT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz", "local"]  # and no folder "s3:"


@pytest.mark.slow
def test_a_store_that_fails_often(s3: S3, tmp_path: pathlib.Path) -> None:
    data = formats.parquet(tmp_path)
    wanted = local_content(data, tmp_path / "local", Settings(shards=3))
    s3.failing = 0.2
    convert(data, f"{s3.root}/out", Settings(shards=3), run_here)
    assert s3.num_failed > 3
    same_in_s3(s3, "out", wanted)


def converting(environment: dict[str, str], data: list[str], url: str, shards: int) -> None:
    """Runs a conversion whose files are uploaded in parts; a process of its own."""
    os.environ.update(environment)
    destination._PART_BYTES = 5 << 20  # the least that S3 accepts
    convert(data, url, Settings(shards=shards, compression="none"), run_here)
    os._exit(0)


class Killer:
    """Kills a process before or after the server has answered its request with a number."""

    def __init__(self, process: Any, number: int, *, after: bool) -> None:
        self.process, self.left, self.after = process, number, after

    def __call__(self, is_after: bool) -> None:
        self.left -= is_after == self.after
        if not self.left and self.process.pid is not None:
            self.process.kill()


def play_kills(s3: S3, folder: pathlib.Path, kills: int, seed: int) -> int:
    """Kills conversions before or after random requests; returns how many were completed, all of which are right."""
    rng = random.Random(seed)
    pq.write_table(pa.table({"x": [rng.randbytes(1 << 18) for _ in range(88)]}), folder / "a.parquet", row_group_size=8)
    data, shards = [str(folder / "a.parquet")], 2
    wanted = local_content(data, folder / "local", Settings(shards=shards, compression="none"))
    completed = killed = 0
    is_complete = False
    while killed < kills or not is_complete:
        out = f"out{completed}"
        arguments = ({**s3.environment, "TMPDIR": tempfile.gettempdir()}, data, f"{s3.root}/{out}", shards)
        process = convert_cases._CONTEXT.Process(target=converting, args=arguments)
        if killed < kills:
            s3.hook = Killer(process, rng.randint(1, 60), after=rng.random() < 0.5)
        process.start()
        process.join(120)
        s3.hook = lambda _: None
        assert process.exitcode in (0, -signal.SIGKILL), f"the process ended with {process.exitcode}"
        is_complete = process.exitcode == 0
        killed += not is_complete
        if is_complete:
            same_in_s3(s3, out, wanted)
            completed += 1
    assert not left_here()
    return completed


@pytest.mark.slow
def test_killed_at_any_request(s3: S3, tmp_path: pathlib.Path) -> None:
    play_kills(s3, tmp_path, kills=6, seed=0)


@pytest.mark.slow
def test_uploads_of_killed_runs_are_aborted_if_they_can_be_listed(
    s3: S3, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = formats.parquet(tmp_path)
    for key in ("out/data-00000-of-00001.array_record", "other/x"):
        s3.client.create_multipart_upload(Bucket="meshfeed", Key=key)
    convert(data, f"{s3.root}/out", Settings(), run_here)
    assert s3.uploads() == ["other/x"]  # not ours

    def refused(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(destination, "abort_uploads", refused)
    convert(data, f"{s3.root}/again", Settings(), run_here)
    assert "uploads that earlier runs left unfinished cannot be listed: Access Denied" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True])
def test_a_store_that_is_down(answers: bool, s3: S3, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses connections, or accepts them and never answers."""
    data = formats.parquet(tmp_path)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(stores, "ANSWER_SECONDS", 2.0)
        forget_clients()
        with pytest.raises(
            meshfeed.MeshfeedError, match=r"s3://meshfeed/out: .*Check the network and that the store is"
        ):
            convert(data, "s3://meshfeed/out", Settings(), run_here)
    assert not left_here()


def test_a_bucket_that_does_not_exist(s3: S3, tmp_path: pathlib.Path) -> None:
    with pytest.raises(meshfeed.SettingsError, match=r"--to s3://nowhere/out cannot be written: .* Create the bucket"):
        convert(formats.parquet(tmp_path), "s3://nowhere/out", Settings(), run_here)

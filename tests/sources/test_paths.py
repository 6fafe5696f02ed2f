"""Names of files: globs, brackets in names, links, and what the library reads of damaged files."""

from __future__ import annotations

import functools
import glob
import io
import json
import os
import pathlib
import re
import tarfile
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import array_record_files
import fsspec
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from token_files import write_llm_c, write_megatron

import meshfeed
from meshfeed import CorruptDataError, MeshfeedError, SettingsError, SourceError
from meshfeed._src.sources.files.paths import expand_paths, in_threads
from meshfeed.sources import ArrayRecord, Folder, Padded, Parquet, Tokens


def make_files(folder: pathlib.Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def found(folder: pathlib.Path, pattern: str) -> list[str]:
    return [name.removeprefix(f"{folder}/") for name in expand_paths(f"{folder}/{pattern}", source="test")]


def test_names_with_brackets(tmp_path: pathlib.Path) -> None:
    make_files(tmp_path, "a[1].x", "a1.x", "run[1]/p[2]/b.x", "run1/p[2]/c.x", "[x]*?.y", "z/run[1]/b.x")
    assert found(tmp_path, "a[1].x") == ["a[1].x"]
    assert found(tmp_path, "a[!2].x") == ["a1.x"]
    assert found(tmp_path, "run[1]/p[2]/*.x") == ["run[1]/p[2]/b.x"]
    assert found(tmp_path, "run[1]/**/*.x") == ["run[1]/p[2]/b.x"]
    assert found(tmp_path, "run?/p[[]2]/*") == ["run1/p[2]/c.x"]
    assert found(tmp_path, "[x]*?.y") == ["[x]*?.y"]
    assert found(tmp_path, "**/b.x") == ["run[1]/p[2]/b.x", "z/run[1]/b.x"]
    store = fsspec.filesystem("memory")
    for name in ("a[1].x", "a1.x", "run[1]/b.x"):
        store.pipe(f"/brackets/{name}", b"x")
    for pattern, names in {"a[1].x": ["a[1].x"], "a[0-9].x": ["a1.x"], "run[1]/*.x": ["run[1]/b.x"]}.items():
        assert expand_paths(f"memory://brackets/{pattern}", source="test") in (
            [f"memory://brackets/{name}" for name in names],
            [f"memory:///brackets/{name}" for name in names],
        )
    store.rm("/brackets", recursive=True)


def test_names_with_braces(tmp_path: pathlib.Path) -> None:
    make_files(tmp_path, *(f"s-{number:03}.x" for number in range(12)), "en/a1.x", "de/a1.x", "de/a2.x")
    make_files(tmp_path, "{1,2}/b.x", "{1,2}/c.x", "[3]/{4,5}/d.x")
    assert found(tmp_path, "s-{000..002}.x") == ["s-000.x", "s-001.x", "s-002.x"]
    assert found(tmp_path, "s-{009..011}.x") == ["s-009.x", "s-010.x", "s-011.x"]
    assert found(tmp_path, "{en,de}/a{1..1}.x") == ["en/a1.x", "de/a1.x"]
    assert found(tmp_path, "{en,de}/*.x") == ["en/a1.x", "de/a1.x", "de/a2.x"]
    assert found(tmp_path, "{1,2}/*.x") == ["{1,2}/b.x", "{1,2}/c.x"]  # a folder of that name
    assert found(tmp_path, "{1,2}/{c,b}.x") == ["{1,2}/c.x", "{1,2}/b.x"]
    assert found(tmp_path, f"{glob.escape('[3]')}/{{4,5}}/{{d,d}}.x") == ["[3]/{4,5}/d.x"] * 2
    with pytest.raises(SourceError, match=r"no file '.*s-012\.x'"):
        found(tmp_path, "s-{010..012}.x")
    with pytest.raises(SourceError, match=r"no file '.*s-{a\.\.b}\.x'"):
        found(tmp_path, "s-{a..b}.x")
    store = fsspec.filesystem("memory")
    for name in ("s-9.x", "s-10.x", "{a,b}.x"):
        store.pipe(f"/braces/{name}", b"x")
    assert expand_paths("memory://braces/s-{9..10}.x", source="test") == [
        "memory://braces/s-9.x",
        "memory://braces/s-10.x",
    ]
    assert expand_paths("memory://braces/{a,b}.x", source="test") == ["memory://braces/{a,b}.x"]
    store.rm("/braces", recursive=True)


def test_a_file_that_several_patterns_match_is_named(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    make_files(tmp_path, "a-0.x", "a-1.x")
    one, both = str(tmp_path / "a-1.x"), str(tmp_path / "a-*.x")
    assert len(expand_paths(both, source="test")) == len(expand_paths([one, one], source="test")) == 2
    assert not caplog.messages, "a name that is listed twice is meant to be read twice"
    assert len(expand_paths([both, one], source="test")) == 3
    assert f"test: {one} matches several of the paths, so its records come several times" in caplog.text


@pytest.mark.parametrize(
    ("names", "example"),
    [(("_SUCCESS", "a.parquet", "b.parquet"), "*.parquet"), (("2026/a.parquet",), "**/*"), ((), "**/*")],
)
def test_the_files_of_a_folder_are_named_by_their_usual_end(
    names: tuple[str, ...], example: str, tmp_path: pathlib.Path
) -> None:
    make_files(tmp_path, *names)
    with pytest.raises(SourceError, match=re.escape(f"with a glob such as '{tmp_path}/{example}'.")):
        expand_paths(tmp_path, source="test")
    make_files(tmp_path, *(f"{number}.tar" for number in range(5)), "a.array_record")
    with pytest.raises(SourceError, match=re.escape(f"such as '{tmp_path}/*.array_record'.")):
        expand_paths(tmp_path, source="ArrayRecord")


@pytest.mark.parametrize("name", ["a.x", "b/a.x", "*.x", "*/a.x"])
def test_a_folder_without_permission_is_named(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(os, "access", lambda folder, *_, **__: asked.append(folder))
    with pytest.raises(SourceError, match=f"test: no permission to look into the folder {tmp_path} for "):
        expand_paths(tmp_path / name, source="test")
    with pytest.raises(SourceError, match=f"Folder: no permission to look into the folder {tmp_path} for "):
        Folder(tmp_path / "b")
    assert asked == [str(tmp_path), str(tmp_path)]


def test_an_open_file_is_no_list_of_names(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.csv").write_text("a\nb\n")
    with open(tmp_path / "a.csv") as opened:
        for paths in (opened, [opened]):
            with pytest.raises(meshfeed.SourceError, match="Pass the name of the file, not the open file"):
                meshfeed.sources.Parquet(paths)  # type: ignore[arg-type]


def test_links(tmp_path: pathlib.Path) -> None:
    make_files(tmp_path, "data/a.x", "data/deep/b.x", "data/.hidden/c.x", "elsewhere/d.x")
    for link in ("one", "two", "deep/up", "deep/top"):  # glob follows each of them 40 times, in every order
        (tmp_path / "data" / link).symlink_to(tmp_path / "data")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    assert found(tmp_path, "data/**/*.x") == ["data/a.x", "data/deep/b.x", "data/more/d.x"]
    assert found(tmp_path, "data/**") == ["data/a.x", "data/deep/b.x", "data/more/d.x"]
    (tmp_path / "data" / "self.x").symlink_to(tmp_path / "data" / "self.x")
    for name in ("data/self.x", "data/*.x"):
        with pytest.raises(SourceError, match=r"self.x.* is a link that leads to no file"):
            found(tmp_path, name)


def test_a_url_is_no_folder_of_a_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"directory='s3://bucket/cache' is a URL. Expected a path"):
        meshfeed.ShardCache("s3://bucket/cache")
    assert not list(tmp_path.iterdir())
    assert meshfeed.ShardCache(f"file://{tmp_path}/cache").directory == tmp_path / "cache"
    with pytest.raises(SettingsError, match="checksums="):
        meshfeed.ShardCache("cache", checksums={"a": "crc7:11"})


def test_long_names_are_cached(tmp_path: pathlib.Path) -> None:
    store, name = fsspec.filesystem("memory"), "長" * 90
    store.pipe(f"/{name}", b"content")
    with meshfeed.ShardCache(tmp_path).open(f"memory://{name}") as copy:
        assert copy.read_bytes() == b"content"
    store.rm(f"/{name}")


def test_duplicate_columns_are_named(tmp_path: pathlib.Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["x", "y", "x"])
    pq.write_table(table, tmp_path / "0.parquet")
    with pytest.raises(SourceError, match=r"0.parquet has several columns named 'x'.*columns=\['y'\]"):
        Parquet(tmp_path / "0.parquet")
    assert Parquet(tmp_path / "0.parquet", ["y"])[0] == {"y": 2}


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.5, 1 << 40, 10**30])
def test_a_padding_that_an_integer_leaf_cannot_hold_is_refused(value: float) -> None:
    source = Padded([{"x": np.arange(3, dtype=np.int32)}], 4, key="x", pad_value=value)
    with pytest.raises(SettingsError, match=r"pad_value=.* is not a value of the leaf 'x', which is int32"):
        source[0]


def test_a_padding_of_nan() -> None:
    row = Padded([{"x": np.zeros(3, np.float32)}], 4, key="x", pad_value=np.nan)[0]["x"]
    assert np.isnan(row).tolist() == [False, False, False, True]


# ---------------------------------------------------------------------- damage


def npy(path: pathlib.Path, version: int, dtype: str) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.arange(50).astype(dtype), version=(version, 0))


@functools.cache
def formats() -> dict[str, tuple[dict[str, bytes], Callable[[str], Any], list[Any] | None]]:
    """Name of a file → all files, the source that reads it, and its records if the format has checksums."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for version, dtype in ((1, "u2"), (2, ">i4"), (3, "<i8")):
            npy(folder / f"{version}.npy", version, dtype)
        write_llm_c(folder / "l.bin", np.arange(100, dtype=np.uint16))
        write_megatron(folder / "m", [[np.arange(1, 30, dtype=np.uint16)], [np.arange(9, dtype=np.uint16)]])
        table = pa.table({"x": np.arange(200), "y": [[1, 2]] * 200})
        pq.write_table(table, folder / "p.parquet", row_group_size=64)
        pq.write_table(table, folder / "crc.parquet", row_group_size=64, write_page_checksum=True)
        for size in (1, 4):
            records = [b"%d" % i * i for i in range(20)]
            array_record_files.write(folder / f"{size}.array_record", records, f"group_size:{size}")
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    made: dict[str, tuple[dict[str, bytes], Callable[[str], Any], list[Any] | None]] = {}
    for name, content in files.items():
        if name.endswith(".parquet"):
            made[name] = ({name: content}, Parquet, None)
        elif name.endswith(".array_record"):
            made[name] = ({name: content}, ArrayRecord, records)
        else:
            pair = {other: files[other] for other in ("m.bin", "m.idx")} if name[0] == "m" else {name: content}
            made[name] = (pair, lambda path: Tokens(path, 4, eod=0 if "m." in path else None), None)
    return made


@settings(max_examples=100, deadline=None, database=None)
@given(st.data())
def test_any_damage_is_an_error_of_the_file(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(formats())))
    files, open_source, expected = formats()[name]
    content = bytearray(files[name])
    for _ in range(data.draw(st.integers(1, 3))):
        size = min(len(content), data.draw(st.sampled_from([16, 140, 1 << 30])))
        at = data.draw(st.integers(0, size - 1))
        at = len(content) - 1 - at if data.draw(st.booleans()) else at
        new = data.draw(
            st.sampled_from([b"", b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\0\1\0\0", b"\x7f" * 4]) | st.binary(max_size=2)
        )
        content[at : at + max(1, len(new))] = new
        content = (content if data.draw(st.integers(0, 5)) else content[: at + 1]) or bytearray(b"x")
    with tempfile.TemporaryDirectory() as folder:
        for other, whole in files.items():
            pathlib.Path(folder, other).write_bytes(content if other == name else whole)
        path = f"{folder}/{name}"
        try:
            source = open_source(path)
            for record_id in range(0, min(len(source), 200), 3):
                record = source[record_id]
                assert expected is None or record in expected
            source.fingerprint()
        except MeshfeedError as error:
            assert folder in str(error) or "no window" in str(error)  # noqa: PT017


def test_a_flipped_byte_of_a_page_with_a_checksum(tmp_path: pathlib.Path) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 60, 1000)
    path = tmp_path / "0.parquet"
    table = pa.table({"x": values})
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"0.parquet is no intact Parquet file .*CRC"):
        Parquet(path)[0]


def test_threads_that_look_at_files_end_before_the_call_returns() -> None:
    def alive() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("meshfeed-files")]

    others = len(alive())  # of a test whose look-up failed
    for _ in range(20):
        assert in_threads(lambda number: number + 1, range(32)) == list(range(1, 33))
        assert len(alive()) <= others


def test_a_failed_look_up_waits_for_no_thread_that_hangs() -> None:
    hanging, resume = threading.Event(), threading.Event()

    def look_up(number: int) -> None:
        if number:
            hanging.set()
            resume.wait(60)
        else:
            hanging.wait(60)
            raise OSError("gone")

    try:
        with pytest.raises(OSError, match="gone"):
            in_threads(look_up, range(2))
        assert not resume.is_set()
    finally:
        resume.set()


def renamed(path: pathlib.Path, name: bytes) -> str:
    """The path after the file got a name that is not UTF-8, as a copy from an old file system has."""
    other = os.path.join(os.path.dirname(path), os.fsdecode(name))
    os.rename(path, other)
    return other


@pytest.mark.parametrize("kind", ["array_record", "npy", "tar", "megatron", "huggingface"])
def test_names_that_are_not_utf8(kind: str, tmp_path: pathlib.Path) -> None:
    tokens = np.arange(64, dtype=np.int32)
    if kind == "array_record":
        records = [tokens[i : i + 8].tobytes() for i in range(0, 64, 8)]
        path = renamed(
            pathlib.Path(array_record_files.write(tmp_path / "a.array_record", records)), b"\xe9.array_record"
        )
        source: Any = ArrayRecord(path, decode_batch=meshfeed.sources.DecodeRaw(np.int32, (8,), key="tokens"))
    elif kind == "tar":
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for i in range(8):
                content = tokens[8 * i : 8 * i + 8].tobytes()
                member = tarfile.TarInfo(f"{i}.bin")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        path = renamed(tmp_path / "a.tar", b"\xe9.tar")
        source = meshfeed.sources.WebDataset(path, decode=decode_tokens)
    elif kind == "huggingface":
        datasets = pytest.importorskip("datasets")
        rows = [json.dumps({"tokens": tokens[i : i + 8].tolist()}) for i in range(0, 64, 8)]
        (tmp_path / "a.jsonl").write_text("\n".join(rows))
        path = renamed(tmp_path / "a.jsonl", b"\xe9.jsonl")
        source = datasets.load_dataset("json", data_files=[path], split="train", streaming=True)
    elif kind == "megatron":
        write_megatron(tmp_path / "a", [[tokens]])
        renamed(tmp_path / "a.idx", b"\xe9.idx")
        source = Tokens(renamed(tmp_path / "a.bin", b"\xe9.bin"), 8, next_token=False)
    else:
        np.save(tmp_path / "a.npy", tokens)
        source = Tokens(renamed(tmp_path / "a.npy", b"\xe9.npy"), 8, next_token=False)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    with meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=2) as feed:
        found = [np.asarray(batch["tokens"]) for batch in feed]
        json.loads(json.dumps(feed.get_state()))
    np.testing.assert_array_equal(np.concatenate(found).ravel(), tokens)


def decode_tokens(record: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"tokens": np.frombuffer(record["bin"], np.int32)}


def test_libraries_that_take_no_such_name_are_named(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"pyarrow opens no file whose name is not UTF-8\. Rename it"):
        Parquet(renamed(tmp_path / "a.parquet", b"\xe9.parquet"))
    compressed = array_record_files.write(tmp_path / "a.array_record", [b"x"] * 9, "group_size:4,zstd:3")
    with pytest.raises(SourceError, match=r"the ArrayRecord library opens no file whose name is not UTF-8"):
        ArrayRecord(renamed(pathlib.Path(compressed), b"\xe9.array_record"), decode=len)[0]
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "é.parquet")
    assert len(Parquet(tmp_path / "é.parquet")) == 2

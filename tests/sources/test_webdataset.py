from __future__ import annotations

import gzip
import io
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import tarfile
import tempfile
from typing import Any

import jax
import numpy as np
import pytest
from format_files import FOLDER, plain_record, read_by_library
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed
from meshfeed import CorruptDataError, SettingsError, SourceError
from meshfeed._src.sources import webdataset
from meshfeed._src.sources.files import lookup
from meshfeed._src.sources.files.tar import split_name
from meshfeed._src.sources.manifest import make_manifest
from meshfeed.sources import WebDataset

TARS = FOLDER / "tar"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(TARS, tmp_path / "tar"))


def indexes(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".meshfeed-index"))


def by_key(record: dict[str, Any]) -> dict[str, Any]:
    return {"cls": np.int64(int(record["cls"])), "length": np.int64(len(record["seg.npy"]))}


def write_tar(path: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["shard-0", "shard-1", "odd"])
def test_every_sample_is_what_the_library_reads(name: str, folder: pathlib.Path) -> None:
    expected = read_by_library(f"tar/{name}.json")
    for _ in range(2):  # from the headers, and from the saved index
        source = WebDataset(folder / f"{name}.tar")
        assert [plain_record(record) for record in source.__getitems__(range(len(source)))] == expected
        assert [list(record) for record in source.read_raw([0, 0])] == [list(expected[0])] * 2
        assert indexes(folder) == [f"{name}.tar.meshfeed-index"]


def test_several_archives_at_random(folder: pathlib.Path) -> None:
    source = WebDataset(f"{folder}/shard-*.tar*")
    expected = read_by_library("tar/shard-0.json") + read_by_library("tar/shard-1.json")
    assert repr(source) == "WebDataset(2 files, 11 records)"
    order = np.random.default_rng(0).integers(0, 11, 30)
    assert [plain_record(record) for record in source.__getitems__(order)] == [expected[i] for i in order]
    assert source.file_of(7).endswith("shard-1.tar")
    assert len(WebDataset(f"{folder}/shard-*.tar*")) == 11  # the indexes match the glob, and are left out
    (folder / "shard-1.tar.meshfeed-index.0123456789abcdef.part").write_bytes(
        b"PK"
    )  # under way, or of a killed process
    assert len(WebDataset(f"{folder}/shard-*.tar*")) == 11
    again = pickle.loads(pickle.dumps(source))
    assert plain_record(again[10]) == expected[10]
    assert again.fingerprint() == source.fingerprint()
    moved = shutil.copytree(folder, folder / "moved")
    assert WebDataset(moved / "shard-0.tar").fingerprint() == WebDataset(folder / "shard-0.tar").fingerprint()
    with pytest.raises(IndexError, match="record id 11 is out of range"):
        source[11]


# Names that decide how WebDataset groups files: split as WebDataset's own expression splits them.
@given(st.text(alphabet="a._/", max_size=9))
def test_names_are_split_as_the_library_splits_them(name: str) -> None:
    if re.match(r"__[^/]*__($|/)", name) or ("/" not in name and name.startswith("__") and name.endswith("__")):
        assert split_name(name) is None or "." not in name.rpartition("/")[2]
        return
    match = re.match(r"((?:.*/)?[^.]+)\.([^/]*)\Z", name)
    assert split_name(name) == (None if match is None else (match[1], match[2]))


def test_a_feed_decodes_it(folder: pathlib.Path) -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    source = WebDataset(f"{folder}/shard-?.tar", decode=by_key)
    assert source.shard_lengths().tolist() == [7, 4]
    with meshfeed.Feed(source, mesh, global_batch_size=4, shuffle="shards") as feed:
        batches = list(feed)
    classes = np.concatenate([np.asarray(batch["cls"]) for batch in batches])
    assert len(batches) == 2
    assert set(classes.tolist()) <= {*range(7), *range(100, 104)}
    assert source[8] == {"cls": 101, "length": source[1]["length"]}
    with pytest.raises(SourceError, match=r"'__key__'.*decode= or meshfeed.sources.Map"):
        next(meshfeed.Feed(WebDataset(folder / "shard-0.tar"), mesh, global_batch_size=4))


def test_an_archive_that_is_missing_on_resume_is_named(tmp_path: pathlib.Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"x-{number}-of-3.tar", {f"{number}.cls": b"1"})
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])

    def feed() -> meshfeed.Feed:
        source = WebDataset(f"{tmp_path}/*.tar", lambda record: {"x": int(record["cls"])})
        return meshfeed.Feed(source, mesh, global_batch_size=1)

    with feed() as saved:
        state = saved.get_state()
    (tmp_path / "x-1-of-3.tar").unlink()
    with feed() as restored, pytest.raises(meshfeed.StateMismatchError) as raised:
        restored.set_state(state)
    assert raised.value.remedy.startswith(
        "The saved source had 3 files, the current one has 2. Missing: x-1-of-3.tar. "
    )


def test_an_index_is_made_again_if_the_archive_changes(folder: pathlib.Path) -> None:
    path = folder / "shard-0.tar"
    old = WebDataset(path)
    old[0]
    write_tar(path, {"a.x": b"1", "b.x": b"2"})
    assert WebDataset(path).read_raw([1, 0]) == [{"__key__": "b", "x": b"2"}, {"__key__": "a", "x": b"1"}]
    old.close()
    with pytest.raises(SourceError, match=r"WebDataset file .* has changed since the source was made"):
        old[0]
    index = folder / "shard-0.tar.meshfeed-index"
    for content in (b"", b"PK\x03\x04 no", index.read_bytes()[:-9]):
        index.write_bytes(content)
        assert len(WebDataset(path)) == 2
    index.unlink()
    source = WebDataset(path)
    index.unlink()
    assert source[1]["x"] == b"2"


def test_the_folder_cannot_be_written(folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    import meshfeed._src.sources.files.tar as module

    def refuse(part: Any, path: Any) -> None:
        if pathlib.Path(path).parent == folder:
            raise PermissionError(13, "read-only", str(path))
        os.rename(part, path)

    monkeypatch.setattr(module.os, "replace", refuse)
    expected = read_by_library("tar/shard-1.json")
    source = WebDataset(folder / "shard-1.tar")
    assert plain_record(source[2]) == expected[2]
    pytest.importorskip("fsspec")
    cache = meshfeed.ShardCache(tmp_path / "cache")
    for _ in range(2):
        assert plain_record(WebDataset(folder / "shard-1.tar", cache=cache)[2]) == expected[2]
    assert indexes(folder) == []
    assert len(indexes(cache.directory)) == 1
    # Archives of one name, size and time in two folders, as in an image of a file system.
    for number in range(2):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        archive = write_tar(folder / "0.tar", {f"{number}.x": bytes([number])})
        os.utime(archive, (1, 1))
        assert WebDataset(archive, cache=cache)[0]["x"] == bytes([number])
        assert indexes(folder) == []


def test_damaged_archives(folder: pathlib.Path) -> None:
    path = folder / "shard-0.tar"
    content = path.read_bytes()
    index = folder / "shard-0.tar.meshfeed-index"
    with tarfile.open(path) as tar:
        third = tar.getmembers()[3].offset
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512
    cases = {
        b"": "empty file",
        b"no archive at all" * 99: "",
        content[: third + 100]: "",
        content[:third]: "the block of zeros that ends an archive",
        content[:end]: "the block of zeros that ends an archive",
        content[:third] + b"\xff" * 512 + content[third + 512 :]: "the block of zeros that ends an archive",
        content[:third] + bytes(512) + content[third + 512 :]: f"ends at byte {third:,}, and there is more at byte",
        content + content: f"ends at byte {end:,}, and there is more at byte {len(content):,}.*joined with cat",
    }
    for damaged, reason in cases.items():
        path.write_bytes(damaged)
        index.unlink(missing_ok=True)
        with pytest.raises(CorruptDataError, match=rf"shard-0.tar is no intact tar archive: .*{reason}") as error:
            WebDataset(path)
        assert error.value.path == str(path)
        assert not index.exists()
    write_tar(path, {"a.x": b"", "b.x": b""})
    assert [record["x"] for record in WebDataset(path).read_raw([0, 1])] == [b"", b""]
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("a.x"))
    with pytest.raises(CorruptDataError, match="sample 'a' has two files with the extension 'x'"):
        WebDataset(path)


def test_sparse_files_are_refused(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "a.x").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    for kind in ("gnu", "pax"):
        path = tmp_path / f"{kind}.tar"
        subprocess.run(["tar", "--sparse", f"--format={kind}", "-cf", path, "-C", tmp_path, "a.x"], check=True)
        assert path.stat().st_size < 1 << 20
        with pytest.raises(SourceError, match=r"tar stores 'a.x' as a sparse file, .* without tar's --sparse"):
            WebDataset(path)


def test_a_header_that_is_not_the_indexed_one_is_an_error(tmp_path: pathlib.Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.x": b"1", "b.x": b"2" * 600, "c.x": b"3"})
    WebDataset(path)
    time, size = path.stat().st_mtime_ns, path.stat().st_size
    write_tar(path, {"a.x": b"1", "b.x": b"2", "c.x": b"3" * 600})
    os.utime(path, ns=(time, time))
    assert path.stat().st_size == size
    source = WebDataset(path)
    assert source[0] == {"__key__": "a", "x": b"1"}
    with pytest.raises(CorruptDataError, match=r"record 1 has a header other than .*delete its index .*index") as error:
        source[1]
    assert (error.value.path, error.value.record_id) == (str(path), 1)


@settings(max_examples=40, deadline=None, database=None)
@given(st.data())
def test_damaged_indexes_are_made_again(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(pathlib.Path(folder) / "x.tar", {f"{i}.x": b"7" * i for i in range(4)})
        expected = [dict(record) for record in WebDataset(path)]
        index = pathlib.Path(f"{path}.meshfeed-index")
        if data.draw(st.booleans()):  # bytes
            content = bytearray(index.read_bytes()[: data.draw(st.integers(0, 4000))])
            for at in data.draw(st.lists(st.integers(0, len(content)), max_size=4)):
                content[at : at + 1] = data.draw(st.binary(max_size=2))
            index.write_bytes(content)
        else:  # values, with the checksums that belong to them
            with np.load(index) as saved:
                columns = dict(saved)
            name = data.draw(st.sampled_from([name for name in columns if name not in ("stamp", "keys")]))
            column = columns[name]
            value = data.draw(st.sampled_from([-1, 0, 2, 513, 1 << 30, 1 << 62]))
            column[data.draw(st.integers(0, len(column) - 1))] = np.array(value).astype(column.dtype)
            columns[name] = data.draw(st.sampled_from([column, column[:-1], column[None], column.astype(np.float32)]))
            with index.open("wb") as file:
                np.savez(file, **columns)
        try:
            source = WebDataset(path)
            assert [dict(record) for record in source] == expected or name == "extension_names"
        except CorruptDataError as error:
            assert error.path == str(path)  # noqa: PT017


@settings(max_examples=100, deadline=None, database=None)
@given(st.data())
def test_damaged_headers_are_errors_of_the_archive(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "x.tar"
        form = data.draw(st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
        with tarfile.open(path, "w", format=form) as tar:
            for name in ("a.x", f"{'long' * 60}.y", "ü.z"):
                info = tarfile.TarInfo(name)
                info.size = 600
                tar.addfile(info, io.BytesIO(name.encode() * 300))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            block = data.draw(st.integers(0, 8)) * 512
            field, size = data.draw(st.sampled_from([(0, 100), (124, 12), (156, 1), (345, 155), (0, 512), (386, 126)]))
            at = data.draw(st.integers(field, field + size - 1)) + block
            content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=12))
            if data.draw(st.booleans()):  # with the checksum that belongs to it
                content[block + 148 : block + 156] = b" " * 8
                content[block + 148 : block + 156] = f"{sum(content[block : block + 512]):06o}\0 ".encode()
        path.write_bytes(content[: data.draw(st.sampled_from([len(content), 9999, 1500]))])
        try:
            source = WebDataset(path)
            for record in source:
                assert all(key == "__key__" or len(value) <= 10240 for key, value in record.items())
        except (CorruptDataError, SourceError) as error:
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("paths", "options", "kind", "message"),
    [
        ("nowhere.tar", {}, SourceError, "no file 'nowhere.tar'"),
        (f"{TARS}/*.nothing", {}, SourceError, "no file matches"),
        (TARS, {}, SourceError, "got the folder"),
        ([], {}, SourceError, "empty list"),
        (f"{TARS}/odd.tar", {"decode": 3}, SettingsError, "decode=3"),
        ("x.tar", {"cache": "folder"}, SettingsError, "cache='folder'"),
    ],
)
def test_wrong_arguments(paths: Any, options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        WebDataset(paths, **options)


def test_archives_without_samples(tmp_path: pathlib.Path) -> None:
    empty = write_tar(tmp_path / "empty.tar", {"no_extension": b"x"})
    with pytest.raises(SourceError, match=r"1 file\(s\) with 0 records in all"):
        WebDataset(empty)
    full = write_tar(tmp_path / "full.tar", {"a.x": b"1"})
    assert len(WebDataset([empty, full, empty])) == 1


def test_odd_extensions(tmp_path: pathlib.Path) -> None:
    tar = write_tar(tmp_path / "a.TAR", {"a.x": b"1"})
    assert WebDataset(tar)[0]["x"] == b"1"
    cache = meshfeed.ShardCache(tmp_path / "cache")
    (tmp_path / "b.tgz").write_bytes(gzip.compress(tar.read_bytes()))
    assert WebDataset(tmp_path / "b.tgz", cache=cache)[0]["x"] == b"1"
    with pytest.raises(SettingsError, match=r"compressed file .*b.tgz' and no cache"):
        WebDataset(tmp_path / "b.tgz")
    (tmp_path / "c.tar").write_bytes(gzip.compress(tar.read_bytes()))
    with pytest.raises(CorruptDataError, match=r"compressed with gzip \(.gz\), which its name does not say. Rename it"):
        WebDataset(tmp_path / "c.tar")


def test_over_a_store_and_compressed(tmp_path: pathlib.Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store, expected = fsspec.filesystem("memory"), read_by_library("tar/shard-0.json")
    store.pipe("/tars/a.tar", (TARS / "shard-0.tar").read_bytes())
    store.pipe("/tars/b.tar.gz", gzip.compress((TARS / "shard-0.tar").read_bytes()))
    with pytest.raises(SettingsError, match=r"compressed file .*b.tar.gz' and no cache"):
        WebDataset(["memory://tars/b.tar.gz"])
    cache = meshfeed.ShardCache(tmp_path / "cache")
    for _ in range(2):
        source = WebDataset(["memory://tars/a.tar", "memory://tars/b.tar.gz"], cache=cache)
        assert [plain_record(record) for record in source.__getitems__(range(14))] == expected * 2
    assert len(indexes(cache.directory)) == 2
    for copy in cache.directory.glob("*.tar*"):
        if not copy.name.endswith(".meshfeed-index"):
            copy.unlink()
    assert (
        len(WebDataset(["memory://tars/a.tar", "memory://tars/b.tar.gz"], cache=cache)) == 14
    )  # counted from the indexes
    assert not list(cache.directory.glob("meshfeed_*"))
    store.rm("/tars", recursive=True)


@pytest.mark.parametrize("cached", [False, True])
def test_a_remote_archive_with_other_samples_than_in_its_manifest(tmp_path: pathlib.Path, cached: bool) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    store.pipe("/listed/a.tar", write_tar(tmp_path / "a.tar", {"1.txt": b"one", "2.txt": b"two"}).read_bytes())
    make_manifest(["memory://listed/a.tar"], digests=False)
    store.pipe("/listed/a.tar", write_tar(tmp_path / "a.tar", {"1.txt": b"one"}).read_bytes())  # of the same size
    source = WebDataset("memory://listed/a.tar", cache=meshfeed.ShardCache(tmp_path / "cache") if cached else None)
    with pytest.raises(
        SourceError, match=r"a\.tar has changed since the manifest .*: 2 samples then, 1 now\. Write the man"
    ):
        source[0]


def test_an_archive_that_another_host_has_looked_at(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, other = "memory://seen/a.tar.gz", meshfeed.ShardCache(tmp_path / "other")

    def looked_at_there(names: list[str], *unused: object) -> list[Any]:
        shards = [webdataset.inspect(name, other) for name in names]
        return [
            [one.num_bytes, one.num_records, one.version, list(other.looked_up(one.path) or ()), {}] for one in shards
        ]

    monkeypatch.setattr(lookup, "look_together", looked_at_there)
    for files in ({"1.txt": b"one", "2.txt": b"two"}, {"3.txt": b"three", "4.txt": b"four"}):
        content = gzip.compress(write_tar(tmp_path / "a.tar", files).read_bytes())
        pytest.importorskip("fsspec").filesystem("memory").pipe("/seen/a.tar.gz", content)
        other.renew([url], {})
        source = WebDataset(url, cache=meshfeed.ShardCache(tmp_path / "mine"))
        assert [record["txt"] for record in source] == list(files.values())


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_are_left_out_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, kind: bytes
) -> None:
    """As by the library; of two names of one file, tar stores the second as a link."""
    path = write_tar(tmp_path / "a.tar", {"1.txt": b"one", "1.cls": b"1", "2.txt": b"two"})
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("2.cls")
        link.type, link.linkname = kind, "1.cls"
        tar.addfile(link)
    assert len(WebDataset(str(path))) == 2
    assert "1 links are left out, the first from '2.cls to 1.cls'" in caplog.text


def test_a_warning_has_names_that_are_not_utf_8_in_a_form_that_is(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tar(tmp_path / "a.tar", {"1.txt": b"one"})
    with tarfile.open(path, "a", errors="surrogateescape") as tar:
        link = tarfile.TarInfo("2.\udcbd")
        link.type, link.linkname = tarfile.SYMTYPE, "1.txt"
        tar.addfile(link)
    assert len(WebDataset(str(path))) == 1
    assert "links are left out" in caplog.text
    caplog.text.encode()

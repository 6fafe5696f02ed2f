from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
from format_files import FOLDER, plain_record, read_by_library
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed
from meshfeed import CorruptDataError, SettingsError, SourceError
from meshfeed._src.base.memory import is_aligned
from meshfeed._src.reading.records import SourceReader
from meshfeed.sources import MDS

RAW = FOLDER / "mds"
WHOLE = list(MDS(RAW))


def copy_of(tmp_path: pathlib.Path, name: str = "mds") -> pathlib.Path:
    return pathlib.Path(shutil.copytree(FOLDER / name, tmp_path / name))


def change_index(folder: pathlib.Path, change: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index["shards"])
    (folder / "index.json").write_text(json.dumps(index))


def test_every_value_is_what_the_library_reads() -> None:
    pytest.importorskip("PIL")
    source, expected = MDS(RAW), read_by_library("mds/read.json")
    assert [plain_record(record) for record in source.__getitems__(range(len(source)))] == expected
    assert repr(source) == "MDS(6 files, 14 records)"
    order = np.random.default_rng(0).integers(0, len(source), 40)
    assert [plain_record(record) for record in source.__getitems__(order)] == [expected[i] for i in order]
    assert plain_record(source[np.int64(3)]) == expected[3]


def test_a_batch_is_stacked() -> None:
    source = MDS(RAW, ["array_f32_2x3", "int64", "float16", "int"])
    ids = np.array([9, 0, 0, 13, 4])
    batch = SourceReader(source).read(ids)
    records = MDS(RAW).__getitems__(ids)
    for name, stacked in batch.items():
        expected = np.stack([record[name] for record in records])
        np.testing.assert_array_equal(stacked, expected)
        assert stacked.dtype == expected.dtype
        assert is_aligned(stacked)
        assert stacked.flags.writeable


def test_columns_that_vary_are_stacked_if_the_batch_is_even() -> None:
    source = MDS(RAW, ["array_i32", "json", "jpeg"])
    records = MDS(RAW).__getitems__([1, 5, 9])
    assert {record["array_i32"].shape for record in records} == {(2,)}
    batch = MDS(RAW, ["array_i32", "jpeg"]).read_batch([1, 5, 9])
    for name, stacked in batch.items():
        np.testing.assert_array_equal(stacked, np.stack([record[name] for record in records]))
    with pytest.raises(SourceError, match=r"array_i32.*of shape \(3,\)"):
        source.read_batch([1, 2])
    with pytest.raises(SourceError, match=r"json"):
        source.read_batch([1])  # text and null within the JSON


def test_text_is_refused_with_the_columns_to_keep() -> None:
    with pytest.raises(SourceError, match=r"'bytes' is stored as bytes, .*Map\(source, function\)"):
        MDS(RAW).read_batch([0])
    with pytest.raises(SourceError, match=r"'str' is stored as str, .*columns=\['int'\]"):
        MDS(RAW, ["str", "int"]).read_batch([0])


def test_images_as_stored() -> None:
    image = pytest.importorskip("PIL.Image")
    decoded = MDS(RAW, ["png", "jpeg"])[2]
    stored = MDS(RAW, ["png", "jpeg"], image_bytes=True)[2]
    for name, content in stored.items():
        assert isinstance(content, bytes)
        np.testing.assert_array_equal(np.asarray(image.open(io.BytesIO(content))), decoded[name])


def test_a_feed_reads_it_at_random_and_resumes(tmp_path: pathlib.Path) -> None:
    import jax

    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])

    def feed() -> Any:
        source = MDS([RAW, RAW], ["int64", "array_f32_2x3"])
        return meshfeed.Feed(source, mesh, global_batch_size=4, shuffle="shards", num_lanes=2, num_epochs=2)

    with feed() as first:
        batches = [np.asarray(batch["int64"]) for batch in first]
    assert sorted(np.concatenate(batches).tolist()) == sorted([3 * i for i in range(14)] * 4)
    with feed() as one:
        next(one)
        state = one.get_state()
    with feed() as other:
        other.set_state(state)
        np.testing.assert_array_equal(np.asarray(next(other)["int64"]), batches[1])


def test_where_the_data_is_found(tmp_path: pathlib.Path) -> None:
    for path in (RAW, f"{RAW}/", RAW / "index.json", [str(RAW)], f"{FOLDER}/m?s", f"file://{RAW}"):
        assert len(MDS(path)) == 14
    assert MDS([RAW, RAW]).file_of(20).endswith("mds/shard.00002.mds")
    moved = copy_of(tmp_path)
    assert MDS(moved).fingerprint() == MDS(RAW).fingerprint()
    assert MDS(moved, ["int"]).fingerprint() != MDS(RAW).fingerprint()
    again = pickle.loads(pickle.dumps(MDS(moved)))
    assert again[13]["int"] == -13 * 10**12


@pytest.mark.parametrize(
    ("paths", "options", "kind", "message"),
    [
        ("nowhere", {}, SourceError, r"no file .*nowhere/index.json"),
        (FOLDER / "tar", {}, SourceError, r"no file .*tar/index.json"),
        ([], {}, SourceError, "empty list"),
        (3, {}, SourceError, r"MDS got 3\."),
        ([3], {}, SourceError, r"MDS got 3\."),
        (RAW, {"columns": ["nothing"]}, SourceError, r"columns=\['nothing'\]; .* has \['array', "),
        (RAW, {"columns": []}, SourceError, r"at least one"),
        (FOLDER / "mds_gz", {}, SettingsError, r"compressed file .*shard.00000.mds.gz' and no cache"),
        ("memory://bucket/mds", {}, (SettingsError, SourceError), r"cache|no file"),
        (RAW, {"cache": "folder"}, SettingsError, r"cache='folder'. Expected a meshfeed.ShardCache"),
    ],
)  # fmt: skip
def test_wrong_arguments(paths: Any, options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        MDS(paths, **options)


def test_a_pickled_column_is_never_read(tmp_path: pathlib.Path) -> None:
    folder = copy_of(tmp_path)

    def make_pickle(shards: Any) -> None:
        for shard in shards:
            shard["column_encodings"][shard["column_names"].index("bytes")] = "pkl"
            shard["column_encodings"][shard["column_names"].index("str")] = "parquet"

    change_index(folder, make_pickle)
    with pytest.raises(SourceError, match=r"'bytes' is stored as a pickle.*never unpickles.*columns=\['int'\]"):
        MDS(folder, ["int", "bytes"])
    with pytest.raises(SourceError, match=r"'str' has the unknown encoding 'parquet'"):
        MDS(folder, ["str"])
    assert MDS(folder, ["int"])[1] == {"int": -(10**12)}


def test_damaged_indexes_and_shards(tmp_path: pathlib.Path) -> None:
    folder = copy_of(tmp_path)
    without_hashes(folder)
    shard = folder / "shard.00001.mds"
    whole, index = shard.read_bytes(), (folder / "index.json").read_text()

    def raises(kind: type[Exception], message: str, read: Any = lambda: MDS(folder)) -> Any:
        with pytest.raises(kind, match=message) as error:
            read()
        return error.value

    shard.write_bytes(whole[:-1])
    assert raises(CorruptDataError, r"shard.00001.mds: the shard is damaged: it has [\d,]+ bytes, and").path == str(
        shard
    )
    shard.unlink()
    raises(SourceError, r"there is no shard .*shard.00001.mds")
    shard.write_bytes(whole)
    first = json.loads(index)["shards"][0]["samples"]
    shard.write_bytes(b"\xff" + whole[1:])
    raises(CorruptDataError, "its header does not have", lambda: MDS(folder)[first])
    shard.write_bytes(whole[:4] + b"\xff\xff\xff\xff" + whole[8:])
    raises(CorruptDataError, "do not ascend", lambda: MDS(folder)[first])
    offset = int.from_bytes(whole[4:8], "little")
    shard.write_bytes(whole[:offset] + b"\xff\xff\xff" + whole[offset + 3 :])
    error = raises(CorruptDataError, "sizes of its columns do not add up", lambda: MDS(folder)[first])
    assert (error.record_id, error.path) == (first, str(shard))
    shard.write_bytes(whole.replace(b'{"a"', b'["a"'))
    error = raises(CorruptDataError, r"record \d+ is damaged: column 'json' is no json", lambda: MDS(folder)[first])
    assert error.record_id == first
    shard.write_bytes(whole)
    for content in ("", "{}", index.replace('"version": 2', '"version": 1'), '{"shards": [1]}'):
        (folder / "index.json").write_text(content)
        raises(CorruptDataError, "index.json is no index of MDS shards")
    (folder / "index.json").write_text('{"shards": []}')
    raises(SourceError, "lists no shards")


def edit_index(folder: pathlib.Path, edit: Any) -> None:
    change_index(folder, lambda shards: [edit(shard) for shard in shards])


def without_hashes(folder: pathlib.Path) -> None:
    edit_index(folder, lambda shard: shard["raw_data"].update(hashes={}))


def test_a_flipped_byte_is_an_error_if_the_index_lists_hashes(tmp_path: pathlib.Path, caplog: Any) -> None:
    folder, expected = copy_of(tmp_path), list(MDS(FOLDER / "mds", ["int64"]))
    shard = folder / "shard.00001.mds"
    whole = shard.read_bytes()
    flipped = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    shard.write_bytes(flipped)
    source = MDS(folder, ["int64"])
    first = int(source.shard_lengths()[0])
    assert source[0] == expected[0]
    with pytest.raises(CorruptDataError, match=r"shard.00001.mds: .*its xxh64 is \w+, and the index lists") as error:
        source[first]
    assert error.value.path == str(shard)
    edit_index(folder, lambda shard: shard["raw_data"]["hashes"].pop("xxh64"))
    with pytest.raises(CorruptDataError, match="its sha1 is"):
        MDS(folder, ["int64"])[first]
    shard.write_bytes(whole)
    assert list(MDS(folder, ["int64"])) == expected
    edit_index(folder, lambda shard: shard["raw_data"].update(hashes={"crc7": "11"}))
    assert list(MDS(folder, ["int64"])) == expected
    assert "shard.00001.mds is not verified: its hashes are crc7" in caplog.text
    # Over a store, a copy is compared when it is fetched.
    store = pytest.importorskip("fsspec").filesystem("memory")
    for path in sorted((FOLDER / "mds").iterdir()):
        store.pipe(f"/hashed/{path.name}", flipped if path.name == shard.name else path.read_bytes())
    remote = MDS("memory://hashed", ["int64"], cache=meshfeed.ShardCache(tmp_path / "cache"))
    assert remote[0] == expected[0]
    with pytest.raises(CorruptDataError, match=r"memory://hashed/shard.00001.mds: fetched .* with xxh64"):
        remote[first]
    store.rm("/hashed", recursive=True)


@pytest.mark.parametrize(
    "name", ["../other/shard.00000.mds", "/etc/hostname", "a/../../x", "", "s3://bucket/x", "x\0", 7, None]
)
def test_shards_outside_of_the_folder_are_refused(tmp_path: pathlib.Path, name: Any) -> None:
    folder = copy_of(tmp_path)
    for packed in (False, True):
        for change in (
            [lambda shard: shard["raw_data"].update(basename=name)]
            if not packed
            else [
                lambda shard: shard["raw_data"].update(basename="gone"),
                lambda shard: shard.update(zip_data={"basename": name, "bytes": 5}, compression="gz"),
            ]
        ):
            edit_index(folder, change)
        with pytest.raises(CorruptDataError, match=r"index.json is no index of MDS shards"):
            MDS(folder, cache=meshfeed.ShardCache(tmp_path / "cache"))


def test_an_index_of_folders_is_read(tmp_path: pathlib.Path) -> None:
    """As Mosaic's merge_index writes it."""
    folder, expected = copy_of(tmp_path), list(MDS(FOLDER / "mds", ["int64"]))
    (folder / "0").mkdir()
    for path in folder.glob("*.mds"):
        path.rename(folder / "0" / path.name)
    edit_index(folder, lambda shard: shard["raw_data"].update(basename=f"0/{shard['raw_data']['basename']}"))
    assert list(MDS(folder, ["int64"])) == expected


@settings(max_examples=100, deadline=None, database=None)
@given(st.data())
def test_any_damage_is_an_error_of_a_file(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = copy_of(pathlib.Path(name))
        hashed = data.draw(st.booleans())
        if not hashed:
            without_hashes(folder)
        if data.draw(st.booleans()):
            index = json.loads((folder / "index.json").read_text())
            part = index["shards"][0]
            while True:
                key = data.draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part))))
                if not isinstance(part[key], dict | list) or not part[key] or data.draw(st.booleans()):
                    break
                part = part[key]
            part[key] = data.draw(
                st.sampled_from(
                    [None, True, -1, 0, 2, 10**6, 1 << 63, 10**30, 0.5, "", "x", [], [1], {}, "ndarray:int8"]
                )
            )
            (folder / "index.json").write_text(json.dumps(index))
            shards = False
        else:
            path = folder / f"shard.0000{data.draw(st.integers(0, 2))}.mds"
            content = bytearray(path.read_bytes())
            for _ in range(data.draw(st.integers(1, 3))):
                at = data.draw(st.integers(0, min(len(content), data.draw(st.sampled_from([32, 400, 10000]))) - 1))
                content[at] = data.draw(st.integers(0, 255))
            path.write_bytes(content)
            shards = True
        try:
            source = MDS(folder)
            found = [source[i] for i in range(min(len(source), 9))]
            assert not (hashed and shards) or repr(found) == repr(WHOLE[:9])
        except (SourceError, meshfeed.SettingsError) as error:
            assert str(folder) in str(error)  # noqa: PT017


def test_a_shard_that_changes_while_it_is_read(tmp_path: pathlib.Path) -> None:
    folder = copy_of(tmp_path)
    source = MDS(folder)
    first = folder / "shard.00000.mds"
    source[0]
    source.close()
    content = first.read_bytes()
    first.write_bytes(content + b"x")
    with pytest.raises(SourceError, match=r"MDS file .*shard.00000.mds has changed since the source was made"):
        source[0]
    first.unlink()
    with pytest.raises(SourceError, match="is gone"):
        source[0]
    first.write_bytes(content)
    os.utime(first, ns=(1, 1))
    with pytest.raises(SourceError, match="has changed"):
        source[0]


def test_bad_records_are_replaced(tmp_path: pathlib.Path) -> None:
    import jax

    folder = copy_of(tmp_path)
    without_hashes(folder)
    shard = folder / "shard.00001.mds"
    content = bytearray(shard.read_bytes())
    offset = int.from_bytes(content[4:8], "little")
    content[offset : offset + 3] = b"\xff\xff\xff"
    shard.write_bytes(content)
    first = json.loads((folder / "index.json").read_text())["shards"][0]["samples"]
    with meshfeed.Feed(
        MDS(folder, ["int64"]),
        jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]),
        global_batch_size=7,
        bad_records=meshfeed.SkipBad(max_fraction=0.5),
    ) as feed:
        values = np.concatenate([np.asarray(batch["int64"]) for batch in feed])
        assert [i for i in range(14) if values[i] != 3 * i] == [first]
        assert feed.stats().skipped_records == 1


@pytest.mark.parametrize("name", ["mds_zstd", "mds_gz"])
def test_compressed_shards_are_read_through_a_cache(name: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("fsspec")
    cache = meshfeed.ShardCache(tmp_path / "cache")
    folder = copy_of(tmp_path, name)  # no other test has its shards open
    source, expected = MDS(folder, cache=cache), read_by_library(f"{name}/read.json")
    assert [plain_record(record) for record in source.__getitems__(range(len(source)))] == expected
    sizes = {shard["raw_data"]["bytes"] for shard in json.loads((FOLDER / name / "index.json").read_text())["shards"]}
    assert {path.stat().st_size for path in (tmp_path / "cache").iterdir()} == sizes
    order = np.random.default_rng(1).permutation(len(source))
    np.testing.assert_array_equal(source.read_batch(order)["id"], order)
    with pytest.raises(SourceError, match=r"different columns: .*id: int64, x: ndarray:int32:4"):
        MDS([FOLDER / name, RAW], cache=cache)


def test_damaged_compressed_shards(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("fsspec")
    for name, ending in (("mds_gz", "gz"), ("mds_zstd", "zstd")):
        folder = copy_of(tmp_path, name)
        shard = folder / f"shard.00000.mds.{ending}"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 0xFF
        shard.write_bytes(content)
        source = MDS(folder, cache=meshfeed.ShardCache(tmp_path / "cache"))
        with pytest.raises(CorruptDataError, match=r"shard.00000.mds.*(cannot be decompressed|fetched .* with sha1)"):
            source[0]
        shard.write_bytes(content[:-20])
        with pytest.raises(CorruptDataError, match=r"shard.00000.mds.*(cannot be decompressed|fetched .* with sha1)"):
            MDS(folder, cache=meshfeed.ShardCache(tmp_path / "cache"))[0]
        assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".part"]


def test_over_a_store(tmp_path: pathlib.Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.put(str(FOLDER), "/mds-store", recursive=True)
    cache = meshfeed.ShardCache(tmp_path / "cache")
    for name in ("mds", "mds_zstd"):
        source = MDS(f"memory://mds-store/{name}", cache=cache)
        assert cache.num_bytes() == 0 or name != "mds"  # opening reads no shard
        expected = read_by_library(f"{name}/read.json")
        assert [plain_record(record) for record in source.__getitems__(range(len(source)))] == expected
    (copy,) = (tmp_path / "cache").glob("*-shard.00000.mds")
    content = copy.read_bytes()
    copy.write_bytes(content[:4] + b"\xff\xff\xff\xff" + content[8:])
    assert plain_record(MDS("memory://mds-store/mds", cache=cache)[0]) == read_by_library("mds/read.json")[0]
    store.rm("/mds-store", recursive=True)

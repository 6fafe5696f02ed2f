from __future__ import annotations

import base64
import contextlib
import gzip
import os
import pathlib
import pickle
import threading
from typing import Any

import jax
import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

import meshfeed  # noqa: E402
from meshfeed import CorruptDataError, SettingsError, SourceError  # noqa: E402
from meshfeed._src.reading.records import SourceReader  # noqa: E402
from meshfeed._src.sources import parquet  # noqa: E402
from meshfeed.sources import ArrayRecord, Parquet, Tokens, WebDataset  # noqa: E402

COUNTS = [23, 0, 41, 7]


def table_of(first: int, count: int) -> pa.Table:
    rows = range(first, first + count)
    return pa.table(
        {
            "id": pa.array(rows, pa.int32()),
            "x": pa.array([i / 3 for i in rows], pa.float32()),
            "flag": pa.array([i % 3 == 0 for i in rows]),
            "pair": pa.array([[i, -i] for i in rows], pa.list_(pa.int64())),
            "fixed": pa.array([[i, i, i] for i in rows], pa.list_(pa.int16(), 3)),
            "ragged": pa.array([list(range(i % 4)) for i in rows], pa.list_(pa.int32())),
            "place": pa.array(
                [{"lat": float(i), "n": i} for i in rows], pa.struct({"lat": pa.float64(), "n": pa.int8()})
            ),
            "text": pa.array([f"row {i}" for i in rows]),
            "hole": pa.array([None if i == 30 else i for i in rows], pa.int32()),
        }
    )


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    first = 0
    for number, count in enumerate(COUNTS):
        pq.write_table(table_of(first, count), tmp_path / f"{number}.parquet", row_group_size=5, compression="zstd")
        first += count
    return tmp_path


@pytest.fixture
def paths(folder: pathlib.Path) -> str:
    return f"{folder}/*.parquet"


NUMBERS = ["id", "x", "flag", "pair", "fixed", "place"]


def test_every_row_is_what_arrow_reads(paths: str, folder: pathlib.Path) -> None:
    source = Parquet(paths)
    expected = pa.concat_tables([pq.read_table(folder / f"{i}.parquet") for i in (0, 2, 3)]).to_pylist()
    assert repr(source) == "Parquet(4 files, 71 records)"
    order = np.random.default_rng(0).integers(0, 71, 50)
    for ids in (range(71), order):
        for i, record in zip(ids, source.__getitems__(ids), strict=True):
            plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in record.items()}
            wanted = dict(expected[i])
            assert plain.pop("x") == np.float32(wanted.pop("x"))
            assert plain == wanted
    assert source[3]["fixed"].dtype == np.int16
    assert (source.file_of(22), source.file_of(23)) == (f"{folder}/0.parquet", f"{folder}/2.parquet")


def test_paths_may_come_from_an_iterator(paths: str, folder: pathlib.Path) -> None:
    assert len(Parquet(folder.glob("*.parquet"))) == 71
    assert len(Parquet(map(str, folder.glob("[02].parquet")), "id")) == 64
    with pytest.raises(SourceError, match="empty list of files"):
        Parquet(folder.glob("*.arrow"))


@pytest.mark.parametrize("source", [ArrayRecord, Parquet, Tokens, WebDataset])
def test_paths_of_each_source_may_come_from_an_iterator(source: type, tmp_path: pathlib.Path) -> None:
    with pytest.raises(SourceError, match=rf"^{source.__name__}: there is no file '{tmp_path}/a'"):
        source(iter([f"{tmp_path}/a"]), **({"sequence_length": 8, "dtype": "uint16"} if source is Tokens else {}))


def test_a_batch_is_stacked_over_files_and_row_groups(paths: str) -> None:
    source = Parquet(paths, NUMBERS)
    for ids in (np.array([70, 0, 23, 22, 0, 5, 4, 63]), np.arange(2, 4), np.array([9])):
        batch = SourceReader(source).read(ids)
        assert batch["id"].dtype == np.int32
        np.testing.assert_array_equal(batch["id"], ids)
        np.testing.assert_array_equal(batch["x"], (ids / 3).astype(np.float32))
        np.testing.assert_array_equal(batch["flag"], ids % 3 == 0)
        np.testing.assert_array_equal(batch["pair"], np.stack([ids, -ids], 1))
        np.testing.assert_array_equal(batch["fixed"], np.stack([ids] * 3, 1).astype(np.int16))
        np.testing.assert_array_equal(batch["place"]["n"], ids)


def test_columns_of_some_groups_are_copied_and_of_others_converted(paths: str, tmp_path: pathlib.Path) -> None:
    source = Parquet(paths, ["hole", "id"])  # of the groups, one has a null
    ids = np.random.default_rng(0).integers(0, 30, 200)
    batch = source.read_batch(ids)
    np.testing.assert_array_equal(batch["hole"], ids.astype(np.int32), strict=True)
    np.testing.assert_array_equal(batch["id"], ids.astype(np.int32), strict=True)
    assert batch["id"].flags.writeable
    batch["id"][:] = -1  # memory of the batch, not of the row group
    np.testing.assert_array_equal(source.read_batch(ids)["id"], ids)
    wide = pa.table({"x": pa.array([[1, 2]] * 5 + [[1, 2, 3]] * 5, pa.list_(pa.int32()))})
    pq.write_table(wide, tmp_path / "wide", row_group_size=5)
    with pytest.raises(SourceError, match="ragged rows: column 'x'") as error:
        Parquet(tmp_path / "wide").read_batch([0, 6, 7])
    assert error.value.record_id == 6


def test_a_feed_over_text_is_refused_when_it_is_created(paths: str, tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    with pytest.raises(SourceError, match=r"column 'text' holds string.*or leave it out: columns=\['id'\]"):
        meshfeed.Feed(Parquet(paths, ["id", "text"]), mesh, global_batch_size=4)
    with pytest.raises(SourceError, match=r"column 'text' holds string") as error:
        meshfeed.Feed(Parquet(paths, ["text"]), mesh, global_batch_size=4)
    assert "columns=" not in str(error.value)
    assert "meshfeed.sources.Map" in str(error.value)
    lengths = meshfeed.sources.Map(Parquet(paths, ["text"]), lambda row: np.int32(len(row["text"])))
    with meshfeed.Feed(lengths, mesh, global_batch_size=4) as feed:
        assert next(feed).shape == (4,)


def test_what_no_device_holds_is_named(paths: str) -> None:
    with pytest.raises(SourceError, match=r"'text' holds string"):
        Parquet(paths).read_batch([1])
    for ids in ([1, 2], [1, 30]):  # in one row group, and in two
        with pytest.raises(SourceError, match=r"ragged rows: column 'ragged'") as error:
            Parquet(paths, ["ragged"]).read_batch(ids)
        assert error.value.record_id == ids[1]
    with pytest.raises(SourceError, match=r"'hole' is null in record 30") as error:
        Parquet(paths, ["hole"]).read_batch([1, 30])
    assert Parquet(paths, "hole")[30] == {"hole": None}


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.list_(pa.int64(), 2), pa.large_list(pa.int64())])
def test_a_null_in_a_list_of_a_record_is_none(kind: Any, tmp_path: pathlib.Path) -> None:
    rows = [[2**53 + 1, None], [1, 2], None]
    pq.write_table(pa.table({"x": pa.array(rows, kind)}), tmp_path / "a.parquet")
    if isinstance(kind, pa.FixedSizeListType) and int(pa.__version__.partition(".")[0]) < 26:
        with pytest.raises(SourceError, match="pyarrow>=26"):
            Parquet(tmp_path / "a.parquet").__getitems__(range(3))
        return
    records = Parquet(tmp_path / "a.parquet").__getitems__(range(3))
    assert [records[0]["x"], records[2]["x"]] == [[2**53 + 1, None], None]
    np.testing.assert_array_equal(records[1]["x"], np.array([1, 2]), strict=True)


def test_no_newer_pyarrow_is_advised_for_lists_of_size_0_than_there_is(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"x": pa.array([[], None, []], pa.list_(pa.int64(), 0))}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="rite the column as lists of any size") as caught:
        Parquet(tmp_path / "a.parquet").__getitems__(range(3))
    assert ("pyarrow>=26" in str(caught.value)) == (int(pa.__version__.partition(".")[0]) < 26)


def test_a_feed_reads_it_in_blocks(paths: str) -> None:
    import jax

    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with meshfeed.Feed(Parquet(paths, NUMBERS), mesh, global_batch_size=8, shuffle=10, num_epochs=1) as feed:
        ids = np.concatenate([np.asarray(batch["id"]) for batch in feed])
    assert len(set(ids.tolist())) == 64
    assert ids.tolist() != sorted(ids.tolist())


def test_a_feed_reads_it_along_shards(paths: str) -> None:
    import jax

    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with meshfeed.Feed(Parquet(paths, NUMBERS), mesh, global_batch_size=8, shuffle="shards", num_lanes=2) as feed:
        ids = np.concatenate([np.asarray(batch["id"]) for batch in feed])
    assert len(set(ids.tolist())) == len(ids) == 64


def test_a_column_named_like_a_field_of_another_one(tmp_path: pathlib.Path) -> None:
    """pyarrow reads both for the name ``a.b``."""
    table = pa.table({"a": [{"b": i} for i in range(6)], "a.b": [i * 2 for i in range(6)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    for ids in ([1], [1, 4]):
        assert {
            name: rows.tolist() for name, rows in Parquet(tmp_path / "a.parquet", ["a.b"]).read_batch(ids).items()
        } == {"a.b": [2 * i for i in ids]}


def test_decoded_groups_are_bounded_and_shared(paths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[str, int]] = []
    decode = parquet._decode_group

    def count(file: Any, group: int, *args: Any) -> Any:
        decoded.append((file.shard.path[-9:], group))
        return decode(file, group, *args)

    monkeypatch.setattr(parquet, "_decode_group", count)
    monkeypatch.setattr(parquet, "_decoded", parquet._DecodedGroups(1 << 20))
    source = Parquet(paths, ["id"])
    threads = [threading.Thread(target=source.read_batch, args=([0, 6, 4, 1, 2],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(decoded) == [("0.parquet", 0), ("0.parquet", 1)]
    one = decode(parquet_file(source), 0, ("id",), None)[1]
    monkeypatch.setattr(parquet, "_decoded", parquet._DecodedGroups(2 * one))
    decoded.clear()
    for row in (0, 5, 10, 0):
        source.read_batch([row])
    assert [group for _, group in decoded] == [0, 1, 2, 0]


def parquet_file(source: Parquet) -> Any:
    return source._check(source._shards.files[0], lambda: None, source._cache)[0]  # type: ignore[arg-type,return-value]


def test_identity_and_pickle(paths: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = Parquet(paths)
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint() == source.fingerprint()
    assert again[70]["id"] == 70
    assert Parquet(paths, ["id"]).fingerprint() != source.fingerprint()
    source.close()
    assert source[0]["id"] == 0


def test_damaged_files(folder: pathlib.Path) -> None:
    path = folder / "0.parquet"
    content = path.read_bytes()
    for damaged in (b"", b"PAR1", content[:-1], content[:400], b"x" * 1000):
        path.write_bytes(damaged)
        with pytest.raises(CorruptDataError, match=r"0.parquet is no intact Parquet file") as error:
            Parquet(path)
        assert error.value.path == str(path)
    damaged = bytearray(content)
    damaged[4:60] = b"\xff" * 56
    path.write_bytes(damaged)
    with pytest.raises(CorruptDataError, match=r"record 3: .*0.parquet is no intact Parquet file") as error:
        Parquet(path, ["id"]).read_batch([3])
    assert (error.value.record_id, error.value.path) == (3, str(path))
    path.write_bytes(content)
    source = Parquet(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceError, match="has changed since the source was made"):
        source[0]
    path.unlink()
    with pytest.raises(SourceError, match="is gone"):
        source[0]


@pytest.mark.parametrize(
    ("given", "options", "kind", "message"),
    [
        ("nowhere.parquet", {}, SourceError, "no file 'nowhere.parquet'"),
        ([], {}, SourceError, "empty list"),
        ("*.parquet", {"columns": ["nothing"]}, SourceError, r"columns=\['nothing'\]; .* has \['id', "),
        ("*.parquet", {"columns": []}, SourceError, "at least one"),
        ("1.parquet", {}, SourceError, r"1 file\(s\) with 0 records"),
        ("*.parquet", {"cache": 3}, SettingsError, "cache=3"),
    ],
)
def test_wrong_arguments(folder: pathlib.Path, given: Any, options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        Parquet(given if isinstance(given, list) or given.startswith("n") else f"{folder}/{given}", **options)


def test_files_with_different_columns(folder: pathlib.Path) -> None:
    pq.write_table(pa.table({"id": pa.array([1], pa.int64())}), folder / "4.parquet")
    with pytest.raises(SourceError, match=r"different columns: 'id' is int32 in .*0.parquet, and int64 in .*4.parq"):
        Parquet(f"{folder}/*.parquet")
    pq.write_table(pa.table({"x": pa.array([1], pa.float32())}), folder / "4.parquet")
    with pytest.raises(SourceError, match=r"'id' is int32 in .*, and no such column in .*4.parquet"):
        Parquet(f"{folder}/*.parquet")
    assert len(Parquet(f"{folder}/*.parquet", ["x"])) == 72


def test_over_a_store(folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for path in folder.glob("*.parquet"):
        store.pipe(f"/rows/{path.name}", path.read_bytes())
    assert Parquet("memory://rows/0.parquet")[3]["id"] == 3
    with pytest.raises(SettingsError, match=r"compressed file .* and no cache"):
        Parquet("memory://rows/0.parquet.gz")
    cache = meshfeed.ShardCache(tmp_path / "cache")
    urls = [f"memory://rows/{i}.parquet" for i in range(4)]
    monkeypatch.setattr(parquet, "_TAIL_BYTES", 64)  # the footer takes a second request
    source = Parquet(urls, NUMBERS, cache=cache)
    assert cache.num_bytes() == 0
    np.testing.assert_array_equal(source.read_batch([70, 3, 24])["id"], [70, 3, 24])
    assert source.fingerprint()["files"] == Parquet(f"{folder}/*.parquet").fingerprint()["files"]
    store.pipe("/rows/0.parquet.gz", gzip.compress((folder / "0.parquet").read_bytes()))
    packed = Parquet(["memory://rows/0.parquet.gz", urls[2]], NUMBERS, cache=cache)
    np.testing.assert_array_equal(packed.read_batch([30, 3])["id"], source.read_batch([30, 3])["id"])
    store.pipe("/rows/1.parquet.gz", gzip.compress(b"x" * 100))
    with pytest.raises(CorruptDataError, match=r"^memory://rows/1.parquet.gz is no intact Parquet file"):
        Parquet("memory://rows/1.parquet.gz", cache=cache)
    store.pipe("/rows/0.parquet", b"x" * 100)
    with pytest.raises(CorruptDataError, match=r"memory://rows/0.parquet is no intact Parquet file"):
        Parquet(urls[0], cache=meshfeed.ShardCache(tmp_path / "cache"))
    store.rm("/rows", recursive=True)


def test_documents_of_a_file_with_an_empty_row_group(tmp_path: pathlib.Path) -> None:
    """As a writer makes it of an empty batch."""
    schema = pa.schema([("t", pa.list_(pa.int32()))])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for rows in ([], [[1, 2], [3]], [], [[4, 5, 6]]):
            writer.write_table(pa.table({"t": rows}, schema))
    packed = meshfeed.sources.Packed(Parquet(str(tmp_path / "a.parquet")), 8, key="t")
    assert [token for token in np.asarray(packed[0]["t"]).tolist() if token] == [1, 2, 3, 4, 5, 6]


def test_an_encrypted_file_is_not_called_damaged(tmp_path: pathlib.Path) -> None:
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def __init__(self, config: object) -> None:
            super().__init__()

        def wrap_key(self, key: bytes, name: str) -> bytes:
            return base64.b64encode(key)

    config = encryption.EncryptionConfiguration(footer_key="k", column_keys={"k2": ["i"]})
    config.plaintext_footer = True
    factory = encryption.CryptoFactory(lambda _: Keys(_))
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    table = pa.table({"i": np.arange(20), "f": np.arange(20.0)})
    pq.write_table(table, tmp_path / "a.parquet", encryption_properties=properties)
    path = str(tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.parquet is encrypted.*columns=") as raised:
        Parquet(path).read_batch([0])
    assert not isinstance(raised.value, CorruptDataError)
    assert Parquet(path, columns=["f"]).read_batch([3])["f"].tolist() == [3.0]


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:This process .* is multi-threaded")
def test_a_forked_child_does_not_wait_for_a_group_that_its_parent_decodes() -> None:
    with contextlib.ExitStack() as stack:
        for lock in parquet._decoded._locks:
            stack.enter_context(lock)
        child = os.fork()
        if not child:
            os._exit(any(lock.locked() for lock in parquet._decoded._locks))
    assert os.waitpid(child, 0)[1] == 0

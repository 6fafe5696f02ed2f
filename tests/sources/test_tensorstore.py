"""TensorStore on real zarr, zarr3 and N5 arrays: rows, windows, columns, and what happens to damaged ones."""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshfeed
from meshfeed import CorruptDataError, SettingsError, SourceError, StateMismatchError
from meshfeed.sources import Mixture, TensorStore
from meshfeed.testing import check_resumable

ts = pytest.importorskip("tensorstore")

DRIVERS = ["zarr", "zarr3", "n5"]
ROWS, COLUMNS = 96, 64
DATA = np.arange(1, ROWS * COLUMNS + 1, dtype=np.int32).reshape(ROWS, COLUMNS)


def write(path: pathlib.Path, array: np.ndarray, chunks=None, driver: str = "zarr3", **kwargs) -> str:
    layout = {} if chunks is None else {"chunk_layout": ts.ChunkLayout(chunk_shape=chunks)}
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(path)}}
    dtype = {"dtype": ts.dtype(array.dtype)} if "dtype" not in kwargs else {}
    store = ts.open(spec, create=True, delete_existing=True, shape=array.shape, **dtype, **layout, **kwargs).result()
    store.write(array).result()
    return str(path)


def bytes_read() -> int:
    return sum(
        value["value"]
        for metric in ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        for value in metric["values"]
    )


def chunk_files(path: str) -> list[pathlib.Path]:
    names = ("zarr.json", ".zarray", ".zattrs", "attributes.json")
    return sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file() and p.name not in names)


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_rows_of_every_format_by_path_url_and_spec(tmp_path, driver):
    path = write(tmp_path / "tokens", DATA, (8, 16), driver)
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": path}}
    for given in (path, pathlib.Path(path), f"file://{path}/", spec, ts.open(spec, open=True).result()):
        source = TensorStore(given)
        assert len(source) == ROWS
        assert source.element_shapes() == jax.ShapeDtypeStruct((COLUMNS,), np.int32)
        for ids in ([3], [0, 1, 2], [90, 5, 5, 17, 95, 0], list(range(ROWS))):
            got = source.read_batch(np.array(ids))
            np.testing.assert_array_equal(got, DATA[ids])
            assert got.ctypes.data % 64 == 0
        np.testing.assert_array_equal(source[7], DATA[7])


def test_several_arrays_are_the_leaves_of_a_record(tmp_path):
    labels = np.arange(ROWS).astype(np.float32)
    half = (np.arange(ROWS * 6).reshape(ROWS, 2, 3) / 7).astype(ml_dtypes.bfloat16)
    source = TensorStore(
        {
            "tokens": write(tmp_path / "tokens", DATA, (8, 16)),
            "labels": write(tmp_path / "labels", labels, (10,), "zarr"),
            "half": write(tmp_path / "half", half, (5, 1, 3)),
        }
    )
    ids = np.array([5, 4, 90])
    batch = source.read_batch(ids)
    assert sorted(batch) == ["half", "labels", "tokens"]
    np.testing.assert_array_equal(batch["tokens"], DATA[ids])
    np.testing.assert_array_equal(batch["labels"], labels[ids])
    assert batch["half"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(batch["half"].view(np.uint16), half[ids].view(np.uint16))
    assert source[4]["half"].shape == (2, 3)
    assert source.element_shapes()["labels"] == jax.ShapeDtypeStruct((), np.float32)


def test_ids_over_several_arrays_follow_the_order_of_the_list(tmp_path):
    parts = [DATA[:10], DATA[10:11], DATA[11:60], DATA[60:]]
    source = TensorStore([write(tmp_path / f"part-{i}", part, (4, 32)) for i, part in enumerate(parts)])
    assert len(source) == ROWS
    for ids in (list(range(ROWS)), [60, 10, 9, 95, 11, 0, 10], [10], list(range(5, 20))):
        np.testing.assert_array_equal(source.read_batch(np.array(ids)), DATA[ids])
        columns = source.read_batch(np.array(ids), columns={"": (slice(3, 40),)})
        np.testing.assert_array_equal(columns, DATA[ids, 3:40])
    assert source.file_of(10).endswith("part-1")
    assert source.file_of(95).endswith("part-3")


def test_an_array_with_another_origin_and_a_transposed_view(tmp_path):
    path = write(tmp_path / "tokens", DATA, (8, 16))
    store = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}, open=True).result()
    np.testing.assert_array_equal(TensorStore(store[10:30]).read_batch(np.array([0, 19])), DATA[[10, 29]])
    np.testing.assert_array_equal(TensorStore(store.T).read_batch(np.array([63, 1])), DATA.T[[63, 1]])


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_windows_of_one_long_array(tmp_path, driver):
    tokens = np.arange(1, 1004, dtype=np.uint16)
    source = TensorStore(write(tmp_path / "tokens", tokens, (90,), driver), window=50)
    windows = tokens[:1000].reshape(20, 50)
    assert len(source) == 20, "the rest of 3 tokens is left out"
    for ids in ([0], [19], [4, 5, 6], [7, 2, 2, 19, 0], list(range(20))):
        np.testing.assert_array_equal(source.read_batch(np.array(ids)), windows[ids])
        part = source.read_batch(np.array(ids), columns={"": (slice(10, 25),)})
        np.testing.assert_array_equal(part, windows[ids, 10:25])


def test_windows_of_several_arrays_and_leaves(tmp_path):
    tokens = [np.arange(100, dtype=np.int32) + 1, np.arange(61, dtype=np.int32) + 1000]
    source = TensorStore(
        {
            "tokens": [write(tmp_path / f"t{i}", part, (16,)) for i, part in enumerate(tokens)],
            "pairs": [
                write(tmp_path / f"p{i}", np.stack([part, part + 5], 1), (16, 2)) for i, part in enumerate(tokens)
            ],
        },
        window=20,
    )
    assert len(source) == 5 + 3
    batch = source.read_batch(np.array([4, 5, 7]))
    np.testing.assert_array_equal(batch["tokens"], [tokens[0][80:], tokens[1][:20], tokens[1][40:60]])
    np.testing.assert_array_equal(batch["pairs"][..., 1], batch["tokens"] + 5)
    cut = source.read_batch(np.array([7, 0]), columns={"['pairs']": (slice(5, 9), slice(1, 2))})
    np.testing.assert_array_equal(cut["pairs"][..., 0], np.array([tokens[1][45:49], tokens[0][5:9]]) + 5)
    assert cut["tokens"].shape == (2, 20)


# --- only what is asked for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_only_the_chunks_of_the_columns_asked_for_are_read(tmp_path, driver):
    data = np.random.default_rng(0).integers(1, 2**31, (64, 1024), np.int32)  # does not compress
    path = write(tmp_path / "tokens", data, (8, 128), driver)

    def cost(columns) -> int:
        source = TensorStore(path, cache_bytes=0)
        before = bytes_read()
        source.read_batch(np.arange(16), columns=columns)
        return bytes_read() - before

    whole = cost(None)
    assert whole >= 16 * 1024 * 4
    for parts in (2, 4, 8):
        assert cost({"": (slice(0, 1024 // parts),)}) < 1.05 * whole / parts
    assert cost({"": (slice(100, 200),)}) < 1.05 * whole / 4, "two of eight chunks"


def test_rows_of_a_sharded_array_cost_their_inner_chunks_only(tmp_path):
    data = np.random.default_rng(0).integers(1, 2**31, (512, 256), np.int32)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "sharded")}}
    layout = ts.ChunkLayout(read_chunk_shape=(1, 64), write_chunk_shape=(512, 256))
    store = ts.open(spec, create=True, dtype=ts.int32, shape=data.shape, chunk_layout=layout).result()
    store.write(data).result()
    source = TensorStore(str(tmp_path / "sharded"))
    source.read_batch(np.array([0]))  # the shard's index
    before = bytes_read()
    ids = np.random.default_rng(1).permutation(512)[:32]
    np.testing.assert_array_equal(source.read_batch(ids, columns={"": (slice(64, 128),)}), data[ids, 64:128])
    assert bytes_read() - before < 2 * 32 * 64 * 4 + 40_000


def test_windows_read_their_own_chunks_only(tmp_path):
    tokens = np.random.default_rng(0).integers(1, 2**31, 64 * 1024, np.int32)
    source = TensorStore(write(tmp_path / "tokens", tokens, (1024,)), window=1024, cache_bytes=0)
    before = bytes_read()
    source.read_batch(np.array([5, 60]))
    assert bytes_read() - before < 2.1 * 4096


def test_chunks_are_decoded_once_for_neighbouring_batches(tmp_path):
    data = np.random.default_rng(0).integers(1, 2**31, (64, 256), np.int32)
    source = TensorStore(write(tmp_path / "tokens", data, (32, 256)), cache_bytes=1 << 20)
    source.read_batch(np.array([0, 1]))
    before = bytes_read()
    np.testing.assert_array_equal(source.read_batch(np.array([2, 3, 31])), data[[2, 3, 31]])
    assert bytes_read() == before


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_chunk_cut_short_is_named_with_its_record(tmp_path, driver):
    path = write(tmp_path / "tokens", DATA, (8, 64), driver)
    damaged = chunk_files(path)[-1]
    damaged.write_bytes(damaged.read_bytes()[:20])
    source = TensorStore(path)
    with pytest.raises(CorruptDataError, match="is damaged") as raised:
        source.read_batch(np.arange(ROWS))
    assert raised.value.path == path
    assert raised.value.record_id is not None
    first = raised.value.record_id
    np.testing.assert_array_equal(source.read_batch(np.arange(first)), DATA[:first])
    with pytest.raises(CorruptDataError):
        source[first]


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_lost_chunk_is_not_silently_the_fill_value(tmp_path, driver):
    path = write(tmp_path / "tokens", DATA, (8, 64), driver)
    chunk_files(path)[0].unlink()
    with pytest.raises(CorruptDataError, match="fill_missing=True"):
        TensorStore(path).read_batch(np.arange(ROWS))
    got = TensorStore(path, fill_missing=True).read_batch(np.arange(ROWS))
    assert (got == 0).all(axis=1).sum() == 8
    own = {"driver": driver, "kvstore": {"driver": "file", "path": path}, "fill_missing_data_reads": True}
    np.testing.assert_array_equal(TensorStore(own).read_batch(np.arange(ROWS)), got)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("view", ["cast", "downsample", "concat", "stack", "cast of a concat", "spec"])
def test_a_lost_chunk_of_an_array_behind_another_driver_is_an_error_too(tmp_path, driver, view):
    path = write(tmp_path / "tokens", DATA, (8, 64), driver)
    base = {"driver": driver, "kvstore": {"driver": "file", "path": path}}
    store = ts.open(base, open=True).result()
    opened = {
        "cast": lambda: ts.cast(store, ts.float64),
        "downsample": lambda: ts.downsample(store, [2, 1], "stride"),
        "concat": lambda: ts.concat([store, store], axis=0),
        "stack": lambda: ts.stack([store, store]),
        "cast of a concat": lambda: ts.cast(ts.concat([store, store[:8]], axis=0), ts.float64),
        "spec": lambda: {"driver": "cast", "base": base, "dtype": "float64"},
    }[view]()
    whole = TensorStore(opened)
    rows = np.arange(len(whole))
    expected = whole.read_batch(rows)
    assert expected.all()
    chunk_files(path)[0].unlink()
    with pytest.raises(CorruptDataError, match="fill_missing=True"):
        TensorStore(opened).read_batch(rows)
    got = TensorStore(opened, fill_missing=True).read_batch(rows)
    assert not got.all()
    assert ((got == expected) | (got == 0)).all()


def test_a_spec_within_a_spec_says_itself_whether_missing_chunks_are_filled(tmp_path):
    path = write(tmp_path / "tokens", DATA, (8, 64))
    chunk_files(path)[0].unlink()
    base = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}, "fill_missing_data_reads": True}
    got = TensorStore({"driver": "cast", "base": base, "dtype": "float64"}).read_batch(np.arange(ROWS))
    assert (got == 0).all(axis=1).sum() == 8


def test_a_lost_chunk_of_precomputed_data_is_an_error(tmp_path):
    scale = {"size": [40, 8, 1], "encoding": "raw", "chunk_size": [10, 8, 1], "resolution": [1, 1, 1]}
    spec = {"driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": str(tmp_path / "image")}}
    more = {"multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 1}, "scale_metadata": scale}
    ts.open({**spec, **more}, create=True).result()[:30].write(np.uint8(1)).result()
    with pytest.raises(CorruptDataError, match="fill_missing=True"):
        TensorStore(spec).read_batch(np.arange(40))
    assert TensorStore(spec, fill_missing=True).read_batch(np.arange(40)).sum() == 30 * 8


def test_chunks_of_fill_values_are_read_where_asked(tmp_path):
    path = write(tmp_path / "mask", np.zeros((ROWS, 8), np.int8), (8, 8))
    np.testing.assert_array_equal(TensorStore(path, fill_missing=True).read_batch(np.arange(5)), np.zeros((5, 8)))


def test_a_flipped_bit_is_found_where_the_array_has_checksums(tmp_path):
    codecs = {
        "driver": "zarr3",
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    path = write(tmp_path / "tokens", DATA, (8, 64), codec=ts.CodecSpec(codecs))
    damaged = chunk_files(path)[3]
    raw = bytearray(damaged.read_bytes())
    raw[100] ^= 1
    damaged.write_bytes(raw)
    with pytest.raises(CorruptDataError, match="is damaged"):
        TensorStore(path).read_batch(np.arange(ROWS))


def test_bad_records_are_replaced_where_asked(tmp_path):
    path = write(tmp_path / "tokens", DATA, (8, 64))
    chunk_files(path)[0].unlink()
    stream = feed(TensorStore({"x": path}), bad_records=meshfeed.SkipBad(max_fraction=0.5))
    got = np.concatenate([np.asarray(batch["x"]) for batch in stream])
    planned = np.concatenate([stream.record_ids(step) for step in range(stream.step)])
    good = planned >= 8
    np.testing.assert_array_equal(got[good], DATA[planned[good]])
    assert (got != 0).all()
    assert stream.stats().skipped_records == 8


def test_what_is_not_there_or_no_array_is_named(tmp_path):
    with pytest.raises(SourceError, match=rf"{tmp_path}/nope.*Check the path"):
        TensorStore(str(tmp_path / "nope"))
    with pytest.raises(SourceError, match="nope"):
        TensorStore({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "nope")}})
    path = write(tmp_path / "tokens", DATA)
    (pathlib.Path(path) / "zarr.json").write_text('{"zarr_format": 3')
    with pytest.raises(SourceError, match="tokens"):
        TensorStore(path)
    with pytest.raises(SourceError, match="got a int"):
        TensorStore(3)
    with pytest.raises(SourceError, match="empty dict"):
        TensorStore({})
    with pytest.raises(SourceError, match="empty list"):
        TensorStore([])


def test_arrays_that_cannot_be_records_are_named(tmp_path):
    scalar = write(tmp_path / "scalar", np.array(3, np.int32))
    with pytest.raises(SourceError, match="no rows"):
        TensorStore(scalar)
    empty = write(tmp_path / "empty", np.zeros((0, 4), np.int32))
    with pytest.raises(SourceError, match="0 rows"):
        TensorStore(empty)
    short = write(tmp_path / "short", np.zeros(40, np.int32))
    with pytest.raises(SourceError, match="0 windows of 50"):
        TensorStore(short, window=50)
    one, two = write(tmp_path / "one", DATA[:5]), write(tmp_path / "two", DATA[:6])
    with pytest.raises(SourceError, match=r"\['a'\] has 5, \['b'\] has 6"):
        TensorStore({"a": one, "b": two})
    other = write(tmp_path / "other", DATA[:5].astype(np.int64))
    with pytest.raises(SourceError, match="int64"):
        TensorStore([one, other])
    for setting, kwargs in (
        ("window", {"window": 0}),
        ("window", {"window": True}),
        ("cache_bytes", {"cache_bytes": -1}),
    ):
        with pytest.raises(SettingsError, match=setting):
            TensorStore(one, **kwargs)
    with pytest.raises(IndexError, match="record id 5"):
        TensorStore(one).read_batch(np.array([0, 5]))
    with pytest.raises(IndexError, match="record id -1"):
        TensorStore(one)[-1]


# --- identity, pickling ---------------------------------------------------------------------------------------------


def test_a_moved_folder_is_the_same_source_and_other_content_is_not(tmp_path):
    write(tmp_path / "here" / "tokens", DATA, (8, 16))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    identity = TensorStore(str(tmp_path / "here" / "tokens")).fingerprint()
    assert TensorStore(str(tmp_path / "there" / "tokens")).fingerprint() == identity
    write(tmp_path / "there" / "tokens", DATA + 1, (8, 16))
    assert TensorStore(str(tmp_path / "there" / "tokens")).fingerprint() != identity
    os.rename(tmp_path / "here" / "tokens", tmp_path / "here" / "renamed")
    assert TensorStore(str(tmp_path / "here" / "renamed")).fingerprint() != identity


def test_it_travels_without_its_open_arrays(tmp_path):
    source = TensorStore({"x": write(tmp_path / "tokens", DATA, (8, 16))})
    payload = pickle.dumps(source)
    assert len(payload) < 4000
    np.testing.assert_array_equal(pickle.loads(payload).read_batch(np.array([9, 3]))["x"], DATA[[9, 3]])
    source.close()
    np.testing.assert_array_equal(source.read_batch(np.array([9, 3]))["x"], DATA[[9, 3]])


# --- through the feed -----------------------------------------------------------------------------------------------


def feed(source, sharding=None, **kwargs):
    if sharding is None:
        sharding = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    settings = {"global_batch_size": 16, "shuffle": True, "seed": 5, "prefetch": 0, **kwargs}
    return meshfeed.MultiHostDataLoadIterator(source, sharding, **settings)


def test_with_the_sequence_sharded_each_step_is_whole_and_resumable(tmp_path):
    path = write(tmp_path / "tokens", DATA, (8, 16))
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", "seq"))

    def make():
        return feed(TensorStore({"x": path}), sharding, num_epochs=2, end="pad", mask_key="real")

    stream = make()
    for step, batch in enumerate(stream):
        ids = stream.record_ids(step)
        np.testing.assert_array_equal(np.asarray(batch["x"])[: ids.size], DATA[ids])
    assert check_resumable(make, save_points=[1, 6, 7]) >= 3


def test_another_window_or_array_is_refused(tmp_path):
    tokens = np.arange(1, 4001, dtype=np.int32)
    path = write(tmp_path / "tokens", tokens, (100,))
    stream = feed(TensorStore({"x": path}, window=50))
    next(stream)
    state = stream.get_state()
    with pytest.raises(StateMismatchError, match=r"source\.records"):
        feed(TensorStore({"x": path}, window=25)).set_state(state)
    other = write(tmp_path / "other" / "tokens", tokens + 1, (100,))
    with pytest.raises(StateMismatchError, match=r"source\.content"):
        feed(TensorStore({"x": other}, window=50)).set_state(state)


def test_as_a_component_of_a_mixture(tmp_path):
    tokens = np.arange(1, 4001, dtype=np.int32)
    rows = TensorStore({"x": write(tmp_path / "rows", DATA, (8, 16))})
    windows = TensorStore({"x": write(tmp_path / "tokens", tokens, (100,))}, window=COLUMNS)
    mixture = Mixture({"rows": rows, "windows": windows}, {"rows": 1, "windows": 3}, block=16)
    stream = feed(mixture)
    batch = next(stream)
    for row, mixed in zip(np.asarray(batch["x"]), stream.record_ids(0).tolist(), strict=True):
        component, record_id = mixed >> 48, mixed & ((1 << 48) - 1)
        np.testing.assert_array_equal(row, rows[record_id]["x"] if component == 0 else windows[record_id]["x"])

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.settings import Workers
from meshfeed._src.reading.workers import open_pool, pickle_task
from meshfeed._src.sources.memory import Memory


def _tree(num_records: int = 50) -> dict:
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, 1000, (num_records, 7), np.int32),
        "extra": (rng.random(num_records), rng.random((num_records, 2, 3)).astype(ml_dtypes.bfloat16)),
    }


@given(st.lists(st.integers(0, 49), max_size=30))
def test_read_batch_is_indexing(ids: list[int]) -> None:
    tree = _tree()
    batch = Memory(tree).read_batch(np.array(ids, np.int64))
    jax.tree.map(lambda leaf, array: np.testing.assert_array_equal(leaf, array[ids]), batch, tree)
    assert jax.tree.map(lambda leaf: leaf.dtype, batch) == jax.tree.map(lambda leaf: leaf.dtype, tree)


@pytest.mark.parametrize("ids", [range(3, 40), [5], [9, 3, 9, 49], []])
def test_buffers_are_aligned_and_the_callers_own(ids) -> None:
    tree = _tree()
    source = Memory(tree)
    for leaf, array in zip(
        jax.tree.leaves(source.read_batch(np.array(ids, np.int64))), jax.tree.leaves(tree), strict=True
    ):
        assert leaf.ctypes.data % 64 == 0 or not leaf.size  # numpy moves an empty view
        assert leaf.flags.writeable
        assert not np.shares_memory(leaf, array)


def test_arrays_that_take_would_copy_whole() -> None:
    base = np.arange(600, dtype=np.float32).reshape(20, 30)
    for array in (np.asfortranarray(base), base[:, ::2], base.astype(">f4"), base[::-1]):
        got = Memory(array).read_batch(np.array([3, 1, 19]))
        np.testing.assert_array_equal(got, array[[3, 1, 19]])
        assert got.dtype == np.float32
        assert got.dtype.isnative


def test_columns() -> None:
    tree = _tree()
    batch = Memory(tree).read_batch(np.array([4, 2]), columns={"['tokens']": (slice(2, 5),)})
    np.testing.assert_array_equal(batch["tokens"], tree["tokens"][[4, 2], 2:5])
    np.testing.assert_array_equal(batch["extra"][0], tree["extra"][0][[4, 2]])


def test_element_shapes() -> None:
    shapes = Memory(_tree()).element_shapes()
    assert shapes["tokens"].shape == (7,)
    assert shapes["tokens"].dtype == np.int32
    assert shapes["extra"][0].shape == ()
    assert shapes["extra"][1].dtype == ml_dtypes.bfloat16


def test_items() -> None:
    tree = _tree()
    source = Memory(tree)
    assert len(source) == 50
    np.testing.assert_array_equal(source[np.int64(7)]["tokens"], tree["tokens"][7])
    assert [record["extra"][0] for record in source.__getitems__([3, 1])] == tree["extra"][0][[3, 1]].tolist()
    assert len(list(iter(source))) == 50  # the old sequence protocol ends at IndexError


@pytest.mark.parametrize("record_id", [-1, 50])
def test_ids_out_of_range(record_id: int) -> None:
    source = Memory(_tree())
    with pytest.raises(IndexError, match=f"record id {record_id} is out of range.* 50 records"):
        source[record_id]
    with pytest.raises(IndexError, match=f"record id {record_id} is out of range"):
        source.read_batch(np.array([1, record_id]))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "without arrays"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, r"\['a'\] has 3, \['b'\] has 4"),
        ({"a": np.zeros((0, 2))}, r"0 records: leaf \['a'\] has"),
        (np.zeros((0, 2)), r"0 records: the array has"),
        ({"a": np.zeros(3), "b": np.array(["x", "yy", "z"])}, r"\['b'\].*<U2"),
        ({"a": np.array([[1], [1, 2]], dtype=object)}, r"ragged rows: .*\['a'\]"),
        ({"a": np.zeros(())}, r"\['a'\].*shape \(\)"),
        ({"a": np.zeros(3, [("x", "i4")])}, r"\['a'\].*which JAX has no dtype for"),
        ({"a": np.array([1, 2], object)}, r"\['a'\] has dtype object .*objects and dates into numbers \(astype\)"),
        ({"a": 3}, r"\['a'\].* is a int"),
        (
            {"a": np.ma.masked_equal([1, 2, 1], 1)},
            r"\['a'\] is a masked array with 2 masked values, and a batch has no masks",
        ),
    ],
)
def test_bad_arrays(arrays, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        Memory(arrays)


def test_arrays_that_numpy_cannot_hold() -> None:
    deleted = jax.numpy.arange(3)
    deleted.delete()
    for array in (deleted, jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(
            SourceError, match=r"\['x'\] is a \w+ which numpy cannot hold: .*Pass numpy arrays with all rec"
        ):
            Memory({"x": array})


def test_fingerprint_tells_content_and_shape_apart() -> None:
    tree = _tree()
    same = Memory(jax.tree.map(np.copy, tree)).fingerprint()
    assert Memory(tree).fingerprint() == same
    assert same["records"] == 50
    assert same["leaves"][0] == ["['extra'][0]", "float64", []]
    changed = jax.tree.map(np.copy, tree)
    changed["tokens"][49, 6] += 1
    assert Memory(changed).fingerprint() != same
    assert Memory(jax.tree.map(lambda array: array[:49], tree)).fingerprint() != same


def test_one_changed_record_of_a_few_mebibytes_changes_the_fingerprint() -> None:
    for arrays in (np.zeros((1000, 8), np.float32), np.zeros((8, 1000), ">i4").T, np.zeros((1000, 0), bool)):
        changed = {"x": arrays, "y": np.arange(1000)}
        changed["y"][500] = 7  # not one of the four that are compared of larger arrays
        assert Memory(changed).fingerprint() != Memory({"x": arrays, "y": np.arange(1000)}).fingerprint()
    large = np.broadcast_to(np.int32(1), ((16 << 20) // 4 + 1,))
    assert "all_records" not in Memory(large).fingerprint()
    assert "all_records" in Memory(large[:-1]).fingerprint()
    assert Memory(large[:100]).fingerprint() == Memory(np.ones(100, np.int32)).fingerprint()


def test_pickle_and_memmap(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40).reshape(10, 4))
    source = Memory(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert type(source[0]) is np.ndarray
    copy = pickle.loads(pickle.dumps(Memory(_tree())))
    np.testing.assert_array_equal(copy.read_batch(np.array([3]))["tokens"], _tree()["tokens"][[3]])


def test_a_large_memory_map_is_mapped_again_by_worker_processes(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.npy"
    whole = np.arange(6 << 20, dtype=np.int32).reshape(-1, 8)  # 24 MiB
    np.save(path, whole)
    found = np.load(path, mmap_mode="r")

    def pickled(*arrays: np.ndarray) -> bytes:
        source = Memory({str(number): array for number, array in enumerate(arrays)})
        return pickle_task(lambda: source, None, Workers(1))

    task = pickled(found, found[::-1], found[:, 1:])
    assert len(task) < 1 << 16
    source = Memory(found)
    reading = pickle_task(lambda: source.read_batch, None, Workers(1))
    with contextlib.closing(open_pool(Workers(1), reading, name="x", describe=str)) as pool:
        pool.submit(0, [3, 1])
        np.testing.assert_array_equal(pool.result(0, 60), whole[[3, 1]])
    copy = pickle.loads(task)().read_batch([5, 0])
    np.testing.assert_array_equal(copy["0"], whole[[5, 0]])
    np.testing.assert_array_equal(copy["1"], whole[::-1][[5, 0]])
    np.testing.assert_array_equal(copy["2"], whole[[5, 0], 1:])
    # All else is copied: for another machine, private memory, and a file that is there no more or was replaced.
    assert len(pickle_task(lambda: source)) > whole.nbytes
    assert len(pickle_task(lambda: source, None, Workers(1, engine="ray"))) > whole.nbytes
    private = np.load(path, mmap_mode="c")
    private[5] = 0
    assert pickle.loads(pickled(private))().read_batch([5])["0"].tolist() == [[0] * 8]
    path.rename(tmp_path / "y.npy")
    np.save(path, 1 + whole)
    with pytest.raises(SourceError, match=r"x\.npy, which is mapped into memory, was replaced"):
        pickle.loads(task)()
    os.unlink(tmp_path / "y.npy")
    assert pickle.loads(pickled(found))().read_batch([5])["0"].tolist() == whole[[5]].tolist()

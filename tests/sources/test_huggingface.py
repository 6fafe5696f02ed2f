"""Map-style datasets."""

from __future__ import annotations

import datetime
import io
import json
import pickle

import jax
import numpy as np
import pytest

datasets = pytest.importorskip("datasets")

from datasets import Array2D, Features, List, Value  # noqa: E402  # after the check that it is installed

import meshfeed  # noqa: E402
from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError  # noqa: E402
from meshfeed.sources import HuggingFace  # noqa: E402

N = 3100  # more than the 1,000 rows of a chunk


def add_one(batch):
    return {"id": [i + 1 for i in batch["id"]]}


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return {
        "id": np.arange(N),
        "tokens": rng.integers(0, 1000, (N, 9), np.int32),
        "pair": rng.random((N, 2)).astype(np.float32),
        "half": rng.random(N).astype(np.float16),
        "flag": rng.random(N) > 0.5,
        "grid": rng.integers(0, 9, (N, 2, 3), np.int64),
        "small": rng.integers(-5, 5, N).astype(np.int8),
    }


@pytest.fixture(scope="module")
def stored(arrays, tmp_path_factory):
    features = Features(
        {
            "id": Value("int64"),
            "tokens": List(Value("int32")),
            "pair": List(Value("float32"), length=2),
            "half": Value("float16"),
            "flag": Value("bool"),
            "grid": Array2D((2, 3), "int64"),
            "small": Value("int8"),
        }
    )
    columns = {name: list(array) for name, array in arrays.items()}
    folder = str(tmp_path_factory.mktemp("stored"))
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder)
    return datasets.load_from_disk(folder)


@pytest.mark.parametrize(
    "ids", [range(40), range(990, 1010), [5], [3099, 0, 1000, 999, 0, 2500], range(0, N, 7), []], ids=len
)
def test_read_batch_is_indexing_in_the_columns_dtype(stored, arrays, ids):
    batch = HuggingFace(stored).read_batch(np.array(ids, np.int64))
    assert list(batch) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(batch[name], array[list(ids)])
        assert batch[name].dtype == array.dtype


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.shuffle(seed=1),
        lambda d: d.select(range(100, 2900, 3)),
        lambda d: d.select(range(500, 1500)),
        lambda d: d.shuffle(seed=1).select(range(5, 1500)).sort("small"),
        lambda d: datasets.concatenate_datasets([d.select(range(700, 900)), d.shuffle(seed=2), d]),
        lambda d: d.rename_column("id", "number").remove_columns(["tokens"]),
        lambda d: d.with_format("numpy"),
        lambda d: d.with_format("arrow", columns=["id", "flag"]),
        lambda d: d.with_format("numpy", columns=["id"], output_all_columns=True),
        lambda d: d.shard(3, 1),
    ],
    ids=range(10),
)
def test_views_of_a_dataset_are_what_the_library_says(stored, change):
    dataset = change(stored)
    source = HuggingFace(dataset)
    ids = np.random.default_rng(0).integers(0, len(dataset), 60)
    batch = source.read_batch(ids)
    wanted = dataset.with_format("numpy", columns=list(batch))[ids]
    assert len(source) == len(dataset)
    for name, value in wanted.items():
        np.testing.assert_array_equal(batch[name], value)
    formatted = dataset.format["columns"]
    assert list(batch) == ([*formatted] if dataset.format["type"] and not dataset.format["output_all_columns"] else
                           dataset.column_names)  # fmt: skip


def test_records_one_by_one_and_several_are_the_batch(stored):
    source = HuggingFace(stored, columns=["tokens", "id"])
    batch = source.read_batch([7, 2050, 7])
    several = source.__getitems__([7, 2050, 7])
    assert [set(record) for record in several] == [{"tokens", "id"}] * 3
    for row, record in enumerate(several):
        np.testing.assert_array_equal(record["tokens"], batch["tokens"][row])
    assert source[np.int64(2050)]["id"] == 2050
    with pytest.raises(IndexError, match=r"3100 is out of range.*3,100 records"):
        source.read_batch([0, N])
    with pytest.raises(IndexError, match="-1 is out of range"):
        source[-1]


def test_nested_columns_become_trees():
    dataset = datasets.Dataset.from_dict(
        {
            "m": [[[i, i + 1], [i + 2, i + 3]] for i in range(6)],
            "s": [{"a": i, "b": [i * 0.5, 1.0]} for i in range(6)],
            "l": [[{"q": i}, {"q": -i}] for i in range(6)],
        }
    )
    batch = HuggingFace(dataset.select(range(1, 6))).read_batch([4, 0, 2])
    assert batch["m"].tolist() == [[[5, 6], [7, 8]], [[1, 2], [3, 4]], [[3, 4], [5, 6]]]
    assert batch["s"]["a"].tolist() == [5, 1, 3]
    assert batch["s"]["b"].tolist() == [[2.5, 1.0], [0.5, 1.0], [1.5, 1.0]]
    assert jax.tree.map(np.ndarray.tolist, batch["l"]) in ({"q": [[5, -5], [1, -1], [3, -3]]},)


def test_lists_need_be_equally_long_only_within_a_batch():
    source = HuggingFace(datasets.Dataset.from_dict({"x": [[1, 2], [3], [4, 5], [], []]}))
    assert source.read_batch([2, 0])["x"].tolist() == [[4, 5], [1, 2]]
    assert source.read_batch([3, 4])["x"].shape == (2, 0)
    with pytest.raises(SourceError, match=r"ragged rows: column 'x' .*\[1\] in record 1.*\[2\].*Pad") as error:
        source.read_batch([0, 1])
    assert error.value.record_id == 1


def test_parts_of_a_dataset_may_differ_in_lengths_and_nulls_where_a_batch_does_not():
    parts = [[[1, 2], [3, 4]], [[5, 6, 7]] * 2, [[8, 9], None], [[10, 11], [12, 13]]]
    source = HuggingFace(datasets.concatenate_datasets([datasets.Dataset.from_dict({"x": part}) for part in parts]))
    assert source.read_batch([7, 0, 4, 1])["x"].tolist() == [[12, 13], [1, 2], [8, 9], [3, 4]]
    assert source.read_batch([3, 2])["x"].tolist() == [[5, 6, 7]] * 2
    with pytest.raises(SourceError, match="ragged rows") as error:
        source.read_batch([0, 7, 2])
    assert error.value.record_id == 2
    with pytest.raises(SourceError, match=r"column 'x' is null in record 5") as error:
        source.read_batch([0, 5, 7])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [1, 2], "t": ["a", "b"]}, r"column 't' holds string.*columns=\['x'\]"),
        ({"x": [1, 2], "t": [[b"a"], [b"b"]]}, r"column 't' holds list.*binary.*columns=\['x'\]"),
        ({"x": [1, 2], "t": [{"a": "u"}, {"a": "v"}]}, r"column 't' holds struct"),
        ({"x": [1, 2], "t": [None, None]}, r"column 't' is of type null"),
        ({"x": [datetime.datetime(2020, 1, 1), datetime.datetime(2021, 1, 1)]}, r"column 'x' is of type timestamp"),
    ],
)
def test_what_no_device_holds_is_named_with_a_remedy(columns, message):
    with pytest.raises(SourceError, match=message):
        meshfeed.Feed(datasets.Dataset.from_dict(columns), jax.make_mesh((1,), ("data",)), global_batch_size=1)


@pytest.mark.parametrize(
    "open_dataset",
    [
        lambda d: HuggingFace(d)[0],
        lambda d: HuggingFace(d.with_transform(lambda batch: batch))[0],
        lambda d: next(HuggingFace(d.to_iterable_dataset()).open(0, 1)),
    ],
    ids=["table", "transform", "stream"],
)
def test_a_dataset_of_text_only_is_not_told_to_keep_other_columns(open_dataset):
    with pytest.raises(
        SourceError,
        match=r"column 'text' holds .* with meshfeed\.sources\.Map or map\(\) of the dataset\.$",
    ):
        open_dataset(datasets.Dataset.from_dict({"text": ["a", "b"], "author": ["c", "d"]}))


@pytest.mark.parametrize("values", [[1, None, 3], [1.5, None, 2.5], [[1], None, [3]], [[1, 2], [None, 3], [4, 5]]])
def test_a_null_is_an_error_that_names_the_record(values):
    source = HuggingFace(datasets.Dataset.from_dict({"x": values}).select([2, 1, 0]))
    assert len(source.read_batch([0, 2])["x"]) == 2
    with pytest.raises(SourceError, match=r"column 'x' is null in record 1\b.*filter") as error:
        source.read_batch([2, 1])
    assert error.value.record_id == 1


def test_with_transform_is_respected(stored):
    dataset = stored.with_transform(lambda batch: {"y": [i * 2 for i in batch["id"]], "t": ["a"] * len(batch["id"])})
    source = HuggingFace(dataset, columns=["y"])
    assert [record["y"].item() for record in source.__getitems__([3, 2000])] == [6, 4000]
    assert source[5]["y"] == 10
    with pytest.raises(SourceError, match=r"column 't' holds str in record 4.*columns=\['y'\]"):
        HuggingFace(dataset)[4]
    with pytest.raises(SourceError, match=r"no column 'z'.*\['t', 'y'\]"):
        HuggingFace(dataset, columns=["z"])[4]
    assert HuggingFace(dataset).fingerprint() != HuggingFace(stored).fingerprint()


def test_a_dtype_given_to_the_format_is_applied(stored):
    assert HuggingFace(stored.with_format("numpy", dtype=np.float32)).read_batch([1, 2])["id"].dtype == np.float32


def test_images_are_decoded_by_the_library(tmp_path):
    pytest.importorskip("PIL")
    pixels = np.random.default_rng(0).integers(0, 255, (3, 4, 5, 3), np.uint8)
    dataset = datasets.Dataset.from_dict(
        {"id": [0, 1, 2], "image": list(pixels)}, features=Features({"id": Value("int64"), "image": datasets.Image()})
    )
    batch = HuggingFace(dataset).read_batch([2, 0])
    np.testing.assert_array_equal(batch["image"], pixels[[2, 0]])
    assert batch["id"].tolist() == [2, 0]
    missing = HuggingFace(dataset.map(lambda row: {"image": None if row["id"] == 1 else row["image"]}), ["image"])
    with pytest.raises(SourceError, match=r"column 'image' is null in record 1\b") as error:
        missing.read_batch([2, 1])
    assert error.value.record_id == 1


def test_fingerprint_tells_content_apart_and_is_stable(stored):
    def fingerprint(dataset, **how):
        return HuggingFace(dataset, **how).fingerprint()

    assert fingerprint(stored) == fingerprint(stored.with_format("numpy"))
    others = [
        fingerprint(stored.shuffle(seed=1)),
        fingerprint(stored.select(range(N - 1))),
        fingerprint(stored, columns=["id"]),
        fingerprint(stored.cast_column("small", Value("int16"))),
        fingerprint(stored.map(add_one, batched=True, keep_in_memory=True)),
    ]
    assert len({repr(value) for value in [fingerprint(stored), *others]}) == 6


def test_it_travels_to_other_processes(stored):
    source = HuggingFace(stored.shuffle(seed=3), columns=["id"])
    assert (
        pickle.loads(pickle.dumps(source)).read_batch([4, 9])["id"].tolist() == source.read_batch([4, 9])["id"].tolist()
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda d: HuggingFace(d, columns=["nope"]),
            SettingsError,
            r"unknown columns \['nope'\]; the dataset has \['id'",
        ),
        (lambda d: HuggingFace(d, columns="id"), SettingsError, "columns is 'id'; expected a list"),
        (lambda d: HuggingFace(d, columns=3), SettingsError, "columns is 3; expected a list"),
        (lambda d: HuggingFace(d, columns=[]), SettingsError, "columns is empty"),
        (lambda d: HuggingFace(d, shuffle_buffer=10), SettingsError, "shuffle=True"),
        (lambda d: HuggingFace(d, shuffle_buffer=-1), SettingsError, "shuffle_buffer is -1"),
        (lambda d: HuggingFace(d, shuffle_buffer=True), SettingsError, "shuffle_buffer is True"),
        (lambda d: HuggingFace(datasets.DatasetDict(train=d)), SourceError, r"pass dataset\['train'\]"),
        (lambda d: HuggingFace([1, 2]), SourceError, "got a list"),
        (lambda d: HuggingFace(d.select([])), SourceError, "0 records"),
    ],
)
def test_wrong_arguments_are_named(stored, make, error, message):
    with pytest.raises(error, match=message):
        make(stored)


def test_through_the_feed(stored, arrays):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def feed(dataset=stored, **how):
        return meshfeed.MultiHostDataLoadIterator(
            HuggingFace(dataset, columns=["id", "tokens", "half"]),
            mesh,
            global_batch_size=160,
            shuffle=True,
            seed=5,
            **how,
        )

    first = feed()
    batches = [next(first) for _ in range(7)]
    for step, batch in enumerate(batches):
        ids = first.record_ids(step)
        np.testing.assert_array_equal(batch["id"], ids)
        np.testing.assert_array_equal(batch["tokens"], arrays["tokens"][ids])
        np.testing.assert_array_equal(batch["half"], arrays["half"][ids])
    again = feed(prefetch=0)
    again.set_state(first.get_state())
    np.testing.assert_array_equal(next(again)["id"], next(first)["id"])
    again.close()
    with pytest.raises(StateMismatchError, match="source"):
        feed(stored.shuffle(seed=1)).set_state(first.get_state())
    first.close()


def test_check_resumable(stored):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    from meshfeed.testing import check_resumable

    points = check_resumable(
        lambda: meshfeed.MultiHostDataLoadIterator(
            stored.select_columns(["id", "pair"]), mesh, global_batch_size=800, shuffle=True, num_epochs=2
        )
    )
    assert points == 8


def test_lists_of_images_of_several_sizes_reach_a_function() -> None:
    sizes = [[(3, 4), (5, 2)], [], [(3, 3), (3, 3)]]
    pillow = pytest.importorskip("PIL.Image")

    def png(size: tuple[int, int], value: int) -> dict:
        out = io.BytesIO()
        pillow.fromarray(np.full((*size, 3), value, np.uint8)).save(out, "PNG")
        return {"bytes": out.getvalue(), "path": None}

    images = [[png(size, 10 * row) for size in of_row] for row, of_row in enumerate(sizes)]
    dataset = datasets.Dataset.from_dict(
        {"tokens": [[1, 2], [3], [4, 5]], "images": images},
        features=Features({"tokens": List(Value("int32")), "images": List(datasets.Image())}),
    )

    def corners(record: dict) -> dict:
        pixels = [image[:2, :2] for image in record["images"]]
        return {"tokens": record["tokens"], "images": np.array(pixels, np.uint8).reshape(-1, 2, 2, 3)}

    stored = HuggingFace(dataset).unconverted()
    assert [[image.shape[:2] for image in stored[row]["images"]] for row in range(3)] == sizes
    row = meshfeed.sources.Packed(meshfeed.sources.Map(dataset, corners), 8, method="fit", side={"images": 5})[0]
    assert sorted(row["images"][row["images_mask"]][:, 0, 0, 0].tolist()) == [0, 0, 20, 20]
    with pytest.raises(SourceError, match="ragged"):
        HuggingFace(dataset)[0]


def test_numbers_beside_an_image_keep_their_dtypes() -> None:
    out = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (2, 3)).save(out, "PNG")
    features = Features({"pair": {"image": datasets.Image(), "n": Value("int8"), "l": List(Value("float16"))}})
    pair = {"image": {"bytes": out.getvalue(), "path": None}, "n": 1, "l": [1.0, 2.0]}
    dataset = datasets.Dataset.from_dict({"pair": [pair, pair]}, features=features)
    for source in (HuggingFace(dataset), HuggingFace(dataset).unconverted()):
        record = source[1]["pair"]
        assert [np.asarray(record[name]).dtype for name in ("image", "n", "l")] == ["uint8", "int8", "float16"]


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="datasets of before Json")
def test_json_and_dates_reach_a_function_as_they_are() -> None:
    call = {"name": "add", "arguments": {"n": 3, "exact": True, "by": 0.5, "to": [1, 2]}}
    features = Features(
        {"calls": List(datasets.Json()), "seen": {"at": Value("timestamp[s]"), "image": datasets.Image()}}
    )
    at = datetime.datetime(2026, 1, 2)
    dataset = datasets.Dataset.from_dict({"calls": [[call]], "seen": [{"at": at, "image": None}]}, features=features)
    written = []

    def write(record: dict) -> dict:
        written.append((json.dumps(record["calls"]), record["seen"]))
        return {"x": np.int32(1)}

    assert meshfeed.sources.Map(dataset, write)[0]["x"] == 1
    assert written == [(json.dumps([call]), {"at": at, "image": None})]

"""Datasets prepared by TensorFlow Datasets; those in ArrayRecord files are read without TensorFlow."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

tfds = pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")

from lane_checks import check_lanes, read_ids, restored, saved  # noqa: E402  # after the checks above

import meshfeed  # noqa: E402
from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, StateMismatchError  # noqa: E402
from meshfeed.sources import TFDS  # noqa: E402

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
N = 50


class Tiny(tfds.core.GeneratorBasedBuilder):
    """Numbered records."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # tfds would look for a checksum file beside this one

    def _info(self):
        features = {"id": np.int64, "x": tfds.features.Tensor(shape=(3,), dtype=np.float32)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, N), "test": self._generate_examples(N, N + 10)}

    def _generate_examples(self, start, stop):
        for i in range(start, stop):
            yield i, {"id": i, "x": np.full(3, i / 2, np.float32)}


def prepare(folder: Path, file_format: str) -> Tiny:
    builder = Tiny(data_dir=folder, file_format=file_format)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
    return builder


@pytest.fixture(scope="module")
def array_record(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("array_record"), "array_record")


@pytest.fixture(scope="module")
def tfrecord(tmp_path_factory):
    pytest.importorskip("tensorflow")
    return prepare(tmp_path_factory.mktemp("tfrecord"), "tfrecord")


@pytest.mark.parametrize("split", ["train", "test", "train[10:30]", "train[50%:]+test", "train[-7:]"])
def test_array_record_is_read_at_random_as_tfds_reads_it(array_record, split):
    source = TFDS(array_record, split)
    theirs = array_record.as_data_source(split)
    assert len(source) == len(theirs)
    ids = np.random.default_rng(0).permutation(len(theirs)).tolist()
    for mine, other in zip(source.__getitems__(ids), theirs.__getitems__(ids), strict=True):
        assert mine["id"] == other["id"]
        np.testing.assert_array_equal(mine["x"], other["x"])
    assert source[1]["x"].dtype == np.float32
    for wrong in (-1, len(source)):
        with pytest.raises(IndexError, match=f"{wrong} is out of range"):
            source[wrong]


def test_datasets_are_found_by_builder_name_and_folder(array_record):
    folder = Path(array_record.data_dir)
    sources = [
        TFDS(array_record, "train"),
        TFDS("tiny", "train", data_dir=folder.parents[1]),
        TFDS(folder, split="train"),
    ]
    assert len({repr(source.fingerprint()) for source in sources}) == 1
    assert TFDS(array_record, "train[:49]").fingerprint() != sources[0].fingerprint()
    assert pickle.loads(pickle.dumps(sources[0]))[7]["id"] == sources[1][7]["id"]
    assert "tiny-train.array_record-00002-of-00003" in sources[0].file_of(N - 1)


@pytest.mark.slow
def test_without_tensorflow(array_record):
    code = (
        "import sys; from meshfeed.sources import TFDS; r = TFDS(sys.argv[1], 'train')[3]; "
        "assert 'tensorflow' not in sys.modules, 'tensorflow was imported'; print(r['id'])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(array_record.data_dir)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) == TFDS(array_record, "train")[3]["id"]


def test_decode_replaces_the_features(array_record):
    sizes = TFDS(array_record, "train", decode=lambda record: {"size": np.int32(len(record))})
    assert sizes[0]["size"] > 10
    drawn = TFDS(array_record, "train", decode=lambda record, rng: {"r": rng.random()})
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with meshfeed.MultiHostDataLoadIterator(drawn, mesh, global_batch_size=16) as feed:
        assert len(np.unique(next(feed)["r"])) == 16


def test_partial_decoding_is_passed_on(array_record):
    pytest.importorskip("tensorflow")  # which tfds asks for types
    only_id = TFDS(array_record, "train", decode=tfds.decode.PartialDecoding({"id": True}))
    assert set(only_id[0]) == {"id"}


def test_through_the_feed(array_record):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    source = TFDS(array_record, "train")

    def feed():
        return meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, shuffle=True, seed=1)

    first = feed()
    batches = list(itertools.islice(first, 4))
    order = [source[i]["id"] for i in range(N)]
    for step, batch in enumerate(batches):
        assert batch["id"].tolist() == [order[i] for i in first.record_ids(step)]
    second = feed()
    second.set_state(first.get_state())
    assert next(second)["id"].tolist() == next(first)["id"].tolist()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda b: TFDS(b, "nope"), SourceError, r"no split 'nope'.*\['test', 'train'\]"),
        (lambda b: TFDS(b, None), SettingsError, "split is None"),
        (lambda b: TFDS(b, "train[10:5]+test"), SourceError, "ends before it begins"),
        (
            lambda b: TFDS("no_such_set", "train", data_dir="/nowhere"),
            SourceError,
            "no dataset 'no_such_set'.*/nowhere",
        ),
        (lambda b: TFDS(3, "train"), SourceError, "got a int"),
        (lambda b: TFDS(Path(b.data_dir).parent, "train"), SourceError, "neither the name .* dataset_info.json"),
    ],
)
def test_what_is_not_there_is_named(array_record, make, error, message):
    with pytest.raises(error, match=message):
        make(array_record)


def test_a_shard_with_another_number_of_records_than_the_dataset_lists(tmp_path):
    """The records of all shards after it would have other numbers, and a slice those of another one."""
    paths = sorted(Path(prepare(tmp_path, "array_record").data_dir).glob("*train*"))
    lengths = [len(meshfeed.sources.ArrayRecord(path)) for path in paths]
    other = lengths.index(min(lengths))
    changed = lengths.index(max(lengths))
    assert lengths[other] != lengths[changed]
    paths[changed].write_bytes(paths[other].read_bytes())
    for split in ("train", "train[:90%]+test"):
        with pytest.raises(
            CorruptDataError, match=f"has {lengths[other]} records, and tfds counts {lengths[changed]}"
        ) as error:
            TFDS(paths[0].parent, split)
        assert error.value.path == str(paths[changed])


def test_a_dataset_that_is_not_prepared(tmp_path):
    with pytest.raises(SourceError, match=r"is not prepared in .*download_and_prepare"):
        TFDS(Tiny(data_dir=tmp_path), "train")


@pytest.mark.slow
@pytest.mark.parametrize("num_lanes", [1, 2, 3, 4, 5, 12])
def test_tfrecord_lanes(tfrecord, num_lanes):
    check_lanes(TFDS(tfrecord, "train"), num_lanes, range(N), step=1 if num_lanes == 12 else 7)


@pytest.mark.parametrize("split", ["train[10:33]", "train[40%:]+test"])
def test_slices_of_tfrecord_splits(tfrecord, array_record, split):
    expected = [record["id"] for record in TFDS(array_record, split)]
    check_lanes(TFDS(tfrecord, split), 4, expected, step=5)


def test_both_formats_give_the_same_records(tfrecord, array_record):
    by_id = {int(record["id"]): record for record in TFDS(array_record, "train")}
    for record in TFDS(tfrecord, "train").open(0, 1):
        np.testing.assert_array_equal(record["x"], by_id[int(record["id"])]["x"])
        assert record["x"].dtype == by_id[int(record["id"])]["x"].dtype


@pytest.mark.parametrize("split", ["train", "train[10:33]", "train[40%:]+test"])
def test_a_split_is_ordered_by_its_files(array_record, split):
    source = TFDS(array_record, split)
    expected = [int(record["id"]) for record in source]
    lengths = source.shard_lengths()
    assert lengths.sum() == len(source)
    ends = np.cumsum(lengths)
    assert len({source.file_of(i) for i in range(len(source))}) == len(lengths)
    assert all(source.file_of(int(e) - 1) == source.file_of(int(e - n)) for e, n in zip(ends, lengths, strict=True))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    settings = {"global_batch_size": 2, "end": "pad", "mask_key": "real", "num_epochs": 1}
    with meshfeed.Feed(source, mesh, shuffle="shards", num_lanes=2, **settings) as feed:
        batches = [{name: np.asarray(leaf) for name, leaf in batch.items()} for batch in feed]
    found = [int(i) for batch in batches for i in batch["id"][batch["real"]]]
    assert sorted(found) == sorted(expected)
    assert found != expected
    parts = meshfeed.sources.random_split(source, {"a": 0.5, "b": 0.5}, by="shard")
    assert sorted(int(r["id"]) for part in parts.values() for r in part) == sorted(expected)


def test_a_dataset_in_both_formats_is_read_at_random(tfrecord, array_record, tmp_path):
    """As ``tfds convert_format`` leaves one in the folder of the other."""
    folders = []
    for part in ("a", "b"):
        folder = tmp_path / part / "tiny" / "1.0.0"
        shutil.copytree(array_record.data_dir, folder)
        shutil.copytree(tfrecord.data_dir, folder, dirs_exist_ok=True)
        info = json.loads((folder / "dataset_info.json").read_text())
        (folder / "dataset_info.json").write_text(json.dumps(info | {"alternativeFileFormats": ["array_record"]}))
        folders.append(folder)
    builder = tfds.builder_from_directory(folders[0])
    both, expected = TFDS(builder, "train[5:]+test"), TFDS(array_record, "train[5:]+test")
    assert [both[i]["id"] for i in range(len(both))] == [expected[i]["id"] for i in range(len(expected))]
    assert builder.info.file_format.name == "TFRECORD"
    several = TFDS(tfds.builder_from_directories(folders), "test")  # tfds knows other formats of one folder only
    assert sorted(read_ids(several.open(0, 1))) == sorted(2 * list(range(N, N + 10)))


def test_a_lanes_state_is_small_and_of_the_same_cut(tfrecord):
    lane = TFDS(tfrecord, "train").open(0, 2)
    next(lane)
    assert len(saved(lane)) < 100
    with pytest.raises(StateMismatchError, match=r"lanes\.0\.cut.*saved 'rows', current 'files'"):
        restored(TFDS(tfrecord, "train").open(0, 3), saved(lane))


def test_random_numbers_of_a_record_do_not_depend_on_the_lanes(tfrecord):
    source = TFDS(tfrecord, "train", decode=lambda record, rng: {"r": rng.random(), "size": len(record)})

    def numbers(num_lanes, **how):
        return sorted(r["r"] for lane in range(num_lanes) for r in source.open(lane, num_lanes, **how))

    assert numbers(1) == numbers(5)
    assert len(set(numbers(1))) == N
    assert numbers(1) != numbers(1, epoch=1) != numbers(1, seed=1)


def test_damaged_tfrecords_are_named(tmp_path):
    pytest.importorskip("tensorflow")
    builder = prepare(tmp_path, "tfrecord")
    path = sorted(Path(builder.data_dir).glob("*train*"))[1]
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:200] + b"\xff" + whole[201:]):
        path.write_bytes(content)
        lane = TFDS(builder, "train").open(1, 3)
        with pytest.raises(CorruptDataError, match=path.name) as error:
            read_ids(lane)
        assert error.value.path == str(path)
        with pytest.raises(CorruptDataError, match=path.name):
            next(lane)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        next(TFDS(builder, "train").open(1, 3))

"""tf.data pipelines as lanes."""

from __future__ import annotations

import itertools
import json
import os

import jax
import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from lane_checks import check_lanes, read_ids, restored, saved  # noqa: E402  # after the check that it is installed

import meshfeed  # noqa: E402
from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, StateMismatchError  # noqa: E402
from meshfeed.sources import TFData  # noqa: E402

N = 24
ANY_ORDER = {"num_parallel_calls": 2, "deterministic": False}


def numbers(lane_index, num_lanes):
    return tf.data.Dataset.range(N).shard(num_lanes, lane_index).map(lambda i: {"id": i})


def generator(lane_index, num_lanes):
    def records():
        for i in range(lane_index, N, num_lanes):
            yield {"id": i}

    return tf.data.Dataset.from_generator(records, output_signature={"id": tf.TensorSpec((), tf.int64)})


def python_function(lane_index, num_lanes):
    dataset = tf.data.Dataset.range(lane_index, N, num_lanes)
    return dataset.map(lambda i: {"id": tf.ensure_shape(tf.py_function(lambda j: j, [i], tf.int64), ())})


PIPELINES = {
    "map": (numbers, range(N)),
    "shuffle": (lambda i, n: numbers(i, n).shuffle(7, seed=1), range(N)),
    "shuffle, map, prefetch": (
        lambda i, n: numbers(i, n).shuffle(5, seed=1).map(dict, num_parallel_calls=2).prefetch(3),
        range(N),
    ),
    "filter": (lambda i, n: numbers(i, n).filter(lambda r: r["id"] % 3 != 0), [i for i in range(N) if i % 3]),
    "interleave": (
        lambda i, n: (
            tf.data.Dataset.range(i, N, n)
            .batch(3)
            .interleave(tf.data.Dataset.from_tensor_slices, cycle_length=2, num_parallel_calls=2)
            .map(lambda j: {"id": j})
        ),
        range(N),
    ),
    "shuffle inside, seeded random": (
        lambda i, n: (
            numbers(i, n)
            .interleave(lambda r: tf.data.Dataset.from_tensors(r).repeat(2).shuffle(2, seed=3))
            .map(lambda r: {**r, "x": tf.random.uniform((), seed=1)})
            .map(lambda r: {**r, "y": tf.random.stateless_uniform((), [1, r["id"]])}, num_parallel_calls=2)
        ),
        [*range(N), *range(N)],
    ),
    "sample": (
        lambda i, n: tf.data.Dataset.sample_from_datasets([numbers(i, n), numbers(i, n)], seed=4),
        [*range(N), *range(N)],
    ),
    "repeat": (lambda i, n: numbers(i, n).repeat(2), [*range(N), *range(N)]),
    "generator": (generator, range(N)),
    "python function": (python_function, range(N)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PIPELINES))
def test_pipelines(name):
    open_lane, expected = PIPELINES[name]
    # A pipeline takes 20 ms to open: not every pipeline with every number of lanes.
    many = 12 if name in ("shuffle", "generator") else 3
    for num_lanes, step in ((1, 7), (many, 2)):
        check_lanes(TFData(open_lane), num_lanes, expected, step=step)


@pytest.mark.slow
@pytest.mark.parametrize("num_lanes", [2, 3, 4, 5])
def test_other_numbers_of_lanes(num_lanes):
    check_lanes(TFData(numbers), num_lanes, range(N), step=4)


def test_records_are_numpy_with_their_dtypes():
    def open_lane(lane_index, num_lanes):
        x = np.arange(12, dtype=np.float32).reshape(4, 3)
        return tf.data.Dataset.from_tensor_slices((x, {"b": x > 4, "h": tf.cast(x, tf.bfloat16)}))

    record = next(TFData(open_lane).open(0, 1))
    assert [(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(record)] == [
        ("float32", (3,)),
        ("bool", (3,)),
        ("bfloat16", (3,)),
    ]


def test_what_cannot_be_checkpointed_says_so_once_and_has_a_small_state(caplog):
    lane = TFData(generator).open(0, 1)
    with caplog.at_level("INFO", "meshfeed"):
        states = [saved(lane) for _ in itertools.islice(lane, 5)]
    assert len([message for message in caplog.messages if "cannot be checkpointed" in message]) == 1
    assert all(json.loads(state)["checkpoint"] is None for state in states)
    assert len(states[-1]) < 200


@pytest.mark.parametrize("open_lane", [generator, python_function])
def test_a_state_from_after_the_end_of_what_cannot_be_checkpointed_is_read_again(open_lane, caplog):
    source = TFData(lambda i, n: open_lane(i, n).batch(N).unbatch())
    for count in (N - 1, N):
        lane = source.open(0, 1)
        assert read_ids(itertools.islice(lane, count)) == list(range(count))
        state = saved(lane)  # the generator or function has ended; the step after it has not
        with caplog.at_level("INFO", "meshfeed"):
            assert read_ids(restored(source.open(0, 1), state)) == read_ids(lane)


def test_epoch_and_seed_are_passed_to_those_who_take_them():
    def open_lane(lane_index, num_lanes, epoch, seed=None):
        return tf.data.Dataset.from_tensors({"id": [lane_index, num_lanes, epoch, seed]})

    assert read_ids(TFData(open_lane).open(1, 4, epoch=2, seed=9)) == [1, 4, 2, 9]
    assert read_ids(TFData(numbers).open(0, 20, epoch=2, seed=9)) == [0, 20]


@pytest.mark.parametrize(
    ("open_lane", "message"),
    [
        (lambda i, n: numbers(i, n).shuffle(10), r"shuffle\(\) without a seed"),
        (lambda i, n: numbers(i, n).shuffle(10).map(dict).prefetch(1), r"shuffle\(\) without a seed"),
        (
            lambda i, n: numbers(i, n).interleave(lambda r: tf.data.Dataset.range(9).shuffle(3)),
            r"shuffle\(\) without a seed in the function of interleave\(\)",
        ),
        (
            lambda i, n: tf.data.Dataset.sample_from_datasets([numbers(i, n)] * 2),
            r"sample_from_datasets\(\).*without a seed",
        ),
        (lambda i, n: numbers(i, n).map(lambda r: tf.random.uniform(())), r"tf\.random .*without a seed in .*map\(\)"),
        (
            lambda i, n: numbers(i, n).map(lambda r: tf.random.uniform((), seed=1), num_parallel_calls=2),
            r"tf\.random .*map\(\) with num_parallel_calls",
        ),
        *(
            (open_lane, rf"a {name}.* with deterministic=False.*parallel steps without")
            for name, open_lane in {
                r"map\(\)": lambda i, n: numbers(i, n).map(dict, **ANY_ORDER).prefetch(2),
                r"batch\(\)": lambda i, n: numbers(i, n).batch(2, **ANY_ORDER),
                r"interleave\(\)": lambda i, n: numbers(i, n).interleave(
                    lambda r: tf.data.Dataset.from_tensors(r["id"]), **ANY_ORDER
                ),
            }.items()
        ),
        (
            lambda i, n: numbers(i, n).flat_map(lambda r: tf.data.Dataset.range(3).map(abs, **ANY_ORDER)),
            r"step with deterministic=False in the function of flatmap\(\)",
        ),
        (lambda i, n: iter([1]), "returned a list_iterator"),
        (lambda i, n: None, "returned a NoneType"),
    ],
)
def test_what_is_no_exact_pipeline_is_refused(open_lane, message):
    with pytest.raises(SourceError, match=message) as error:
        TFData(open_lane).open(3, 4)
    assert error.value.lane_index == 3
    with pytest.raises(SourceError, match="got a _RangeDataset"):
        TFData(tf.data.Dataset.range(3))


def test_tensors_without_an_array_form_are_refused():
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[[1], [2, 3]]]))
    with pytest.raises(SourceError, match=r"holds a RaggedTensor.*to_tensor\(\)"):
        next(TFData(lambda i, n: ragged).open(0, 1))


def test_another_pipeline_is_refused():
    lane = TFData(numbers).open(1, 2)
    next(lane)
    for other in (lambda i, n: numbers(i, n).prefetch(2), lambda i, n: tf.data.Dataset.range(N).shard(n, i)):
        with pytest.raises(StateMismatchError, match=r"lanes\.1\.pipeline"):
            restored(TFData(other).open(1, 2), saved(lane))


def test_data_that_became_shorter_is_an_error():
    lane = TFData(generator).open(0, 1)
    for _ in range(20):
        next(lane)
    short = TFData(lambda i, n: generator(i, n).take(15)).open(0, 1)
    state = {**lane.get_state(), "pipeline": short.get_state()["pipeline"]}
    with pytest.raises(SourceError, match="ended after 15 of the 20 records"):
        short.set_state(state)


def test_a_damaged_checkpoint_is_refused():
    lane = TFData(numbers).open(0, 1)
    next(lane)
    state = lane.get_state()
    other = TFData(PIPELINES["shuffle"][0]).open(0, 1)
    next(other)
    mixed = {**state, "checkpoint": other.get_state()["checkpoint"]}
    with pytest.raises(StateMismatchError, match=r"lanes\.0\.checkpoint.*same version of TensorFlow"):
        TFData(numbers).open(0, 1).set_state(mixed)


def test_after_one_error_the_iterator_is_never_called_again():
    def fail(i):
        if int(i) == 3:
            raise ValueError("no such image")
        return i

    def open_lane(lane_index, num_lanes):
        return tf.data.Dataset.range(9).map(lambda i: {"id": tf.py_function(fail, [i], tf.int64)})

    lane = TFData(open_lane).open(0, 1)
    assert [int(next(lane)["id"]) for _ in range(3)] == [0, 1, 2]
    for _ in range(3):  # tf.data itself would go on with record 4
        with pytest.raises(tf.errors.InvalidArgumentError, match="no such image") as error:
            next(lane)
    assert error.value.__cause__ is None  # tools that follow causes would loop on an error that is its own


@pytest.mark.parametrize("shared", [True, False])
def test_a_shuffle_shared_by_lanes_is_refused(shared):
    base = tf.data.Dataset.range(N).map(lambda i: {"id": i})
    shuffled = base.shuffle(N, seed=1)
    fixed = base.shuffle(N, seed=1, reshuffle_each_iteration=False)
    if shared:
        with pytest.raises(SourceError, match=r"share a shuffle.*inside open"):
            TFData(lambda i, n: shuffled.shard(n, i)).open(0, 2)
    else:
        check_lanes(TFData(lambda i, n: fixed.shard(n, i)), 2, range(N), step=9)
        check_lanes(TFData(lambda i, n: base.shuffle(N, seed=1).shard(n, i)), 2, range(N), step=9)


@pytest.mark.parametrize("anew", [True, False])
def test_samples_drawn_anew_by_each_lane_are_refused(anew):
    base = tf.data.Dataset.range(N).map(lambda i: {"id": i})
    parts = [base.take(9), base.skip(9)]
    sampled = tf.data.Dataset.sample_from_datasets(parts, seed=4, rerandomize_each_iteration=anew)
    source = TFData(lambda i, n: sampled.shard(n, i))
    if anew:
        with pytest.raises(SourceError, match=r"share a shuffle\(\) or sample_from_datasets\(\).*inside open"):
            source.open(0, 2)
    else:
        check_lanes(source, 2, range(N), step=9)


def test_what_cannot_open_lanes_or_identify_data_is_refused_at_once():
    with pytest.raises(
        SourceError, match=r"TFData got .*\(lane_index\), which cannot be called as open\(lane_index, num"
    ):
        TFData(lambda lane_index: None)
    with pytest.raises(SettingsError, match="fingerprint of TFData is a set that is not JSON") as error:
        TFData(numbers, fingerprint={1})
    assert error.value.setting == "fingerprint"
    assert TFData(numbers, fingerprint=["a"]).fingerprint() == {"kind": "tf.data", "given": ["a"]}


def test_a_running_lane_is_set_back():
    lane = TFData(PIPELINES["shuffle"][0]).open(0, 1)
    start = saved(lane)
    first = read_ids(lane)
    assert read_ids(restored(lane, start)) == first


def test_damaged_files_are_corrupt_data(tmp_path):
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(20):
            writer.write(np.int64(i).tobytes())
    content = bytearray(open(path, "rb").read())  # noqa: SIM115
    content[130] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(content)
    lane = TFData(lambda i, n: tf.data.TFRecordDataset(path)).open(2, 3)
    with pytest.raises(CorruptDataError, match=r"lane 2 of tf\.data read damaged data"):
        list(lane)


@pytest.mark.slow
def test_through_the_feed():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def feed():
        source = TFData(PIPELINES["shuffle"][0])
        return meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, num_lanes=4, num_epochs=2)

    first = feed()
    batches, states = [], [first.get_state()]
    for batch in first:
        batches.append(batch["id"].tolist())
        states.append(first.get_state())
    assert len(batches) == 6
    assert sorted(itertools.chain(*batches)) == sorted([*range(N), *range(N)])
    for point in (0, 3, 5, 6):
        second = feed()
        second.set_state(json.loads(json.dumps(states[point])))
        assert [batch["id"].tolist() for batch in second] == batches[point:]
        second.close()
    first.close()

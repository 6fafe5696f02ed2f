"""Design's table of bad input: each answer names what is wrong and what to do."""

from __future__ import annotations

import json
import pathlib
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed


def rows_sharding() -> NamedSharding:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, P("data"))


def make_feed(source: Any = None, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    options.setdefault("global_batch_size", 16)
    source = {"x": np.zeros((64, 2), np.float32)} if source is None else source
    return meshfeed.MultiHostDataLoadIterator(source, rows_sharding(), **options)


class Records:
    """Random access over a function of the record id."""

    def __init__(self, record: Any, count: int = 64) -> None:
        self._record, self._count = record, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record_id: int) -> Any:
        return self._record(record_id)

    def fingerprint(self) -> str:
        return "records"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("global_batch_size", 0),
        ("global_batch_size", -1),
        ("global_batch_size", 1.5),
        ("global_batch_size", True),
        ("global_batch_size", "16"),
        ("shuffle", -1),
        ("shuffle", 0.5),
        ("shuffle", "yes"),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("num_epochs", 0),
        ("num_epochs", True),
        ("end", "keep"),
        ("end", None),
        ("mask_key", ""),
        ("mask_key", "mask"),  # with end="drop"
        ("num_lanes", 0),
        ("num_lanes", 4),  # of a random-access source
        ("load", "twice"),
        ("load", []),
        ("load", [0, 0]),
        ("load", [7]),
        ("load", 3),
        ("prefetch", -1),
        ("prefetch", 1.0),
        ("num_workers", -1),
        ("num_threads", 0),
        ("retry", 3),
        ("bad_records", 0.1),
        ("check_replicas", 1),
        ("timeout_seconds", 0),
        ("timeout_seconds", float("inf")),
        ("name", ""),
        ("name", "a/b"),
    ],
)
def test_a_wrong_setting_names_the_keyword_and_what_it_takes(setting: str, value: Any) -> None:
    with pytest.raises(meshfeed.SettingsError) as info:
        make_feed(**{setting: value})
    assert setting in str(info.value)
    assert info.value.setting == setting
    assert isinstance(info.value, ValueError)


@pytest.mark.parametrize(
    ("setting", "value", "takes"),
    [
        ("load", "twice", "a list of distinct process indices that read for all"),
        ("retry", None, r"Retry\(attempts=1\) disables retries"),
        ("timeout_seconds", float("inf"), "a finite number of seconds above 0"),
    ],
)
def test_the_message_has_every_way_out(setting: str, value: Any, takes: str) -> None:
    with pytest.raises(meshfeed.SettingsError, match=takes):
        make_feed(**{setting: value})


def test_a_bare_array_is_not_called_a_leaf_without_a_name() -> None:
    with pytest.raises(meshfeed.SourceError, match="Memory's array has dtype object"):
        meshfeed.sources.Memory(np.array(["a", None], object))


def test_an_iterator_of_records_is_told_from_one_of_batches() -> None:
    with pytest.raises(meshfeed.SourceError, match=r"with rows first\. If these are single records, pass the dataset"):
        next(make_feed(iter([{"x": np.int32(1)}] * 16)))


@pytest.mark.parametrize("record", [np.int32(1), np.zeros(5), np.zeros(17), "text"])
def test_a_generator_of_records_is_told_to_use_stream(record: Any) -> None:
    with make_feed(record for _ in range(64)) as feed, pytest.raises(meshfeed.SourceError) as info:
        next(feed)
    assert "wrap it in sources.Stream: meshfeed.sources.Stream(lambda lane_index, num_lanes: itertools" in str(
        info.value
    )


def test_so_is_one_whose_first_record_sets_the_batch_size() -> None:
    with pytest.raises(
        meshfeed.PlanError, match=r"If this is a single record, pass its source as a meshfeed\.sources\.Stream"
    ):
        next(make_feed((np.zeros(5) for _ in range(64)), global_batch_size=None))


def test_batches_that_change_later_are_not_taken_for_records() -> None:
    batches = (np.zeros(16 if step != 1 else 5) for step in range(3))
    with make_feed(batches) as feed:
        next(feed)
        with pytest.raises(meshfeed.SourceError, match="host batch 1 has 5 rows") as info:
            next(feed)
    assert "Stream" not in str(info.value)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'batch_size'; did you mean global_batch_size=\?"):
        make_feed(batch_size=3)


def test_an_unknown_keyword_of_a_method_names_the_feed() -> None:
    with make_feed() as feed:
        with pytest.raises(TypeError, match=r"^Feed\.record_ids\(\) got an unexpected keyword.*did you mean step=\?"):
            feed.record_ids(steps=1)
        with pytest.raises(TypeError, match=r"^Feed\.set_state\(\) got an unexpected keyword"):
            feed.set_state(position=1)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("shufle", "shuffle"),
        ("random_seed", "seed"),
        ("epochs", "num_epochs"),
        ("lanes", "num_lanes"),
        ("workers", "num_workers"),
        ("num_thread", "num_threads"),
        ("retries", "retry"),
        ("bad_record", "bad_records"),
        ("timeout", "timeout_seconds"),
        ("worker_count", "num_workers"),
        ("read_options", "num_threads"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"'{given}'; did you mean {meant}=\?"):
        make_feed(**{given: 1})


def test_an_unknown_keyword_without_a_near_one_lists_all() -> None:
    with pytest.raises(TypeError, match=r"'verbose'; it takes .*global_batch_size, .*end, .*name\."):
        make_feed(verbose=True)
    with pytest.raises(TypeError, match=r"RemoteFeed\(\) got .*'batch_size'; did you mean global_batch_size=\?"):
        meshfeed.remote.RemoteFeed(dict, rows_sharding(), batch_size=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("drop_last", 'pass end="drop" or end="pad"'),
        ("num_replicas", "leave it out: the sharding divides the rows among the hosts"),
        ("shard_options", "leave it out: the sharding divides the rows among the hosts"),
        ("shuffle_seed", "pass seed=; a function that draws random numbers takes them from its parameter rng"),
        ("collate_fn", "records must have one shape: change records in the source"),
        ("pin_memory", "leave it out: batches arrive on the devices"),
    ],
)
def test_a_keyword_of_another_loader_is_answered_by_what_to_do_here(given: str, answer: str) -> None:
    for make in (make_feed, lambda **options: meshfeed.remote.RemoteFeed(dict, rows_sharding(), **options)):
        with pytest.raises(TypeError, match=f"keyword argument '{given}'; .*{re.escape(answer)}"):
            make(**{given: 1})


def test_sources_suggest_keywords_too() -> None:
    for call, message in (
        (
            lambda: meshfeed.sources.Parquet("a.parquet", column=["x"]),
            r"Parquet\(\) .*'column'; did you mean columns=\?",
        ),
        (lambda: meshfeed.sources.Map([1], int, batch=True), r"Map\(\) .*'batch'; did you mean batched=\?"),
        (lambda: meshfeed.sources.Tokens("a", length=8), r"'length'; did you mean sequence_length=\?"),
        (
            lambda: meshfeed.checkpoint.Checkpointer.save(None, 1, state={}),  # type: ignore[arg-type,call-arg]
            r"save\(\) .*'state'; did you mean train_state=\?",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_data_in_place_of_a_function_is_not_shown_whole() -> None:
    data: Any = {"x": np.arange(1_000)}
    for call in (
        lambda: meshfeed.remote.RemoteFeed(data, rows_sharding(), global_batch_size=8),
        lambda: meshfeed.testing.check_resumable(data),
        lambda: meshfeed.testing.run_hosts(data, 2),
        lambda: meshfeed.monitoring.prometheus(data),
    ):
        with pytest.raises(meshfeed.MeshfeedError, match=r"^\w+={'x': array\(") as error:
            call()
        assert len(str(error.value)) < 400


def test_an_argument_by_position_that_has_a_name_is_a_type_error() -> None:
    message = (
        r"takes 2 arguments by position \(source, sharding\), but 3 were given; pass the others by name, such as global"
    )
    with pytest.raises(TypeError, match=message):
        meshfeed.Feed([1], rows_sharding(), 8)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'sharding'"):
        meshfeed.Feed([1])  # type: ignore[call-arg]


@pytest.mark.parametrize("stages", [[], [(1, 8)], [(0, 8), (0, 16)], [(0, 0)], [(0, 8), (5, True)], [8], "08"])
def test_a_wrong_batch_schedule_says_what_it_takes(stages: Any) -> None:
    with pytest.raises(meshfeed.SettingsError, match="first_step"):
        meshfeed.BatchSchedule(stages)


@pytest.mark.parametrize(
    "make",
    [
        lambda: meshfeed.Retry(attempts=0),
        lambda: meshfeed.Retry(initial_seconds=-1),
        lambda: meshfeed.Retry(max_seconds=float("nan")),
        lambda: meshfeed.Retry(on=("OSError",)),  # type: ignore[arg-type]
        lambda: meshfeed.Retry(on=5),  # type: ignore[arg-type]
        lambda: meshfeed.SkipBad(0),
        lambda: meshfeed.SkipBad(1.5),
        lambda: meshfeed.SkipBad(True),
    ],
)
def test_small_settings_check_themselves(make: Any) -> None:
    with pytest.raises(meshfeed.SettingsError, match="it takes"):
        make()


def test_global_batch_size_missing_says_who_needs_it() -> None:
    with pytest.raises(meshfeed.SettingsError, match="global_batch_size is missing"):
        make_feed(global_batch_size=None)


@pytest.mark.parametrize("sharding", [None, "data", P("data"), {"x": 3}])
def test_a_wrong_sharding_is_a_settings_error(sharding: Any) -> None:
    with pytest.raises(meshfeed.SettingsError, match="sharding"):
        meshfeed.MultiHostDataLoadIterator({"x": np.zeros((64, 2))}, sharding, global_batch_size=16)


@pytest.mark.parametrize("spec", [None, P("data"), P()])
def test_a_mesh_without_devices_is_a_plan_error(spec: P | None) -> None:
    mesh = Mesh(np.empty((0, 2), object), ("data", "model"))
    sharding = mesh if spec is None else NamedSharding(mesh, spec)
    with pytest.raises(meshfeed.PlanError, match=r"mesh without devices, of shape \{'data': 0, 'model': 2\}"):
        meshfeed.Feed({"x": np.zeros((64, 2))}, sharding, global_batch_size=16)


def test_a_made_up_mesh_has_devices() -> None:
    with pytest.raises(meshfeed.SettingsError, match="mesh axis 'data' has size 0"):
        meshfeed.testing.fake_mesh({"data": 0}, 1, 1)


def test_a_batch_that_the_mesh_cannot_divide_names_axis_batch_and_sizes_that_work() -> None:
    with pytest.raises(meshfeed.PlanError) as info:
        make_feed(global_batch_size=20)
    text = str(info.value)
    assert all(part in text for part in ("data", "8", "20", "16", "24")), text


def test_a_column_that_the_mesh_cannot_divide_names_the_leaf() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    feed = meshfeed.MultiHostDataLoadIterator(
        {"x": np.zeros((64, 6), np.float32)}, NamedSharding(mesh, P("data", "seq")), global_batch_size=16
    )
    with feed, pytest.raises(meshfeed.PlanError, match=r"\['x'\]"):
        next(feed)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (lambda i: {"a": {"text": "hello"}}, ["['a']['text']", "str", "record", "()"]),
        (lambda i: {"a": b"bytes"}, ["['a']", "bytes", "decode"]),
        (lambda i: b"bytes", ["bytes", "decode"]),
        (lambda i: {"a": np.array([object()])}, ["['a']", "object", "(1,)"]),
        (lambda i: {"a": np.array(["x", "y"])}, ["['a']", "<U1", "(2,)"]),
        (lambda i: {"a": np.array("2020-01-01", "datetime64[D]")}, ["['a']", "datetime64"]),
        (lambda i: {"a": np.longdouble(i)}, ["['a']", str(np.dtype(np.longdouble)), "record", "()"]),
        (lambda i: {"a": jax.random.key(i)}, ["['a']", "key<fry>", "record", "()"]),
        (lambda i: {}, ["no leaves"]),
        (lambda i: [1, 2] if i != 4 else (1, 2), ["record 4", "([*, *])", "((*, *))"]),
        (lambda i: {"a": np.zeros(3 + (i == 5))}, ["ragged", "['a']", "record 5", "(4,)", "(3,)"]),
        (
            lambda i: {"a": np.zeros(3, np.float32 if i == 7 else np.float64)},
            ["['a']", "record 7", "float32", "float64"],
        ),
        (lambda i: [1, 2, 3][: 2 + (i == 4)], ["ragged rows", "record 4", "[2] int64"]),
        (lambda i: {"a": [1, 2, 3][: 2 + (i == 4)], "b": 1}, ["ragged rows", "record 4", "['a'][2]"]),
        (lambda i: {"a": np.array([[1, 2], [3]], object)}, ["ragged rows", "['a']", "2 lists of unequal lengths"]),
        (lambda i: {"a": 1} if i != 9 else {"b": 1}, ["['a']", "['b']", "record 9"]),
        (lambda i: {"a": 2**40 + i}, ["['a']", "int64"]),
        (
            lambda i: {"a": np.rec.array((i, 2.0), dtype=[("n", "i4"), ("x", "f4")])},
            ["['a']", "record 0", "('n', '<i4')"],
        ),
        (lambda i: {"a": 1} if i != 9 else {"a": 1, 2: 1}, ["record 9", "['a', 2]", "sorted"]),
        (lambda i: {"a": 1, 2: 1}, ["record 0", "['a', 2]", "sorted"]),
    ],
)
def test_records_that_cannot_be_batched_name_leaf_dtype_shape_and_record(
    record: Any, parts: list[str], prefetch: int
) -> None:
    with make_feed(Records(record), prefetch=prefetch) as feed:
        for _ in range(2):
            with pytest.raises(meshfeed.SourceError) as info:
                next(feed)
            assert all(part in str(info.value) for part in parts), str(info.value)


def test_keys_that_cannot_be_sorted_are_refused_wherever_records_come_from() -> None:
    class Batches(Records):
        def read_batch(self, record_ids: np.ndarray) -> Any:
            return {"a": record_ids, 2: record_ids}

    with pytest.raises(meshfeed.SourceError, match=r"\['a', 2\]"):
        make_feed({"a": np.zeros(64), 2: np.zeros(64)})
    with pytest.raises(meshfeed.SourceError, match=r"\['a', 2\]"):
        meshfeed.sources.Memory({"a": np.zeros(64), 2: np.zeros(64)})
    with pytest.raises(meshfeed.SourceError, match=r"\['tokens', 2\]"):
        meshfeed.sources.Packed(Records(lambda i: {"tokens": np.ones(4, np.int32), 2: np.ones(4)}), 8)
    for source in (Batches(None), iter([{"a": np.zeros(16), 2: np.zeros(16)}])):
        with make_feed(source) as feed, pytest.raises(meshfeed.SourceError, match=r"\['a', 2\]"):
            next(feed)


def test_a_scalar_batch_leaf_of_host_batches_is_refused_by_name() -> None:
    with make_feed(iter([{"x": np.float32(1), "y": np.zeros(16)}])) as feed, pytest.raises(meshfeed.SourceError):
        next(feed)


def test_64_bit_integers_are_narrowed_where_every_value_fits() -> None:
    with make_feed(Records(lambda i: {"a": np.int64(i - 32), "b": np.uint64(i), "c": np.float64(i)})) as feed:
        batch = next(feed)
        assert (batch["a"].dtype, batch["b"].dtype, batch["c"].dtype) == (np.int32, np.uint32, np.float32)
        assert np.asarray(batch["a"]).tolist() == list(range(-32, -16))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_64_bit_integer_that_does_not_fit_is_named_and_never_wraps(value: int) -> None:
    with make_feed(Records(lambda i: {"a": np.int64(value if i == 20 else 0)})) as feed:
        next(feed)
        with pytest.raises(meshfeed.SourceError) as info:
            next(feed)
    assert "['a']" in str(info.value)
    assert str(value) in str(info.value)


@pytest.mark.parametrize("source", [[], {"x": np.zeros((0, 2))}, Records(lambda i: i, 0)])
def test_an_empty_source_is_an_error(source: Any) -> None:
    with pytest.raises(meshfeed.SourceError, match=r"0 records|empty|no rows"):
        make_feed(source)


def test_stop_iteration_inside_a_read_is_an_error_and_not_the_end() -> None:
    def record(record_id: int) -> dict[str, Any]:
        if record_id == 20:
            raise StopIteration
        return {"a": record_id}

    with make_feed(Records(record)) as feed:
        next(feed)
        with pytest.raises(meshfeed.SourceError, match="StopIteration") as info:
            next(feed)
        assert info.value.record_id == 20


class Stops:
    """Batches of 16 rows, or records, that may be read again; one method raises StopIteration where no data ends."""

    def __init__(self, method: str, shape: tuple[int, ...] = ()) -> None:
        self.method, self.shape, self.at, self.passes = method, shape, 0, 0

    def _check(self, method: str) -> None:
        if method == self.method:
            raise StopIteration

    def __iter__(self) -> Stops:
        self.passes += 1
        if self.passes > 2:  # the first call finds out whether the iterable is an iterator
            self._check("__iter__")
        self.at = 0
        return self

    def __next__(self) -> np.ndarray:
        if self.at == 32:
            raise StopIteration
        self.at += 1
        return np.full(self.shape, self.at, np.int32)

    def get_state(self) -> int:
        if self.at:
            self._check("get_state")
        return self.at

    def set_state(self, state: int) -> None:
        self._check("set_state")
        self.at = state

    def close(self) -> None:
        self._check("close")


@pytest.mark.parametrize("num_threads", [None, 2])
@pytest.mark.parametrize("method", ["get_state", "close"])
def test_stop_iteration_of_a_lane_where_no_data_ends_is_an_error(method: str, num_threads: int | None) -> None:
    source = meshfeed.sources.Stream(lambda lane_index, num_lanes: Stops(method))
    feed = make_feed(source, num_lanes=2, num_epochs=2, num_threads=num_threads)
    with feed, pytest.raises(meshfeed.SourceError, match=r"lane \d raised StopIteration outside of next\(\)") as info:
        list(feed)
    assert info.value.lane_index in (0, 1)


def test_a_generator_has_one_epoch() -> None:
    with pytest.raises(meshfeed.SettingsError, match="can be read only once") as info:
        make_feed(({"x": np.zeros(16)} for _ in range(4)), num_epochs=2)
    assert info.value.setting == "num_epochs"
    with make_feed(({"x": np.zeros(16)} for _ in range(4)), num_epochs=None) as feed:  # one that may never end
        next(feed)


def test_an_error_that_skip_bad_does_not_cover_says_which_it_does() -> None:
    def decode(record: dict[str, Any]) -> Any:
        return record["label"] if record["x"] == 3 else record

    source = meshfeed.sources.Map({"x": np.arange(64)}, decode)
    with make_feed(source, bad_records=meshfeed.SkipBad(0.5)) as feed, pytest.raises(KeyError) as info:
        next(feed)
    assert any(
        "replaces only damaged records and those whose decoder raises ValueError" in note
        for note in info.value.__notes__
    )
    with make_feed(source) as feed, pytest.raises(KeyError) as info:
        next(feed)
    assert not any("bad_records" in note for note in info.value.__notes__)


def test_a_record_with_other_keys_has_one_error() -> None:
    source = Records(lambda record_id: {"y" if record_id == 3 else "x": record_id})
    with (
        make_feed(source) as feed,
        pytest.raises(meshfeed.SourceError, match=r"record 3 has the leaves \['y'\]") as info,
    ):
        next(feed)
    assert info.value.__suppress_context__


@pytest.mark.parametrize("method", ["get_state", "set_state", "__iter__"])
def test_stop_iteration_of_host_batches_where_no_data_ends_is_an_error(method: str) -> None:
    batches = meshfeed.sources.HostBatches(Stops(method, (16,)))
    feed = make_feed(batches, global_batch_size=None, num_epochs=2)
    with feed, pytest.raises(meshfeed.SourceError, match="raised StopIteration outside of __next__"):
        list(feed)


@pytest.mark.parametrize("record_ids", [[1.5], ["1"], [True], [[0, 1]], None, "1"])
def test_read_takes_record_ids_and_nothing_that_only_looks_like_them(record_ids: Any) -> None:
    with make_feed() as feed, pytest.raises(meshfeed.SettingsError, match="record ids") as info:
        feed.read(record_ids)
    assert info.value.setting == "record_ids"


@pytest.mark.parametrize("step", [1.5, "1", True, None])
@pytest.mark.parametrize("method", ["record_ids", "replay"])
def test_a_step_is_an_int(method: str, step: Any) -> None:
    with make_feed() as feed, pytest.raises(meshfeed.SettingsError) as info:
        getattr(feed, method)(step)
    assert str(info.value).startswith(f"{method}({step!r}); it takes an int of at least 0.")
    assert info.value.setting == "step"


def test_settings_may_be_numpy_numbers() -> None:
    options: dict[str, Any] = {
        "global_batch_size": np.int64(16),
        "shuffle": np.bool_(True),
        "seed": np.uint64(3),
        "num_epochs": np.int8(2),
        "prefetch": np.int32(1),
        "check_replicas": np.bool_(False),
        "timeout_seconds": np.float32(20),
    }
    with make_feed(**options) as feed:
        next(feed)
        config = json.loads(json.dumps(feed.config()))
        assert (config["shuffle"], config["name"]) == (True, feed.name)
        plain = make_feed(shuffle=True, seed=3, num_epochs=2)
        plain.set_state(json.loads(json.dumps(feed.get_state())))
        plain.close()


def test_mask_key_must_be_new_and_records_dicts() -> None:
    with make_feed(end="pad", mask_key="x") as feed, pytest.raises(meshfeed.SourceError, match="already"):
        next(feed)
    with (
        make_feed(Records(lambda i: np.float32(i)), end="pad", mask_key="x") as feed,
        pytest.raises(meshfeed.SourceError, match="dict"),
    ):
        next(feed)


def test_structures_that_differ_in_more_than_the_length_of_a_list_are_not_called_ragged() -> None:
    for record in (lambda i: {"a": [1, 2]} if i else {"b": [1]}, lambda i: (1, 2, 3)[: 2 + (i == 3)]):
        with make_feed(Records(record)) as feed, pytest.raises(meshfeed.SourceError) as info:
            next(feed)
        assert "ragged" not in str(info.value)


def test_ragged_lists_of_a_lane_and_of_memory_are_called_ragged() -> None:
    stream = meshfeed.sources.Stream(lambda lane, lanes: (np.zeros(2 + (i == 20)) for i in range(64)))
    with make_feed(stream, num_lanes=1) as feed, pytest.raises(meshfeed.SourceError, match="ragged rows"):
        for _ in feed:
            pass
    with pytest.raises(
        meshfeed.SourceError, match=r"ragged rows: Memory's leaf \['x'\] holds lists of unequal lengths"
    ):
        meshfeed.sources.Memory({"x": np.array([[1, 2], [3]], object)})


READERS = {
    "x.parquet": "meshfeed.sources.Parquet(",
    "x.npy": "meshfeed.sources.Memory(numpy.load(",
    "x.bin": "meshfeed.sources.Tokens(",
    "x.idx": "meshfeed.sources.Tokens(",
    "x.tar": "meshfeed.sources.WebDataset(",
    "shard.00000.mds": "meshfeed.sources.MDS(folder)",
    "x.mds.zstd": "meshfeed.sources.MDS(folder)",
    "x.tfrecord-00000-of-00002": "or convert it with meshfeed convert",
    "x.jsonl.gz": "datasets.load_dataset('json', data_files=",
    "x.csv": "datasets.load_dataset('csv', data_files=",
    "x.jpeg": "meshfeed.sources.Map(meshfeed.sources.Folder(folder), decode)",
}


@pytest.mark.parametrize(("name", "reader"), READERS.items())
def test_a_file_that_another_source_reads_names_it(name: str, reader: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"not ArrayRecord " * 40)
    for call in (
        lambda: meshfeed.sources.ArrayRecord(path),
        lambda: make_feed(path),
        lambda: make_feed(str(path)),
        lambda: make_feed([str(path)]),
        lambda: meshfeed.sources.Mixture({"a": str(path)}, weights={"a": 1}),
        lambda: meshfeed.sources.Memory(str(path)),
        lambda: meshfeed.sources.HostBatches(str(path)),
        lambda: meshfeed.sources.Stream(str(path)),  # type: ignore[arg-type]
        lambda: meshfeed.sources.Grain(str(path)),
        lambda: meshfeed.sources.TensorStore(str(path), window=1),
    ):
        with pytest.raises(meshfeed.SourceError) as info:
            call()
        assert reader in str(info.value), str(info.value)


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["cat/0.jpeg"], "It is a folder: pass meshfeed.sources.Map(meshfeed.sources.Folder('{folder}'), decode), where "
         "decode turns a record, the path and bytes of a file, into arrays (meshfeed.sources.DecodeImage decodes the bytes "
         "of an image)."),
        (["a.unknown"], "It is a folder: pass meshfeed.sources.Map(meshfeed.sources.Folder('{folder}'), decode), where "
         "decode turns a record, the path and bytes of a file, into arrays."),
        (["README", "index.json", "shard.00000.mds"], "It is a folder, with a shard of Mosaic Streaming in it: pass "
         "meshfeed.sources.MDS(folder), with the folder of its index.json."),
        (["x-0.jsonl"], "It is a folder, with a JSON file in it: pass datasets.load_dataset('json', "
         "data_files='{folder}/*.jsonl', split='train')."),
        (["deep/er/x-0.parquet"], "It is a folder, with a Parquet file in it: pass "
         "meshfeed.sources.Parquet('{folder}/deep/er/*.parquet')."),
        (["data-0.arrow", "dataset_info.json", "state.json"], "It is a dataset that save_to_disk wrote: pass "
         "datasets.load_from_disk('{folder}')."),
        ([], "Pass a source such as meshfeed.sources.ArrayRecord(path), or a dataset of Grain, Hugging Face or TFDS opened "
         "on it."),
    ],
)  # fmt: skip
def test_a_folder_names_what_reads_its_files(names: list[str], remedy: str, tmp_path: pathlib.Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(meshfeed.SourceError) as info:
        make_feed(tmp_path)
    assert str(info.value) == (
        f"got the path {str(tmp_path)!r} as a source, and a feed reads records, not paths. "
        f"{remedy.replace('{folder}', str(tmp_path))}"
    )


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (meshfeed.sources.Parquet, "x.parquet"),
        (meshfeed.sources.WebDataset, "x.tar"),
        (lambda path: meshfeed.sources.Tokens(path, sequence_length=8), "x.npy"),
    ],
)
def test_sources_of_other_formats_name_the_reader_too(
    make: Callable[[pathlib.Path], object], own: str, tmp_path: pathlib.Path
) -> None:
    for name in ("x.csv", "x.jsonl", own):
        path = tmp_path / name
        path.write_bytes(b"of another format " * 40)
        with pytest.raises(meshfeed.SourceError) as info:
            make(path)
        assert ("Its name suggests" in str(info.value)) == (name != own), str(info.value)


def test_so_does_a_file_behind_a_url(tmp_path: pathlib.Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe_file("/named/x.parquet", b"not ArrayRecord " * 40)
    cache = meshfeed.ShardCache(tmp_path)
    with pytest.raises(meshfeed.CorruptDataError, match=r"pass meshfeed\.sources\.Parquet\("):
        meshfeed.sources.ArrayRecord("memory://named/x.parquet", cache=cache)


def test_a_file_of_the_right_name_is_called_damaged_and_not_of_another_format(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.array_record"
    path.write_bytes(b"cut short")
    with pytest.raises(meshfeed.CorruptDataError, match="cut short") as info:
        meshfeed.sources.ArrayRecord(path)
    assert "pass" not in str(info.value)
    with pytest.raises(meshfeed.SourceError, match=r"pass meshfeed\.sources\.ArrayRecord\("):
        make_feed(path)


def test_text_is_not_taken_for_paths() -> None:
    with pytest.raises(meshfeed.SourceError) as info:
        make_feed(["see file.npy for details.", "a"] * 20)
    assert "numpy" not in str(info.value)


def test_decode_raw_as_decode_names_decode_batch(tmp_path: pathlib.Path) -> None:
    decoder = meshfeed.sources.DecodeRaw(np.int32, 4)
    with pytest.raises(meshfeed.SettingsError, match=r"Pass it as decode_batch=, not as decode=\.") as info:
        meshfeed.sources.ArrayRecord(tmp_path / "x", decode=decoder)
    assert info.value.setting == "decode"
    with pytest.raises(TypeError, match=r"Pass it as decode_batch=, not as decode=\."):
        decoder(bytes(16))  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [3, None, "path/to/file", {"a": 1}, {1, 2}, lambda: None])
def test_what_is_no_source_is_refused_with_what_is_taken(source: Any) -> None:
    with pytest.raises(meshfeed.MeshfeedError):
        meshfeed.MultiHostDataLoadIterator(source, rows_sharding(), global_batch_size=16)


def test_streams_refuse_what_they_cannot_do() -> None:
    stream = meshfeed.sources.Stream(lambda lane, lanes: iter([]))
    for setting, value in (("shuffle", True), ("bad_records", meshfeed.SkipBad()), ("num_lanes", 5)):
        with pytest.raises(meshfeed.SettingsError, match=setting):
            make_feed(stream, **{setting: value})
    with make_feed(stream) as feed:
        for use in (lambda: feed.record_ids(0), lambda: feed.read([0])):
            with pytest.raises(meshfeed.SourceError, match="no record ids"):
                use()
        with pytest.raises(TypeError):
            len(feed)


def test_host_batches_refuse_what_they_cannot_do() -> None:
    for setting, value in (
        ("shuffle", True),
        ("num_workers", 1),
        ("num_lanes", 2),
        ("bad_records", meshfeed.SkipBad()),
        ("load", "once"),
        ("global_batch_size", meshfeed.BatchSchedule([(0, 8), (2, 16)])),
    ):
        with pytest.raises(
            meshfeed.SettingsError, match=setting if setting != "global_batch_size" else "BatchSchedule"
        ):
            make_feed(iter([{"x": np.zeros((16, 1))}]), **{setting: value})
    with make_feed(iter([{"x": np.zeros((17, 1))}])) as feed, pytest.raises(meshfeed.SourceError, match="17 rows"):
        next(feed)


def test_every_error_is_a_meshfeed_error_and_survives_a_process_border() -> None:
    error = meshfeed.StateMismatchError("seed", 1, 2, "Pass seed=1.")
    again = pickle.loads(pickle.dumps(error))
    assert (again.field, again.saved, again.current, again.remedy) == ("seed", 1, 2, "Pass seed=1.")
    assert str(again) == str(error)
    for name in meshfeed.__all__:
        value = getattr(meshfeed, name) if name.endswith("Error") else None
        assert value is None or issubclass(value, meshfeed.MeshfeedError)


def test_functions_that_cannot_be_called_are_refused_where_they_are_given(tmp_path: Any) -> None:
    with pytest.raises(meshfeed.SourceError, match=r"open\(lane_index, num_lanes\)"):
        meshfeed.sources.Stream(lambda lane_index: iter([]))
    with pytest.raises(meshfeed.SettingsError, match="decode='utf8'"):
        meshfeed.sources.ArrayRecord(str(tmp_path / "x"), decode="utf8")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mesh", "sharding"])
def test_swapped_arguments_are_named(kind: str) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = mesh if kind == "mesh" else jax.NamedSharding(mesh, jax.P("data"))
    with pytest.raises(
        meshfeed.SettingsError, match=r"Feed got its arguments in the other order\. Expected Feed\(source"
    ):
        meshfeed.Feed(placed, {"x": np.arange(64)}, global_batch_size=8)

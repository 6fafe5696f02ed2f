"""RemoteFeed in one process: the same batches, states and errors as the local feed, and nothing but arrays between."""

from __future__ import annotations

import fractions
import inspect
import json
import os
import pathlib
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import colocated_python
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed
from meshfeed._src.plan.plan import normalize_sharding
from meshfeed._src.remote.client import (
    END,
    ERROR,
    OK,
    Endpoint,
    Header,
    RemoteClient,
    decode_answer,
    encode_answer,
    encode_error,
    rows_of,
    to_rows,
    zeros,
)
from meshfeed._src.remote.feed import make_feed_payload
from meshfeed.remote import RemoteFeed

sys.path.insert(0, str(Path(__file__).parent.parent))

import remote_jobs
from interrupts import interrupted
from remote_jobs import digest, make_memory, make_stream

AUTO = (AxisType.Auto, AxisType.Auto)
RANDOM: dict[str, Any] = {"global_batch_size": 16, "shuffle": True, "seed": 3, "num_epochs": 2}


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "random access": (make_memory, RANDOM),
    "padded, masked": (make_memory, {**RANDOM, "end": "pad", "mask_key": "mask", "prefetch": 0}),
    "batch ramp-up": (make_memory, {**RANDOM, "global_batch_size": meshfeed.BatchSchedule([(0, 8), (3, 16), (5, 24)])}),
    "auto": (make_memory, {**RANDOM, "num_threads": "auto", "num_workers": "auto", "prefetch": "auto"}),
    "load once": (make_memory, {**RANDOM, "load": "once"}),
    "stream": (make_stream, {"global_batch_size": 16, "end": "pad", "mask_key": "mask"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_batches_and_states_as_the_local_feed(mesh: Mesh, case: str) -> None:
    make, settings = CASES[case]
    sharding = NamedSharding(mesh, P("data"))
    remote = RemoteFeed(make, sharding, **settings)
    local = meshfeed.MultiHostDataLoadIterator(make(), sharding, **settings)
    for _ in range(3):
        assert remote.element_spec == local.element_spec
        here, there = next(local), next(remote)
        assert digest(there) == digest(here)
        assert jax.tree.map(lambda leaf: leaf.sharding, there) == jax.tree.map(lambda leaf: leaf.sharding, here)
        assert (remote.step, remote.position) == (local.step, local.position)
        assert remote.get_state() == local.get_state()
    tuned = remote.stats().tuned
    assert (tuned is None) == ("auto" not in case)
    assert tuned is None or tuned["num_threads"] >= 1
    # each continues the other's state
    state = local.get_state()
    fresh = RemoteFeed(make, sharding, **settings)
    fresh.set_state(json.dumps(state).encode())  # pyright: ignore[reportArgumentType] # as a local feed takes it
    local.set_state(remote.get_state())
    rest = [digest(batch) for batch in local]
    assert rest
    assert [digest(batch) for batch in remote] == rest
    assert [digest(batch) for batch in fresh] == rest
    with pytest.raises(StopIteration) as end:
        next(local)
    for feed in (remote, fresh):
        for _ in range(2):
            with pytest.raises(StopIteration) as far:
                next(feed)
            (near_note,), (note,) = end.value.__notes__, far.value.__notes__
            assert note.partition(" ")[2] == near_note.partition(" ")[2]
        assert feed.get_state() == local.get_state()
        feed.close()
    local.close()


def test_the_keywords_are_those_of_the_local_feed() -> None:
    def keywords(feed: type) -> dict[str, Any]:
        parameters = inspect.signature(feed).parameters.values()
        return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}

    assert keywords(RemoteFeed) == keywords(meshfeed.Feed)


class FailsAtFirst:
    """Host batches, which cannot be read the first two times."""

    begun = 0

    def __iter__(self) -> Any:
        FailsAtFirst.begun += 1
        if FailsAtFirst.begun < 3:
            raise meshfeed.SourceError("the store was busy")
        return iter([{"x": np.full(16, number, np.int32)} for number in range(3)])


def test_errors_of_the_first_batch_that_pass_lose_no_batch(mesh: Mesh) -> None:
    with RemoteFeed(FailsAtFirst, NamedSharding(mesh, P("data")), retry=meshfeed.Retry(attempts=1)) as remote:
        with pytest.raises(meshfeed.SourceError, match="the store was busy"):
            next(remote)
        for _ in range(2):
            remote.reset()
            assert [int(batch["x"][0]) for batch in remote] == [0, 1, 2]


def test_the_whole_interface(mesh: Mesh, tmp_path: pathlib.Path) -> None:
    sharding = {"x": NamedSharding(mesh, P("data")), "weird": NamedSharding(mesh, P())}
    with (
        RemoteFeed(make_memory, sharding, **RANDOM) as remote,
        meshfeed.MultiHostDataLoadIterator(make_memory(), sharding, **RANDOM) as local,
    ):
        assert iter(remote) is remote
        assert len(remote) == len(local) == 12
        assert remote.record_ids(np.int64(7)).tolist() == local.record_ids(7).tolist()
        assert remote.read([5, 3])["weird"].tobytes() == local.read([5, 3])["weird"].tobytes()
        np.testing.assert_array_equal(remote.replay(np.int64(4))["x"], local.replay(4)["x"])
        assert {**remote.config(), "name": ""} == {**local.config(), "name": ""}
        assert remote.cannot_resume == local.cannot_resume is None
        first = digest(next(remote))
        assert remote.stats().batches == 1
        assert remote.stats(since=remote.stats()).batches == 0
        assert str(remote.plan()) == str(local.plan())
        remote.report(tmp_path / "report.html")
        assert f"<h1>{remote.name}</h1>" in (tmp_path / "report.html").read_text()
        assert repr(remote).startswith(f"<meshfeed.remote.RemoteFeed {remote.name!r}: step=1, position=")
        assert remote.local_iterator.get_state() == remote.get_state()
        next(remote)
        remote.reset()
        assert remote.step == 0
        assert digest(next(remote)) == first
        with pytest.raises(IndexError, match="step 99"):
            remote.record_ids(99)
        with pytest.raises(meshfeed.SettingsError):
            remote.record_ids(True)
        with pytest.raises(meshfeed.SettingsError, match="it takes record ids"):
            remote.read([1.5])


def test_what_can_be_read_only_once_says_so_before_it_is_saved(mesh: Mesh) -> None:
    def make_batches() -> Any:
        return ({"x": np.full(16, number, np.int32)} for number in range(3))

    with RemoteFeed(make_batches, mesh) as remote, meshfeed.Feed(make_batches(), mesh) as local:
        assert remote.cannot_resume == local.cannot_resume is not None
        assert remote.cannot_resume.startswith("the batches come from a generator, which can be read only once")


def test_no_public_name_of_a_local_feed_is_missing() -> None:
    missing = set(dir(meshfeed.Feed)) - set(dir(RemoteFeed))
    assert not {name for name in missing if name[0] not in "_x"}  # x: what a run of scripts/mutate adds


@pytest.mark.parametrize("kinds", [("pinned_host",), ("device",), ("pinned_host", "unpinned_host")])
def test_batches_have_the_memory_kind_that_all_leaves_ask_for(mesh: Mesh, kinds: tuple[str, ...]) -> None:
    leaves = dict(zip(("x", "weird"), (kinds[0], kinds[-1]), strict=True))
    sharding = {name: NamedSharding(mesh, P("data"), memory_kind=kind) for name, kind in leaves.items()}
    with RemoteFeed(make_memory, sharding, **RANDOM) as remote:
        found = {leaf.sharding.memory_kind for leaf in next(remote).values()}
    default = jax.devices()[0].default_memory().kind
    assert found == {kinds[0] if len(kinds) == 1 else default}


@pytest.mark.parametrize(
    "settings", [lambda: jax.disable_jit(True), lambda: jax.transfer_guard_host_to_device("disallow")]
)
def test_settings_of_the_thread_do_not_reach_the_hosts(settings: Any) -> None:
    permuted = np.array(jax.devices())[[2, 0, 3, 1]].reshape(2, 2)
    sharding = NamedSharding(Mesh(permuted, ("data", "model"), axis_types=AUTO), P(("data", "model")))
    with meshfeed.Feed(make_memory(), sharding, **RANDOM) as local:
        wanted = [next(local) for _ in range(2)]
    with settings(), RemoteFeed(make_memory, sharding, **RANDOM) as remote:
        found = [next(remote) for _ in range(2)]
    assert [digest(batch) for batch in found] == [digest(batch) for batch in wanted]
    assert found[0]["x"].sharding == wanted[0]["x"].sharding


def test_dtypes_stay_those_with_which_the_feed_was_made(mesh: Mesh) -> None:
    with jax.enable_x64(True):
        feed = RemoteFeed(lambda: {"x": np.arange(48) + 2**40}, NamedSharding(mesh, P("data")), global_batch_size=8)
    with feed:
        next(feed)
        feed.reshard(NamedSharding(mesh, P("data")))
        assert np.array_equal(np.asarray(next(feed)["x"]), np.arange(8, 16) + 2**40)


def test_padding_has_the_dtype_with_which_the_feed_was_made(mesh: Mesh) -> None:
    with jax.enable_x64(True):
        spec = jax.ShapeDtypeStruct((8,), np.int64, sharding=NamedSharding(mesh, P("data")))
    assert zeros(spec, 16).dtype == np.int64


def test_stats_and_report_go_on_after_reshard(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("meshfeed._src.remote.feed.report_page", lambda figures: shown.append(figures) or "")
    with RemoteFeed(make_memory, NamedSharding(mesh, P("data")), **RANDOM) as feed:
        next(feed)
        first = feed.stats()
        for spec in (P("model"), P(("data", "model"))):
            feed.reshard(NamedSharding(mesh, spec))
            next(feed)
        assert feed.stats().batches == 3
        assert feed.stats().records == 48
        assert feed.stats(since=first).batches == 2
        feed.report(tmp_path / "report.html")
        ((host,),) = (one["hosts"] for one in shown[0]["feeds"])
        assert (host["batches"], host["records"], host["step"], host["runs"]) == (3, 48, 3, 1)
        times = [second for second in shown[0]["feeds"][0]["over_time"]["batches_per_second"]["0"] if second]
        assert times  # since the feed was made


@pytest.mark.parametrize("case", ["random access", "stream"])
def test_batches_go_from_the_cpus_to_the_devices_beside_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = np.array(jax.devices())  # the first four stand for accelerators, the others for the CPUs beside them
    mesh = Mesh(devices[[2, 0, 3, 1]].reshape(2, 2), ("data", "model"), axis_types=AUTO)
    beside = Mesh(devices[[6, 4, 7, 5]].reshape(2, 2), ("data", "model"), axis_types=AUTO)
    monkeypatch.setattr("meshfeed._src.remote.client.colocated_mesh", lambda _: beside)
    make, settings = CASES[case]
    sharding = NamedSharding(mesh, P("data"))
    with (
        RemoteFeed(make, sharding, **settings) as remote,
        meshfeed.MultiHostDataLoadIterator(make(), sharding, **settings) as local,
    ):
        for here in local:
            there = next(remote)
            assert remote.element_spec == local.element_spec
            assert jax.tree.map(lambda leaf: leaf.sharding, there) == jax.tree.map(lambda leaf: leaf.sharding, here)
            assert digest(there) == digest(here)
        with pytest.raises(StopIteration):
            next(remote)


def test_each_of_several_controllers_moves_its_own_shards(mesh: Mesh) -> None:
    """JAX refuses to move a whole array of which a process has only some shards."""
    devices = np.array(jax.devices())[::-1].reshape(2, 4)  # stand for the accelerators beside the CPUs of the mesh
    near, far = (NamedSharding(one, P("data")) for one in (mesh, Mesh(devices, mesh.axis_names, axis_types=AUTO)))
    whole = jax.device_put(np.arange(32, dtype=np.int32).reshape(8, 4), near)
    leaf: Any = types.SimpleNamespace(
        is_fully_addressable=False,
        sharding=near,
        addressable_shards=whole.addressable_shards,
        shape=whole.shape,
    )
    client = object.__new__(RemoteClient)
    client.mesh, client.cpu_mesh = far.mesh, near.mesh
    moved = client.to_accelerators({"x": leaf})["x"]
    assert moved.sharding == far
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(whole))
    for shard in whole.addressable_shards:
        (there,) = (other for other in moved.addressable_shards if other.device.id == 7 - shard.device.id)
        assert there.index == shard.index


def test_iterating_again_after_the_end_warns_unless_the_feed_goes_on(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if "iterating again" in record.getMessage()]

    settings = {"global_batch_size": 16, "name": "train"}
    go_on = {
        "reset": lambda feed, state: feed.reset(),
        "set_state": lambda feed, state: feed.set_state(state),
        "reshard": lambda feed, state: feed.reshard(mesh),
    }
    for name, call in go_on.items():
        with RemoteFeed(make_mixture, mesh, **settings) as feed:
            state = feed.get_state()
            assert len(list(feed)) == len(feed)
            call(feed, state)
            iter(feed)
            assert not warnings(), name
    with RemoteFeed(make_memory, mesh, **settings) as feed:
        assert [sum(1 for _ in feed) for _ in range(3)] == [6, 0, 0]
    (warning,) = warnings()
    assert warning.startswith("train: ")


def test_a_feed_is_true_whether_it_has_batches_or_a_length(mesh: Mesh) -> None:
    with RemoteFeed(make_memory, mesh, global_batch_size=16, num_epochs=None) as endless:
        with pytest.raises(TypeError, match="repeats forever"):
            len(endless)
        assert endless
    with RemoteFeed(make_memory, mesh, global_batch_size=104) as empty:
        assert len(empty) == 0
        assert empty


def test_after_close(mesh: Mesh) -> None:
    feed = RemoteFeed(make_memory, mesh, global_batch_size=16, name="train")
    next(feed)
    state = feed.get_state()
    feed.close()
    feed.close()
    assert feed.get_state() == state
    assert repr(feed) == "<meshfeed.remote.RemoteFeed 'train': step=1, position=16, closed>"
    remedy = r"train is closed\. To continue, pass its get_state\(\) to set_state of a new feed"
    for call in (feed.__next__, feed.start, lambda: feed.set_weights({"a": 1}), lambda: feed.reshard(mesh)):
        with pytest.raises(meshfeed.MeshfeedError, match=remedy):
            call()


def test_a_feed_that_could_not_be_made_can_be_shown() -> None:
    assert repr(object.__new__(RemoteFeed)) == "<meshfeed.remote.RemoteFeed: not made>"


def test_a_state_of_another_stream_changes_nothing(mesh: Mesh) -> None:
    feed = RemoteFeed(make_memory, mesh, **RANDOM)
    next(feed)
    state = feed.get_state()
    other = json.loads(json.dumps(state))
    other["fingerprint"]["seed"] = 4
    with pytest.raises(meshfeed.StateMismatchError, match="seed") as caught:
        feed.set_state(other)
    assert (caught.value.field, caught.value.saved, caught.value.current) == ("seed", 4, 3)
    with pytest.raises(meshfeed.StateMismatchError):
        feed.set_state({"meshfeed": 99})
    assert feed.get_state() == state
    feed.close()


def test_checkpoints_go_from_one_to_the_other(mesh: Mesh, tmp_path: Path) -> None:
    sharding = NamedSharding(mesh, P("data"))
    make: Any = {
        "remote": lambda: RemoteFeed(make_memory, sharding, **RANDOM),
        "local": lambda: meshfeed.MultiHostDataLoadIterator(make_memory(), sharding, **RANDOM),
    }
    for source, target in (("remote", "local"), ("local", "remote")):
        with meshfeed.checkpoint.Checkpointer(tmp_path / source, save_interval_steps=1) as checkpointer:
            feed = make[source]()
            for _ in range(3):
                next(feed)
            checkpointer.save(3, {"w": np.ones(3)}, feed)
            rest = [digest(batch) for batch in feed]  # the save has captured what it needs
            checkpointer.wait()
            feed.close()
            feed = make[target]()
            step, _ = checkpointer.restore({"w": np.ones(3)}, feed)
            assert (step, feed.step, feed.position) == (3, 3, 48)
            assert [digest(batch) for batch in feed] == rest
            feed.close()


# ---------------------------------------------------------------------- errors


def test_what_cannot_travel_is_refused_in_the_constructor(mesh: Mesh) -> None:
    lock = threading.Lock()
    for factory in (lambda: lock, (number for number in range(3)).__next__):
        with pytest.raises(meshfeed.SettingsError, match="make_source cannot be sent") as caught:
            RemoteFeed(factory, mesh, global_batch_size=16)
        assert caught.value.setting == "make_source"
    with pytest.raises(meshfeed.SettingsError, match="takes a function") as caught:
        RemoteFeed(make_memory(), mesh, global_batch_size=16)  # pyright: ignore[reportArgumentType]
    assert caught.value.setting == "make_source"

    class OddError(Exception):
        lock = threading.Lock()

    with pytest.raises(
        meshfeed.SettingsError, match=r"^settings cannot be sent .* Expected values that can be"
    ) as caught:
        RemoteFeed(make_memory, mesh, global_batch_size=16, retry=meshfeed.Retry(on=(OddError,)))
    assert caught.value.setting == "settings"


def test_devices_without_cpus_of_this_process_beside_them_are_refused(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(mesh: Mesh) -> Mesh:
        raise ValueError("2 accelerators and 1 CPU device")

    monkeypatch.setattr(colocated_python, "colocated_cpu_devices", too_few)
    with pytest.raises(meshfeed.SettingsError, match=r"beside them: 2 accel.* and 1 .*jax_num_cpu_devices") as caught:
        RemoteFeed(make_memory, mesh, global_batch_size=16)
    assert caught.value.setting == "sharding"
    monkeypatch.setattr(NamedSharding, "addressable_devices", frozenset())
    monkeypatch.setattr(colocated_python, "colocated_cpu_devices", lambda mesh: mesh)
    with pytest.raises(meshfeed.SettingsError, match="no device of the mesh belongs to this process") as caught:
        RemoteFeed(make_memory, mesh, global_batch_size=16)
    assert caught.value.setting == "sharding"


def test_settings_are_checked_before_anything_travels(mesh: Mesh) -> None:
    with pytest.raises(meshfeed.SettingsError, match="global_batch_size"):
        RemoteFeed(lambda: 1 / 0, mesh, global_batch_size=-1)
    with pytest.raises(TypeError):
        RemoteFeed(make_memory, mesh, global_batch_sise=1)  # pyright: ignore[reportCallIssue]
    other = jax.make_mesh((8,), ("data",), axis_types=AUTO[:1])
    two = {"x": NamedSharding(mesh, P("data")), "weird": NamedSharding(other, P("data"))}
    with pytest.raises(meshfeed.SettingsError, match="2 meshes") as caught:
        RemoteFeed(make_memory, two, global_batch_size=16)
    assert caught.value.setting == "sharding"


def test_errors_of_the_host_are_raised_here_with_their_message(mesh: Mesh) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        RemoteFeed(lambda: 1 / 0, mesh, global_batch_size=16)
    with pytest.raises(meshfeed.PlanError, match="12"):
        RemoteFeed(make_memory, mesh, global_batch_size=12)
    with pytest.raises(meshfeed.MeshfeedError, match=r"raised StopIteration on a host .* outside of next\(\)"):
        RemoteFeed(lambda: next(iter(())), mesh, global_batch_size=16)

    def make() -> Any:
        class Failing:
            def __len__(self) -> int:
                return 64

            def __getitem__(self, record_id: int) -> Any:
                if record_id == 40:
                    raise RuntimeError("disk on fire")
                return {"x": np.full(3, record_id, np.int32)}

            def fingerprint(self) -> str:
                return "failing"

        return Failing()

    feed = RemoteFeed(make, mesh, global_batch_size=16)
    assert [int(np.asarray(next(feed)["x"])[0, 0]) for _ in range(2)] == [0, 16]  # good batches come first
    for _ in range(2):
        with pytest.raises(Exception, match="disk on fire"):
            next(feed)
    feed.close()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        KeyError("missing"),
        OSError("gone"),
        meshfeed.SourceError("no record", record_id=7),
        meshfeed.StateMismatchError("seed", 1, 2, "Take the other."),
        meshfeed.StalledError("late", hosts=(3,), waited_seconds=4.0),
        json.JSONDecodeError("no JSON", "{", 1),
        UnicodeDecodeError("utf8", b"\xff", 0, 1, "odd"),
    ],
)
def test_errors_come_back_with_type_text_and_attributes(error: Exception) -> None:
    error.add_note("while reading shard 3")
    back = decode_answer(encode_error(error))
    assert isinstance(back, BaseException)
    assert str(error) in str(back)
    assert back.__notes__ == ["while reading shard 3"]
    if type(error).__module__ in ("builtins", "meshfeed") and not isinstance(error, UnicodeDecodeError):
        assert type(back) is type(error)
    if isinstance(error, meshfeed.SourceError):
        assert isinstance(back, meshfeed.SourceError)
        assert back.record_id == 7


def test_an_error_type_that_is_not_known_here_comes_as_the_nearest_that_is() -> None:
    class OwnError(ValueError):
        pass

    back = decode_answer(encode_error(OwnError("theirs")))
    assert type(back) is ValueError
    assert "OwnError: theirs" in str(back)


# ---------------------------------------------------------------------- the wire


@pytest.mark.parametrize("value", [None, 5, 2**60, [1, [2]], {"a": "ü"}, (1, 2), {"x": np.arange(3)}])
def test_answers_keep_their_value(value: Any) -> None:
    back = decode_answer(encode_answer(value))
    assert type(back) is type(value)
    jax.tree.map(np.testing.assert_array_equal, back, value)


def test_arrays_arrive_contiguous_writable_and_in_native_order() -> None:
    value = {
        "a": np.arange(6, dtype=">i4").reshape(2, 3).T,
        "b": (np.full((), 2.5, np.float32), np.zeros((0, 4), bool)),
    }
    back = decode_answer(encode_answer(value))
    jax.tree.map(np.testing.assert_array_equal, back, value)
    leaves = jax.tree.leaves(back)
    assert [leaf.dtype for leaf in leaves] == [np.int32, np.float32, np.bool_]
    assert all(leaf.flags.c_contiguous and leaf.flags.writeable for leaf in leaves)


def test_headers_hold_64_bit_numbers_on_every_device(mesh: Mesh) -> None:
    header = Header(END, 2**40, 2**41, 2**50 + 1, 2**33, 4095, 2**62 - 1)
    array = to_rows(header.to_row(), NamedSharding(mesh, P(("data", "model"))), 8)
    assert [Header.from_row(row) for row in rows_of(array)] == [header] * 8


@pytest.mark.parametrize("answers", [["same"] * 3, ["same", "same", "a longer one"], ["one", "same", "same"]])
def test_hosts_that_answer_alike_are_told_apart(
    mesh: Mesh, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One controller that sees the devices of all hosts under its own process index."""

    class Hosts:
        def fetch(self, buffer: jax.Array) -> jax.Array:
            rows = []
            for device in range(buffer.shape[0]):
                host = min(device // 3, 2)
                monkeypatch.setattr("meshfeed._src.base.coordination.process_index", lambda host=host: host)
                endpoint = Endpoint(b"")
                endpoint._answers[7] = encode_answer(answers[host])
                rows.append(rows_of(endpoint.fetch(buffer))[device])
            return jax.device_put(np.stack(rows), buffer.sharding)

    client = object.__new__(RemoteClient)
    client._near, client._num_near = NamedSharding(mesh, P(("data", "model"))), 8
    client._held = {"endpoint": Hosts()}
    headers = {host: Header(OK, len(encode_answer(answer)), host=host) for host, answer in enumerate(answers)}
    assert client._fetch(headers, 7) == dict(enumerate(answers))


def test_the_error_of_one_host_is_raised_whatever_the_others_last_answered(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that has nothing to answer has an empty answer, or still that of an earlier call."""
    error = encode_error(meshfeed.SourceError("the disk of host 2 is gone"))
    held = [b"", encode_error(meshfeed.SourceError("an error of an earlier call")), error]

    class Hosts:
        def fetch(self, buffer: jax.Array) -> jax.Array:
            rows = []
            for device in range(buffer.shape[0]):
                host = min(device // 3, 2)
                monkeypatch.setattr("meshfeed._src.base.coordination.process_index", lambda host=host: host)
                endpoint = Endpoint(b"")
                endpoint._answers[0] = held[host]
                rows.append(rows_of(endpoint.fetch(buffer))[device])
            return jax.device_put(np.stack(rows), buffer.sharding)

    client = object.__new__(RemoteClient)
    client._near, client._num_near = NamedSharding(mesh, P(("data", "model"))), 8
    client._held = {"endpoint": Hosts()}
    headers = [Header(ERROR if host == 2 else OK, len(answer), host=host) for host, answer in enumerate(held)]
    rows = np.stack([headers[min(device // 3, 2)].to_row() for device in range(8)])
    with pytest.raises(meshfeed.SourceError, match="the disk of host 2 is gone"):
        client._check(jax.device_put(rows, client._near))


def make_mixture() -> Any:
    return meshfeed.sources.Mixture({"a": make_memory(), "b": make_memory()}, weights={"a": 0.5, "b": 0.5})


def outcome(call: Any, feed: Any) -> Any:
    try:
        return "done", call(feed)
    except meshfeed.MeshfeedError as error:
        return type(error)


def test_arguments_that_are_no_json_are_taken_or_refused_as_by_the_local_feed(mesh: Mesh) -> None:
    weights = {"a": np.float32(0.25), "b": fractions.Fraction(3, 4)}
    calls = [
        lambda feed: feed.set_weights(types.MappingProxyType(weights), from_step=np.int64(70)),
        lambda feed: feed.set_weights({**weights, "b": {1}}),
        lambda feed: feed.read({1, 2}),
        lambda feed: feed.read(iter([1])),
        lambda feed: feed.replay(1, state=json.dumps(feed.get_state()).encode())["x"].tolist(),
        lambda feed: feed.replay(1, state=types.MappingProxyType(feed.get_state()))["x"].tolist(),
        lambda feed: feed.record_ids({1}),
        lambda feed: feed.get_state(),
    ]
    settings = {"global_batch_size": 16, "num_epochs": None, "name": "train"}
    with RemoteFeed(make_mixture, mesh, **settings) as remote, meshfeed.Feed(make_mixture(), mesh, **settings) as local:
        found = [[outcome(call, feed) for call in calls] for feed in (remote, local)]
        assert found[0] == found[1]
        assert [one if isinstance(one, type) else one[0] for one in found[0]] == [
            "done", *[meshfeed.SettingsError] * 3, "done", "done", meshfeed.SettingsError, "done"
        ]  # fmt: skip


class FailsLate:
    """Records of which the third batch cannot be read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> Any:
        if record_id >= 16:
            raise ValueError(f"record {record_id} cannot be decoded")
        return {"x": np.full(2, record_id, np.int32)}


def test_calls_of_other_threads_and_signal_handlers_get_their_own_answers(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteFeed(FailsLate, mesh, global_batch_size=8, retry=meshfeed.Retry(attempts=1)) as remote:
        next(remote)
        state, endpoint = remote.get_state(), remote._client._held["endpoint"]

        class Interrupted:
            """Another caller begins before the answer of the first has been fetched."""

            calling = False

            def __getattr__(self, name: str) -> Any:
                return getattr(endpoint, name)

            def fetch(self, buffer: jax.Array) -> Any:
                if not self.calling:
                    self.calling = True
                    for _ in range(3):
                        assert remote.stats().batches == remote.step
                    self.calling = False
                return endpoint.fetch(buffer)

        monkeypatch.setitem(remote._client._held, "endpoint", Interrupted())
        assert remote.get_state() == state
        assert remote.config()["name"] == remote.name
        next(remote)
        for _ in range(2):
            with pytest.raises(ValueError, match="record 16 cannot be decoded"):
                next(remote)


@pytest.mark.parametrize("case", ["random access", "batch ramp-up", "stream"])
def test_an_interrupt_in_next_loses_and_repeats_nothing(mesh: Mesh, case: str) -> None:
    make, settings = CASES[case]
    with RemoteFeed(make, mesh, **settings) as remote, meshfeed.Feed(make(), mesh, **settings) as local:
        states, batches = [local.get_state()], []
        for batch in local:
            batches.append(digest(batch))
            states.append(local.get_state())
        point = 0
        for step in range(len(batches)):
            for _ in range(9):
                point += 7
                if not interrupted(lambda: next(remote), point):  # it had fewer points, and delivered the batch
                    remote.set_state(states[step])
                    point = 0
                    break
                # In every second step without a call between, which has the hosts take the batch back.
                assert step % 2 or remote.get_state() == states[step], point
                assert remote.step == step
            assert digest(next(remote)) == batches[step], point
            assert (remote.step, remote.get_state()) == (step + 1, states[step + 1])
        with pytest.raises(StopIteration):
            next(remote)


def test_a_batch_on_its_way_is_not_repeated_when_another_thread_calls(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings = CASES["batch ramp-up"]
    with RemoteFeed(make, mesh, **settings) as remote, meshfeed.Feed(make(), mesh, **settings) as local:
        endpoint = remote._client._held["endpoint"]
        states: list[Any] = []
        asked: list[Any] = []

        class OnItsWay:
            def __getattr__(self, name: str) -> Any:
                return getattr(endpoint, name)

            def take(self, request: jax.Array) -> Any:
                sent = endpoint.take(request)
                asked.append(remote.get_state())
                return sent

        monkeypatch.setitem(remote._client._held, "endpoint", OnItsWay())
        for batch in remote:
            states.append(local.get_state())
            assert digest(batch) == digest(next(local))
        assert asked == [*states, local.get_state()]


def test_a_feed_that_is_closed_while_a_batch_is_on_its_way_has_the_state_after_it(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings = CASES["stream"]
    remote = RemoteFeed(make, mesh, **settings)
    with meshfeed.Feed(make(), mesh, **settings) as local:
        assert digest(next(remote)) == digest(next(local))
        endpoint, state = remote._client._held["endpoint"], local.get_state()

        class OnItsWay:
            def __getattr__(self, name: str) -> Any:
                return getattr(endpoint, name)

            def take(self, request: jax.Array) -> Any:
                sent = endpoint.take(request)
                remote.close()  # as another thread, or the handler of a signal, does
                assert remote.get_state() == state
                return sent

        monkeypatch.setitem(remote._client._held, "endpoint", OnItsWay())
        assert digest(next(remote)) == digest(next(local))
        for _ in range(2):
            assert remote.get_state() == local.get_state()
    with pytest.raises(meshfeed.MeshfeedError, match="is closed"):
        next(remote)


def test_hosts_that_jax_does_not_connect_are_refused(mesh: Mesh) -> None:
    client = object.__new__(RemoteClient)
    client._near = NamedSharding(mesh, P(("data", "model")))
    rows = np.stack([Header(OK, host=0, endpoint=1 + device // 4).to_row() for device in range(8)])
    with pytest.raises(meshfeed.MeshfeedError, match=r"process index 0: JAX does not connect them.*distributed\.init"):
        client._check(jax.device_put(rows, client._near))
    assert Endpoint(b"").identity != Endpoint(b"").identity


def test_nothing_raised_leaves_an_endpoint_and_the_end_is_a_flag(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P(("data", "model")))
    request, other = (to_rows(np.full(2, bit, np.uint8), sharding, 8) for bit in (0, 1))

    def flag_of(array: jax.Array) -> int:
        return Header.from_row(rows_of(array)[0]).flag

    broken = Endpoint(b"no pickle")
    assert flag_of(broken.begin(request)) == ERROR
    assert flag_of(broken.take(to_rows(np.zeros(1, np.uint8), sharding, 8))[0]) == ERROR
    settings = {**RANDOM, "num_epochs": 1}
    endpoint = Endpoint(make_feed_payload(make_memory, normalize_sharding(mesh), settings))
    assert flag_of(endpoint.begin(request)) == OK
    flags, shapes = [], []
    for step in range(8):
        header, batch = endpoint.take((request, other)[step % 2])
        flags.append(flag_of(header))
        shapes.append(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), batch))
    assert flags == [OK] * 6 + [END] * 2
    assert all(shape == shapes[0] for shape in shapes)  # compiled once: the end looks like a batch
    bad = to_rows(np.frombuffer(b'[1, 0, "no such call", []]', np.uint8), sharding, 8)
    assert flag_of(endpoint.stage(bad)) == ERROR


@pytest.mark.slow
def test_factory_settings_and_state_work_in_a_fresh_interpreter(mesh: Mesh, tmp_path: Path) -> None:
    rows = np.arange(640, dtype=np.int32).reshape(-1, 5)

    def make() -> Any:  # a closure: travels by value
        return meshfeed.sources.Memory({"x": rows})

    settings = {**RANDOM, "retry": meshfeed.Retry(on=(OSError, RuntimeError)), "bad_records": meshfeed.SkipBad(0.1)}
    settings["global_batch_size"] = meshfeed.BatchSchedule([(0, 8), (3, 16)])
    prefix = normalize_sharding({"x": NamedSharding(mesh, P("data"))})
    feed = RemoteFeed(make, prefix, **settings)
    expected = [digest(next(feed)) for _ in range(2)]
    (tmp_path / "state.json").write_text(json.dumps(feed.get_state()))
    expected += [digest(next(feed)) for _ in range(2)]
    (tmp_path / "payload").write_bytes(make_feed_payload(make, prefix, settings))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, remote_jobs.__file__, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=240)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["digests"] == expected[2:]
    assert result["state"] == feed.get_state()
    feed.set_state(result["state"])
    next(feed)
    feed.close()


def test_buckets_are_refused(mesh: Mesh) -> None:
    def make_buckets() -> Any:
        return meshfeed.sources.Buckets([np.arange(n) for n in (1, 5, 3, 2)], (2, 5))

    with (
        pytest.raises(meshfeed.SettingsError, match="Use Padded or Packed") as error,
        RemoteFeed(make_buckets, NamedSharding(mesh, P(("data", "model"))), global_batch_size=8, end="pad") as feed,
    ):
        next(feed)
    assert error.value.setting == "make_source"


@pytest.mark.parametrize("case", ["random access", "stream"])
def test_it_continues_on_another_sharding(mesh: Mesh, case: str) -> None:
    make, settings = CASES[case]
    smaller = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=AUTO[:1]), P("data"))
    remote = RemoteFeed(make, NamedSharding(mesh, P("data")), **settings)
    local = meshfeed.Feed(make(), NamedSharding(mesh, P("data")), **settings)
    for _ in range(3):
        assert digest(next(remote)) == digest(next(local))
    with pytest.raises(meshfeed.PlanError):
        remote.reshard(Mesh(np.array(jax.devices()[:3]), ("data",), axis_types=AUTO[:1]))
    for feed in (remote, local):
        feed.reshard(smaller)
        assert feed.step == 3
    assert remote.position == local.position
    assert remote.element_spec == local.element_spec
    assert remote.get_state() == local.get_state()
    assert [digest(batch) for batch in remote] == [digest(batch) for batch in local]
    remote.close()
    local.close()
    for feed in (remote, local):
        with pytest.raises(meshfeed.MeshfeedError, match="is closed"):
            feed.reshard(smaller)

"""Checkpoints in real processes: read once, exact in every mode, errors on all hosts, other numbers of hosts."""

from __future__ import annotations

import logging
import pathlib

import checkpoint_feeds
import checkpoint_trees
import pytest
from checkpoint_jobs import (
    NUM_LANES,
    fail_after_all_have_written,
    fail_before_a_save,
    lanes,
    restore_elsewhere,
    save_after_host_0_has_saved_alone,
    save_and_restore,
    save_in_the_next_job,
    stored_bytes,
)

from meshfeed._src.testing.hosts import free_port
from meshfeed.testing import HostPool, run_hosts

pytestmark = pytest.mark.multihost


def save_on_one_device(directory: str):
    """The least favourable layout: every leaf up to 16 MiB is one chunk."""
    from meshfeed.checkpoint import Checkpointer

    feed = checkpoint_feeds.LaneFeed(lanes(), NUM_LANES)
    next(feed)
    with Checkpointer(f"{directory}/1x1", save_interval_steps=1) as ckpt:
        ckpt.save(3, checkpoint_trees.mixed_tree(checkpoint_trees.make_mesh(1, 1)), feed)


def fail_on_host_1(directory: str):
    """Host 1 cannot read: the same error on every host, feeds as they were; then it can, and all go on."""
    import jax

    from meshfeed._src.checkpoint import stored as checkpoint_stored
    from meshfeed.checkpoint import Checkpointer

    tree = checkpoint_trees.mixed_tree(checkpoint_trees.make_mesh(4, 2))
    feed = checkpoint_feeds.LaneFeed(lanes(), NUM_LANES)
    whole = checkpoint_stored.StoredArrays.finish_read

    def fail(self, leaf, box, future, verify):
        raise OSError(5, "Input/output error", leaf.name)

    with Checkpointer(f"{directory}/4x2") as ckpt:
        if jax.process_index() == 1:
            checkpoint_stored.StoredArrays.finish_read = fail
        try:
            ckpt.restore(checkpoint_trees.abstract(tree), feed, step=3)
            message = "restored"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        finally:
            checkpoint_stored.StoredArrays.finish_read = whole
        assert feed.position == 0
        assert ckpt.restore(checkpoint_trees.abstract(tree), feed)[0] == 3
    return message


def fail_to_save_on_host_1(directory: str):
    """Host 1 cannot write its digests, then its lanes: the same error on every host, at once; the next save succeeds."""
    import jax
    import numpy as np

    from meshfeed._src.checkpoint import array_handler
    from meshfeed._src.state import files
    from meshfeed.checkpoint import Checkpointer

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    mesh = checkpoint_trees.make_mesh(4, 2)
    feed = checkpoint_feeds.LaneFeed(lanes(), NUM_LANES)
    messages = []
    with Checkpointer(f"{directory}/full", max_to_keep=1, save_interval_steps=1) as ckpt:
        for step, module, name in (
            (1, None, ""),
            (2, array_handler, "write_part"),
            (3, files, "write_state"),
            (4, None, ""),
        ):
            state = {"w": checkpoint_trees.place(np.full((1 << 10, 64), step), mesh, "data")}
            whole = getattr(module, name, None)
            if module is not None and jax.process_index() == 1:
                setattr(module, name, fail)
            try:
                next(feed)
                ckpt.save(step, state, feed)
                ckpt.wait()
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
            finally:
                if module is not None:
                    setattr(module, name, whole)
        checkpoint_trees.assert_same(state, ckpt.restore(state, feed)[1])
    # Host 0 may still have the note that it saves there.
    left = sorted({path.name for path in pathlib.Path(directory, "full").iterdir()} - {".writer.json"})
    return messages, left


def refuse_a_state_on_host_1(directory: str):
    """In the middle of a run, host 1 alone cannot resume a real feed from an earlier step: all go on where they were."""
    import jax
    import numpy as np

    import meshfeed
    from meshfeed.checkpoint import Checkpointer

    class Lane:
        at = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.at += 1
            return {"x": np.int32(self.at)}

        def get_state(self):
            return self.at

        def set_state(self, state):
            if state == 1 and jax.process_index() == 1:
                raise OSError("the shard is gone")
            self.at = state

    source = meshfeed.sources.Stream(lambda lane_index, num_lanes: Lane())
    retry = meshfeed.Retry(attempts=1)
    with (
        meshfeed.Feed(source, checkpoint_trees.make_mesh(4, 2), global_batch_size=8, num_lanes=8, retry=retry) as feed,
        Checkpointer(f"{directory}/refused", save_interval_steps=1) as ckpt,
    ):
        next(feed)
        ckpt.save(1, {"w": np.ones(2)}, feed)
        ckpt.wait()
        next(feed)
        try:
            ckpt.restore({"w": np.ones(2)}, feed, step=1)
            message = "restored"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        assert feed.step == 2
        for step in (3, 4):
            for shard in next(feed)["x"].addressable_shards:
                assert np.asarray(shard.data).tolist() == [step]
    return message


def keep_states_of_another_iterator(directory: str):
    """Each host gets back the state that it saved."""
    import jax
    import numpy as np

    from meshfeed.checkpoint import Checkpointer, verify

    mine = {"next": 10 + jax.process_index(), "slice": (0, jax.process_index())}
    with Checkpointer(f"{directory}/another", save_interval_steps=1) as ckpt:
        ckpt.save(1, {"w": np.ones(2)}, checkpoint_feeds.OtherIterator(mine))
    return restore_states_of_another_iterator(directory), mine, verify(f"{directory}/another")[0].intact


def restore_states_of_another_iterator(directory: str):
    import numpy as np

    from meshfeed.checkpoint import Checkpointer

    restored = checkpoint_feeds.OtherIterator("not set")
    with Checkpointer(f"{directory}/another") as ckpt:
        try:
            assert ckpt.restore({"w": np.ones(2)}, restored)[0] == 1
        except Exception as error:
            assert restored.state == "not set"
            return f"{type(error).__name__}: {error}"
    return restored.state


def refuse_what_does_not_fit(directory: str):
    """One host alone reads the integer that does not fit in the wanted dtype."""
    import jax
    import numpy as np

    from meshfeed.checkpoint import Checkpointer

    mesh = checkpoint_trees.make_mesh(4, 2)
    values = np.arange(1 << 18, dtype=np.int32).reshape(1 << 10, -1) % 100
    values[-1, -1] = 1 << 20
    tree = {"rows": checkpoint_trees.place(values, mesh, "data"), "few": checkpoint_trees.place(values[-8:], mesh)}
    with Checkpointer(f"{directory}/fits", save_interval_steps=1) as ckpt:
        ckpt.save(1, tree)
        ckpt.wait()
        messages = []
        for name, leaf in tree.items():
            wanted = jax.ShapeDtypeStruct(leaf.shape, np.int8, sharding=leaf.sharding)
            try:
                ckpt.restore({**tree, name: wanted})
            except Exception as error:
                messages.append(str(error))
        assert ckpt.restore(tree)[0] == 1
    return messages


def fall_back(directory: str):
    """Two steps, the newer one damaged by host 0: every host restores the older one and warns."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from meshfeed.checkpoint import Checkpointer

    mesh = checkpoint_trees.make_mesh(4, 2)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("meshfeed").addHandler(handler)
    feed = checkpoint_feeds.CountingFeed()
    with Checkpointer(f"{directory}/damaged", save_interval_steps=1) as ckpt:
        for step in (1, 2):
            next(feed)
            values = np.random.default_rng(step).integers(0, 1 << 30, (256, 256)).astype(np.int32)
            state = {"w": checkpoint_trees.place(values, mesh, None, "model")}
            assert ckpt.save(step, state, feed)
        ckpt.wait()
        if jax.process_index() == 0:
            files = [path for path in pathlib.Path(directory, "damaged/2/arrays").rglob("d/*") if path.is_file()]
            for path in files:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 4
                path.write_bytes(bytes(data))
        multihost_utils.sync_global_devices("damaged")
        other = checkpoint_feeds.CountingFeed()
        step, restored = ckpt.restore(state, other)
        first = np.random.default_rng(1).integers(0, 1 << 30, (256, 256)).astype(np.int32)
        checkpoint_trees.assert_same(checkpoint_trees.place(first, mesh, None, "model"), restored["w"])
        assert other.position == 4
        next(other)
        assert ckpt.save(2, restored, other)  # over the damaged one
        ckpt.wait()
        again = ckpt.restore(state)[0]
    return step, again, any("step 2" in record and "passed over" in record for record in records)


def restore_on_parts(directory: str):
    """Sub-meshes that leave hosts out, two meshes in one tree, arrays of single processes, an axis across hosts."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshfeed.checkpoint import ArraysHandler, ArraysRestore, Checkpointer

    values = np.random.default_rng(5).integers(0, 1 << 30, (512, 512)).astype(np.int32)
    whole = checkpoint_trees.make_mesh(4, 2)
    state = {
        "a": checkpoint_trees.place(values, whole, None, "model"),
        "b": checkpoint_trees.place(values + 1, whole, "data"),
        "c": checkpoint_trees.place(values + 2, whole, "data"),
        "local": jnp.arange(200_000),
        "count": jnp.int32(7),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 4),
        "empty": checkpoint_trees.place(np.zeros((0, 3), np.float32), whole),
    }
    with Checkpointer(f"{directory}/parts", save_interval_steps=1) as ckpt:
        ckpt.save(1, state)
        ckpt.wait()
        auto = (jax.sharding.AxisType.Auto,) * 2
        half = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=auto)  # hosts 0 and 1
        alone = Mesh(np.array(jax.devices()[2:4]), ("x",), axis_types=auto[:1])  # host 1
        turned = Mesh(np.array(jax.devices()).reshape(4, 2).T, ("x", "y"), axis_types=auto)
        wanted = {
            **state,
            "a": jax.ShapeDtypeStruct(values.shape, np.int32, sharding=NamedSharding(half, PartitionSpec("y"))),
            "b": jax.ShapeDtypeStruct(values.shape, np.int32, sharding=NamedSharding(turned, PartitionSpec(None, "y"))),
            "c": jax.ShapeDtypeStruct(values.shape, np.int32, sharding=NamedSharding(alone, PartitionSpec("x"))),
            "keys": jax.ShapeDtypeStruct((4,), state["key"].dtype, sharding=NamedSharding(half, PartitionSpec("x"))),
            "empty": jax.ShapeDtypeStruct((0, 3), np.float32, sharding=NamedSharding(half, PartitionSpec())),
        }
        for mode in ("once", "single_replica", "every_host"):
            with Checkpointer(f"{directory}/parts", restore=mode) as other:
                restored = other.restore(wanted)[1]
            for name, add in (("a", 0), ("b", 1), ("c", 2)):
                assert restored[name].sharding == wanted[name].sharding
                for shard in restored[name].addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), (values + add)[shard.index])
            assert len(restored["a"].addressable_shards) == (2 if jax.process_index() < 2 else 0)
            assert (restored["keys"].dtype, restored["keys"].shape) == (state["keys"].dtype, (4,))  # on all hosts
            for shard in restored["keys"].addressable_shards:
                data, expected = (jax.random.key_data(keys) for keys in (shard.data, state["keys"][shard.index[:1]]))
                np.testing.assert_array_equal(data, expected)
            assert (restored["empty"].shape, restored["empty"].dtype) == ((0, 3), np.float32)  # on all hosts
            for name in ("local", "count", "key"):
                checkpoint_trees.assert_same(state[name], restored[name])
            assert int(restored["count"] + restored["b"].min()) == 7 + int(state["b"].min())  # it is bound to no device
            cut = jax.ShapeDtypeStruct((500, 600), np.int32, sharding=wanted["c"].sharding)
            args = ArraysRestore({"c": cut}, partial_restore=True, strict=False)
            (found,) = ArraysHandler(mode).restore(f"{directory}/parts/1/arrays", args).values()
            assert found.shape == cut.shape
            for shard in found.addressable_shards:
                padded = np.pad(values[:500] + 2, ((0, 0), (0, 88)))
                np.testing.assert_array_equal(np.asarray(shard.data), padded[shard.index])
        part = checkpoint_trees.place(values, half, "x") if jax.process_index() < 2 else restored["a"]
        try:
            ckpt.save(2, {"part": part})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


def leave(directory: str):
    """Steps after leaving: all alike; the feed of host 1 has moved on; host 1 leaves by an exception."""
    import jax
    import numpy as np

    from meshfeed.checkpoint import Checkpointer

    mesh = checkpoint_trees.make_mesh(4, 2)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("meshfeed").addHandler(handler)
    found = []
    for way in ("together", "moved", "raised"):
        feed = checkpoint_feeds.CountingFeed()
        here = jax.process_index() == 1
        try:
            with Checkpointer(f"{directory}/{way}", save_interval_steps=10) as ckpt:
                for step in (1, 2):
                    next(feed)
                    ckpt.save(step, {"w": checkpoint_trees.place(np.full((8, 8), step), mesh, "data")}, feed)
                if here and way == "moved":
                    next(feed)
                if here and way == "raised":
                    raise KeyError("host 1 alone")
        except KeyError:
            assert here
        found.append(ckpt.steps())
    return found, [record.split(": ")[1:3] for record in records if "step 2" in record]


def do_different_things(directory: str):
    """Host 1 passes another step, no feed, another tree, another folder: all refuse, at once, and then go on."""
    import time

    import jax
    import numpy as np

    from meshfeed.checkpoint import Checkpointer, restore_once

    mesh, here = checkpoint_trees.make_mesh(4, 2), jax.process_index() == 1
    feed, found = checkpoint_feeds.CountingFeed(), []

    def tree(value):
        return {name: checkpoint_trees.place(np.full((8, 8), value), mesh, "data") for name in ("a", "b")}

    def note(work):
        started = time.monotonic()
        try:
            found.append(f"did {work()}")
        except Exception as error:
            found.append(str(error).replace(directory, ""))
        assert time.monotonic() - started < 20, found

    with Checkpointer(f"{directory}/different", save_interval_steps=1, timeout_seconds=40) as ckpt:
        for step in (1, 2):
            next(feed)
            ckpt.save(step, tree(step), feed)
        ckpt.wait()
        wanted = checkpoint_trees.abstract(tree(0))
        note(lambda: ckpt.restore(wanted, feed, step=1 + here))
        note(lambda: ckpt.restore(wanted, step=1 if here else None))
        note(lambda: ckpt.restore(wanted, None if here else feed))
        note(lambda: ckpt.save(3, tree(3), None if here else feed))
        note(lambda: restore_once(f"{directory}/different/{1 + here}/arrays", wanted))
        other = {**wanted, "a": ... if here else wanted["a"]}
        note(lambda: restore_once(f"{directory}/different/1/arrays", other))
        step, restored = ckpt.restore(wanted, feed)
        assert (step, feed.step) == (2, 2)
        checkpoint_trees.assert_same(tree(2), restored)
        ckpt.save(3, tree(3), feed)
    return found


def check_different_things(found):
    calls = [
        ("restoring step 1 with a feed", "restoring step 2 with a feed"),
        ("restoring the newest step", "restoring step 1"),
        ("restoring the newest step with a feed", "restoring the newest step"),
        ("saving a step with a feed", "saving a step"),
    ]
    for message, (others, one) in zip(found, calls, strict=False):
        assert f"different things at the same time (hosts 0, 2, 3: {others}; host 1: {one})" in message
    saves, trees = found[len(calls) :]
    assert "hosts restore different saves at the same time (hosts 0, 2, 3: " in saves
    assert "of step 1; host 1: " in saves
    assert "hosts restore different trees (hosts 0, 2, 3: " in trees


def check_failures_before_a_save(results):
    found, steps = zip(*results, strict=True)
    assert set(map(str, steps)) == {"([6], [1, 5])"}
    expected = {
        "one host": "CheckpointError: host 0: leaf ['leaf'] has no device on the hosts [0, 2, 3]",
        "deleted": "CheckpointError: host 1: leaf ['leaf']: the array was deleted",
        "flatten": "CheckpointError: host 1: ZeroDivisionError",
        "opaque": "CheckpointError: host 1: leaf ['leaf']: a builtins.builtin_function_or_method cannot be saved",
        "state": "CheckpointError: host 1: RuntimeError: no state",
        "cut": "saving step 2 failed: host 1: ZeroDivisionError",
        "tree": "step 2: host 1 saves a different tree from host 0; the first difference is leaf ['x']",
        "dtype": "step 2: host 1 saves a different tree from host 0; the first difference is leaf ['w']",
        "step": "hosts save different steps at the same time: hosts 0, 2, 3: 2; host 1: 3",
        "place": "the feed is not at the same place on all hosts (hosts 0, 2, 3: step 2, position 8; host 1: step 3,",
    }
    for name, text in expected.items():
        messages = {of_host[name] for of_host in found}
        assert len(messages) == 1, messages
        assert text in messages.pop()
    for host, of_host in enumerate(found):
        text = "KeyboardInterrupt" if host == 1 else "StalledError: saving step 2"
        assert of_host["interrupt"].startswith(text), of_host


def check_failures_after_all_have_written(results):
    for host, (messages, lines, left) in enumerate(results):
        assert len(messages) == 2, messages
        for step, message in zip((2, 3), messages, strict=True):
            assert message.startswith("CheckpointError: ")
            assert f"saving step {step} failed: host 0: OSError: [Errno 28] No space left on device" in message
        assert ["an older step is not removed: [Errno 39]" in line for line in lines] == [True] * (host == 0)
        assert left == ["6"]


def test_exact_read_once_and_agreed_on_several_hosts(tmp_path):
    modes = [("once", None), ("once", 1 << 20), ("single_replica", None), ("every_host", None)]
    save_on_one_device(str(tmp_path))
    with HostPool(num_hosts=4, devices_per_host=2, timeout_seconds=240) as pool:
        read = [result.value for result in pool.run(restore_elsewhere, str(tmp_path), "1x1", (4, 2))]
        assert sum(read) <= 1.1 * stored_bytes(tmp_path / "1x1/3/arrays")
        for shape in ((4, 2), (1, 8)):
            results = pool.run(save_and_restore, str(tmp_path), shape, modes)
            stored = stored_bytes(tmp_path / f"{shape[0]}x{shape[1]}/3/arrays")
            for limit in (None, 1 << 20):
                read = [result.value[f"once {limit}"] for result in results]
                assert sum(read) <= 1.1 * stored
                assert max(read) <= 1.5 * sum(read) / len(read)
        iterator = tmp_path / "4x2/3/iterator"
        assert [path.name for path in iterator.glob("*.json")] == ["state.json"]
        messages = {result.value for result in pool.run(fail_on_host_1, str(tmp_path))}
        assert len(messages) == 1
        assert "CheckpointError: host 1" in messages.pop()
        for messages, left in (result.value for result in pool.run(fail_to_save_on_host_1, str(tmp_path))):
            assert len(messages) == 2
            for step, message in zip((2, 3), messages, strict=True):
                assert f"saving step {step} failed: host 1: OSError: [Errno 28] No space left" in message
            assert left == ["4"]
        for host, result in enumerate(pool.run(refuse_a_state_on_host_1, str(tmp_path))):
            message = (
                "OSError: the shard is gone" if host == 1 else "CheckpointError: step 1: host 1 cannot resume the feed"
            )
            assert result.value.startswith(message)
        for host, result in enumerate(pool.run(keep_states_of_another_iterator, str(tmp_path))):
            restored, mine, intact = result.value
            assert restored == mine == {"next": 10 + host, "slice": (0, host)}
            assert intact
        written = pool.run(fail_after_all_have_written, str(tmp_path))
        check_failures_after_all_have_written([result.value for result in written])
        check_failures_before_a_save([result.value for result in pool.run(fail_before_a_save, str(tmp_path))])
        refused = {tuple(result.value) for result in pool.run(refuse_what_does_not_fit, str(tmp_path))}
        assert len(refused) == 1
        for name, message in zip(("rows", "few"), refused.pop(), strict=True):
            assert f"leaf '{name}' holds 1048576" in message
        assert "has no device on the hosts [2, 3]" in pool.run(restore_on_parts, str(tmp_path))[0].value
        assert {result.value for result in pool.run(fall_back, str(tmp_path))} == {(1, 2, True)}
        for result in pool.run(do_different_things, str(tmp_path)):
            check_different_things(result.value)
        for host, result in enumerate(pool.run(leave, str(tmp_path))):
            steps, warnings = result.value
            assert steps == [[1, 2], [1], [1]]
            reasons = ["the feed has moved on since", "the with block of the Checkpointer raised KeyError"]
            assert [[first, second.partition(".")[0]] for first, second in warnings] == [
                ["host 1", reason] for reason in (reasons if host != 1 else reasons[:1])
            ]
    with HostPool(num_hosts=2, devices_per_host=2, timeout_seconds=120) as pool:
        for saved, shape in (("4x2", (2, 2)), ("1x8", (4, 1))):
            read = [result.value for result in pool.run(restore_elsewhere, str(tmp_path), saved, shape)]
            assert sum(read) <= 1.1 * stored_bytes(tmp_path / f"{saved}/3/arrays")
        for result in pool.run(restore_states_of_another_iterator, str(tmp_path)):
            assert "4 host(s) saved this iterator, each its own state, and there are 2 now" in result.value
    # one process of eight devices
    restore_elsewhere(str(tmp_path), "4x2", (8, 1))


def test_hosts_on_which_orbax_has_counted_other_operations(tmp_path):
    """Steps were committed without what other hosts wrote before host 0 had made their folder."""
    for result in run_hosts(save_after_host_0_has_saved_alone, str(tmp_path), devices_per_host=2):
        assert result.value == [1, 2]


def test_the_next_job_of_the_same_processes(tmp_path):
    for result in run_hosts(save_in_the_next_job, str(tmp_path / "run"), free_port(), devices_per_host=2):
        assert result.value == [2, 3, 4]

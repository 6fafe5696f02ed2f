from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from meshfeed._src.base import errors
from meshfeed._src.sources.host_batches import HostBatches


def batches(count=7):
    return [{"x": np.full((4, 2), i), "y": np.arange(4) + i} for i in range(count)]


class Restartable:
    def __init__(self, count=7):
        self.count = count

    def __iter__(self):
        return iter(batches(self.count))


class Stateful:
    """One-shot, with a state that holds a tuple and bytes."""

    def __init__(self, count=7):
        self.all, self.next_index = batches(count), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_index == len(self.all):
            raise StopIteration
        self.next_index += 1
        return self.all[self.next_index - 1]

    def get_state(self):
        return {"at": (self.next_index, b"x")}

    def set_state(self, state):
        assert isinstance(state["at"], tuple)
        self.next_index = state["at"][0]


def values(iterator):
    return [int(batch["y"][0]) for batch in iterator]


class Refusing:
    """A new iterator for each pass, which refuses every state; ``open`` counts those not closed."""

    def __init__(self):
        self.open = 0

    def __iter__(self):
        self.open += 1
        return RefusingPass(self)


class RefusingPass(Stateful):
    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def set_state(self, state):
        raise ValueError("another run's")

    def close(self):
        self.owner.open -= 1


def test_an_iterator_that_refuses_a_state_is_closed():
    refusing = Refusing()
    source = HostBatches(refusing)
    known = refusing.open
    reader = source.iterator()
    next(reader)
    state = reader.get_state()
    for resume in (reader.set_state, source.iterator):
        with pytest.raises(errors.StateMismatchError, match="another run's"):
            resume(state)
        assert refusing.open == known + 1, "only that of the reader"
    assert values(reader) == [1, 2, 3, 4, 5, 6], "a refused state changes nothing"


@pytest.mark.parametrize("make", [Restartable, Stateful, batches])
def test_resumes_at_every_point(make):
    for stop in range(8):
        first = HostBatches(make()).iterator()
        head = values(itertools.islice(first, stop))
        state = json.loads(json.dumps(first.get_state()))
        source = HostBatches(make())
        assert source.resumable
        resumed = source.iterator()
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert head + values(resumed) == list(range(7))
        assert values(first) == list(range(stop, 7))


@pytest.mark.parametrize("make", [Restartable, Stateful])
def test_set_state_goes_back_too(make):
    iterator = HostBatches(make()).iterator()
    state = iterator.get_state()
    assert values(iterator) == list(range(7))
    assert values(iterator) == []
    iterator.set_state(state)
    assert values(iterator) == list(range(7))


@pytest.mark.parametrize("make", [Restartable, Stateful])
def test_iterator_starts_again(make):
    source = HostBatches(make())
    assert values(itertools.islice(source.iterator(), 3)) == [0, 1, 2]
    assert values(source.iterator()) == list(range(7))


class WithLiveState(Stateful):
    """Its state is the object that it changes."""

    def __init__(self):
        super().__init__()
        self.place = {"at": [0]}

    def __next__(self):
        if self.place["at"][0] == 7:
            raise StopIteration
        self.place["at"][0] += 1
        return {"y": np.full(2, self.place["at"][0] - 1)}

    def get_state(self):
        return self.place

    def set_state(self, state):
        self.place = state


def test_a_state_that_the_iterator_changes_stays_the_one_before_the_first_batch():
    source = HostBatches(WithLiveState())
    for taken in (3, 7, 7):
        assert values(itertools.islice(source.iterator(), taken)) == list(range(taken))
    assert source.first_batch()["y"][0] == 0


def test_a_generator_is_read_once_and_cannot_be_resumed():
    source = HostBatches(batch for batch in batches())
    assert not source.resumable
    assert not source.elastic
    iterator = source.iterator()
    next(iterator)
    state = iterator.get_state()
    iterator.set_state(state)  # where it is already
    with pytest.raises(errors.SourceError, match="a generator, which can be read only once and has been read"):
        source.iterator()
    other = HostBatches(batch for batch in batches()).iterator()
    with pytest.raises(errors.StateMismatchError, match="A generator can be read once") as error:
        other.set_state(state)
    assert (error.value.saved, error.value.current) == (1, 0)
    assert values(other) == list(range(7))


def test_states_that_do_not_fit_change_nothing():
    counted = HostBatches(Restartable()).iterator()
    stateful = HostBatches(Stateful()).iterator()
    next(counted), next(stateful)
    with pytest.raises(errors.StateMismatchError, match="without set_state"):
        counted.set_state(stateful.get_state())
    with pytest.raises(errors.StateMismatchError, match="Pass the kind of iterable"):
        stateful.set_state(counted.get_state())
    with pytest.raises(errors.StateMismatchError, match="ends earlier") as error:
        counted.set_state({"batches": 9})
    assert (error.value.saved, error.value.current) == (9, 7)
    for damaged in (None, {}, {"batches": -1}, {"batches": "2"}):
        with pytest.raises(errors.StateMismatchError, match="damaged"):
            counted.set_state(damaged)
    assert values(counted) == values(stateful) == list(range(1, 7))


def test_an_error_is_raised_again_and_the_iterator_left_alone():
    def generate():
        yield {"x": np.zeros(2)}
        raise OSError("disk")

    iterator = HostBatches(generate()).iterator()
    next(iterator)
    for _ in range(3):
        with pytest.raises(OSError, match="disk"):
            next(iterator)


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("save_each", [True, False])
def test_what_can_be_resumed_goes_on_after_an_error(stateful, save_each):
    failures = iter([2, 5])
    fail_at = [next(failures)]

    class Failing(Stateful):
        def __next__(self):
            if self.next_index == fail_at[0]:
                fail_at[0] = next(failures, -1)
                self.next_index += 2  # as many libraries do, it would go on somewhere else
                raise OSError("network")
            return super().__next__()

    if stateful:
        source = HostBatches(Failing())
    else:
        Failing.get_state = Failing.set_state = None
        source = HostBatches(type("Loader", (), {"__iter__": lambda self: Failing()})())
    iterator, got, errors_seen = source.iterator(), [], 0
    while True:
        try:
            got.append(int(next(iterator)["y"][0]))
        except OSError:
            errors_seen += 1
        except StopIteration:
            break
        if save_each:
            assert iterator.get_state()["batches"] == len(got)
    assert got == list(range(7))
    assert errors_seen == 2


def test_a_loader_that_ends_before_its_length_is_logged(caplog):
    class Loader(list):
        """As torch's: a StopIteration of the dataset reaches the caller."""

        fails = True

        def __iter__(self):
            return map(self.read, range(len(self)))

        def read(self, index):
            if self.fails and index == 3:
                raise StopIteration
            return self[index]

    loader = Loader(batches())
    assert values(HostBatches(loader).iterator()) == [0, 1, 2]
    assert "the Loader of host batches ended after 3 batches, and its len() is 7; if that counts batches" in caplog.text
    caplog.clear()
    loader.fails = False
    resumed = HostBatches(loader).iterator({"batches": 4})
    assert (values(resumed), caplog.text) == ([4, 5, 6], "")


def test_two_readers_of_one_iterator_are_warned_of(caplog):
    shared = Stateful()
    first, second = HostBatches(shared), HostBatches(shared)
    for _ in range(2):
        first.iterator()
    assert caplog.text == ""
    second.iterator()
    assert "two feeds that are open read the same Stateful of host batches, so each batch goes to one" in caplog.text
    caplog.clear()
    second.close()
    HostBatches(shared).iterator()
    lists = batches()
    for _ in range(2):
        HostBatches(lists).iterator()
    assert caplog.text == ""


def test_a_restore_after_an_error_that_raises_stop_iteration_does_not_look_like_the_end():
    class Flaky(Stateful):
        def __next__(self):
            if self.next_index == 2:
                raise OSError("the disk is away")
            return super().__next__()

        def set_state(self, state):
            raise StopIteration

    iterator = HostBatches(Flaky()).iterator()
    for _ in range(2):
        next(iterator)
    with pytest.raises(OSError, match="the disk is away"):
        next(iterator)
    with pytest.raises(errors.SourceError, match=r"StopIteration in __iter__ or set_state.*the disk is away"):
        next(iterator)


def test_a_length_that_is_not_known_does_not_replace_the_end():
    class Unknown(Restartable):
        def __len__(self):
            raise NotImplementedError("the sampler has no length")

    assert values(HostBatches(Unknown()).iterator()) == list(range(7))


def test_an_interrupted_generator_does_not_look_like_the_end():
    def generate():
        yield {"x": np.zeros(2)}
        raise KeyboardInterrupt

    iterator = HostBatches(generate()).iterator()
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(errors.SourceError, match="interrupted after 1 batches"):
        next(iterator)


def test_only_what_nobody_can_write_to_is_handed_on_as_it_is():
    writable = np.arange(6.0)
    frozen = np.arange(6.0)
    frozen.flags.writeable = False
    view = writable[:]
    view.flags.writeable = False
    constant = np.frombuffer(np.arange(6.0).tobytes())
    got = next(HostBatches([{"w": writable, "f": frozen, "v": view, "c": constant, "n": [1, 2]}]).iterator())
    assert got["c"] is constant
    writable[:] = -1
    frozen.flags.writeable = True
    frozen[:] = -1
    for name in "wfv":
        np.testing.assert_array_equal(got[name], np.arange(6.0))
    assert got["n"] == [1, 2]


def test_what_cannot_be_iterated_is_refused():
    for bad in (3, "abc", lambda: batches()):
        with pytest.raises(errors.SourceError, match="Expected an iterable of batches"):
            HostBatches(bad)


def test_close_reaches_the_iterator():
    closed = []

    def generate():
        try:
            yield {"x": np.zeros(2)}
            yield {"x": np.zeros(2)}
        finally:
            closed.append(True)

    iterator = HostBatches(generate()).iterator()
    next(iterator)
    iterator.close()
    assert closed == [True]
    HostBatches([]).iterator().close()


def test_an_iterator_that_goes_back_to_a_state_is_closed_with_its_batches_only():
    class Closing(Stateful):
        closed = False

        def __next__(self):
            assert not self.closed
            return super().__next__()

        def close(self):
            self.closed = True

    underlying = Closing(3)
    source = HostBatches(underlying)
    for _ in range(2):  # as a feed does at a reset, at a restore, and between epochs
        iterator = source.iterator()
        assert values(iterator) == [0, 1, 2]
        iterator.close()
    source.close()
    assert underlying.closed


def test_fingerprint_says_nothing_of_the_content():
    assert HostBatches([]).fingerprint() == HostBatches(Stateful()).fingerprint() == {"kind": "host_batches"}


def test_grain_data_loader_resumes_exactly():
    grain = pytest.importorskip("grain")

    def loader(seed=5):
        return grain.DataLoader(
            data_source=np.arange(90),
            sampler=grain.samplers.IndexSampler(
                90, shard_options=grain.sharding.NoSharding(), shuffle=True, seed=seed, num_epochs=1
            ),
            operations=[grain.transforms.Batch(8, drop_remainder=True)],
            worker_count=0,
        )

    whole = [batch.tolist() for batch in HostBatches(loader()).iterator()]
    assert len(whole) == 11
    for stop in (0, 1, 5, 11):
        first = HostBatches(loader()).iterator()
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.get_state()))
        resumed = HostBatches(loader()).iterator()
        resumed.set_state(state)
        assert [batch.tolist() for batch in resumed] == whole[stop:]
    other = HostBatches(loader(seed=6)).iterator()
    with pytest.raises(errors.StateMismatchError, match="not elastic") as error:
        other.set_state(state)
    assert json.loads(error.value.saved)["sampler"], "as Grain wrote it, not encoded"


def test_a_resume_takes_the_first_pass_of_a_pipeline_that_reshuffles(caplog) -> None:
    """Such as tf.data's seeded shuffle, whose first pass is the same in every process and whose second is another."""

    class Reshuffled:
        passes = 0

        def __iter__(self):
            self.passes += 1
            order = np.random.default_rng(self.passes).permutation(6)
            return ({"x": np.full(2, number)} for number in order)

    first = HostBatches(Reshuffled()).iterator()
    delivered = [int(next(first)["x"][0]) for _ in range(2)]
    state, rest = first.get_state(), [int(batch["x"][0]) for batch in first]
    again = HostBatches(Reshuffled()).iterator(state)
    assert [int(batch["x"][0]) for batch in again] == rest
    assert sorted(delivered + rest) == list(range(6))
    assert not caplog.records
    again.set_state(state)  # now only by another pass
    assert len(list(again)) == 4
    assert "batch 1 of a pass" in caplog.text
    assert "this Reshuffled differ" in caplog.text
    caplog.clear()
    del state["last"]  # as states were before
    again.set_state(state)
    assert len(list(again)) == 4
    assert not caplog.records


def test_a_pass_that_differs_from_the_delivered_one_is_noticed_after_an_error_too(caplog) -> None:
    class Flaky:
        passes = 0

        def __iter__(self):
            self.passes += 1
            yield {"x": np.full(2, self.passes)}
            if self.passes == 1:
                raise OSError("once")
            yield {"x": np.full(2, 7)}

    iterator = HostBatches(Flaky()).iterator()
    next(iterator)
    with pytest.raises(OSError, match="once"):
        next(iterator)
    assert next(iterator)["x"].tolist() == [7, 7]
    assert "batch 0 of a pass" in caplog.text


@pytest.mark.parametrize("leaf", [np.zeros((0, 3)), np.int32(4), np.array(["a", "b"]), np.array([{}, {}])])
def test_states_of_batches_without_rows_or_of_text_can_be_taken(leaf) -> None:
    iterator = HostBatches([{"x": leaf}, {"x": leaf}]).iterator()
    next(iterator)
    resumed = HostBatches([{"x": leaf}, {"x": leaf}]).iterator(iterator.get_state())
    assert len(list(resumed)) == 1

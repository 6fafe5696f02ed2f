from __future__ import annotations

import gc
import itertools
import weakref

import jax
import numpy as np
import pytest

import meshfeed
from meshfeed._src.base import errors, hooks
from meshfeed._src.sources.map import Map
from meshfeed._src.sources.shuffle_buffer import ShuffleBuffer
from meshfeed._src.sources.stream import Stream


class Counter:
    def __init__(self, values):
        self.values, self.next_index, self.closed = values, 0, False

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_index == len(self.values):
            raise StopIteration
        self.next_index += 1
        return self.values[self.next_index - 1]

    def get_state(self):
        return {"next": (self.next_index,)}

    def set_state(self, state):
        (self.next_index,) = state["next"]

    def close(self):
        self.closed = True


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 4, 12])
def test_lanes_cover_the_records_once(num_lanes):
    def open_lane(lane_index, num_lanes):
        yield from range(lane_index, 50, num_lanes)

    source = Stream(open_lane)
    records = [list(source.open(lane, num_lanes)) for lane in range(num_lanes)]
    assert sorted(itertools.chain(*records)) == list(range(50))
    assert all(records[lane] == list(range(lane, 50, num_lanes)) for lane in range(num_lanes))


def test_an_iterable_will_do():
    assert list(Stream(lambda lane_index, num_lanes: [1, 2, 3]).open(0, 1)) == [1, 2, 3]


def test_epoch_is_passed_only_to_those_who_take_it():
    plain = Stream(lambda lane_index, num_lanes: [lane_index])
    with_epoch = Stream(lambda lane_index, num_lanes, epoch: [epoch])
    with_any = Stream(lambda *args, **more: [more["epoch"]])
    assert [list(s.open(3, 4, epoch=2)) for s in (plain, with_epoch, with_any)] == [[3], [2], [2]]


def test_state_of_the_iterator_is_kept_and_only_then_there():
    stateful = Stream(lambda lane_index, num_lanes: Counter("abcde"))
    for stop in range(6):
        lane = stateful.open(0, 1)
        head = list(itertools.islice(lane, stop))
        state = lane.get_state()
        assert state == {"next": (stop,)}
        resumed = stateful.open(0, 1)
        resumed.set_state(state)
        assert head + list(resumed) == list("abcde")
    stateless = Stream(lambda lane_index, num_lanes: iter("abc")).open(0, 1)
    assert not hasattr(stateless, "get_state")
    assert not hasattr(stateless, "set_state")


def test_close_reaches_the_iterator():
    counter = Counter("ab")
    Stream(lambda *_: counter).open(0, 1).close()
    assert counter.closed
    Stream(lambda *_: [1]).open(0, 1).close()


def test_an_iterator_shared_by_lanes_is_refused():
    shared = (i for i in range(10))
    source = Stream(lambda lane_index, num_lanes: shared)
    source.open(0, 2)
    with pytest.raises(errors.SourceError, match=r"open\(1, 2\) returned an iterator that it had returned before") as e:
        source.open(1, 2)
    assert e.value.lane_index == 1


def test_what_is_no_iterable_is_refused():
    with pytest.raises(errors.SourceError, match=r"open\(1, 2\) returned a NoneType") as error:
        Stream(lambda lane_index, num_lanes: None).open(1, 2)
    assert error.value.lane_index == 1
    with pytest.raises(errors.SourceError, match=r"Stream got a list. Expected a function open"):
        Stream([1, 2])


def test_what_open_raises_says_where():
    def open_lane(lane_index, num_lanes):
        raise KeyError("no such shard")

    class Bare:
        open = staticmethod(open_lane)

    for source in (Stream(open_lane), Bare(), Map(Bare(), dict)):
        with pytest.raises(KeyError) as error:
            hooks.open_lane(source, 1, 2, epoch=3, seed=0)
        assert error.value.__notes__ == ["while opening lane 1 of 2, epoch 3"]


def test_data_that_has_become_shorter_does_not_end_the_lane():
    records = []

    def open_lane(lane_index, num_lanes):
        return iter(records[lane_index::num_lanes])

    class Restored(Counter):
        def set_state(self, state):
            raise StopIteration

    stream = Stream(open_lane)
    sources = [Map(stream, int), Map(ShuffleBuffer(stream, 8), int), ShuffleBuffer(stream, 8)]
    for source in sources:
        records[:] = range(20)
        lane = hooks.open_lane(source, 0, 2, epoch=0, seed=0)
        for _ in range(7):
            next(lane)
        state = lane.get_state()
        for length in (10, 6):
            del records[length:]
            shorter = hooks.open_lane(source, 0, 2, epoch=0, seed=0)
            with pytest.raises(errors.SourceError, match=r"ended \d records before the record to resume at"):
                shorter.set_state(state) or next(shorter)

    def feed(kind):
        source = Stream(lambda lane_index, num_lanes: kind(np.arange(20)[lane_index::num_lanes]))
        return meshfeed.Feed(source, jax.make_mesh((1,), ("data",)), global_batch_size=4, num_lanes=1)

    with feed(Counter) as first, feed(Restored) as second:
        next(first)
        with pytest.raises(errors.SourceError, match="restoring lane 0 raised StopIteration"):
            second.set_state(first.get_state())


@pytest.mark.slow
def test_a_source_that_nobody_uses_is_freed():
    def make():
        counter = Counter(range(8))
        source = Stream(lambda lane_index, num_lanes: Counter(counter.values[lane_index::num_lanes]))
        assert list(hooks.open_lane(source, 1, 2, epoch=0, seed=0)) == [1, 3, 5, 7]
        return weakref.ref(source), weakref.ref(counter)

    source, counter = make()
    gc.collect()
    assert source() is None
    assert counter() is None


def test_fingerprint():
    assert Stream(lambda *_: []).fingerprint() == {"kind": "stream"}
    assert Stream(lambda *_: [], fingerprint=["a", 1]).fingerprint() == {"kind": "stream", "given": ["a", 1]}
    with pytest.raises(errors.SettingsError, match="fingerprint of Stream is a set") as error:
        Stream(lambda *_: [], fingerprint={1})
    assert error.value.setting == "fingerprint"

"""One thread that runs ahead of another: order, room, errors, and waking."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshfeed._src.base import wake_up
from meshfeed._src.base.read_ahead import Closed, ReadAhead


@pytest.fixture
def start() -> Iterator[Callable[..., ReadAhead[Any]]]:
    made: list[ReadAhead[Any]] = []

    def make(produce: Callable[[], Any], depth: int = 2) -> ReadAhead[Any]:
        made.append(ReadAhead(produce, depth=lambda: depth, name="ahead"))
        made[-1].start()
        return made[-1]

    yield make
    for ahead in made:
        ahead.stop()
        ahead.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 20 s"
        time.sleep(0.001)


@pytest.mark.slow
def test_all_items_arrive_in_order_however_the_two_threads_meet(start: Callable[..., ReadAhead[Any]]) -> None:
    """Faster producer, faster consumer, and each in turn: no wake-up is lost, or the clock would show it."""
    for producer_pause, consumer_pause in ((0, 0), (3e-4, 0), (0, 3e-4), (1e-4, 1e-4)):
        numbers = itertools.count()

        def produce(numbers: Iterator[int] = numbers, pause: float = producer_pause) -> int:
            time.sleep(pause) if pause else None
            return next(numbers)

        ahead, waits = start(produce), []
        for expected in range(2000):
            begin = time.monotonic()
            item = ahead.peek()
            assert item == expected
            waits.append(time.monotonic() - begin)
            ahead.pop(item)
            if consumer_pause:
                time.sleep(consumer_pause)
        # a lost wake-up is made good by the tick of half a second; a busy machine delays some, never most of them
        assert sum(wait > 0.45 for wait in waits) < 5


def test_no_more_than_the_depth_is_made_ahead(start: Callable[..., ReadAhead[Any]]) -> None:
    numbers = itertools.count()
    made: list[int] = []

    def produce() -> int:
        made.append(next(numbers))
        return made[-1]

    ahead = start(produce, depth=3)
    until(lambda: len(made) == 3)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    assert ahead.peek() == ahead.peek() == 0  # looking takes nothing off
    ahead.pop(ahead.peek())
    until(lambda: len(made) == 4)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [StopIteration(), ValueError("the disk is on fire"), KeyboardInterrupt()])
def test_an_error_comes_after_the_items_before_it_and_again(
    start: Callable[..., ReadAhead[Any]], error: BaseException
) -> None:
    items = iter([1, 2])

    def produce() -> int:
        found = next(items, None)
        if found is None:
            raise error
        return found

    ahead = start(produce, depth=5)
    for expected in (1, 2):
        item = ahead.peek()
        assert item == expected
        ahead.pop(item)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            ahead.peek()
        assert caught.value is error


def test_a_waiting_caller_hears_the_clock_and_may_give_up(start: Callable[..., ReadAhead[Any]]) -> None:
    go_on = threading.Event()
    ahead = start(lambda: go_on.wait(30))
    heard: list[float] = []

    def tick(waited: float) -> None:
        heard.append(waited)
        if len(heard) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        ahead.peek(tick)
    assert 0.4 < heard[0] < heard[1]
    go_on.set()
    assert ahead.peek() is True  # giving up has lost nothing


def test_closing_frees_who_waits_and_ends_the_thread(start: Callable[..., ReadAhead[Any]]) -> None:
    go_on, ended = threading.Event(), []
    ahead = start(lambda: go_on.wait(30))

    def wait() -> None:
        with pytest.raises(Closed):
            ahead.peek()
        ended.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    ahead.stop()
    waiting.join(20)
    assert ended
    go_on.set()
    ahead.join()
    ahead.pop(True)  # of a batch that was looked at before the close: nothing to take off any more
    assert not any(thread.name == "ahead" and thread.is_alive() for thread in threading.enumerate())
    with pytest.raises(Closed):
        ahead.peek()


class Item:
    """A batch, which a weak reference can watch."""


def test_closing_lets_go_of_an_item_that_is_being_made(start: Callable[..., ReadAhead[Any]]) -> None:
    making, go_on = threading.Event(), threading.Event()
    made: list[weakref.ref[Item]] = []

    def produce() -> Item:
        making.set()
        go_on.wait()
        item = Item()
        made.append(weakref.ref(item))
        return item

    ahead = start(produce)
    making.wait()
    ahead.stop()
    go_on.set()
    ahead.join()
    assert [item() for item in made] == [None]  # without help from the garbage collector, since ``ahead`` lives on


def test_closing_lets_go_of_an_error_and_with_it_of_the_frames_that_caught_it(
    start: Callable[..., ReadAhead[Any]],
) -> None:
    def produce() -> Item:
        raise ValueError("no more")

    ahead = start(produce)

    def step() -> weakref.ref[Item]:
        batch = Item()
        with contextlib.suppress(ValueError):
            ahead.peek()
        return weakref.ref(batch)

    batch = step()
    ahead.stop()
    assert batch() is None


def test_an_interrupt_between_taking_off_and_saying_so_does_not_stop_the_thread(
    start: Callable[..., ReadAhead[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_up, "TICK_SECONDS", 20.0)  # far longer than a busy machine makes a thread wait
    numbers = itertools.count()
    ahead = start(lambda: next(numbers), depth=1)
    until(lambda: ahead.ready)
    time.sleep(0.05)  # the thread waits for room now

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ahead._room, "ring", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ahead.pop(0)
    begin = time.monotonic()
    assert ahead.peek() == 1
    assert time.monotonic() - begin < 10

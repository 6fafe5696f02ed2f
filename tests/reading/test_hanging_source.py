"""A source whose reads hang while a feed identifies it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import meshfeed
from meshfeed._src.base.settings import Retry
from meshfeed._src.reading.identity import identify_within, source_identity


class Hanging:
    """Reads wait for an event, as on a network disk that is gone."""

    kind = "HangingDisk"

    def __init__(self, released: threading.Event, read: bool = True) -> None:
        self._released = released
        if not read:
            self.fingerprint = released.wait

    def __len__(self) -> int:
        return 100

    def __getitem__(self, record_id: int) -> np.ndarray:
        self._released.wait(60)
        return np.zeros(3)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def one_device() -> Mesh:
    return jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("read", "doing"),
    [(True, "reading four of its records"), (False, r"its fingerprint\(\)")],
)
def test_a_feed_over_a_source_that_hangs_names_it(released: threading.Event, read: bool, doing: str) -> None:
    message = rf"its source, a HangingDisk: {doing} has not returned after \d s \(timeout_seconds=0.2\)"
    with pytest.raises(meshfeed.StalledError, match=message) as caught:
        meshfeed.MultiHostDataLoadIterator(
            Hanging(released, read), one_device(), global_batch_size=4, timeout_seconds=0.2
        )
    assert caught.value.hosts == (0,)
    assert caught.value.waited_seconds >= 0.2


def test_a_source_that_answers_in_time_is_identified(released: threading.Event) -> None:
    released.set()
    source = Hanging(released)
    assert identify_within(source, Retry(), 30) == source_identity(source) != {}
    assert source_identity(source)["kind"] == "HangingDisk"


def test_errors_of_a_source_are_its_own() -> None:
    class Broken(Hanging):
        def fingerprint(self) -> str:
            raise ZeroDivisionError("of the source")

    with pytest.raises(ZeroDivisionError, match="of the source"):
        identify_within(Broken(threading.Event()), Retry(), 30)

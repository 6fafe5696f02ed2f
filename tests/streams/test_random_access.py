"""Random access: records that differ between workers, damaged ones that are looked at, and what an interrupt leaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed


class Records:
    """Records made by a function, without a fingerprint of their own, that can be closed."""

    def __init__(self, record: Callable[[int], Any], count: int = 64) -> None:
        self._record, self._count, self.closed = record, count, False

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record_id: int) -> Any:
        if self.closed:
            raise RuntimeError("read after close")
        return self._record(record_id)

    def close(self) -> None:
        self.closed = True


def make_feed(source: Any, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    options = {"global_batch_size": 8, "retry": meshfeed.Retry(initial_seconds=0), **options}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **options)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_threads": 2}])
def test_batches_of_several_readers_must_be_alike_too(options: dict[str, Any]) -> None:
    source = Records(lambda i: {"x": np.float32(i) if i < 8 or i == 63 else np.int32(i)})
    with (
        make_feed(source, **options) as feed,
        pytest.raises(meshfeed.SourceError, match=r"int32.*float32|float32.*int32"),
    ):
        list(feed)


def test_get_state_works_after_close_although_the_source_is_closed() -> None:
    for steps in (0, 2):
        source = Records(lambda i: {"x": np.float32(i)})
        feed = make_feed(source)
        for _ in range(steps):
            next(feed)
        feed.close()
        assert source.closed
        assert feed.get_state()["position"] == 8 * steps


def test_a_damaged_record_that_is_probed_is_no_reason_to_have_no_state() -> None:
    def record(damaged: tuple[int, ...]) -> Callable[[int], Any]:
        def read(i: int) -> Any:
            if i in damaged:
                raise ValueError("damaged")
            return {"x": np.float32(i)}

        return read

    identities = []
    for damaged in [(), (0,), (63,), (0, 63)]:
        with make_feed(Records(record(damaged)), bad_records=meshfeed.SkipBad(0.9)) as feed:
            next(feed)
            identities.append(feed.get_state()["fingerprint"]["source"]["content"])
    assert len(set(identities)) == 4


class Counting(Records):
    """Counts the calls that read."""

    reads = 0

    def __getitem__(self, record_id: int) -> Any:
        self.reads += 1
        return super().__getitem__(record_id)


class WithFingerprint(Counting):
    """Reads for a fingerprint of its own."""

    def fingerprint(self) -> str:
        return str(self[0])


@pytest.mark.parametrize("kind", [Counting, WithFingerprint])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_is_taken_without_a_read_at_any_moment(kind: type[Counting], mixed: bool) -> None:
    parts = [kind(lambda i: {"x": np.float32(i)}, 640) for _ in range(12 if mixed else 1)]
    names = [f"part {number}" for number in range(len(parts))]
    source: Any = parts[0]
    if mixed:
        source = meshfeed.sources.Mixture(dict(zip(names, parts, strict=True)), dict.fromkeys(names, 1.0))
    feed = make_feed(source, prefetch=0)
    made = [part.reads for part in parts]
    assert all(made)
    states = [feed.get_state()]
    feed.reset()
    states.append(feed.get_state())
    assert states[0] == states[1]
    assert [part.reads for part in parts] == made
    next(feed)
    before = [part.reads for part in parts]
    feed.set_state(feed.get_state())
    feed.config()
    feed.close()
    feed.get_state()
    assert [part.reads for part in parts] == before


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError(0), "records"),
        (OSError("storage is gone"), "records"),
        (RuntimeError("no"), "records"),
        (IndexError(), "records"),
        (KeyError(0), "mixture"),
    ],
)
def test_an_unreadable_record_is_part_of_the_identity_whatever_its_exception(
    error: Exception, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make(damaged: tuple[int, ...]) -> meshfeed.MultiHostDataLoadIterator:
        def record(i: int) -> Any:
            if i in damaged:
                raise error
            return {"x": np.float32(i)}

        source: Any = Records(record)
        if kind == "mixture":
            source = meshfeed.sources.Mixture(
                {"a": source, "b": Records(lambda i: {"x": np.float32(i)})}, {"a": 1, "b": 1}
            )
        return make_feed(source, retry=meshfeed.Retry(attempts=1))

    feeds = [make(damaged) for damaged in ((), (63,), (21, 63))]
    texts = [json.dumps(feed.get_state()["fingerprint"], sort_keys=True) for feed in feeds]
    assert len(set(texts)) == 3
    with make((63,)) as again:
        assert json.dumps(again.get_state()["fingerprint"], sort_keys=True) == texts[1]
    assert "record 63 cannot be read" in caplog.text
    for feed in feeds:
        feed.close()


def test_looking_at_the_source_is_tried_again() -> None:
    failures = [OSError("a blip"), OSError("another")]
    lock = threading.Lock()

    def record(i: int) -> Any:
        with lock:
            if i == 63 and failures:
                raise failures.pop()
        return {"x": np.float32(i)}

    with make_feed(Records(record)) as feed:
        assert feed.get_state()["position"] == 0


def test_replacing_bad_records_never_promotes_the_others() -> None:
    def record(i: int) -> Any:
        if i == 1:
            raise ValueError("damaged")
        return {"x": np.float32(i) if i < 4 else np.float64(i)}

    with (
        make_feed(Records(record), bad_records=meshfeed.SkipBad(0.9)) as feed,
        pytest.raises(meshfeed.SourceError, match=r"float64.*float32"),
    ):
        next(feed)


@pytest.mark.parametrize("position", [2**62, 2**63 + 8, 2**70])
def test_a_position_beyond_every_stream_is_refused_before_anything_is_read(position: int) -> None:
    with make_feed({"x": np.zeros(64)}, num_epochs=None) as feed:
        next(feed)
        state = feed.get_state()
        with pytest.raises(meshfeed.StateMismatchError) as info:
            feed.set_state({**state, "position": position})
        assert info.value.field == "position"
        assert feed.get_state() == state
        feed.set_state({**state, "position": 2**61})
        next(feed)

"""Tracebacks of errors show the user's frames and not meshfeed's."""

from __future__ import annotations

import inspect
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base.errors import VARIABLE, hides_own_frames
from meshfeed.checkpoint import Checkpointer

OWN = pathlib.Path(meshfeed.__file__).parent


class Damaged:
    """Record 20 cannot be read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> dict[str, int]:
        if record_id == 20:
            raise RuntimeError("the disk is on fire")
        return {"x": record_id}

    def fingerprint(self) -> str:
        return "damaged"


def make_feed(source: Any, **options: Any) -> meshfeed.Feed:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.Feed(source, mesh, **{"global_batch_size": 16, **options})


def frames_of(call: Callable[[], Any], error: type[BaseException]) -> list[traceback.FrameSummary]:
    with pytest.raises(error) as info:
        call()
    return list(traceback.extract_tb(info.value.__traceback__))


def own(frames: list[traceback.FrameSummary]) -> list[str]:
    return [f"{frame.name} in {frame.filename}" for frame in frames if pathlib.Path(frame.filename).is_relative_to(OWN)]


@pytest.mark.parametrize("options", [{"prefetch": 0}, {}, {"num_threads": 3}], ids=str)
def test_an_error_of_the_source_shows_the_source_and_the_caller(options: dict[str, Any]) -> None:
    with make_feed(Damaged(), retry=meshfeed.Retry(on=(RuntimeError,), initial_seconds=0), **options) as feed:
        next(feed)
        frames = frames_of(lambda: next(feed), RuntimeError)
    assert own(frames) == []
    names = [frame.name for frame in frames]
    assert names[-1] == "__getitem__"
    assert names[0] == "frames_of"
    assert {pathlib.Path(frame.filename).name for frame in frames} == {pathlib.Path(__file__).name}


@pytest.mark.parametrize(
    "call",
    [
        lambda: make_feed(3),
        lambda: make_feed(Damaged(), global_batch_size=0),
        lambda: make_feed(Damaged(), global_batch_size=12),
        lambda: make_feed(Damaged()).set_state({"meshfeed": 1}),
        lambda: make_feed(Damaged()).read([64]),
        lambda: meshfeed.sources.ArrayRecord("no-such-file"),
        lambda: meshfeed.sources.Stream(3),  # type: ignore[arg-type]
        lambda: meshfeed.sources.Mixture({}),  # type: ignore[call-arg]
    ],
)
def test_errors_of_meshfeed_end_at_the_call(call: Callable[[], Any]) -> None:
    frames = frames_of(call, Exception)
    assert own(frames) == []
    assert frames[-1].name == "<lambda>" or frames[-1].name == "make_feed"


def test_the_end_of_the_data_holds_no_frames() -> None:
    with make_feed({"x": np.zeros((16, 2))}) as feed:
        next(feed)
        assert own(frames_of(lambda: next(feed), StopIteration)) == []


def test_causes_are_trimmed_too() -> None:
    def open_lane(lane_index: int, num_lanes: int) -> Any:
        raise OSError("no such disk")

    with make_feed(meshfeed.sources.Stream(open_lane), retry=meshfeed.Retry(attempts=1)) as feed:
        with pytest.raises(OSError, match="no such disk") as info:
            next(feed)
    chain, error = [], info.value
    while error is not None:
        chain += traceback.extract_tb(error.__traceback__)
        error = error.__cause__ or error.__context__
    assert own(chain) == []
    assert "open_lane" in [frame.name for frame in chain]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (meshfeed.sources.Map([b"no Example"] * 16, meshfeed.sources.DecodeExample({"x": "int32"})), ValueError),
        (meshfeed.sources.Map([b"no image"] * 16, meshfeed.sources.DecodeImage(8)), ValueError),
    ],
    ids=["DecodeExample", "DecodeImage"],
)
@pytest.mark.parametrize("options", [{"prefetch": 0}, {}], ids=str)
def test_what_a_decoder_of_meshfeed_refuses_ends_at_the_call(
    source: Any, error: type[Exception], options: dict[str, Any]
) -> None:
    frames = frames_of(lambda: next(make_feed(source, **options)), error)
    assert own(frames) == []


def test_an_error_in_a_worker_shows_the_users_frames() -> None:
    with make_feed(Damaged(), num_workers=1) as feed:
        next(feed)
        with pytest.raises(RuntimeError, match="the disk is on fire") as info:
            next(feed)
    assert own(list(traceback.extract_tb(info.value.__traceback__))) == []
    (note,) = (note for note in info.value.__notes__ if "Traceback" in note)
    assert [line.rpartition(" ")[2] for line in note.splitlines() if line.startswith("  File")] == ["__getitem__"]


def test_a_checkpointer_that_cannot_save_on_leaving_ends_at_the_call(tmp_path: pathlib.Path) -> None:
    def leave() -> None:
        with make_feed({"x": np.zeros((16, 2))}) as feed, Checkpointer(tmp_path, save_interval_steps=2) as checkpoints:
            checkpoints.save(0, {"w": np.zeros(2)}, feed)
            checkpoints.save(1, {"w": print}, feed)

    assert own(frames_of(leave, meshfeed.CheckpointError)) == []


def test_a_fault_of_meshfeed_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    fault = "def finish(self, arrays, size):\n    return {}['no such key']\n"
    exec(compile(fault, str(OWN / "_placer.py"), "exec"), namespace)
    with make_feed({"x": np.zeros((16, 2))}) as feed:
        monkeypatch.setattr(type(feed._place.placer), "finish", namespace["finish"])
        monkeypatch.setattr(type(feed._place.placer), "finish_computes", True)
        frames = frames_of(lambda: next(feed), KeyError)
    assert [frame.name for frame in frames][-3:] == ["__next__", "_finish", "finish"]


@pytest.mark.parametrize(("value", "hidden"), [("1", False), ("0", True), ("", True)])
def test_the_environment_shows_every_frame(value: str, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with make_feed(Damaged(), prefetch=0) as feed:
        next(feed)
        assert (own(frames_of(lambda: next(feed), RuntimeError)) == []) is hidden


def test_the_wrapper_keeps_name_and_signature() -> None:
    @hides_own_frames
    def function(first: int, *, second: str = "x") -> None:
        """What it does."""

    assert str(inspect.signature(function)) == "(first: 'int', *, second: 'str' = 'x') -> 'None'"
    assert (function.__name__, function.__doc__) == ("function", "What it does.")
    assert "global_batch_size" in inspect.signature(meshfeed.Feed).parameters


def test_an_error_of_maxtexts_loader_shows_the_loader_and_the_caller() -> None:
    def batches() -> Any:
        yield {"x": np.zeros((8, 2), np.float32)}
        raise RuntimeError("the disk is on fire")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with meshfeed.maxtext.MultiHostDataLoadIterator(batches(), mesh) as loader:
        next(loader)
        before = loader.stats()
        for _ in range(2):
            frames = frames_of(lambda: next(loader), RuntimeError)
            assert own(frames) == []
            assert {pathlib.Path(frame.filename).name for frame in frames} == {pathlib.Path(__file__).name}
        assert frames[-1].name == "batches"
        assert (before.batches, loader.stats(since=before).batches) == (1, 0)

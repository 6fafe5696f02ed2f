"""How a process gets to the Ray cluster of its workers, with a stand-in for ``ray.init``; no cluster is started."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

import meshfeed

ray = pytest.importorskip("ray")

from meshfeed._src.reading import ray_workers  # noqa: E402  # after the check that Ray is installed

NO_CLUSTER = ConnectionError("Could not find any running Ray instance.")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[dict[str, Any]]]:
    """Makes ``ray.init`` call a function; returns the list of the settings that it gets."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_workers, "_attempts", [])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def answer(call: Callable[[], None]) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def init(**settings: Any) -> None:
            asked.append(settings)
            call()

        monkeypatch.setattr(ray, "init", init)
        return asked

    return answer


def refuse() -> None:
    raise NO_CLUSTER


@pytest.mark.parametrize(
    ("address", "where"),
    [
        (None, "that runs on this machine; RAY_ADDRESS is not set"),
        ("10.0.0.1:6379", "at RAY_ADDRESS=10.0.0.1:6379"),
    ],
)
def test_without_a_cluster_the_error_says_where_it_looked_and_what_to_do(
    answers: Any, address: str | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(refuse)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    for _ in range(2):  # a cluster may have been started meanwhile
        with pytest.raises(meshfeed.SettingsError) as error:
            ray_workers.connect()
        assert str(error.value).startswith(
            f"num_workers=Workers(engine='ray') could not connect to the Ray cluster {where}: Could not find any running Ray "
            "instance. Start one with `ray start --head` on one machine"
        )
        assert error.value.setting == "num_workers"
        assert error.value.__cause__ is NO_CLUSTER
    assert asked == [{"address": "auto", "configure_logging": False}] * 2
    connected = answers(lambda: None)
    ray_workers.connect()
    assert len(connected) == 1


def test_a_connected_process_stays_connected(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    ray_workers.connect()
    assert asked == []


def test_an_address_that_does_not_answer_is_asked_once(answers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = threading.Event()
    asked = answers(lambda: reached.wait(60))
    monkeypatch.setattr(ray_workers, "_CONNECT_SECONDS", 0.01)
    for _ in range(2):
        with pytest.raises(
            meshfeed.SettingsError, match=r"RAY_ADDRESS is not set: no answer within 0 s\. Start one with"
        ):
            ray_workers.connect()
    reached.set()
    monkeypatch.setattr(ray_workers, "_CONNECT_SECONDS", 60.0)
    ray_workers.connect()  # it has answered after all
    assert len(asked) == 1


def test_what_ray_says_about_a_handler_of_sigterm_is_not_shown(
    answers: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("ray._private.worker")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    try:

        def say() -> None:
            logger.error("SIGTERM handler is not set because current thread is not the main thread.")
            logger.error("Connected to Ray cluster.")

        answers(say)
        ray_workers.connect()
        assert caplog.messages == ["Connected to Ray cluster."]
        say()  # otherwise it is
        assert len(caplog.messages) == 3
    finally:
        logger.removeHandler(caplog.handler)

"""Hosts of one job as threads over a key-value store in memory, which counts requests."""

from __future__ import annotations

import collections
import concurrent.futures
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "chaos"))

from memory_store import MemoryStore

from meshfeed._src.agreement.messages import AnnouncedContents
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.base import coordination

R = TypeVar("R")


class CountingStore(MemoryStore):
    """Counts requests by kind, and remembers how long each get was to wait."""

    def __init__(self, shared: MemoryStore | None = None) -> None:
        super().__init__()
        if shared is not None:
            self._values, self._changed = shared._values, shared._changed
        self.calls: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        self.calls["set"] += 1
        super().set(key, value, overwrite=overwrite)

    def get(self, key: str, seconds: float) -> str | None:
        self.calls["get"] += 1
        self.seconds.append(seconds)
        return super().get(key, seconds)

    def try_get(self, key: str) -> str | None:
        self.calls["try_get"] += 1
        return super().try_get(key)

    def directory(self, prefix: str) -> dict[str, str]:
        self.calls["directory"] += 1
        return super().directory(prefix)

    def delete(self, key: str) -> None:
        self.calls["delete"] += 1
        super().delete(key)

    def increment(self, key: str) -> int:
        self.calls["increment"] += 1
        return super().increment(key)

    @property
    def keys(self) -> list[str]:
        return sorted(self._values)


class Job:
    """Hosts as threads: each thread is the process that it was started for."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self._here = threading.local()
        monkeypatch.setattr(coordination, "key_value_store", lambda: store)
        monkeypatch.setattr(coordination, "process_index", lambda: self.host)

    @property
    def host(self) -> int:
        """The process that this thread is."""
        return getattr(self._here, "host", 0)

    def on(self, host: int, function: Callable[..., R], *args: Any) -> R:
        """Calls the function as ``host``, on this thread."""
        before = self.host
        self._here.host = host
        try:
            return function(*args)
        finally:
            self._here.host = before
            coordination.finish_calls()

    def run(self, hosts: Iterable[int], function: Callable[[int], R]) -> list[R | BaseException]:
        """Calls the function on each host at the same time; returns what it returned or raised."""

        def call(host: int) -> R | BaseException:
            try:
                return self.on(host, function, host)
            except BaseException as error:
                return error

        hosts = list(hosts)
        with concurrent.futures.ThreadPoolExecutor(len(hosts)) as threads:
            return list(threads.map(call, hosts))


def reduce_nothing(reports: object, first: int, end: int) -> tuple[AnnouncedContents, None]:
    return {}, None


def make_agreement(store: Any, host: int, hosts: int, **options: Any) -> WindowAgreement:
    settings: dict[str, Any] = {"first_step": 0, "pad": False, "byte_limit": 1 << 30, "timeout_seconds": 30}
    settings |= {"scope": "test", "describe": lambda: "reading", "reduce": reduce_nothing, **options}
    return WindowAgreement(store, participants=range(hosts), host=host, **settings)

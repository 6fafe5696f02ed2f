"""A key-value store in memory, for agreements between threads."""

from __future__ import annotations

import threading


class MemoryStore:
    """The interface of the coordination service's key-value store, in memory."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        with self._changed:
            assert overwrite or key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout=seconds)
            return self._values.get(key)

    def try_get(self, key: str) -> str | None:
        with self._changed:
            return self._values.get(key)

    def directory(self, prefix: str) -> dict[str, str]:
        prefix = prefix.rstrip("/") + "/"
        with self._changed:
            return {key[len(prefix) :]: value for key, value in self._values.items() if key.startswith(prefix)}

    def increment(self, key: str) -> int:
        with self._changed:
            number = int(self._values.get(key, "0")) + 1
            self._values[key] = str(number)
            return number

    def keys(self) -> list[str]:
        """All keys."""
        with self._changed:
            return sorted(self._values)

    def delete(self, key: str) -> None:
        with self._changed:
            for name in [n for n in self._values if n == key or n.startswith(key + "/")]:
                del self._values[name]

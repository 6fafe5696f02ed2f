"""Who is late, found out at a cost that does not grow with the square of the number of hosts.

When one of thousands of hosts is late, all others want to know which. If each of them listed what has been published,
the coordination service would send a million values. So the reducer, which lists anyway, leaves a note with the names,
and the others look whether those are still missing: a few requests a host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence

from meshfeed import _process

_NAMED = 8
_FIRST_NOTE_SECONDS = 0.2
_NOTE_SECONDS = 1.0


class Lateness:
    """One host's view of who is late; the reducer's side as well.

    Args:
      store: the key-value store.
      prefix: of the agreement's keys.
      participants: rising; the first is the reducer.
      host: this process.
      describe: what this host's reader is doing.
    """

    def __init__(
        self,
        store: _process.KeyValueStore,
        prefix: str,
        participants: Sequence[int],
        host: int,
        describe: Callable[[], str],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._participants = participants
        self._host = host
        self._describe = describe
        self._noted: tuple[int, float, tuple[int, ...]] = (-1, 0.0, ())

    def say(self) -> None:
        """Publishes what this host is doing; called by a host that is late itself."""
        self._store.set(f"{self._prefix}/doing/{self._host}", self._describe(), overwrite=True)

    def note(self, window: int, arrived: Mapping[int, str]) -> None:
        """Reducer: leaves a note for the others, now and then; called whenever it has listed a window."""
        now = time.monotonic()
        noted_window, next_note, noted = self._noted
        if noted_window != window:
            self._noted = (window, now + _FIRST_NOTE_SECONDS, ())
            return
        if now < next_note:
            return
        late = tuple(host for host in self._participants if host not in arrived)
        if late and late != noted:
            message = {"hosts": late[:_NAMED], "count": len(late)}
            self._store.set(f"{self._prefix}/late/{window}", json.dumps(message), overwrite=True)
        self._noted = (window, now + _NOTE_SECONDS, late)

    def forget(self, window: int) -> None:
        """Reducer: the window is complete."""
        if self._noted[0] == window and self._noted[2]:
            self._store.delete(f"{self._prefix}/late/{window}")

    def who(self, window: int) -> tuple[tuple[int, ...], str]:
        """The hosts that keep a window waiting, at most 8 of them, and the words for it."""
        reducer = self._participants[0]
        text = self._store.try_get(f"{self._prefix}/late/{window}")
        note = {"hosts": [reducer], "count": 1} if text is None else json.loads(text)
        late = [host for host in note["hosts"] if self._store.try_get(f"{self._prefix}/w/{window}/{host}") is None]
        if not late:
            return (reducer,), f"host {reducer}, which announces, is silent"
        doing = {}
        for host in late:
            what = self._describe() if host == self._host else self._store.try_get(f"{self._prefix}/doing/{host}")
            if what:
                doing[host] = what
        notes = "; ".join(f"host {host} is {what}" for host, what in doing.items())
        count = max(len(late), note["count"] - len(note["hosts"]) + len(late))
        who = _process.format_hosts(late) + (f" and {count - len(late):,} more" if count > len(late) else "")
        return tuple(late), f"{who} {'has' if count == 1 else 'have'} not read it yet" + (
            f" ({notes})" if notes else ""
        )

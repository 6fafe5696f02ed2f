"""Who is late, and what they are doing, at a cost that does not grow with the square of the number of hosts.

The reducer, which lists what has been published anyway, leaves a note with the names, and the others look whether those are
still missing: a few requests a host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshfeed._src.base import coordination


class Lateness:
    """One host's view of who is late.

    Args:
      store: the key-value store.
      prefix: of the agreement's keys.
      participants: rising; the first is the reducer.
      host: this process.
      describe: what this host's reader is doing.
    """

    def __init__(
        self,
        store: coordination.KeyValueStore,
        prefix: str,
        participants: Sequence[int],
        host: int,
        describe: Callable[[], str],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._reducer = participants[0]
        self._host = host
        self._describe = describe

    def say(self) -> None:
        """Publishes what this host is doing; called by a host that is late itself."""
        self._store.set(f"{self._prefix}/doing/{self._host}", self._describe(), overwrite=True)

    def who(self, window: int) -> tuple[tuple[int, ...], str]:
        """The hosts that keep a window waiting, at most 8 of them, and the words for it.

        No hosts where all have come: then the reducer is about to announce, or it is what is late.
        """
        prefix, note = f"{self._prefix}/w/{window}", f"{self._prefix}/late/{window}"
        late, count = coordination.missing_hosts(self._store, prefix, note, self._reducer)
        if not late:
            return (), f"host {self._reducer}, which announces, is silent"
        doing = {}
        for host in late:
            what = self._describe() if host == self._host else self._store.try_get(f"{self._prefix}/doing/{host}")
            if what:
                doing[host] = what
        notes = "; ".join(f"host {host} is {what}" for host, what in doing.items())
        who = coordination.format_missing(late, count)
        return late, f"{who} {'has' if count == 1 else 'have'} not read it yet" + (f" ({notes})" if notes else "")

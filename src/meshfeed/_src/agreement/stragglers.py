"""Finds the late hosts and what they are doing, at a cost that is not quadratic in the number of hosts.

The reducer, which lists the published keys anyway, writes a note naming the missing hosts. The others only check
whether those are still missing: a few requests per host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshfeed._src.base import coordination


class Lateness:
    """One host's view of the late hosts.

    Args:
      store: the key-value store.
      prefix: key prefix of the agreement.
      participants: process indices, ascending; the first is the reducer.
      host: this process.
      describe: returns what this host's reader is doing.
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
        """Publishes what this host is doing. Called if this host is late itself."""
        self._store.set(f"{self._prefix}/doing/{self._host}", self._describe(), overwrite=True)

    def who(self, window: int) -> tuple[tuple[int, ...], str]:
        """Returns the hosts that have not published a window, at most 8, and a message naming them.

        Empty if all have published: then the reducer is about to announce the window, or is itself late.
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

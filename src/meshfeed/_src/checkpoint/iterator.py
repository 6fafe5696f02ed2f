"""Orbax v0 handler for the state of a feed, for people who have their own CheckpointManager or Composite."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as orbax_future

from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.names import public
from meshfeed._src.checkpoint.arguments import check_feed
from meshfeed._src.state import files as state_files

PLAIN_FILE = "metadata"
"""A copy of the state under the name that Orbax's own JSON handlers read."""

# By this name Orbax v1 finds its JSON handler, also in a process that never imports meshfeed. Orbax v0 knows this name
# by our class alone, and so uses it.
_JSON_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.json_handler.JsonHandler"


@public("meshfeed.checkpoint._iterator")  # Orbax writes this name into checkpoints: it stays as it was
class IteratorHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores the state of a feed as one item of an Orbax checkpoint.

    ::

        manager.save(step, args=ocp.args.Composite(data=IteratorSave(feed), …))
        manager.restore(step, args=ocp.args.Composite(data=IteratorRestore(feed), …))

    The state is captured before ``save`` returns, also with asynchronous managers. One file holds it for all hosts, and
    it is restored in place, on any number of hosts. Plain Orbax restores the item as JSON: the state itself.
    """

    @classmethod
    def typestr(cls) -> str:
        """What Orbax notes in a step as the kind of this item, to find a handler when no arguments are given."""
        return _JSON_HANDLER

    async def async_save(self, directory: Any, args: IteratorSave) -> list[orbax_future.Future]:
        """Captures the state, and gives futures that write it."""
        check_feed(args.feed, ("get_state",), "Give IteratorSave(feed).")
        state = args.feed.get_state()
        process = process_index()
        if not state_files.must_write(state, process):
            return []
        identity = args.identity

        async def write() -> None:
            path = await directory.await_creation() if hasattr(directory, "await_creation") else directory
            state_files.write_state(path, state, identity=identity, process=process)

        return [orbax_future.CommitFutureAwaitingContractedSignals(write(), name="meshfeed_iterator")]

    def save(self, directory: Any, args: IteratorSave) -> None:
        """Writes the state before it returns."""
        state_files.write_state(directory, args.feed.get_state(), identity=args.identity)

    def restore(self, directory: Any, args: IteratorRestore | None = None) -> Any:
        """Reads the state of all hosts and sets it on ``args.feed``, which is given back; without it, the state.

        Raises:
          CheckpointError: no whole state is there.
          StateMismatchError: the feed cannot continue it, and is as it was.
        """
        if args is not None:
            check_feed(args.feed, ("set_state",), "Give IteratorRestore(feed).")
        state = state_files.read_state(directory)
        if args is None or args.feed is None:
            return state
        args.feed.set_state(state)
        return args.feed

    def finalize(self, directory: Any) -> None:
        """Joins the files of all hosts in one; Orbax calls it on the primary host when all have written."""
        state_files.merge_files(directory)
        if state_files.state_paths(directory):
            state_files.write_json(epath.Path(directory) / PLAIN_FILE, state_files.read_state(directory))

    def metadata(self, directory: Any) -> dict[str, Any]:
        """The saved state, without a feed."""
        return state_files.read_state(epath.Path(directory))


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(IteratorHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
    """Saves the state of ``feed``.

    Attributes:
      feed: a :class:`meshfeed.Feed`, or anything that has ``get_state() -> dict``.
      identity: ties the file to the arrays saved with it; :class:`~meshfeed.checkpoint.Checkpointer` sets it.
    """

    feed: Any
    identity: Mapping[str, Any] | None = None


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(IteratorHandler, for_restore=True)
@dataclasses.dataclass
class IteratorRestore(ocp.args.CheckpointArgs):
    """Restores into ``feed``, in place.

    Attributes:
      feed: whatever has ``set_state(dict)``; None gives back the state itself.
    """

    feed: Any = None

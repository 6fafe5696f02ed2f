"""The state of a feed as an Orbax v0 item, and as a Grain iterator for managers that accept only those."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Protocol

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as orbax_future

from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.hooks import Resumable
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint.arguments import HasState, check_feed, created
from meshfeed._src.checkpoint.orbax_internals import JSON_HANDLER
from meshfeed._src.state import files as state_files

PLAIN_FILE = "metadata"
"""A copy of the state under the name that Orbax's own JSON handlers read."""


@public("meshfeed.checkpoint._iterator")  # Orbax writes this name into checkpoints, so it must not change
class IteratorHandler(ocp.handlers.AsyncCheckpointHandler):
    """Saves and restores the state of a feed as one item of an Orbax checkpoint.

    ::

        manager.save(step, args=ocp.args.Composite(data=IteratorSave(feed), …))
        manager.restore(step, args=ocp.args.Composite(data=IteratorRestore(feed), …))

    The state is captured before ``save`` returns, including with asynchronous managers. One file holds the state of all
    hosts; it is restored in place, on any number of hosts. Plain Orbax restores the item as JSON: the state itself.
    """

    @classmethod
    def typestr(cls) -> str:
        """Returns the item kind that Orbax records in a step, to find a handler if no arguments are given."""
        return JSON_HANDLER

    async def async_save(self, directory: epath.Path, args: IteratorSave) -> list[orbax_future.Future]:
        """Captures the state and returns futures that write it."""
        check_feed(args.feed, ("get_state",), "Pass IteratorSave(feed).")
        state, process = args.feed.get_state(), process_index()
        if not state_files.must_write(state, process):
            return []
        identity = args.identity

        async def write() -> None:
            state_files.write_state(await created(directory), state, identity=identity, process=process)

        return [orbax_future.CommitFutureAwaitingContractedSignals(write(), name="meshfeed_iterator")]

    def save(self, directory: epath.PathLike, args: IteratorSave) -> None:
        """Writes the state before returning."""
        check_feed(args.feed, ("get_state",), "Pass IteratorSave(feed).")
        state_files.write_state(directory, args.feed.get_state(), identity=args.identity)

    def restore(
        self, directory: epath.PathLike, args: IteratorRestore | None = None
    ) -> Resumable | dict[str, JsonValue]:
        """Reads the state of all hosts, sets it on ``args.feed`` and returns the feed; without one, returns the state.

        Raises:
          CheckpointError: there is no complete state.
          StateMismatchError: the feed cannot resume from it; the feed is unchanged.
        """
        if args is not None:
            check_feed(args.feed, ("set_state",), "Pass IteratorRestore(feed).")
        state = state_files.read_state(directory)
        if args is None or args.feed is None:
            return state
        args.feed.set_state(state)
        return args.feed

    def finalize(self, directory: epath.PathLike) -> None:
        """Merges the files of all hosts into one. Orbax calls it on the primary host once all hosts have written."""
        state_files.merge_files(directory)
        if state_files.state_paths(directory):
            state_files.write_json(epath.Path(directory) / PLAIN_FILE, state_files.read_state(directory))

    def metadata(self, directory: epath.PathLike) -> dict[str, JsonValue]:
        """Returns the saved state, without a feed."""
        return state_files.read_state(epath.Path(directory))


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(IteratorHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
    """Saves the state of ``feed``.

    Attributes:
      feed: a :class:`meshfeed.Feed`, or any object with ``get_state() -> dict``.
      identity: links the file to the arrays saved with it; set by :class:`~meshfeed.checkpoint.Checkpointer`.
    """

    feed: HasState
    identity: Mapping[str, JsonValue] | None = None


@public("meshfeed.checkpoint")
@ocp.args.register_with_handler(IteratorHandler, for_restore=True)
@dataclasses.dataclass
class IteratorRestore(ocp.args.CheckpointArgs):
    """Restores into ``feed``, in place.

    Attributes:
      feed: any object with ``set_state(dict)``. None returns the state itself.
    """

    feed: Resumable | None = None


class FeedIterator(Resumable, Iterator[PyTree], Protocol):
    """A feed that delivers batches."""


class GrainIteratorFace:
    """The interface that Orbax's peer-to-peer manager and Grain's own handlers expect: a state as bytes."""

    def __init__(self, feed: FeedIterator) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[PyTree]:
        return self

    def __next__(self) -> PyTree:
        return next(self._feed)

    def get_state(self) -> bytes:
        """Returns the feed's state as JSON bytes."""
        return json.dumps(self._feed.get_state()).encode()

    def set_state(self, state: bytes) -> None:
        """Sets the feed's state in place, from JSON bytes."""
        self._feed.set_state(json.loads(state))


@public("meshfeed.checkpoint")
def as_grain_iterator(feed: FeedIterator) -> GrainIteratorFace:
    """Wraps ``feed`` as an iterator with Grain's interface, including its state.

    ::

        manager.save(step, args=p2p.args.Composite(
            state=…, data_iter=grain.checkpoint.CheckpointSave(as_grain_iterator(feed))))

    Such managers keep one state per process, so a stream can resume only on as many hosts as it was saved on. If a
    manager accepts any Orbax handler, use :class:`IteratorHandler`.

    Args:
      feed: a :class:`meshfeed.Feed`, or any iterator with ``get_state`` and ``set_state`` whose state is JSON.
    """
    return GrainIteratorFace(feed)

"""A save by a Checkpointer: what is saved, its parts, which are written on all hosts or fail on all of them, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as orbax_future

from meshfeed._src.base.coordination import format_differences, process_count, process_index
from meshfeed._src.base.errors import CheckpointError, MeshfeedError
from meshfeed._src.base.exact_json import ALLOWED, decode_value, encode_value
from meshfeed._src.base.threads import SingleCall
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.checkpoint.agreement import Agreement, error_of, report_of
from meshfeed._src.checkpoint.leaves import EncodedTree, describe_leaves
from meshfeed._src.checkpoint.options import short
from meshfeed._src.checkpoint.stored import digest
from meshfeed._src.state.files import HOSTS, is_of_feed
from meshfeed._src.state.state import digest_of

T = TypeVar("T")
_CREATION_SECONDS, _POLL_SECONDS = 60.0, 0.01  # after that, writing names the folder that is missing
_MOST_ROUNDS = 8  # hosts that failed wait for the others, which then raise, in one round or two


class SavePoints:
    """Where the hosts of one save wait for each other in the background, and learn which of them failed: this host's side.

    Orbax's own barriers do not say why a host is missing: it failed earlier, and the others wait for it until their timeout,
    30 minutes by default. A barrier that timed out also fails at once for the next Checkpointer that saves a step of that
    number.

    All hosts reach the points in the same order. A host that fails leaves out the points up to the barrier at which Orbax
    ends every save. There it reports its error, and the hosts that wait for it elsewhere raise the same. ``save_id`` is
    unique in the job, and the same on all hosts.
    """

    def __init__(self, save_id: object, step: int, timeout_seconds: float) -> None:
        doing = f"waiting for the other hosts of step {step}"
        self._agreement = Agreement(doing, timeout_seconds, f"save-{save_id}", kind="saving a step")
        self._caller = threading.get_ident()

    def attempt(self, point: str, work: Callable[[], object]) -> None:
        """Runs ``work``; returns once it has succeeded on every host, or raises the same error on all."""
        failed: Exception | None = None
        try:
            work()
        except Exception as error:
            failed = error
        _, first = self._meet(point, failed)
        if first is not None:
            raise error_of(first) from failed

    def barrier(self, point: str) -> None:
        """Waits for the other hosts, as Orbax asks for it; raises the error of a host that has failed before this point.

        Orbax calls it on its threads also while it handles an error of this host, which is then reported.
        """
        # Around a call of save(), the caller may handle an error of its own.
        failed = None if threading.get_ident() == self._caller else sys.exception()
        for _ in range(_MOST_ROUNDS):
            together, first = self._meet(point, failed)
            if together:
                return
            if failed is None:
                break  # otherwise the others raise now, and arrive here next
        else:
            first = None
        if first is not None:
            raise error_of(first)
        raise CheckpointError(
            f"{self._agreement.doing}: hosts are at different points of the save ({point} on this one)."
        )

    def _meet(self, point: str, failed: BaseException | None) -> tuple[bool, JsonValue]:
        """Returns whether all hosts are at this point, and the report of the lowest-numbered host that failed, or None."""

        def reduce(found: dict[int, JsonValue]) -> JsonValue:
            first = next((report for _, (_, report) in sorted(found.items()) if report is not None), None)
            return [len({point for point, _ in found.values()}) == 1, first]

        together, first = self._agreement.reduce([point, None if failed is None else report_of(failed)], reduce)
        return together, first

    def close(self) -> None:
        """Ends the points, once the save has ended on this host."""
        self._agreement.close()


class OrbaxBarrier:
    """The barrier for Orbax's ``AsyncOptions``. ``points`` are those of the save in progress."""

    def __init__(self) -> None:
        self.points: SavePoints | None = None

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other hosts."""
        if self.points is None:  # not in the background of a save
            with Agreement(key, timeout_ms / 1000) as agreement:
                agreement.collect(None)
        else:
            self.points.barrier(key)


@dataclasses.dataclass(eq=False)
class StepSave:
    """One save by a ``Checkpointer``, which its items share. Other managers may save on some of the hosts only."""

    identity: Mapping[str, JsonValue]  # id, step, feed_step, position and parts of the save; stored with each part
    timeout_seconds: float  # how long hosts wait for each other at the end
    started: list[orbax_future.Future] = dataclasses.field(default_factory=list)  # of this host
    # Why this host could not capture a part; the futures raise the same.
    failures: list[BaseException] = dataclasses.field(default_factory=list)

    @property
    def step(self) -> int:
        """The caller's step number."""
        return self.identity["step"]

    @functools.cached_property
    def points(self) -> SavePoints:
        """Where the hosts of this save wait for each other."""
        return SavePoints(self.identity["id"], self.step, self.timeout_seconds)

    def end(self) -> None:
        """Ends the waits for other hosts, once the save has ended on this one."""
        if (points := vars(self).pop("points", None)) is not None:
            points.close()

    def begin(self, item: str, futures: Sequence[orbax_future.Future]) -> list[orbax_future.Future]:
        """Returns the futures of an item for Orbax, which succeed on all hosts or raise the same error on all."""
        self.started += futures
        if process_count() == 1:
            return list(futures)
        return [_OnAllHosts(futures, item, self.points)]

    def failed(self, error: BaseException) -> orbax_future.Future:
        """Returns the future of a part that could not be captured.

        Raised at once, the error would keep this host from Orbax's barriers, in which the other hosts wait; Orbax would
        still be making the folder while the next save begins; and nobody could wait for the threads of other leaves.
        """
        self.failures.append(error)
        return _Failed(error)


@dataclasses.dataclass
class _OnAllHosts:
    """Otherwise, if one host failed, the others would wait for it in Orbax's barriers, and raise the barriers' errors."""

    futures: Sequence[orbax_future.Future]
    item: str
    points: SavePoints

    def result(self, timeout: float | None = None) -> None:
        """Waits for this host's futures, then for the other hosts."""
        self.points.attempt(self.item, lambda: [future.result(timeout) for future in self.futures])

    def cancel(self) -> None:
        """Cancels this host's futures."""
        for future in self.futures:
            future.cancel()


class _Failed:
    """Holds the text of an error only, since Orbax keeps what this raises."""

    def __init__(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, MeshfeedError) else f"{type(error).__name__}: {error}"
        self._text = text if isinstance(error, Exception) else f"the save was interrupted: {type(error).__name__}"

    def result(self, timeout: float | None = None) -> None:
        """Raises a CheckpointError; an interrupt too is an Exception on the thread that waits for this."""
        raise CheckpointError(self._text)

    def cancel(self) -> None:
        """Does nothing."""


async def created(folder: epath.PathLike) -> epath.Path:
    """Waits until the folder of a save exists: some versions of Orbax pass a handle instead of a path.

    Orbax's primary host makes the folder in the background. Another host that saves before the primary has announced that
    does not wait for it (``AwaitableSignalsContract``, Orbax 0.12), which happens with the managers that have no barrier at
    the start of a save. Object stores have no folders to wait for.
    """
    wait = getattr(folder, "await_creation", None)
    path = epath.Path(folder) if wait is None else await wait()
    deadline = time.monotonic() + _CREATION_SECONDS
    while "://" not in str(path) and not path.exists() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    return path


def run_coroutine(coroutine: Coroutine[Any, Any, T], name: str) -> T:
    """Runs a coroutine, on a thread of that name if the caller runs an event loop in this one, such as a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return SingleCall(lambda: asyncio.run(coroutine), name).result()


def wait_until_finished(manager: ocp.CheckpointManager) -> None:
    """Waits until the manager has committed what it saves, and raises the error of the save, though Ctrl-C may arrive.

    Orbax joins its thread. If Ctrl-C arrives there, CPython before 3.13 takes that thread for ended, so later waits return at
    once, also the one at exit, and the save is lost; and Orbax forgets the step. So another thread waits first.
    """
    with contextlib.suppress(Exception):  # raised below; or the interpreter ends, and no thread can be started any more
        SingleCall(manager.wait_until_finished, "meshfeed-wait-for-save").result()
    manager.wait_until_finished()


_DESCRIBED_LEAVES = 10_000


def check_same(agreement: Agreement, identity: Mapping[str, JsonValue], encoded: EncodedTree) -> None:
    """Raises on every host if hosts save different steps, trees or positions of the feed."""
    step, own = identity["step"], describe_leaves(encoded.tree)
    place = [identity["feed_step"], identity["position"]]
    found = agreement.collect([step, place, len(own), digest_of(own)])
    steps = {host: str(number) for host, (number, *_) in found.items()}
    if (differing := format_differences(steps)) is not None:
        raise CheckpointError(f"hosts save different steps at the same time: {differing}. Call save in the same order.")
    places = {host: f"step {at[0]}, position {at[1]}" for host, (_, at, *_) in found.items()}
    if (differing := format_differences(places)) is not None:
        raise CheckpointError(
            f"step {step}: the feed is not at the same place on all hosts ({differing}). A host has called next more often, "
            "so global arrays since then hold rows of different steps. Call next equally often on every host, without an "
            "extra call on one of them, and restart from the last checkpoint.",
            step=step,
        )
    if len({digest for *_, digest in found.values()}) == 1:
        return
    # Only now and only so many, because the description of a large tree is long.
    first = agreement.publish(lambda: own[:_DESCRIBED_LEAVES])
    differences = sorted({*map(tuple, first)} ^ {*map(tuple, own[:_DESCRIBED_LEAVES])})
    reports = agreement.collect(": ".join(differences[0]) if differences else None)
    different = [(host, leaf) for host, leaf in sorted(reports.items()) if leaf is not None]
    host, leaf = different[0] if different else ("?", f"after the first {_DESCRIBED_LEAVES:,}")
    raise CheckpointError(
        f"step {step}: host {host} saves a different tree from host 0; the first difference is leaf {leaf}. Pass the "
        "same train_state on every host.",
        step=step,
    )


class HasState(Protocol):
    """The part of a feed that saving needs."""

    def get_state(self) -> dict[str, JsonValue]:
        """Returns the state after the last delivered batch, as JSON."""
        ...


def number_of(feed: HasState | None, name: str) -> int | None:
    """Returns an attribute of a feed as an int, or None if the feed is None or has no such number."""
    value = getattr(feed, name, None)
    return int(value) if isinstance(value, int | np.integer) else None


def _feed_marker(feed: HasState | None) -> JsonValue:
    """Returns a value that changes when a feed delivers a batch: its counters, which are cheap, or else its state."""
    if feed is None:
        return None
    numbers = (number_of(feed, "step"), number_of(feed, "position"))
    # A copy, since the iterator may change its own.
    return copy.deepcopy(feed.get_state()) if numbers == (None, None) else numbers


class SkippedStep:
    """A training state and a feed at one step.

    Nothing is copied, because a copy at every step would need memory for a second train state. So :meth:`problem` checks
    for later changes.
    """

    def __init__(self, step: int, train_state: PyTree, feed: HasState | None) -> None:
        self.step = step
        self.feed = feed
        self._leaves, self._structure = jax.tree_util.tree_flatten(train_state)
        self._host_digests = self._digests()
        self._feed_marker = _feed_marker(feed)

    @property
    def train_state(self) -> PyTree:
        """The tree as it was passed."""
        return jax.tree_util.tree_unflatten(self._structure, self._leaves)

    def _digests(self) -> list[str]:
        # Numpy arrays are often written in place; a digest costs less than a copy.
        return [digest(x) for x in self._leaves if isinstance(x, np.ndarray) and not x.dtype.hasobject]

    def problem(self) -> str | None:
        """Returns why the step can no longer be saved, or None if it can."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.train_state):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                return f"leaf {jax.tree_util.keystr(path)} was donated or deleted since"
        if self._digests() != self._host_digests:
            return "a numpy leaf was changed since"
        if _feed_marker(self.feed) != self._feed_marker:
            return "the feed has moved on since"
        return None


_EXACT = "__exact__"


@dataclasses.dataclass
class CapturedState:
    """The state of a feed at the time of a save, in place of the feed."""

    state: dict[str, JsonValue]

    @classmethod
    def of(cls, feed: HasState) -> Self:
        """Captures the state of a feed, or of another iterator whose state JSON may change: Grain's has tuples, or is bytes.

        Raises:
          CheckpointError: the state has no exact form in JSON.
        """
        state: Any = feed.get_state()
        if isinstance(state, dict) and is_of_feed(state):
            return cls(state)
        with contextlib.suppress(TypeError, ValueError):
            copied = json.loads(json.dumps(state))  # the iterator may change its own while it is written
            if isinstance(state, dict) and copied == state and not {_EXACT, HOSTS} & set(state):
                return cls(copied)
        try:
            return cls({_EXACT: encode_value(state)})
        except TypeError as error:
            raise CheckpointError(f"the state of {short(feed)} cannot be saved: {error}. {ALLOWED}") from error

    def get_state(self) -> dict[str, JsonValue]:
        """Returns the state."""
        return self.state


def given_state(saved: dict[str, JsonValue]) -> Any:
    """Returns what ``get_state`` gave on this host, from what :meth:`CapturedState.of` made of it.

    Raises:
      CheckpointError: another number of hosts saved an iterator that is not a feed.
    """
    if is_of_feed(saved):
        return saved
    hosts = saved[HOSTS] if set(saved) == {HOSTS} else {"0": saved}
    if process_count() != len(hosts):
        raise CheckpointError(
            f"{len(hosts)} host(s) saved this iterator, each its own state, and there are {process_count()} now. An "
            "iterator that is not a feed continues on the number of hosts that saved it: start as many, restore without "
            "it, or let a meshfeed.Feed read the data, which continues on any number."
        )
    saved = hosts[str(process_index())]
    return decode_value(saved[_EXACT]) if set(saved) == {_EXACT} else saved

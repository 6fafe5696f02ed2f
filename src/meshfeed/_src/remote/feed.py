"""A feed that runs on the CPU hosts attached to the accelerators, under one controller.

::

    feed = meshfeed.remote.RemoteFeed(make_source, sharding, global_batch_size=1024, shuffle=True)
    for batch in feed: ...

The controller holds no data: each host runs a :class:`meshfeed.Feed` over its CPU devices, created from the
pickled factory, and its batches are copied to the accelerators attached to that host. On CPU, everything runs in one
process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from meshfeed._src.arrays.dtypes import x64_types
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import (
    Failure,
    MeshfeedError,
    SettingsError,
    SourceError,
    hide_own_frames,
    hides_own_frames,
)
from meshfeed._src.base.exact_json import tree_from_json, tree_to_json
from meshfeed._src.base.fork import NotCopied
from meshfeed._src.base.settings import SETTINGS, Balance, BatchSchedule, FeedSettings, Retry, ShardShuffle, SkipBad
from meshfeed._src.base.stats import FeedStats, stats_since
from meshfeed._src.base.stores import write_output
from meshfeed._src.base.turn import in_turn
from meshfeed._src.base.types import PyTree, RecordIds, public
from meshfeed._src.feed.compiled import refuse_compiled, trace_state_clean
from meshfeed._src.feed.iterator import Feed, SecondPass, note_end
from meshfeed._src.feed.local_iterator import LocalIterator
from meshfeed._src.feed.parts import SourceFactory
from meshfeed._src.feed.resharding import hosts_left
from meshfeed._src.pictures.plan import MeshPlan, plan_of_batch
from meshfeed._src.pictures.report import report_figures, report_page
from meshfeed._src.plan.plan import normalize_sharding, sharding_leaves
from meshfeed._src.remote.client import RemoteClient, make_payload
from meshfeed._src.state import state as feed_state
from meshfeed._src.state.files import Checkpointable


def make_feed_payload(
    make_source: object, prefix: PyTree, settings: Mapping[str, Any], *, resharded: bool = False
) -> bytes:
    """Returns a pickled function from a mesh of CPU devices to a :class:`FeedTarget`."""
    what = "a function without arguments that can be imported on those hosts, or pickled with all that it refers to"
    if not callable(make_source):
        raise SettingsError(f"make_source={make_source!r:.80}; it takes {what}.", setting="make_source")
    # Pickle the factory alone first: the error then names make_source rather than the settings.
    make_payload(make_source, setting="make_source", what=what)
    specs = jax.tree.map(lambda sharding: sharding.spec, prefix)  # shardings refer to the controller's devices
    make_target = functools.partial(FeedTarget, make_source, specs, settings, resharded)
    return make_payload(make_target, setting="settings", what="values that can be pickled")


class FeedTarget:
    """The target of a :class:`meshfeed._src.remote.client.Endpoint`: a feed over the CPU devices of the host's mesh.

    ``specs`` is a pytree prefix of ``PartitionSpec``; ``settings`` are keywords of the feed. With ``resharded``, it continues
    another feed on this mesh, as :meth:`meshfeed.Feed.reshard` does.
    """

    def __init__(
        self, make_source: Callable[[], Any], specs: PyTree, settings: Mapping[str, Any], resharded: bool, mesh: Mesh
    ) -> None:
        sharding = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        if resharded:
            settings = {**settings, "load": hosts_left(settings["load"], sharding)}
        self._feed = feed = Feed(SourceFactory(make_source), sharding, **settings)
        if "buckets" in feed.config()["fingerprint"]:
            feed.close()
            raise SettingsError(
                "make_source returned Buckets, whose batches differ in shape. RemoteFeed takes batches of one shape. Use "
                "Padded or Packed.",
                setting="make_source",
            )
        self._size = 0
        self._varies = isinstance(feed.config()["global_batch_size"], list)
        self.calls: dict[str, Any] = {
            "get_state": feed.get_state,
            "set_state": feed.set_state,
            "reset": feed.reset,
            "start": feed.start,
            "set_weights": lambda weights, from_step: feed.set_weights(weights, from_step=from_step),
            "close": lambda because=None: feed.close(
                _because=None if because is None else Failure.from_json(because).exception()
            ),
            "len": feed.__len__,
            "element_spec": self._element_spec,
            "record_ids": lambda step: feed.record_ids(step).tolist(),
            "read": lambda record_ids: jax.tree.map(np.copy, feed.read(record_ids)),
            "replay": lambda step, state: jax.tree.map(np.copy, feed.replay(step, state=state)),
            "config": feed.config,
            "cannot_resume": lambda: feed.cannot_resume,
            "stats": lambda: dataclasses.asdict(feed.stats()),
            "report": lambda: report_figures([feed._figures()]),
            "counted": feed._stats.to_json,
            "continue_from": feed._stats.continue_from,
        }

    def next(self) -> PyTree:
        """Returns the next batch of the feed."""
        return self._feed.__next__()  # not next(feed): an interrupt after that C call would lose the batch

    def set_delivered(self, batch: PyTree, delivered: bool) -> None:
        """Counts the batch that the last :meth:`next` returned as delivered, or has it come again."""
        self._feed._set_delivered(batch, delivered)

    def numbers(self) -> tuple[int, int, int]:
        """Returns the step, the position, and the rows of the next batch."""
        if self._varies and self._size:  # a constant size is looked up only once
            self._size = _num_rows(self._feed.element_spec)
        return self._feed.step, self._feed.position, self._size

    def spec(self) -> PyTree | None:
        """Returns the spec of the next batch, or None if this host has no batch."""
        try:
            spec = self._feed.element_spec
        except SourceError:  # next() raises it, or finds that other hosts have records
            return None
        self._size = _num_rows(spec)
        return spec

    def _element_spec(self) -> dict[str, Any]:
        """Returns structure, shapes, dtypes and PartitionSpec entries as JSON, without device references."""
        tree = self._feed.element_spec
        return {"tree": tree_to_json(tree), "specs": [tuple(leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]}


def _num_rows(spec: PyTree) -> int:
    return jax.tree.leaves(spec)[0].shape[0]


@public("meshfeed.remote")
class RemoteFeed(Checkpointable, NotCopied):
    """:class:`meshfeed.Feed` on the CPU hosts attached to the accelerators, with the same interface.

    The global batches are bit-identical to a local feed's, and either can resume from the other's checkpoints. (NaNs of
    bfloat16 and float8_e5m2 may lose their payload on a mesh whose devices are in another order than ``jax.devices()``,
    since JAX then permutes them in a compiled call.)
    All other keywords are those of :class:`meshfeed.Feed`.

    Args:
      make_source: ``make_source() -> source``, called on each host; must be importable there, or picklable with
        everything it refers to. It is sent to the hosts as a pickle, which executes code there: the network between the
        controller and the hosts must be trusted. All other messages between hosts are plain data, not pickles.
      sharding: as for :class:`meshfeed.Feed`; all leaves must use one mesh.

    Raises:
      SettingsError: a keyword has an invalid value, the factory cannot be pickled, or an accelerator has no colocated
        CPU device.
      SourceError, PlanError: as for :class:`meshfeed.Feed`, re-raised here with the message from the host.
    """

    @hides_own_frames
    def __init__(
        self,
        make_source: Callable[[], Any],
        sharding: PyTree,
        *,
        global_batch_size: int | BatchSchedule | None = None,
        shuffle: bool | int | str | ShardShuffle = False,
        seed: int = 0,
        num_epochs: int | None = 1,
        end: Literal["drop", "pad"] = "drop",
        mask_key: str | None = None,
        balance: Balance | None = None,
        num_lanes: int | None = None,
        load: Literal["sharded", "once"] | Sequence[int] = "sharded",
        prefetch: int | Literal["auto"] = 2,
        num_workers: int | Literal["auto"] = 0,
        num_threads: int | Literal["auto"] | None = None,
        retry: Retry = Retry(),
        bad_records: SkipBad | None = None,
        check_replicas: bool = False,
        timeout_seconds: float = 300,
        name: str | None = None,
    ) -> None:
        arguments = locals()  # must be first: only the arguments are defined
        self._closed = self._ended = False
        self._make_source = make_source
        self._x64 = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue] # JAX 0.10 does not declare it
        self._settings = {name: arguments[name] for name in SETTINGS}
        try:
            FeedSettings.of(arguments)  # fails here rather than on the hosts
        except SettingsError:
            if coordination.process_count() > 1:  # other controllers, whose hosts wait for those of this one
                with contextlib.suppress(Exception):
                    self._make_client(sharding)
            raise
        self._client, self._memory_kind = self._make_client(sharding)
        self._turn = self._client.turn
        self._client.know_spec()
        self._settings["name"] = self.name = str(self._client.call("config")[0]["name"])
        self._second_pass = SecondPass(self.name)

    def _make_client(self, sharding: PyTree, *, resharded: bool = False) -> tuple[RemoteClient, str | None]:
        """Creates the feeds on the hosts; also returns the memory kind of the arrays on the accelerators."""
        prefix = normalize_sharding(sharding)
        meshes = list(dict.fromkeys(leaf.mesh for leaf in sharding_leaves(prefix)))
        if len(meshes) > 1:
            raise SettingsError(
                f"sharding is over {len(meshes)} meshes; a remote feed takes one. Create one feed per mesh.",
                setting="sharding",
            )
        # The memory kind belongs to the accelerators: apply it in the transfer from the CPU mesh.
        kinds = {leaf.memory_kind for leaf in sharding_leaves(prefix)}
        payload = make_feed_payload(self._make_source, prefix, self._settings, resharded=resharded)
        client = RemoteClient(payload, meshes[0])  # pyright: ignore[reportArgumentType] # of real devices
        return client, kinds.pop() if len(kinds) == 1 else None

    def __repr__(self) -> str:
        known = vars(self)  # the constructor may have failed before setting these
        header = getattr(known.get("_client"), "header", None)
        if header is None or "name" not in known:
            return "<meshfeed.remote.RemoteFeed: not made>"
        closed = ", closed" if self._closed else ""
        return f"<meshfeed.remote.RemoteFeed {self.name!r}: step={header.step}, position={header.position}{closed}>"

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> RemoteFeed:
        if self._ended:
            self._second_pass.begins()
        return self

    def __next__(self) -> PyTree:
        """Returns the next global batch on the accelerators, a pytree of ``jax.Array`` ``[global_batch_size, ...]``.

        After an interrupt (Ctrl-C), call it again to continue with the same batch.

        Raises:
          StopIteration: the end of the stream, and on every later call until ``reset`` or ``set_state``.
          MeshfeedError: the feed is closed, another call of ``next``, ``set_state`` or ``reset`` is running, or JAX compiles
            the caller.
          Exception: any error that the feed raised on a host, with its message.
        """
        try:
            self._check_open()
            if not trace_state_clean():
                refuse_compiled(self.name)
            return self._client.take(self._to_accelerators)
        except Exception as error:  # no decorator: an interrupt in its frame would lose the batch
            if isinstance(error, StopIteration):
                self._ended = True
                note_end(error, self.name, self._client.header.step, self._settings["num_epochs"])
            hide_own_frames(error)
            raise

    def _to_accelerators(self, batch: PyTree) -> PyTree:
        return self._client.to_accelerators(batch, self._memory_kind)

    def _check_open(self) -> None:
        if self._closed:
            raise MeshfeedError(f"{self.name} is closed. To continue, pass its get_state() to set_state of a new feed.")

    @in_turn
    def start(self) -> None:
        """Begins to open the data and read ahead on the hosts, and returns at once; see :meth:`meshfeed.Feed.start`."""
        self._check_open()
        self._client.call("start")

    # ------------------------------------------------------------------ state

    def get_state(self) -> dict[str, Any]:
        """Returns the JSON state after the last delivered batch, merged over all hosts of this controller."""
        states = self._client.call("get_state")
        return states[0] if len(states) == 1 else feed_state.merge_states(states)

    @in_turn
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from ``state``, which may come from a local feed.

        Raises:
          StateMismatchError: the state is damaged, from a newer version, or from a different stream. The feed is
            unchanged.
        """
        parsed = feed_state.parse_state(state)  # rejects a damaged state before any host changes
        self._client.call("set_state", parsed.to_json())
        self._ended = False

    @in_turn
    def reset(self) -> None:
        """Restarts from the first batch."""
        self._client.call("reset")
        self._ended = False

    @in_turn
    def set_weights(self, weights: Mapping[str, float], *, from_step: int | None = None) -> None:
        """Changes the weights of a mixture from a step on; see :meth:`meshfeed.Feed.set_weights`."""
        self._check_open()
        self._client.call("set_weights", weights, from_step)
        self._ended = False

    @in_turn
    def reshard(self, sharding: PyTree) -> None:
        """Continues the same stream on another sharding: creates the feeds on its hosts, at the state of the current ones.

        Call it on all controllers, after the same step. With several controllers, a stream cannot move, because each
        controller has the lanes of its own hosts only: save a checkpoint, and restore it in a new feed. Bad records that
        hosts of other controllers have replaced are still counted in the state, but listed only there. If ``load`` is a
        list, hosts that are not in ``sharding`` are left out of it.

        Raises:
          StateMismatchError: the state of this controller lacks lanes that its hosts need.
          SettingsError, PlanError: as for the constructor. The feed is unchanged.
          MeshfeedError: the feed is closed, or another call of ``next``, ``set_state`` or ``reset`` is running.
        """
        self._check_open()
        state, counted = self.get_state(), self._client.call("counted")[0]
        with x64_types(self._x64):  # as in Feed.reshard
            client, memory_kind = self._make_client(sharding, resharded=True)
        try:
            client.call("set_state", state)
            client.know_spec()
            client.call("continue_from", counted)
        except BaseException:
            client.close()
            raise
        left, self._client = self._client, client
        self._memory_kind, self._turn, self._ended = memory_kind, client.turn, False
        left.close()

    # ------------------------------------------------------------------ inspection

    @property
    def step(self) -> int:
        """Batches delivered so far; the next batch has this index."""
        return self._client.header.step

    @property
    def position(self) -> int:
        """Real records delivered so far, over all hosts."""
        return self._client.header.position

    def __bool__(self) -> bool:
        """True for every feed, whatever its length."""
        return True

    def __len__(self) -> int:
        """Total number of batches, including those already delivered; raises TypeError if unknown."""
        return self._client.call("len")[0]

    @property
    def element_spec(self) -> PyTree:
        """Spec of the next batch, a pytree of ``jax.ShapeDtypeStruct`` with shardings; available before any batch."""
        mesh, spec = self._client.mesh, self._client.call("element_spec")[0]
        leaves, structure = jax.tree.flatten(tree_from_json(spec["tree"]))
        specs = [PartitionSpec(*entries) for entries in spec["specs"]]
        shardings = [NamedSharding(mesh, one, memory_kind=self._memory_kind) for one in specs]
        pairs = zip(leaves, shardings, strict=True)
        return structure.unflatten(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one) for leaf, one in pairs)

    @hides_own_frames
    def record_ids(self, step: int) -> RecordIds:
        """Returns the record ids of any past or future batch, int64 ``[rows]``; see :meth:`meshfeed.Feed.record_ids`."""
        return np.array(self._client.call("record_ids", step)[0], np.int64)

    @hides_own_frames
    def read(self, record_ids: ArrayLike) -> PyTree:
        """Reads and decodes records on one of the hosts: a pytree of numpy arrays ``[len(record_ids), ...]``.

        Raises:
          SourceError: an id is not in the source, or the source is not random-access.
          SettingsError: ``record_ids`` is not a sequence of integers.
        """
        return self._client.call("read", np.asarray(record_ids).tolist())[0]

    def replay(self, step: int, *, state: Mapping[str, Any] | None = None) -> PyTree:
        """Returns one global batch again as numpy, read by one of the hosts; see :meth:`meshfeed.Feed.replay`."""
        return self._client.call("replay", step, None if state is None else feed_state.parse_state(state).to_json())[0]

    def plan(self) -> MeshPlan:
        """Returns the rows and columns that each accelerator holds; see :meth:`meshfeed.Feed.plan`."""
        return plan_of_batch(self.element_spec)

    def config(self) -> dict[str, Any]:
        """Returns all settings and the fingerprint as JSON values."""
        return self._client.call("config")[0]

    @property
    def cannot_resume(self) -> str | None:
        """Why no saved position of this feed can be restored, and what to pass instead; None if positions can be."""
        return self._client.call("cannot_resume")[0]

    @property
    def local_iterator(self) -> LocalIterator:
        """The feed as the local iterator that MaxText expects, with its state after the last delivered batch."""
        return LocalIterator(self)

    @hides_own_frames
    def stats(self, *, since: FeedStats | None = None) -> FeedStats:
        """Returns the stats of the first host, in total or ``since`` an earlier call; times are measured on that host."""
        return stats_since(FeedStats(**self._client.call("stats")[0]), since)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the figures of the first host over time as one HTML page; see :meth:`meshfeed.Feed.report`."""
        write_output("path", path, report_page(self._client.call("report")[0]))

    # ------------------------------------------------------------------ closing

    def close(self, *, _because: BaseException | None = None) -> None:
        """Stops threads and processes on the hosts; ``get_state`` still works, and a second close is a no-op."""
        if not self._closed:
            self._closed = True
            self._client.close(_because)

    def __enter__(self) -> RemoteFeed:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(_because=error)

"""The feed as an endpoint runs it, and what is sent so that it can be made there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.tree_json import tree_to_json
from meshfeed._src.base.types import PyTree
from meshfeed._src.feed.iterator import Feed
from meshfeed._src.remote.wire import make_payload


@dataclasses.dataclass(frozen=True)
class FeedRecipe:
    """Makes the target on a host, given the mesh of CPU devices there.

    Attributes:
      make_source: the user's factory.
      specs: pytree prefix of PartitionSpecs.
      settings: keywords of the feed.
    """

    make_source: Callable[[], Any]
    specs: PyTree
    settings: Mapping[str, Any]

    def __call__(self, mesh: Mesh) -> FeedTarget:
        """The target over ``mesh``."""
        sharding = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self.specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        return FeedTarget(Feed(self.make_source(), sharding, **self.settings))


def make_feed_payload(make_source: Any, prefix: PyTree, settings: Mapping[str, Any]) -> bytes:
    """A :class:`FeedRecipe` as bytes.

    Raises:
      SettingsError: ``make_source`` is no function, or cannot travel.
    """
    what = "a function without arguments that can be imported on those hosts, or pickled with all that it refers to"
    if not callable(make_source):
        raise SettingsError(f"make_source={make_source!r}; it takes {what}.", setting="make_source")
    make_payload(make_source, setting="make_source", what=what)
    specs = jax.tree.map(lambda sharding: sharding.spec, prefix)
    return make_payload(FeedRecipe(make_source, specs, settings), setting="settings", what="values that can be pickled")


class FeedTarget:
    """See :class:`meshfeed._src.remote.endpoint.EndpointTarget`.

    Args:
      feed: over CPU devices.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._size = 0
        schedule = feed.config()["global_batch_size"]
        self._varies = isinstance(schedule, list)
        self.calls: dict[str, Any] = {
            "get_state": lambda: json.dumps(feed.get_state()),
            "set_state": self._set_state,
            "reset": self._reset,
            "close": feed.close,
            "len": feed.__len__,
            "element_spec": self._element_spec,
            "record_ids": lambda step: feed.record_ids(step).tolist(),
            "read": lambda record_ids: jax.tree.map(lambda leaf: leaf.copy(), feed.read(record_ids)),
            "replay": self._replay,
            "config": feed.config,
            "stats": lambda: dataclasses.asdict(feed.stats()),
        }

    def next(self) -> PyTree:
        """The feed's next batch."""
        batch = next(self._feed)
        if self._varies:
            self._look_at_size()
        return batch

    def numbers(self) -> tuple[int, int, int]:
        """Step, position, rows of the next batch."""
        return self._feed.step, self._feed.position, self._size

    def spec(self) -> PyTree | None:
        """What the next batch looks like; None where this host has none to look at."""
        try:
            spec = self._feed.element_spec
        except SourceError:  # next() says why, or finds that other hosts have records
            return None
        self._size = jax.tree.leaves(spec)[0].shape[0]
        return spec

    def _look_at_size(self) -> None:
        self._size = jax.tree.leaves(self._feed.element_spec)[0].shape[0]

    def _set_state(self, text: str) -> None:
        self._feed.set_state(json.loads(text))
        if self._varies:
            self._look_at_size()

    def _reset(self) -> None:
        self._feed.reset()
        if self._varies:
            self._look_at_size()

    def _replay(self, step: int, state: Mapping[str, Any] | None) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.copy(), self._feed.replay(step, state=state))

    def _element_spec(self) -> dict[str, Any]:
        """Without the devices: structure, shapes and dtypes, and the entries of the leaves' PartitionSpecs."""
        tree = self._feed.element_spec
        return {"tree": tree_to_json(tree), "specs": [tuple(leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]}

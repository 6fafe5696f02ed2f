"""The feed that an endpoint runs, and the pickled recipe from which each host creates it."""

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
    """Creates the target on a host, given the mesh of CPU devices.

    Attributes:
      make_source: the user's source factory.
      specs: pytree prefix of PartitionSpecs; not shardings, because those refer to the controller's devices.
      settings: keywords of the feed.
    """

    make_source: Callable[[], Any]
    specs: PyTree
    settings: Mapping[str, Any]

    def __call__(self, mesh: Mesh) -> FeedTarget:
        """Returns the target over ``mesh``."""
        sharding = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self.specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        return FeedTarget(Feed(self.make_source(), sharding, **self.settings))


def make_feed_payload(make_source: Any, prefix: PyTree, settings: Mapping[str, Any]) -> bytes:
    """Returns a pickled :class:`FeedRecipe`.

    Raises:
      SettingsError: if ``make_source`` is not callable or cannot be pickled.
    """
    what = "a function without arguments that can be imported on those hosts, or pickled with all that it refers to"
    if not callable(make_source):
        raise SettingsError(f"make_source={make_source!r}; it takes {what}.", setting="make_source")
    # Pickle the factory alone first: the error then names make_source rather than the settings.
    make_payload(make_source, setting="make_source", what=what)
    specs = jax.tree.map(lambda sharding: sharding.spec, prefix)
    return make_payload(FeedRecipe(make_source, specs, settings), setting="settings", what="values that can be pickled")


class FeedTarget:
    """Implements :class:`meshfeed._src.remote.endpoint.EndpointTarget`.

    Args:
      feed: a feed over CPU devices.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._size = 0
        schedule = feed.config()["global_batch_size"]
        self._varies = isinstance(schedule, list)  # a constant size is looked up only once
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
        """Returns the next batch of the feed."""
        batch = next(self._feed)
        if self._varies:
            self._update_size()
        return batch

    def numbers(self) -> tuple[int, int, int]:
        """Returns the step, the position, and the rows of the next batch."""
        return self._feed.step, self._feed.position, self._size

    def spec(self) -> PyTree | None:
        """Returns the spec of the next batch, or None if this host has no batch."""
        try:
            spec = self._feed.element_spec
        except SourceError:  # next() raises it, or finds that other hosts have records
            return None
        self._size = jax.tree.leaves(spec)[0].shape[0]
        return spec

    def _update_size(self) -> None:
        self._size = jax.tree.leaves(self._feed.element_spec)[0].shape[0]

    def _set_state(self, text: str) -> None:
        self._feed.set_state(json.loads(text))
        if self._varies:
            self._update_size()

    def _reset(self) -> None:
        self._feed.reset()
        if self._varies:
            self._update_size()

    def _replay(self, step: int, state: Mapping[str, Any] | None) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.copy(), self._feed.replay(step, state=state))

    def _element_spec(self) -> dict[str, Any]:
        """Returns structure, shapes, dtypes and PartitionSpec entries as JSON, without device references."""
        tree = self._feed.element_spec
        return {"tree": tree_to_json(tree), "specs": [tuple(leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]}

"""Mixes several sources into one, with shares that are exact in every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.types import public
from meshfeed._src.order.weights import block_counts, check_all_named, parse_weights
from meshfeed._src.sources.checks import checked_count
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.lists import listed, select_all
from meshfeed._src.sources.mixture.components import Components
from meshfeed._src.sources.mixture.random_access import RandomMixture
from meshfeed._src.sources.mixture.stream import StreamMixture
from meshfeed._src.sources.recognize import as_source


@public("meshfeed.sources")
@hides_own_frames
def Mixture(
    components: Mapping[str, Any],
    weights: Any,
    block: int = 2048,
    *,
    on_end: str = "repeat",
    shuffle: bool | int = False,
    take: Mapping[str, int | float] | None = None,
    repeat: Mapping[str, int | float] | None = None,
) -> Any:
    """Mixes several sources into one, by weight.

    Every block of ``block`` records holds the same number of records of each component (the weights' shares, rounded by
    largest remainder), in an order specific to the block. Each component keeps its own order and its own epochs: one
    that is drawn from twice as fast as another of the same length starts its second epoch when the other is halfway
    through its first. The records of step k depend only on k.

    Weights may change at given steps: ``[(0, {"web": 3, "code": 1}), (5000, {"web": 1})]``. A state can resume as long
    as the stages that have begun are unchanged. Later stages may change, and components may be added at the end of the
    dict.

    If every component is random access, so is the mixture: a record id is ``component << 48 | id``, with components
    numbered in the order of the dict. If any component is a stream, all are read as lanes and each lane is mixed
    independently.

    Args:
      components: name → source, or any object that the feed accepts as one. All records must have the same structure.
      weights: name → relative weight; or stages ``[(first_step, {name: weight}), ...]``. Every component must be named
        in at least one stage. A component with weight 0 in a stage, or not named in it, is not read in that stage.
      block: number of records in which the shares are exact, 1 to 2**24; a weight below ``1 / block`` of the total is an
        error.
      on_end: what happens when a component has been read ``num_epochs`` times. ``"repeat"``: it repeats until every
        component of the last stage has been read ``num_epochs`` times in full, which ends the mixture. ``"stop"``: the
        mixture ends.
      shuffle: order of random-access components that are read as lanes, like the feed's ``shuffle`` (which streams do
        not support). Not for random-access mixtures, which use the feed's.
      take: name → the records of a component that are used, from its first: an int, or a float up to 1.0 for a fraction
        of a random-access component. Of a :class:`ShuffleBuffer`, those that it gives first, which are others in each epoch.
      repeat: name → how often a component is read per epoch of the mixture; 1 if not named. It determines when the
        mixture ends, and the weights how often records are drawn. A float such as 1.5, for random access, reads a
        :func:`Sample` of that size.

    The components may be :class:`Buckets` with equal settings: the mixture is then ``Buckets`` of the mixed records, and
    the shares are exact in an epoch. What is built over a mixture, such as ``Packed`` or a view, has the records of one epoch
    of the mixture in order.

    A component may be a mixture itself: its components become those of this mixture, named ``outer/inner``, and share
    the weight of the inner mixture by its own weights. ``block``, ``on_end`` and ``shuffle`` are those of the outer mixture;
    a ``shuffle`` of the inner one that differs is an error. A function over a mixture of streams is no component; apply it
    to the components of that mixture.

    Returns:
      A random-access source if every component is one, otherwise a stream source.

    Raises:
      SettingsError: ``weights``, ``block``, ``on_end``, ``shuffle``, ``take`` or ``repeat`` is invalid.
      SourceError: no component, or a component that is not a source of records.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Memory, Mixture
      >>> code, prose = Memory({"x": np.zeros(50)}), Memory({"x": np.ones(50)})
      >>> source = Mixture({"code": code, "prose": prose}, weights={"code": 0.25, "prose": 0.75})
    """
    if not isinstance(components, Mapping) or not components:
        raise SourceError(
            f"Mixture got {type(components).__name__} {components!r:.80}. Expected a dict of at least one source, "
            'such as Mixture({"web": web, "code": code}, weights={"web": 3, "code": 1}).'
        )
    sources = {name: _component(name, component) for name, component in components.items()}
    if any(hooks.find(source, hooks.GroupsRecords) for source in sources.values()):
        settings: Any = {"block": block, "on_end": on_end, "shuffle": shuffle, "take": take, "repeat": repeat}
        return select_all(sources, "Mixture", lambda records: Mixture(records, weights, **settings).as_list())
    given = Components.of(sources, parse_weights(weights, list(sources)), take, repeat)
    mixed = given.flattened()
    block = checked_count(block, "block")
    for _, stage_weights in mixed.stages:
        block_counts(stage_weights, list(mixed.sources), block)  # raises if a weight is too small for the block
    check_all_named(weights, list(sources))
    if on_end not in ("repeat", "stop"):
        raise SettingsError(f"on_end={on_end!r}; it takes 'repeat' or 'stop'.", setting="on_end")
    if any(map(hooks.is_stream, mixed.sources.values())):
        return StreamMixture(given, block, on_end, shuffle)
    if shuffle is not False:
        raise SettingsError(
            f"shuffle={shuffle!r} of a Mixture is for mixtures with a stream among them. All components here are "
            "read at random: pass shuffle= to the feed.",
            setting="shuffle",
        )
    return RandomMixture(given, block, on_end)


def _component(name: object, component: object) -> Any:
    """The source for one component that the user gave."""
    if not isinstance(name, str) or not name:
        raise SourceError(f"Mixture got a component named {name!r}. Expected a string that is not empty.")
    source = as_source(component)
    if isinstance(source, HostBatches):
        raise SourceError(f"component {name!r} is host batches. Expected a source of records. Pass records.")
    if not hooks.is_stream(source) and not len(source):
        raise SourceError(f"component {name!r} has 0 records. Expected at least one. Leave it out of the mixture.")
    if hooks.find(source, hooks.StagedStream) is not None and not isinstance(source, StreamMixture):
        raise SourceError(
            f"component {name!r} is {source!r}. Expected no function over a mixture of streams, whose seed, epochs and state "
            "are those of a feed. Apply the function to its components instead: Mixture({name: Map(stream, function)}, "
            "weights=…) may be a component."
        )
    grouped = hooks.find(source, hooks.GroupsRecords) is not None
    return source if grouped or isinstance(source, RandomMixture) else listed(source, "Mixture")

"""meshfeed: global ``jax.Array`` batches for a multi-host training mesh, identical on any number of hosts.

Public names are imported lazily, on first use, so ``import meshfeed`` loads neither JAX nor any data library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshfeed._src.base.ended import tell_at_exit as _tell_at_exit

if TYPE_CHECKING:
    from meshfeed import checkpoint, maxtext, monitoring, remote, sources, testing
    from meshfeed._src.base.errors import (
        AgreementError,
        CheckpointError,
        CorruptDataError,
        MeshfeedError,
        PeerError,
        PlanError,
        SettingsError,
        SourceError,
        StalledError,
        StateMismatchError,
    )
    from meshfeed._src.base.settings import BatchSchedule, Retry, ShardShuffle, SkipBad, Workers
    from meshfeed._src.base.stats import FeedStats
    from meshfeed._src.feed.iterator import Feed, MultiHostDataLoadIterator
    from meshfeed._src.pictures.plan import MeshPlan
    from meshfeed._src.sources.files.shard_cache import CacheStats, ShardCache
    from meshfeed._src.state.state import merge_states

__version__ = "0.1.0"

_tell_at_exit()

_HOME = {
    "AgreementError": "meshfeed._src.base.errors",
    "BatchSchedule": "meshfeed._src.base.settings",
    "CheckpointError": "meshfeed._src.base.errors",
    "CorruptDataError": "meshfeed._src.base.errors",
    "Feed": "meshfeed._src.feed.iterator",
    "FeedStats": "meshfeed._src.base.stats",
    "MeshPlan": "meshfeed._src.pictures.plan",
    "MeshfeedError": "meshfeed._src.base.errors",
    "MultiHostDataLoadIterator": "meshfeed._src.feed.iterator",
    "PeerError": "meshfeed._src.base.errors",
    "PlanError": "meshfeed._src.base.errors",
    "Retry": "meshfeed._src.base.settings",
    "SettingsError": "meshfeed._src.base.errors",
    "CacheStats": "meshfeed._src.sources.files.shard_cache",
    "ShardCache": "meshfeed._src.sources.files.shard_cache",
    "ShardShuffle": "meshfeed._src.base.settings",
    "SkipBad": "meshfeed._src.base.settings",
    "SourceError": "meshfeed._src.base.errors",
    "StalledError": "meshfeed._src.base.errors",
    "StateMismatchError": "meshfeed._src.base.errors",
    "Workers": "meshfeed._src.base.settings",
    "merge_states": "meshfeed._src.state.state",
}
_MODULES = ("checkpoint", "maxtext", "monitoring", "remote", "sources", "testing")

__all__ = [
    "AgreementError",
    "BatchSchedule",
    "CacheStats",
    "CheckpointError",
    "CorruptDataError",
    "Feed",
    "FeedStats",
    "MeshPlan",
    "MeshfeedError",
    "MultiHostDataLoadIterator",
    "PeerError",
    "PlanError",
    "Retry",
    "SettingsError",
    "ShardCache",
    "ShardShuffle",
    "SkipBad",
    "SourceError",
    "StalledError",
    "StateMismatchError",
    "Workers",
    "checkpoint",
    "maxtext",
    "merge_states",
    "monitoring",
    "remote",
    "sources",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"meshfeed.{name}")
    else:
        raise AttributeError(f"module 'meshfeed' has no attribute {name!r}{_elsewhere(name)}")
    globals()[name] = value
    return value


def _elsewhere(name: str) -> str:
    """Returns where a class that is looked for here is, for the message; the modules are imported only to say so."""
    if not name[:1].isupper():
        return ""
    found = (module for module in _MODULES if name in importlib.import_module(f"meshfeed.{module}").__all__)
    return "".join(f"; it is meshfeed.{module}.{name}" for module in found)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

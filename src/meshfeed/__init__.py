"""meshfeed: global ``jax.Array`` batches for a training mesh of many hosts, exact on any number of them.

The public names are loaded when they are first used; nothing runs at import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfeed import checkpoint, maxtext, remote, sources, testing
    from meshfeed._errors import (
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
    from meshfeed._iterator import Feed, MultiHostDataLoadIterator
    from meshfeed._settings import BatchSchedule, Retry, SkipBad, Workers
    from meshfeed._state import merge_states
    from meshfeed._stats import FeedStats
    from meshfeed.sources._shard_cache import ShardCache

__version__ = "0.1.0"

_HOME = {
    "AgreementError": "meshfeed._errors",
    "BatchSchedule": "meshfeed._settings",
    "CheckpointError": "meshfeed._errors",
    "CorruptDataError": "meshfeed._errors",
    "Feed": "meshfeed._iterator",
    "FeedStats": "meshfeed._stats",
    "MeshfeedError": "meshfeed._errors",
    "MultiHostDataLoadIterator": "meshfeed._iterator",
    "PeerError": "meshfeed._errors",
    "PlanError": "meshfeed._errors",
    "Retry": "meshfeed._settings",
    "SettingsError": "meshfeed._errors",
    "ShardCache": "meshfeed.sources._shard_cache",
    "SkipBad": "meshfeed._settings",
    "SourceError": "meshfeed._errors",
    "StalledError": "meshfeed._errors",
    "StateMismatchError": "meshfeed._errors",
    "Workers": "meshfeed._settings",
    "merge_states": "meshfeed._state",
}
_MODULES = ("checkpoint", "maxtext", "remote", "sources", "testing")

__all__ = [
    "AgreementError",
    "BatchSchedule",
    "CheckpointError",
    "CorruptDataError",
    "Feed",
    "FeedStats",
    "MeshfeedError",
    "MultiHostDataLoadIterator",
    "PeerError",
    "PlanError",
    "Retry",
    "SettingsError",
    "ShardCache",
    "SkipBad",
    "SourceError",
    "StalledError",
    "StateMismatchError",
    "Workers",
    "checkpoint",
    "maxtext",
    "merge_states",
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
        raise AttributeError(f"module 'meshfeed' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

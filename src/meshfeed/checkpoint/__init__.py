"""Arrays and data position in one checkpoint: read once across the cluster, exact to the bit, intact or refused.

Nothing here is imported before it is asked for, so that ``import meshfeed.checkpoint`` loads no Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfeed.checkpoint._array_handler import ArrayHandler
    from meshfeed.checkpoint._arrays import ArraysHandler, ArraysRestore, ArraysSave, restore_once
    from meshfeed.checkpoint._checkpointer import Checkpointer
    from meshfeed.checkpoint._errors import DamagedCheckpointError
    from meshfeed.checkpoint._foreign import convert_state
    from meshfeed.checkpoint._grain_face import as_grain_iterator
    from meshfeed.checkpoint._iterator import IteratorHandler, IteratorRestore, IteratorSave
    from meshfeed.checkpoint._metadata import StepMetadata
    from meshfeed.checkpoint._verify import verify

_HOMES = {
    "ArrayHandler": "_array_handler",
    "ArraysHandler": "_arrays",
    "ArraysRestore": "_arrays",
    "ArraysSave": "_arrays",
    "Checkpointer": "_checkpointer",
    "DamagedCheckpointError": "_errors",
    "IteratorHandler": "_iterator",
    "IteratorRestore": "_iterator",
    "IteratorSave": "_iterator",
    "StepMetadata": "_metadata",
    "as_grain_iterator": "_grain_face",
    "convert_state": "_foreign",
    "restore_once": "_arrays",
    "verify": "_verify",
}

__all__ = [
    "ArrayHandler",
    "ArraysHandler",
    "ArraysRestore",
    "ArraysSave",
    "Checkpointer",
    "DamagedCheckpointError",
    "IteratorHandler",
    "IteratorRestore",
    "IteratorSave",
    "StepMetadata",
    "as_grain_iterator",
    "convert_state",
    "restore_once",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Saves arrays and data position in one checkpoint, verifies it, and restores it, reading each byte about once per job.

Public names are imported lazily, so ``import meshfeed.checkpoint`` does not import Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfeed._src.checkpoint.array_handler import ArrayHandler
    from meshfeed._src.checkpoint.checkpointer import Checkpointer
    from meshfeed._src.checkpoint.foreign import convert_state
    from meshfeed._src.checkpoint.handlers import (
        ArraysHandler,
        ArraysRestore,
        ArraysSave,
        IteratorHandler,
        IteratorRestore,
        IteratorSave,
        as_grain_iterator,
        restore_once,
    )
    from meshfeed._src.checkpoint.options import RestoreOptions
    from meshfeed._src.checkpoint.step import StepMetadata, verify
    from meshfeed._src.checkpoint.stored import DamagedCheckpointError

# All handlers are imported together: Orbax finds the handler of an item by what has been imported.
_HOMES = {
    "ArrayHandler": "handlers",
    "ArraysHandler": "handlers",
    "ArraysRestore": "handlers",
    "ArraysSave": "handlers",
    "Checkpointer": "checkpointer",
    "DamagedCheckpointError": "stored",
    "IteratorHandler": "handlers",
    "IteratorRestore": "handlers",
    "IteratorSave": "handlers",
    "RestoreOptions": "options",
    "StepMetadata": "step",
    "as_grain_iterator": "handlers",
    "convert_state": "foreign",
    "restore_once": "handlers",
    "verify": "step",
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
    "RestoreOptions",
    "StepMetadata",
    "as_grain_iterator",
    "convert_state",
    "restore_once",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"meshfeed._src.checkpoint.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

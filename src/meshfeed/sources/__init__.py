"""Sources: one file a family, each loaded, with its library, when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfeed.sources._array_record import ArrayRecord
    from meshfeed.sources._decode_raw import DecodeRaw
    from meshfeed.sources._grain import Grain
    from meshfeed.sources._host_batches import HostBatches
    from meshfeed.sources._huggingface import HuggingFace
    from meshfeed.sources._memory import Memory
    from meshfeed.sources._mixture import Mixture
    from meshfeed.sources._recognize import as_source
    from meshfeed.sources._stream import Stream
    from meshfeed.sources._tensorstore import TensorStore
    from meshfeed.sources._tfdata import TFData
    from meshfeed.sources._tfds import TFDS

_HOME = {
    "ArrayRecord": "_array_record",
    "DecodeRaw": "_decode_raw",
    "Grain": "_grain",
    "HostBatches": "_host_batches",
    "HuggingFace": "_huggingface",
    "Memory": "_memory",
    "Mixture": "_mixture",
    "Stream": "_stream",
    "TFDS": "_tfds",
    "TFData": "_tfdata",
    "TensorStore": "_tensorstore",
    "as_source": "_recognize",
}

__all__ = [
    "ArrayRecord",
    "DecodeRaw",
    "Grain",
    "HostBatches",
    "HuggingFace",
    "Memory",
    "Mixture",
    "Stream",
    "TFDS",
    "TFData",
    "TensorStore",
    "as_source",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshfeed.sources' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"meshfeed.sources.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

"""Sources. Each is imported on first use, together with the library that it needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfeed._src.sources.array_record.source import ArrayRecord
    from meshfeed._src.sources.decode_raw import DecodeRaw
    from meshfeed._src.sources.grain.source import Grain
    from meshfeed._src.sources.host_batches import HostBatches
    from meshfeed._src.sources.huggingface.source import HuggingFace
    from meshfeed._src.sources.mds.source import MDS
    from meshfeed._src.sources.memory import Memory
    from meshfeed._src.sources.mixture.source import Mixture
    from meshfeed._src.sources.recognize import as_source
    from meshfeed._src.sources.stream import Stream
    from meshfeed._src.sources.tensorstore import TensorStore
    from meshfeed._src.sources.tf.tf_data import TFData
    from meshfeed._src.sources.tf.tfds import TFDS
<<<<<<< HEAD
    from meshfeed._src.sources.webdataset.source import WebDataset
=======
    from meshfeed._src.sources.tokens.source import Tokens
>>>>>>> b650a89 (Tokens: windows and documents of flat token files, read in batches without a memory map)

_HOME = {
    "ArrayRecord": "array_record.source",
    "DecodeRaw": "decode_raw",
    "Grain": "grain.source",
    "HostBatches": "host_batches",
    "HuggingFace": "huggingface.source",
    "MDS": "mds.source",
    "Memory": "memory",
    "Mixture": "mixture.source",
    "Stream": "stream",
    "TFDS": "tf.tfds",
    "TFData": "tf.tf_data",
    "TensorStore": "tensorstore",
<<<<<<< HEAD
    "WebDataset": "webdataset.source",
=======
    "Tokens": "tokens.source",
>>>>>>> b650a89 (Tokens: windows and documents of flat token files, read in batches without a memory map)
    "as_source": "recognize",
}

__all__ = [
    "ArrayRecord",
    "DecodeRaw",
    "Grain",
    "HostBatches",
    "HuggingFace",
    "MDS",
    "Memory",
    "Mixture",
    "Stream",
    "TFDS",
    "TFData",
    "TensorStore",
<<<<<<< HEAD
    "WebDataset",
=======
    "Tokens",
>>>>>>> b650a89 (Tokens: windows and documents of flat token files, read in batches without a memory map)
    "as_source",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshfeed.sources' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"meshfeed._src.sources.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

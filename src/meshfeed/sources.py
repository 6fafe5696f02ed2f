"""Sources of records. Each is imported on first use, together with the library that it needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshfeed._src.sources.array_record.source import ArrayRecord
    from meshfeed._src.sources.chat.tokenize import TokenizeChat
    from meshfeed._src.sources.concat import Concat
    from meshfeed._src.sources.decode import DecodeExample, DecodeRaw
    from meshfeed._src.sources.decode_image import DecodeImage
    from meshfeed._src.sources.decode_video import DecodeVideo
    from meshfeed._src.sources.folder import Folder
    from meshfeed._src.sources.host_batches import HostBatches
    from meshfeed._src.sources.join import Join
    from meshfeed._src.sources.map import Map
    from meshfeed._src.sources.mds import MDS
    from meshfeed._src.sources.memory import Memory
    from meshfeed._src.sources.mixture.mixture import Mixture
    from meshfeed._src.sources.packed import Packed
    from meshfeed._src.sources.padded import Buckets, Padded
    from meshfeed._src.sources.parquet import Parquet
    from meshfeed._src.sources.recognize import Grain, HuggingFace, as_source
    from meshfeed._src.sources.selection import Sample, Subset, random_split
    from meshfeed._src.sources.sequence_order import sequence_order
    from meshfeed._src.sources.shuffle_buffer import ShuffleBuffer
    from meshfeed._src.sources.stream import Stream
    from meshfeed._src.sources.tensorstore import TensorStore
    from meshfeed._src.sources.tf_data import TFData
    from meshfeed._src.sources.tfds import TFDS
    from meshfeed._src.sources.tokens.source import Tokens
    from meshfeed._src.sources.webdataset import WebDataset
    from meshfeed._src.sources.zip import Zip

_HOME = {
    "ArrayRecord": "array_record.source",
    "Buckets": "padded",
    "Concat": "concat",
    "DecodeExample": "decode",
    "DecodeImage": "decode_image",
    "DecodeRaw": "decode",
    "DecodeVideo": "decode_video",
    "Folder": "folder",
    "Grain": "recognize",
    "HostBatches": "host_batches",
    "HuggingFace": "recognize",
    "Join": "join",
    "MDS": "mds",
    "Map": "map",
    "Memory": "memory",
    "Mixture": "mixture.mixture",
    "Packed": "packed",
    "Padded": "padded",
    "Parquet": "parquet",
    "Sample": "selection",
    "ShuffleBuffer": "shuffle_buffer",
    "Stream": "stream",
    "Subset": "selection",
    "TFDS": "tfds",
    "TFData": "tf_data",
    "TensorStore": "tensorstore",
    "TokenizeChat": "chat.tokenize",
    "Tokens": "tokens.source",
    "WebDataset": "webdataset",
    "Zip": "zip",
    "as_source": "recognize",
    "random_split": "selection",
    "sequence_order": "sequence_order",
}

__all__ = [
    "ArrayRecord",
    "Buckets",
    "Concat",
    "DecodeExample",
    "DecodeImage",
    "DecodeRaw",
    "DecodeVideo",
    "Folder",
    "Grain",
    "HostBatches",
    "HuggingFace",
    "Join",
    "MDS",
    "Map",
    "Memory",
    "Mixture",
    "Packed",
    "Padded",
    "Parquet",
    "Sample",
    "ShuffleBuffer",
    "Stream",
    "Subset",
    "TFDS",
    "TFData",
    "TensorStore",
    "TokenizeChat",
    "Tokens",
    "WebDataset",
    "Zip",
    "as_source",
    "random_split",
    "sequence_order",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'meshfeed.sources' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"meshfeed._src.sources.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

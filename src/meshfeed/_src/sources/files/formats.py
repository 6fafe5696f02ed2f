"""Suggests the source for a file by its name; used in the error messages of other sources."""

from __future__ import annotations

import os
import re

_LOAD = "datasets.load_dataset({format!r}, data_files={path!r}, split='train')"
_ARRAY_RECORD = ("an ArrayRecord file", "meshfeed.sources.ArrayRecord({path!r}, decode=…)")
_JSON = ("a JSON file", _LOAD.replace("{format!r}", "'json'"))
_NUMPY = (
    "a numpy file",
    "meshfeed.sources.Memory(numpy.load({path!r}, mmap_mode='r')), or meshfeed.sources.Tokens({path!r}, sequence_length) "
    "if it holds one run of tokens",
)
_TAR = ("a tar archive", "meshfeed.sources.WebDataset({path!r}, decode=…)")
_TFRECORD = (
    "a TFRecord file",
    "meshfeed.sources.TFData(open), where open(lane_index, num_lanes) makes a tf.data.Dataset, or convert it with meshfeed "
    "convert, which needs no TensorFlow",
)
_ZARR = ("a zarr array", "meshfeed.sources.TensorStore({path!r})")

# file name extension → what the file is, and what to pass to the feed
_READERS = {
    "array_record": _ARRAY_RECORD,
    "arrayrecord": _ARRAY_RECORD,
    "arrow": ("an Arrow file", "datasets.Dataset.from_file({path!r})"),
    "bin": (
        "a file of tokens",
        "meshfeed.sources.Tokens({path!r}, sequence_length, dtype=…)",
    ),
    "csv": ("a CSV file", _LOAD.replace("{format!r}", "'csv'")),
    "json": _JSON,
    "jsonl": _JSON,
    "mds": ("a shard of Mosaic Streaming", "meshfeed.sources.MDS(folder), with the folder of its index.json"),
    "npy": _NUMPY,
    "parquet": ("a Parquet file", "meshfeed.sources.Parquet({path!r})"),
    "tar": _TAR,
    "tfrecord": _TFRECORD,
    "tfrecords": _TFRECORD,
    "txt": ("a text file", _LOAD.replace("{format!r}", "'text'")),
    "zarr": _ZARR,
    "zarr3": _ZARR,
}
_ENDING = re.compile(rf"\.({'|'.join(sorted(_READERS, key=len, reverse=True))})(?=$|[.-])", re.IGNORECASE)


def source_of(path: str) -> str | None:
    """Returns the name of the class in ``meshfeed.sources`` that reads a file, by its name; None if there is none."""
    endings = _ENDING.findall(os.path.basename(path))
    reader = _READERS[endings[-1].lower()][1] if endings else ""
    found = re.search(r"meshfeed\.sources\.(ArrayRecord|Parquet|WebDataset|MDS)\(", reader)
    return found[1] if found else "Tokens" if re.search(r"\.(bin|idx|npy)$", path) else None


def reader_hint(path: object, *, unless: str = "") -> str:
    """Returns a sentence that names the file format and what to pass to the feed.

    Args:
      path: a path, glob or URL, or a list whose first item is used; returns an empty string for anything else.
      unless: name of the calling source; returns an empty string if that source reads such files.

    Returns:
      The sentence with a leading space; an empty string if the format is unknown.
    """
    if isinstance(path, list | tuple) and path:
        path = path[0]
    if not isinstance(path, str | os.PathLike):
        return ""
    name = os.fspath(path)
    endings = _ENDING.findall(os.path.basename(name.rstrip("/")))  # "x.array_record-00000-of-00016", "x.csv.gz"
    if not endings:
        return ""
    what, reader = _READERS[endings[-1].lower()]
    reader = reader.format(path=name)
    if unless and f"meshfeed.sources.{unless}(" in reader:
        return ""
    return f" Its name suggests {what}: pass {reader}."

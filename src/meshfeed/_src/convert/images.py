"""Images in folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.convert.inputs import Input, Scan, binary, integers

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 16
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class ImageFolder(Input):
    """Images in a folder. Each subfolder is a class, numbered in order of name."""

    name = "images"

    def num_bytes(self, path: str) -> int:
        """See :class:`Input`."""
        return sum(os.path.getsize(os.path.join(path, name)) for name in image_names(path))

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        import pyarrow as pa

        names = image_names(path)
        classes = sorted({name.split("/", 1)[0] for name in names if "/" in name})
        if classes and not all("/" in name for name in names):
            stray = next(name for name in names if "/" not in name)
            raise SourceError(
                f"{path} has images in subfolders, which are classes, and outside of them: {stray}. Move it."
            )
        fields = [("filename", pa.large_binary()), ("image", pa.large_binary())]
        fields += [("label", pa.int64())] if classes else []
        return Scan(len(names), pa.schema(fields), more={"names": names, "classes": classes})

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        import pyarrow as pa

        labels = {name: number for number, name in enumerate(scan.more["classes"])}
        names: Sequence[str] = scan.more["names"][start:stop]
        for low in range(0, len(names), _ROWS):
            rows = names[low : low + _ROWS]
            columns = {
                "filename": binary([os.fsencode(name) for name in rows]),
                "image": binary([_content(path, name) for name in rows]),
                "label": integers(np.array([labels.get(name.split("/", 1)[0], 0) for name in rows])),
            }
            yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def image_names(path: str) -> list[str]:
    """Returns the images in a folder and its subfolders, relative to it, sorted."""
    return select_images(
        os.path.relpath(os.path.join(folder, name), path).replace(os.sep, "/")
        for folder, _, names in os.walk(path, followlinks=True)
        for name in names
    )


def select_images(names: Iterable[str]) -> list[str]:
    """Returns the paths that end in the name of an image, sorted."""
    return sorted(
        name for name in names if name.lower().endswith(_IMAGES) and not name.rpartition("/")[2].startswith(".")
    )


def _content(path: str, name: str) -> bytes:
    with open(os.path.join(path, name), "rb") as file:
        return file.read()

"""Decoder of compressed images, with crops, flips and colors at random.

libjpeg-turbo (by simplejpeg) decodes JPEG, OpenCV everything else; both release the GIL. JPEG is decoded at 1/2, 1/4 or 1/8
of its size if the crop is still at least as large as the result: the decoder skips most of the work for the pixels left out.
"""

from __future__ import annotations

import inspect
import io
import math
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import SettingsError, hides_own_frames, missing_package
from meshfeed._src.base.types import public
from meshfeed._src.reading.stacking import RecordStack

_REDUCTIONS = (8, 4, 2)  # libjpeg-turbo has fast code for these; other fractions take longer than the whole image
_AREA = (0.08, 1.0)
_ASPECT = (3 / 4, 4 / 3)
_ATTEMPTS = 10
_GRAY = (0.299, 0.587, 0.114)  # luma of ITU-R BT.601, as in JPEG


class PixelDecoder:
    """What decoders of images and of videos share: their size, the part of the pixels that they keep, and random numbers."""

    fresh_arrays = True  # each call returns new memory, so the feed need not copy it

    def __init__(self, size: object, crop: str, flip: bool, key: str | None, *, is_random: bool) -> None:
        name = type(self).__name__
        self.height, self.width = _as_size(size, name)
        if crop not in ("center", "random"):
            raise refused(name, "crop", crop, '"center" or "random"')
        if not isinstance(flip, bool):
            raise refused(name, "flip", flip, "True or False")
        if key is not None and not isinstance(key, str):
            raise refused(name, "key", key, "the name of a leaf, or None")
        self.crop, self.flip, self.key = crop, flip, key
        self._draws = crop == "random" or flip or is_random
        # Feeds pass random generators to functions with this parameter, and identify sources by the output of others.
        names = ("record", "rng") if self._draws else ("record",)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def _box(self, height: int, width: int, rng: np.random.Generator | None) -> tuple[int, int, int, int]:
        """Top, left, height and width of the part to keep."""
        if self.crop == "center" or rng is None:
            return center_box(height, width, self.width / self.height)
        return random_box(height, width, self.width / self.height, rng)


@public("meshfeed.sources")
class DecodeImage(PixelDecoder):
    """Decodes JPEG, PNG and what else OpenCV reads into images of one size, uint8 ``[height, width, 3]`` in RGB.

    It is a ``decode`` of a source, or a function of :class:`Map`, also with ``batched=True``. Can be pickled and sent to
    workers, and releases the GIL for most of its time, so ``num_threads`` scales too::

        ArrayRecord(paths, decode=DecodeImage(224, crop="random", flip=True, key="image"))
        ArrayRecord(paths, decode=DecodeExample({"image": DecodeImage(224), "label": np.int32}))
        Map(Parquet(paths), DecodeImage((480, 640), key="image"))

    The same bytes and random numbers give the same pixels on every machine with the same versions of the libraries. Alpha
    channels are left out, gray images get three equal channels, and the EXIF orientation is ignored. Only in TIFF files,
    colors are multiplied by alpha and the orientation is applied. Needs the extra ``images``.

    Args:
      size: height and width of the result in pixels, or one int for both.
      crop: the part of the image that is resized. ``"center"``: the largest one in the middle with the aspect ratio of
        ``size``. ``"random"``: 8 to 100 % of the area, with 3/4 to 4/3 of the aspect ratio of ``size``, at a random place
        (the crop of Szegedy et al. 2015, "Going deeper with convolutions").
      flip: mirror half of the images, left to right, at random.
      color: largest relative change of brightness, contrast and saturation, each drawn uniformly from ``[1 - color, 1 +
        color]``; 0 for none.
      key: a record of bytes becomes ``{key: image}``. In a record that is a dict, the bytes under ``key`` are replaced by the
        image, and other leaves are kept. None: records are bytes, and become the image itself.

    Raises:
      SettingsError: a setting is invalid, or a library is missing.
    """

    @hides_own_frames
    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        crop: str = "center",
        flip: bool = False,
        color: float = 0.0,
        key: str | None = None,
    ) -> None:
        if isinstance(color, bool) or not isinstance(color, int | float) or not 0 <= color < 1:
            raise refused("DecodeImage", "color", color, "a number from 0 to less than 1")
        super().__init__(size, crop, flip, key, is_random=color > 0)
        self.color = color
        _libraries()

    @hides_own_frames
    def __call__(self, record: Any, rng: Any = None) -> Any:
        """Decodes one record, or a list of n records into arrays ``[n, ...]``.

        Args:
          record: bytes or a uint8 array ``[num_bytes]``; with ``key``, also a dict that holds them; or a list of
            such records.
          rng: a generator, or n of them for a list; required if the decoder is random.

        Returns:
          uint8 ``[height, width, 3]`` or ``[n, height, width, 3]``; in a dict if there is a ``key``.

        Raises:
          ValueError: the bytes are no image that can be decoded, or are cut short.
          SourceError: other leaves of the records of a list differ in structure, shape or dtype.
        """
        if self._draws and rng is None:
            raise ValueError(
                "DecodeImage draws random numbers here and got none. Pass it as decode= of a source or as the function of "
                "Map, to which the feed passes a generator for each record; in DecodeExample, name the feature as bytes "
                "and put a Map with DecodeImage(…, key=…) around the source."
            )
        if not isinstance(record, list | tuple):
            image = memory.empty((self.height, self.width, 3), np.uint8)
            self._decode(self._find(record), rng if self._draws else None, image)
            return image if self.key is None else {**(record if isinstance(record, Mapping) else {}), self.key: image}
        if self.key is not None and record:
            stack = RecordStack(len(record))  # refuses other leaves that differ between records
            for row, one in enumerate(record):
                decoded = self(one, rng[row] if self._draws else None)
                stack.add(
                    {name: np.asarray(leaf) if isinstance(leaf, list) else leaf for name, leaf in decoded.items()}
                )
            return stack.take()[0]
        images = memory.empty((len(record), self.height, self.width, 3), np.uint8)
        for row, one in enumerate(record):
            self._decode(self._find(one), rng[row] if self._draws else None, images[row])
        return images if self.key is None else {self.key: images}

    def _find(self, record: Any) -> Any:
        """The image's bytes in a record."""
        if not isinstance(record, Mapping):
            return record
        if self.key is None or self.key not in record:
            raise ValueError(
                f"DecodeImage got a record with the leaves {sorted(map(str, record))} and key={self.key!r}. Name the leaf "
                "that holds the image: DecodeImage(…, key=…)."
            )
        return record[self.key]

    def _decode(self, data: Any, rng: np.random.Generator | None, out: np.ndarray) -> None:
        cv2, simplejpeg = _libraries()
        data = _as_bytes(data)
        is_jpeg = data[:2] == b"\xff\xd8"
        try:
            shape, pixels = _open_jpeg(simplejpeg, data) if is_jpeg else ((0, 0), _open(cv2, data))
        except Exception as error:
            raise ValueError(f"{_describe(data)} cannot be decoded as an image: {error}") from error
        height, width = shape if pixels is None else pixels.shape[:2]
        box = self._box(height, width, rng)
        if pixels is None:
            reduced_by = next((by for by in _REDUCTIONS if box[2] >= by * self.height and box[3] >= by * self.width), 1)
            try:
                pixels = simplejpeg.decode_jpeg(
                    data, colorspace="RGB", min_height=-(-height // reduced_by), min_width=-(-width // reduced_by)
                )
            except ValueError as error:
                raise ValueError(f"{_describe(data)} cannot be decoded as an image: {error}") from error
            box = _reduced(box, reduced_by, *pixels.shape[:2])
        resize_box(cv2, pixels, box, out)
        if rng is not None:
            self._augment(cv2, rng, out)

    def _augment(self, cv2: types.ModuleType, rng: np.random.Generator, out: np.ndarray) -> None:
        if self.flip and rng.random() < 0.5:
            cv2.flip(out, 1, dst=out)
        if not self.color:
            return
        brightness, contrast, saturation = rng.uniform(1 - self.color, 1 + self.color, 3)
        gray = np.tile(np.array(_GRAY), (3, 1))
        mean = float(out.reshape(-1, 3).mean(0) @ np.array(_GRAY))
        # saturation mixes with the gray of the pixel, contrast with that of the image: together one affine map of RGB.
        matrix = brightness * contrast * (saturation * np.eye(3) + (1 - saturation) * gray)
        offset = np.full((3, 1), brightness * (1 - contrast) * mean)
        cv2.transform(out, np.hstack([matrix, offset]), dst=out)


def resize_box(cv2: types.ModuleType, pixels: np.ndarray, box: tuple[int, int, int, int], out: np.ndarray) -> None:
    """Resizes a box (top, left, height, width) of pixels, uint8 ``[height, width, 3]``, to those of ``out``."""
    top, left, rows, columns = box
    shrinks = rows > 2 * out.shape[0] or columns > 2 * out.shape[1]
    # The exact variant: the ordinary one rounds differently from one processor to another.
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR_EXACT
    cv2.resize(
        pixels[top : top + rows, left : left + columns], (out.shape[1], out.shape[0]), dst=out, interpolation=method
    )


def _libraries() -> tuple[types.ModuleType, types.ModuleType]:
    try:
        import cv2
        import simplejpeg
    except ImportError as error:
        raise missing_package("DecodeImage", error, "images", setting="decode") from error
    return cv2, simplejpeg


def refused(name: str, setting: str, value: object, what: str) -> SettingsError:
    """Returns the error for a setting of the decoder ``name``."""
    return SettingsError(f"{name} got {setting}={value!r}; it takes {what}.", setting=setting)


def _as_size(size: Any, name: str) -> tuple[int, int]:
    try:
        height, width = map(operator.index, size if isinstance(size, Sequence) else (size, size))
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1 or isinstance(size, bool):
        raise refused(name, "size", size, "pixels as an int of at least 1, or (height, width)")
    return height, width


def _as_bytes(data: Any) -> bytes:
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1:
        return data.tobytes()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise ValueError(
        f"DecodeImage got {type(data).__name__}, which is not the bytes of an image file. Pass bytes or a uint8 array of one "
        "dimension; if the record has several leaves, name the one with the image by key=."
    )


def _describe(data: bytes) -> str:
    return f"a record of {len(data):,} bytes that begins with {data[:8]!r}"


def _open_jpeg(simplejpeg: types.ModuleType, data: bytes) -> tuple[tuple[int, int], np.ndarray | None]:
    """Height and width of a JPEG; and its pixels if libjpeg-turbo does not convert its colors."""
    height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    if colors in ("CMYK", "YCCK"):
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            return (height, width), np.asarray(image.convert("RGB"))
    return (height, width), None


def _open(cv2: types.ModuleType, data: bytes) -> np.ndarray:
    pixels = None
    if data:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise ValueError("OpenCV does not know the format, or the file is damaged")
    return pixels


def center_box(height: int, width: int, aspect: float) -> tuple[int, int, int, int]:
    """Top, left, height and width of the largest box in the middle with this width / height."""
    rows, columns = min(height, round(width / aspect)), min(width, round(height * aspect))
    rows, columns = max(rows, 1), max(columns, 1)
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def random_box(height: int, width: int, aspect: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A box of a random area and aspect ratio at a random place; the middle one if ten of them are too large."""
    shares = rng.uniform(*_AREA, _ATTEMPTS)
    aspects = aspect * np.exp(rng.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1]), _ATTEMPTS))
    places = rng.random((_ATTEMPTS, 2))
    for share, ratio, (down, right) in zip(shares.tolist(), aspects.tolist(), places.tolist(), strict=True):
        rows, columns = (round(math.sqrt(share * height * width * by)) for by in (1 / ratio, ratio))
        if 0 < rows <= height and 0 < columns <= width:
            return int(down * (height - rows + 1)), int(right * (width - columns + 1)), rows, columns
    return center_box(height, width, aspect)


def _reduced(box: tuple[int, int, int, int], by: int, height: int, width: int) -> tuple[int, int, int, int]:
    """The nearest box of an image that was decoded at a fraction of its size, now ``[height, width]``."""
    top, left, rows, columns = (round(part / by) for part in box)
    rows, columns = min(max(rows, 1), height), min(max(columns, 1), width)
    return min(top, height - rows), min(left, width - columns), rows, columns

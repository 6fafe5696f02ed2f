"""Decoder of clips of videos: frames at equal distances in a range of time, cropped and resized alike."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import operator
import os
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import hides_own_frames, missing_package
from meshfeed._src.base.types import public
from meshfeed._src.sources.decode_image import PixelDecoder, refused, resize_box

if TYPE_CHECKING:
    import av

_MATRICES = {1: "ITU709", 7: "SMPTE240M"}  # of ISO 23091-2; BT.601 otherwise
_SLACK = 1e-6  # of a unit of time: 0.1 s of 1/30000 s each is not 2999.9999


@public("meshfeed.sources")
class DecodeVideo(PixelDecoder):
    """Decodes clips of videos that FFmpeg reads (MP4, WebM and others) into uint8 ``[num_frames, height, width, 3]`` in RGB.

    It is a ``decode`` of a source, or a function of :class:`Map`. Can be pickled and sent to workers, and releases the GIL
    for most of its time, so ``num_threads`` scales too::

        WebDataset(paths, decode=DecodeVideo(16, 112, seconds=2, start="random", key="mp4"))
        Map(Parquet(paths, ["path", "begin"]), DecodeVideo(8, 224, seconds=4, key="path", start_key="begin"))

    Frame i of a clip of n is the one that is shown ``(i + 1/2) · seconds / n`` after the start of the clip, whatever the
    frame rate, also if it varies. Decoding begins at the key frame before the clip and ends with the clip. A clip that is
    longer than what follows its start repeats the last frame.

    The same bytes and random numbers give the same pixels on machines with the same versions of the libraries and processors
    of one kind. The rotation that phones store beside the pixels is ignored. Needs the extra ``video``.

    Args:
      num_frames: frames of a clip.
      size: height and width of the result in pixels, or one int for both.
      seconds: length of a clip; None for all that follows the start.
      start: where a clip begins, in seconds from the first frame; ``"center"`` or ``"random"`` for a clip in the middle, or
        anywhere, of the video.
      start_key: leaf of the record that holds the start in seconds, instead of ``start``.
      crop: as for :class:`DecodeImage`; the same part of all frames of a clip.
      flip: mirror half of the clips, left to right, at random.
      key: leaf of the record that holds the video, which is replaced by the clip; other leaves are kept. None: records are
        videos, and become the clip itself. A video is bytes, a uint8 array, or the path of a local file.

    Raises:
      SettingsError: a setting is invalid, or a library is missing.
    """

    @hides_own_frames
    def __init__(
        self,
        num_frames: int,
        size: int | tuple[int, int],
        *,
        seconds: float | None = None,
        start: float | str = 0.0,
        start_key: str | None = None,
        crop: str = "center",
        flip: bool = False,
        key: str | None = None,
    ) -> None:
        try:
            self.num_frames = 0 if isinstance(num_frames, bool) else operator.index(num_frames)
        except TypeError:
            self.num_frames = 0
        if self.num_frames < 1:
            raise _refused("num_frames", num_frames, "an int of at least 1")
        if seconds is not None and not (_is_time(seconds) and seconds > 0):
            raise _refused("seconds", seconds, "a number above 0, or None")
        if start not in ("center", "random") and not _is_time(start):
            raise _refused("start", start, '"center", "random", or seconds of at least 0')
        if start_key is not None and not isinstance(start_key, str):
            raise _refused("start_key", start_key, "the name of a leaf, or None")
        super().__init__(size, crop, flip, key, is_random=start == "random")
        if start_key is not None and (key is None or start != 0):
            raise _refused("start_key", start_key, "the name of a leaf beside key, and no start beside it")
        self.seconds, self.start, self.start_key = seconds, start, start_key
        _libraries()

    @hides_own_frames
    def __call__(self, record: Any, rng: np.random.Generator | None = None) -> Any:
        """Decodes the clip of one record.

        Args:
          record: a video; with ``key``, a dict that holds one.
          rng: a generator; required if the decoder is random.

        Returns:
          uint8 ``[num_frames, height, width, 3]``; in a dict if there is a ``key``.

        Raises:
          ValueError: the record is no video that can be decoded, is cut short, or ends before the clip.
          OSError: the file cannot be read.
        """
        if self._draws and rng is None:
            raise ValueError(
                "DecodeVideo draws random numbers here and got none. Pass it as decode= of a source or as the function of "
                "Map, to which the feed passes a generator for each record."
            )
        if self.key is None:
            return self._decode(record, self.start, rng)
        for name in (self.key, self.start_key):
            if name is not None and not (isinstance(record, Mapping) and name in record):
                has = f"the leaves {sorted(map(str, record))}" if isinstance(record, Mapping) else type(record).__name__
                raise ValueError(
                    f"DecodeVideo got {has}, and not the leaf {name!r}. Pass key= and start_key= of your records."
                )
        start = self.start if self.start_key is None else float(record[self.start_key])
        if self.start_key is not None and not _is_time(start):
            raise ValueError(f"the leaf {self.start_key!r} is {start!r}. Expected seconds of at least 0.")
        return {**record, self.key: self._decode(record[self.key], start, rng)}

    def _decode(self, video: Any, start: float | str, rng: np.random.Generator | None) -> np.ndarray:
        av, cv2 = _libraries()
        what, opened = _as_file(video)
        clip = memory.empty((self.num_frames, self.height, self.width, 3), np.uint8)
        try:
            with contextlib.ExitStack() as containers:
                stream = containers.enter_context(_open(av, opened, what)).streams.video[0]
                length = _length(av, stream, opened, what)
                times = self._times(stream, length, start, rng, what)
                decoded = _from_key_frame(stream, times[0])
                if decoded is None:
                    stream = containers.enter_context(_open(av, opened, what)).streams.video[0]
                    decoded = _decoded(stream)
                self._fill(cv2, _shown(decoded, stream, length, times, what), rng, clip)
        except av.FFmpegError as error:
            if isinstance(error, OSError) and isinstance(opened, str):
                raise
            raise ValueError(f"{what} cannot be decoded as a video: {error}") from error
        return clip

    def _times(
        self, stream: av.VideoStream, length: int | None, start: float | str, rng: np.random.Generator | None, what: str
    ) -> list[int]:
        """When the frames of a clip are shown, in the stream's units of time."""
        unit, first = float(stream.time_base or 0), stream.start_time or 0
        if length is None and (isinstance(start, str) or self.seconds is None):
            raise ValueError(f"{what} does not state its duration. Pass start= and seconds= as numbers.")
        begin = 0.0
        if not isinstance(start, str):
            begin = start / unit
        elif self.seconds is not None and length is not None:
            share = 0.5 if start == "center" or rng is None else rng.random()
            begin = share * max(length - self.seconds / unit, 0)
        if length is not None and begin >= length:
            raise ValueError(f"{what} has {length * unit:.3f} s, and the clip begins at {begin * unit:.3f} s.")
        seconds = (length or 0) - begin if self.seconds is None else self.seconds / unit
        return [
            first + math.floor(begin + (number + 0.5) * seconds / self.num_frames + _SLACK)
            for number in range(self.num_frames)
        ]

    def _fill(
        self, cv2: types.ModuleType, frames: Iterator[av.VideoFrame], rng: np.random.Generator | None, clip: np.ndarray
    ) -> None:
        """Writes frames, cropped and resized alike, to their places in the clip."""
        box, flips, last, shape = None, False, None, (None, None)
        for number, frame in enumerate(frames):
            if frame is last:
                clip[number] = clip[number - 1]
                continue
            last, pixels = frame, _rgb(frame, *shape)
            if box is None:
                height, width = shape = pixels.shape[:2]
                box = self._box(height, width, rng)
                flips = self.flip and rng is not None and rng.random() < 0.5
            resize_box(cv2, pixels, box, clip[number])
            if flips:
                cv2.flip(clip[number], 1, dst=clip[number])


def _length(av: types.ModuleType, stream: av.VideoStream, video: Any, what: str) -> int | None:
    """The duration in units of the stream; None if the file does not state it."""
    container: Any = stream.container
    if stream.duration is not None or container.duration is None or not stream.time_base:
        return stream.duration
    unit, first, frame = float(stream.time_base), stream.start_time or 0, 1 / float(stream.average_rate or 1)
    stated = container.duration / 1e6
    if "matroska" not in container.format.name or (len(container.streams) == 1 and not first):
        return round(stated / unit)
    # In Matroska and WebM it may be that of the sound, and count from 0: the last packets have the times.
    ends: dict[int, float] = {}
    with contextlib.suppress(av.FFmpegError), _open(av, video, what) as other:
        other.seek(container.duration)
        for packet in other.demux():
            if packet.pts is not None:
                end = float((packet.pts + (packet.duration or 0)) * packet.time_base)
                ends[packet.stream.index] = max(end, ends.get(packet.stream.index, end))
    is_whole = max(ends.values(), default=0.0) + frame >= stated
    shown = ends.get(stream.index, math.inf) - first * unit
    return round((shown if is_whole and shown + frame < stated else stated) / unit)


def _open(av: types.ModuleType, video: Any, what: str) -> Any:
    """Opens a video at its beginning."""
    # Titles may be of any encoding; PyAV 19 ignores that itself.
    options: dict[str, Any] = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
    container = av.open(io.BytesIO(video) if isinstance(video, bytes) else video, **options)
    if not container.streams.video:
        container.close()
        raise ValueError(f"{what} has no video stream. Expected a video.")
    container.streams.video[0].codec_context.thread_count = 1  # the feed reads several clips at the same time
    return container


def _decoded(stream: av.VideoStream) -> Iterator[Any]:
    container: Any = stream.container
    return (frame for frame in container.decode(stream) if frame.pts is not None)


def _from_key_frame(stream: av.VideoStream, time: int) -> Iterator[Any] | None:
    """Yields the frames from a key frame on that is shown at ``time`` or before.

    Returns None if there is none after the first frame: to seek there may lead to a later frame (MPEG-TS, FLV).
    """
    container: Any = stream.container
    target, back = time, 0
    while target > (stream.start_time or 0):
        # An index may hold the times of decoding, so the key frame that it leads to may be shown after the time.
        container.seek(target, stream=stream)
        decoded = _decoded(stream)
        before = next(decoded, None)
        if before is not None and before.pts <= time:
            return itertools.chain([before], decoded)
        back = 4 * back + 1
        target = time - round(back / (stream.time_base or 1))
    return None if back else _decoded(stream)


def _shown(
    decoded: Iterator[Any], stream: av.VideoStream, length: int | None, times: list[int], what: str
) -> Iterator[av.VideoFrame]:
    """Yields the frame that is shown at each of ascending times."""
    first, unit = stream.start_time or 0, float(stream.time_base or 1)
    before, after = next(decoded, None), next(decoded, None)
    if before is None:
        raise ValueError(f"{what} has no frame with a time. Write it as MP4 or WebM.")
    for time in times:
        while after is not None and after.pts <= time:
            before, after = after, next(decoded, None)
        end = before.pts + (before.duration or 0) + 1 / float(stream.average_rate or 1) / unit
        if after is None and length is not None and end < min(time, first + length):
            raise ValueError(
                f"{what} is cut short: it ends at {(before.pts - first) * unit:.3f} of {length * unit:.3f} s. Copy it again."
            )
        yield before


def _libraries() -> tuple[types.ModuleType, types.ModuleType]:
    try:
        import av
        import cv2
    except ImportError as error:
        raise missing_package("DecodeVideo", error, "video", setting="decode") from error
    return av, cv2


def _refused(setting: str, value: object, what: str) -> Exception:
    return refused("DecodeVideo", setting, value, what)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _as_file(video: Any) -> tuple[str, Any]:
    """A name for messages, and what PyAV opens."""
    if isinstance(video, str | os.PathLike):
        path = os.fspath(video)
        return path, path
    if isinstance(video, np.ndarray) and video.dtype == np.uint8 and video.ndim == 1:
        video = video.tobytes()
    if isinstance(video, bytes | bytearray | memoryview):
        data = bytes(video)
        return f"a record of {len(data):,} bytes that begins with {data[:8]!r}", data
    raise ValueError(
        f"DecodeVideo got {type(video).__name__}, which is not a video. Pass bytes, a uint8 array of one dimension, or the "
        "path of a file; if the record has several leaves, name the one with the video by key=."
    )


def _rgb(frame: av.VideoFrame, height: int | None, width: int | None) -> np.ndarray:
    """Returns the pixels of a frame, uint8 ``[height, width, 3]``, by the color matrix that the stream names.

    A frame of a different size, as in recorded calls, is resized; None keeps that of the frame.
    """
    matrix = _MATRICES.get(int(frame.colorspace), "DEFAULT")
    return frame.reformat(width, height, format="rgb24", src_colorspace=matrix).to_ndarray()

"""Clips of videos: which frames they have, beside a decoder that reads the whole file, and what is refused."""

from __future__ import annotations

import io
import pathlib
import pickle
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest
from array_record_files import write
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import meshfeed
from meshfeed.sources import ArrayRecord, DecodeVideo, Map, Memory
from meshfeed.testing import check_resumable

av = pytest.importorskip("av")
MESH = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
SIDE = 32


def picture(number: int) -> np.ndarray:
    """A frame that shows its number: one gray for all tens, one for the rest; dark on the left."""
    pixels = np.full((SIDE, SIDE + 16, 3), 16, np.uint8)
    pixels[:16, 8:] = 40 + number // 10 * 20
    pixels[16:, 8:] = 40 + number % 10 * 20
    return pixels


def numbers(clip: np.ndarray) -> list[int]:
    """The numbers that frames show."""
    tens, ones = (clip[:, rows, 12:20].mean((1, 2, 3)) for rows in (slice(4, 12), slice(20, 28)))
    return [round((ten - 40) / 20) * 10 + round((one - 40) / 20) for ten, one in zip(tens, ones, strict=True)]


def video(
    count: int = 60,
    rate: int = 10,
    kind: str = "mp4",
    codec: str = "libx264",
    times: Any = None,
    file: Any = None,
    **options: str,
) -> bytes:
    """A video of ``count`` frames, with key frames 12 apart and frames that refer to later ones."""
    out = io.BytesIO()
    with av.open(out if file is None else file, "w", format=kind, options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = SIDE + 16, SIDE, "yuv420p"
        stream.codec_context.gop_size = 12
        stream.codec_context.max_b_frames = 0 if kind in ("avi", "webm") else 2
        if codec == "libx264":
            stream.options = {"crf": "10"}
        stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts = round(number * 1000 / rate) if times is None else times[number]
            frame.time_base = Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


VIDEO = video()  # 6 s


@given(st.floats(0, 5.9), st.floats(0.05, 8), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_frames_are_those_shown_at_equal_distances(start: float, seconds: float, count: int) -> None:
    clip = DecodeVideo(count, (SIDE, SIDE + 16), seconds=seconds, start=start)(VIDEO)
    assert (clip.dtype, clip.shape) == (np.uint8, (count, SIDE, SIDE + 16, 3))
    times = start + (np.arange(count) + 0.5) * seconds / count
    near = np.abs(times * 10 - np.round(times * 10)) < 2e-2  # the units of the file may round to either side
    wanted = np.minimum(np.floor(times * 10), 59)
    assert [n for n, skip in zip(numbers(clip), near, strict=True) if not skip] == wanted[~near].tolist()


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx"), ("avi", "mpeg4")]
)
def test_other_formats(kind: str, codec: str) -> None:
    data = video(kind=kind, codec=codec)
    assert numbers(DecodeVideo(4, (SIDE, SIDE + 16), seconds=0.4, start=3.1)(data)) == [31, 32, 33, 34]
    assert numbers(DecodeVideo(6, (SIDE, SIDE + 16))(data)) == [5, 15, 25, 35, 45, 55], "all of it"


@pytest.mark.parametrize("start", [0.0, 0.1, 0.4, 0.8, 1.1, 1.2, 3.1])
@pytest.mark.parametrize("kind", ["mpegts", "flv"])
def test_a_format_that_seeks_to_later_frames(kind: str, start: float) -> None:
    data, first = video(kind=kind), round(start * 10)
    assert numbers(DecodeVideo(3, (SIDE, SIDE + 16), seconds=0.3, start=start)(data)) == [first, first + 1, first + 2]


def with_sound(kind: str, begin: int, seconds: int, path: pathlib.Path | None = None) -> bytes:
    """A video of 6 s that begins at ``begin`` s, beside sound of ``seconds``."""
    out = io.BytesIO()
    with av.open(out if path is None else str(path), "w", format=kind) as container:
        stream = container.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = SIDE + 16, SIDE, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        sound = container.add_stream("libopus", rate=48000, layout="mono") if seconds else None
        packets = []
        for number in range(60):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = begin * 1000 + number * 100, Fraction(1, 1000)
            packets += stream.encode(frame)
        packets += stream.encode()
        for number in range(seconds * 50):
            heard = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), format="fltp", layout="mono")
            heard.sample_rate, heard.pts, heard.time_base = 48000, number * 960, Fraction(1, 48000)
            packets += sound.encode(heard)
        packets += sound.encode() if sound else []
        for packet in sorted(packets, key=lambda packet: packet.pts * packet.time_base):
            container.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize(("begin", "seconds"), [(0, 9), (0, 3), (5, 0), (5, 11), (2, 20)])
@pytest.mark.parametrize("kind", ["webm", "matroska"])
def test_a_duration_that_is_not_that_of_the_frames(kind: str, begin: int, seconds: int, tmp_path: pathlib.Path) -> None:
    data, size = with_sound(kind, begin, seconds), (SIDE, SIDE + 16)
    assert numbers(DecodeVideo(6, size)(data)) == [5, 15, 25, 35, 45, 55]
    assert numbers(DecodeVideo(2, size, seconds=2, start="center")(data)) == [25, 35]
    assert numbers(DecodeVideo(2, size, seconds=4, start=5.3)(data)) == [59, 59]
    with_sound(kind, begin, seconds, tmp_path / "video")
    assert numbers(DecodeVideo(1, size)(str(tmp_path / "video"))) == [30]
    with pytest.raises(ValueError, match=r"is cut short|cannot be decoded"):
        DecodeVideo(6, size)(data[: len(data) // 2])


def test_pixels_are_those_of_a_decoder_that_reads_the_whole_file() -> None:
    with av.open(io.BytesIO(VIDEO)) as container:
        whole = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    for start in (0.0, 1.15, 1.25, 2.35, 2.45, 5.9):
        clip = DecodeVideo(3, (SIDE, SIDE + 16), seconds=0.3, start=start)(VIDEO)
        first = int(start * 10 + 0.5 + 1e-6)
        np.testing.assert_array_equal(clip, whole[np.minimum([first, first + 1, first + 2], 59)])


def test_a_frame_rate_that_varies() -> None:
    times = [0, 100, 900, 1000, 1100, 3000, 3100, 3200]  # milliseconds
    data = video(8, times=times)
    asked = [0.05, 0.5, 0.95, 1.5, 2.9, 3.05]
    found = [numbers(DecodeVideo(1, (SIDE, SIDE + 16), seconds=1e-3, start=start)(data))[0] for start in asked]
    assert found == [0, 1, 2, 4, 4, 5]


@pytest.mark.parametrize("scale", [0.25, 2])
def test_frames_whose_size_changes_show_the_same(scale: float) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libvpx", rate=10)
        coder = other = stream.codec_context
        for number in range(40):
            if number == 20:
                container.mux(stream.encode())
                other = av.CodecContext.create("libvpx", "w")
                other.framerate = 10
            factor = 1 if number < 20 else scale
            if number in (0, 20):
                other.width, other.height, other.pix_fmt = round((SIDE + 16) * factor), round(SIDE * factor), "yuv420p"
                other.time_base = Fraction(1, 1000)
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame = frame.reformat(other.width, other.height)
            frame.pts, frame.time_base = number * 100, Fraction(1, 1000)
            for packet in stream.encode(frame) if other is coder else other.encode(frame):
                packet.stream = stream
                container.mux(packet)
        for packet in other.encode(None):
            packet.stream = stream
            container.mux(packet)
    for width in (16, SIDE + 16):
        assert numbers(DecodeVideo(8, (SIDE, width))(file.getvalue())) == [2, 7, 12, 17, 22, 27, 32, 37]


def test_a_path_a_dict_and_an_array(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.mp4").write_bytes(VIDEO)
    decode = DecodeVideo(2, SIDE, seconds=1)
    wanted = decode(VIDEO)
    np.testing.assert_array_equal(decode(str(tmp_path / "a.mp4")), wanted)
    np.testing.assert_array_equal(decode(np.frombuffer(VIDEO, np.uint8)), wanted)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(decode))(VIDEO), wanted)
    named = DecodeVideo(2, SIDE, seconds=1, key="mp4", start_key="begin")
    found = named({"mp4": VIDEO, "begin": np.float32(2), "label": 3})
    assert (found["label"], numbers(DecodeVideo(2, (SIDE, SIDE + 16), seconds=1, start=2.0)(VIDEO))) == (3, [22, 27])
    np.testing.assert_array_equal(found["mp4"], DecodeVideo(2, SIDE, seconds=1, start=2)(VIDEO))
    with pytest.raises(FileNotFoundError):
        decode(str(tmp_path / "lost.mp4"))


def test_clips_in_the_middle_and_at_random() -> None:
    size = (SIDE, SIDE + 16)
    assert numbers(DecodeVideo(2, size, seconds=2, start="center")(VIDEO)) == [25, 35]
    decode, rng = DecodeVideo(2, size, seconds=1, start="random"), np.random.default_rng
    starts = [numbers(decode(VIDEO, rng(seed)))[0] for seed in range(40)]
    assert numbers(decode(VIDEO, rng(3)))[0] == starts[3]
    assert min(starts) < 12
    assert max(starts) > 42
    assert all(second - first == 5 for first, second in (numbers(decode(VIDEO, rng(seed))) for seed in range(9)))
    assert numbers(DecodeVideo(1, size, seconds=60, start="random")(VIDEO, rng(0))) == [30 + 29], (
        "longer than the video"
    )


def test_all_frames_of_a_clip_are_cropped_and_mirrored_alike() -> None:
    decode = DecodeVideo(4, (16, 24), seconds=0.4, start=1.0, flip=True)
    sides = set()
    for seed in range(12):
        clip = decode(VIDEO, np.random.default_rng(seed))
        left, right = (clip[:, :, columns].mean((1, 2, 3)) < 30 for columns in (slice(3), slice(-3, None)))
        assert (left != right).all()
        assert set(left) == {left[0]}
        sides.add(bool(left[0]))
    assert sides == {False, True}
    decode = DecodeVideo(4, 16, seconds=0.4, start=1.0, crop="random")
    darks = [decode(VIDEO, np.random.default_rng(seed)).mean((1, 3)) < 30 for seed in range(30)]
    assert all(np.ptp(dark.sum(axis=1)) <= 1 for dark in darks), "one column may be gray"
    assert len({int(dark[0].sum()) for dark in darks}) > 1
    with pytest.raises(ValueError, match="draws random numbers here and got none"):
        decode(VIDEO)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "a record of 0 bytes"),
        (b"no video at all", "cannot be decoded as a video"),
        (VIDEO[: len(VIDEO) // 2], "cannot be decoded as a video"),
        (7, "got int, which is not a video"),
        ({"mp4": VIDEO}, "got dict, which is not a video"),
    ],
)
def test_what_is_no_video_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DecodeVideo(2, SIDE)(data)


def test_a_video_that_is_cut_short_is_refused(tmp_path: pathlib.Path) -> None:
    video(file=str(tmp_path / "index_first.mp4"), movflags="faststart")  # otherwise half of it could not be opened
    data = (tmp_path / "index_first.mp4").read_bytes()
    assert numbers(DecodeVideo(2, (SIDE, SIDE + 16))(data)) == [15, 45]
    with pytest.raises(ValueError, match=r"is cut short: it ends at [0-5]\.\d00 of 6\.000 s|cannot be decoded"):
        DecodeVideo(2, SIDE)(data[: len(data) * 2 // 3])
    with pytest.raises(ValueError, match=r"has 6\.000 s, and the clip begins at 6\.500 s"):
        DecodeVideo(2, SIDE, seconds=1, start=6.5)(VIDEO)


def test_sound_alone_is_no_video() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(ValueError, match="has no video stream"):
        DecodeVideo(2, SIDE)(file.getvalue())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_frames": 0}, "num_frames=0"),
        ({"num_frames": 1.5}, "num_frames=1.5"),
        ({"size": 0}, "size=0"),
        ({"seconds": 0}, "seconds=0"),
        ({"start": "end"}, "start='end'"),
        ({"start": -1.0}, "start=-1.0"),
        ({"crop": "left"}, "crop='left'"),
        ({"flip": 1}, "flip=1"),
        ({"key": 3}, "key=3"),
        ({"start_key": "begin"}, "start_key='begin'"),
        ({"start_key": "begin", "key": "mp4", "start": "random"}, "start_key='begin'"),
    ],
)
def test_settings_are_checked(how: dict[str, Any], words: str) -> None:
    with pytest.raises(meshfeed.SettingsError, match=words.replace(".", r"\.")):
        DecodeVideo(**{"num_frames": 2, "size": SIDE, **how})


@pytest.mark.slow
def test_a_feed_of_clips_resumes_and_is_the_same_with_workers(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "clips.array_record", [video(20 + number) for number in range(10)])
    decode = DecodeVideo(3, 16, seconds=0.6, start="random", crop="random", flip=True)

    def feed(**how: Any) -> Any:
        source = ArrayRecord(tmp_path / "clips.array_record", decode=decode)
        return meshfeed.Feed(source, MESH, global_batch_size=8, shuffle=True, num_epochs=3, **how)

    assert check_resumable(feed, save_points=[1]) == 3
    with feed() as alone, feed(num_workers=1) as others:
        for one, other in zip(alone, others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_in_map_beside_other_leaves() -> None:
    data = np.stack([np.frombuffer(VIDEO, np.uint8)] * 8)
    source = Map(
        Memory({"mp4": data, "begin": np.arange(8) / 2}),
        DecodeVideo(1, SIDE, seconds=0.1, key="mp4", start_key="begin"),
    )
    batch = source.read_batch([6, 0])
    assert batch["mp4"].shape == (2, 1, SIDE, SIDE, 3)
    assert batch["begin"].tolist() == [3.0, 0.0]

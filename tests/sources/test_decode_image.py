"""Images of one size from JPEG and PNG: what is cropped, how, and with which random numbers."""

from __future__ import annotations

import io
import pathlib
import pickle
from typing import Any

import jax
import numpy as np
import pyarrow
import pytest
from array_record_files import write
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from PIL import Image

import meshfeed
from meshfeed._src.convert.example import encode_examples
from meshfeed._src.sources.decode_image import _reduced, center_box, random_box
from meshfeed.sources import ArrayRecord, DecodeExample, DecodeImage, Map, Memory

MESH = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """A smooth picture, of which JPEG keeps nearly everything."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "JPEG", **settings: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


def difference(one: np.ndarray, other: Any) -> float:
    return float(np.abs(one.astype(int) - np.asarray(other).astype(int)).mean())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("size", [(60, 80), (61, 47), (300, 500), (1000, 700), (32, 32)])
def test_the_middle_is_what_pillow_crops_and_resizes(kind: str, size: tuple[int, int]) -> None:
    data, short = saved(picture(*size), kind), min(size)
    top, left = (size[0] - short) // 2, (size[1] - short) // 2
    box = (left, top, left + short, top + short)
    wanted = Image.open(io.BytesIO(data)).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR, box=box)
    found = DecodeImage(32)(data)
    assert (found.dtype, found.shape) == (np.uint8, (32, 32, 3))
    assert difference(found, wanted) < 4


def test_another_aspect_ratio_keeps_the_proportions() -> None:
    image = picture(400, 400)
    found = DecodeImage((50, 100))(saved(image))
    wanted = image.resize((100, 50), Image.Resampling.BILINEAR, box=(0, 100, 400, 300))
    assert found.shape == (50, 100, 3)
    assert difference(found, wanted) < 4


def test_all_kinds_of_pixels_become_rgb() -> None:
    image = picture(64, 64)
    gray = DecodeImage(64)(saved(image.convert("L")))
    np.testing.assert_array_equal(gray[..., 0], gray[..., 2])
    assert difference(DecodeImage(64)(saved(image.convert("CMYK"))), image) < 12
    assert difference(DecodeImage(64)(saved(image.convert("RGBA"), "PNG")), image) == 0
    assert difference(DecodeImage(64)(saved(image.convert("P"), "PNG")), image.convert("P").convert("RGB")) == 0
    turned = image.getexif()
    turned[274] = 6  # to be shown turned by 90 degrees, which neither Pillow nor TensorFlow does when decoding
    assert difference(DecodeImage(64)(saved(image, exif=turned)), image) < 3


def test_the_seed_decides_about_crops_flips_and_colors() -> None:
    decode, data = DecodeImage(32, crop="random", flip=True, color=0.4), saved(picture(90, 120))
    same = [decode(data, rng=np.random.default_rng(3)) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    assert len({decode(data, rng=np.random.default_rng(seed)).tobytes() for seed in range(20)}) == 20


def test_flipping_mirrors_half_of_the_images() -> None:
    data = saved(picture(40, 60))
    plain, decode = DecodeImage(32)(data), DecodeImage(32, flip=True)
    found = [decode(data, rng=np.random.default_rng(seed)) for seed in range(200)]
    flipped = sum(np.array_equal(image, plain[:, ::-1]) for image in found)
    assert flipped + sum(np.array_equal(image, plain) for image in found) == 200
    assert 70 < flipped < 130


def test_colors_change_as_the_factors_say() -> None:
    data = saved(picture(32, 32), "PNG")
    plain = DecodeImage(32)(data).astype(float)
    found = DecodeImage(32, color=0.5)(data, rng=np.random.default_rng(1))
    brightness, contrast, saturation = np.random.default_rng(1).uniform(0.5, 1.5, 3)
    luma = np.array([0.299, 0.587, 0.114])
    gray = (plain @ luma)[..., None]
    wanted = gray + saturation * (plain - gray)
    wanted = brightness * (gray.mean() + contrast * (wanted - gray.mean()))
    assert np.abs(found - wanted.clip(0, 255)).max() <= 1


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 900), st.integers(1, 900), st.integers(0, 9))
def test_boxes_are_inside_the_image(height: int, width: int, rows: int, columns: int, seed: int) -> None:
    aspect = columns / rows
    for box in (center_box(height, width, aspect), random_box(height, width, aspect, np.random.default_rng(seed))):
        for by in (1, 2, 4, 8):
            size = -(-height // by), -(-width // by)
            top, left, box_rows, box_columns = _reduced(box, by, *size)
            assert 0 <= top < top + box_rows <= size[0]
            assert 0 <= left < left + box_columns <= size[1]


def testrandom_boxes_have_the_area_and_aspect_of_the_paper() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([random_box(400, 600, 1.0, rng) for _ in range(2000)], float)
    shares, aspects = boxes[:, 2] * boxes[:, 3] / 240_000, boxes[:, 3] / boxes[:, 2]
    assert 0.07 < shares.min() < 0.1
    assert 0.85 < shares.max() <= 1
    assert 0.74 < aspects.min() < 0.78
    assert 1.28 < aspects.max() < 1.35


def jpeg_files(tmp_path: pathlib.Path) -> str:
    return write(tmp_path / "images", [saved(picture(40 + i, 60, i)) for i in range(24)], "group_size:1")


def feed(source: Any, **settings: Any) -> meshfeed.Feed:
    return meshfeed.Feed(source, MESH, global_batch_size=8, shuffle=True, num_epochs=2, **settings)


@pytest.mark.slow
def test_the_stream_does_not_depend_on_threads_workers_or_batching(tmp_path: pathlib.Path) -> None:
    path, decode = jpeg_files(tmp_path), DecodeImage(16, crop="random", flip=True, color=0.2, key="image")
    with (
        feed(ArrayRecord(path, decode=decode)) as plain,
        feed(ArrayRecord(path, decode=decode), num_threads=3) as threads,
        feed(ArrayRecord(path, decode=decode), num_workers=1) as workers,
        feed(ArrayRecord(path, decode_batch=decode)) as batched,
    ):
        seen = []
        for batches in zip(plain, threads, workers, batched, strict=True):
            images = [np.asarray(batch["image"]) for batch in batches]
            assert images[0].shape == (8, 16, 16, 3)
            for other in images[1:]:
                np.testing.assert_array_equal(images[0], other)
            seen.append(images[0])
    assert len(seen) == 6
    rows = {row.tobytes() for batch in seen for row in batch}
    assert len(rows) == 48  # other crops in the second epoch


def test_map_keeps_the_other_leaves(tmp_path: pathlib.Path) -> None:
    records = [{"image": saved(picture(40, 60, i)), "label": np.int32(i)} for i in range(8)]

    class Records:
        def __len__(self) -> int:
            return len(records)

        def __getitem__(self, i: int) -> dict[str, Any]:
            return records[i]

        def fingerprint(self) -> str:
            return "records"

    decode = DecodeImage(16, key="image")
    for batched in (False, True):
        with feed(Map(Records(), decode, batched=batched)) as images:
            batch, ids = next(images), images.record_ids(0)
            np.testing.assert_array_equal(batch["label"], ids)
            for row, record_id in enumerate(ids):
                np.testing.assert_array_equal(batch["image"][row], decode(records[record_id])["image"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"label": np.float32(1)}, {"label": np.int64(2**60 + 1)}),  # which no float represents
        ({}, {"label": 1}),
        ({"label": 1}, {}),
        ({"label": np.zeros(2)}, {"label": np.zeros(3)}),
        ({"label": "a"}, {"label": "b"}),
    ],
)
def test_other_leaves_that_differ_are_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    image = saved(picture(20, 20))
    decode, records = DecodeImage(16, key="image"), [{"image": image, **first}, {"image": image, **second}]
    for found in (lambda: decode(records), lambda: Map(records, decode, batched=True).read_batch([0, 1])):
        with pytest.raises(meshfeed.SourceError, match=r"\['label'\]"):
            found()


def test_other_leaves_may_be_lists_and_dicts() -> None:
    image = saved(picture(20, 20))
    decode = DecodeImage(16, key="image")
    found = decode([{"image": image, "box": [number, 2], "more": {"x": number}} for number in range(2)])
    assert (found["box"].tolist(), found["more"]["x"].tolist()) == ([[0, 2], [1, 2]], [0, 1])
    assert decode([])["image"].shape == (0, 16, 16, 3)


def test_in_an_example() -> None:
    (record,) = encode_examples([("x", pyarrow.array([saved(picture(20, 20), "PNG")]))], 1, 0)
    found = DecodeExample({"x": DecodeImage(20)})(record)
    assert difference(found["x"], picture(20, 20)) == 0


def test_it_can_be_pickled_and_takes_arrays_of_bytes() -> None:
    decode, data = pickle.loads(pickle.dumps(DecodeImage(16, flip=True))), saved(picture(40, 40))
    array = np.frombuffer(data, np.uint8)
    np.testing.assert_array_equal(
        decode(data, rng=np.random.default_rng(0)), decode(array, rng=np.random.default_rng(0))
    )
    assert DecodeImage(16)([]).shape == (0, 16, 16, 3)


def test_a_decoder_without_random_numbers_identifies_the_source_by_its_images(tmp_path: pathlib.Path) -> None:
    source = Map(Memory({"x": np.zeros((4, 3), np.uint8)}), DecodeImage(16, key="x", flip=True))
    assert source.wants_rng
    assert not Map(Memory({"x": np.zeros((4, 3), np.uint8)}), DecodeImage(16, key="x")).wants_rng


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"",
            r"a record of 0 bytes that begins with b'' cannot be decoded as an image: OpenCV does not know the format",
        ),
        (b"not an image at all", "a record of 19 bytes that begins with b'not an i' cannot be decoded as an image"),
        (saved(picture(80, 80))[:-40], "cannot be decoded as an image: .*(?i:premature end)"),
        (saved(picture(80, 80))[:30], "cannot be decoded as an image: "),
        (saved(picture(80, 80), "PNG")[:60], "cannot be decoded as an image: OpenCV does not know the format"),
        ("text", "DecodeImage got str, which is not the bytes of an image file"),
        (np.zeros((2, 2), np.uint8), "DecodeImage got ndarray, which is not the bytes"),
        ({"x": b""}, r"the leaves \['x'\] and key=None. Name the leaf that holds the image"),
    ],
)
def test_what_is_no_image(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeImage(16)(data)


def test_random_without_numbers() -> None:
    with pytest.raises(ValueError, match=r"draws random numbers here and got none\. Pass it as decode= of a source"):
        DecodeImage(16, flip=True)(saved(picture(20, 20)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "DecodeImage got size=0; it takes pixels as an int of at least 1, or "),
        ({"size": (3, 4, 5)}, "size="),
        ({"size": True}, "size=True"),
        ({"size": "224"}, "size='224'"),
        ({"size": 8, "crop": "middle"}, """crop='middle'; it takes "center" or "random"."""),
        ({"size": 8, "flip": 1}, "flip=1; it takes True or False"),
        ({"size": 8, "color": 1}, "color=1; it takes a number from 0 to less than 1"),
        ({"size": 8, "key": 3}, "key=3; it takes the name of a leaf, or None"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(meshfeed.SettingsError, match=message):
        DecodeImage(**settings)

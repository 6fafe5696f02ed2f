"""tf.train.Example without TensorFlow: judged by TensorFlow's own serializer, and by protobuf written by hand."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import array_record_files
import numpy as np
import pytest

import meshfeed
from meshfeed._src.sources.decode import parse_example
from meshfeed.sources import DecodeExample

# Example{features{feature{key: "a", value{int64_list{value: [1, 300]}}}}}, packed and one by one
PACKED = b"\x0a\x0e\x0a\x0c\x0a\x01a\x12\x07\x1a\x05\x0a\x03\x01\xac\x02"
ONE_BY_ONE = b"\x0a\x0e\x0a\x0c\x0a\x01a\x12\x07\x1a\x05\x08\x01\x08\xac\x02"


def example(**features: Any) -> bytes:
    """Serializes with TensorFlow."""
    tf = pytest.importorskip("tensorflow")
    lists = {}
    for name, values in features.items():
        if values and isinstance(values[0], bytes):
            lists[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        elif values and isinstance(values[0], float):
            lists[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            lists[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString()


def test_integers_packed_and_one_by_one() -> None:
    for record in (PACKED, ONE_BY_ONE):
        found = parse_example(record)
        assert found.keys() == {"a"}
        assert found["a"].tolist() == [1, 300]


def test_it_reads_what_tensorflow_writes() -> None:
    numbers = [
        *np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500).tolist(),
        0,
        1,
        -1,
        127,
        128,
        2**63 - 1,
        -(2**63),
    ]
    floats = [0.5, float("nan"), -0.0, float("inf"), 1e-40]
    record = example(
        numbers=numbers, few=[5, -5], floats=floats, words=[b"", b"x" * 300, "ü".encode()], one=[b"1"], none=[]
    )
    found = DecodeExample()(record)
    assert found["numbers"].tolist() == numbers
    assert found["few"].tolist() == [5, -5]
    np.testing.assert_array_equal(found["floats"], np.array(floats, np.float32))
    assert found["words"] == [b"", b"x" * 300, "ü".encode()]
    assert found["one"] == b"1"
    assert found["none"].tolist() == []


def test_named_features_get_their_dtype_and_shape() -> None:
    tokens = list(range(6))
    raw = np.arange(4, dtype=np.int16)
    record = example(tokens=tokens, label=[3], raw=[raw.tobytes()], text=[b"abc"], skipped=[1], weight=[1.5])
    decode = DecodeExample(
        {
            "tokens": (np.int32, (2, -1)),
            "label": np.uint8,
            "raw": (np.int16, 4),
            "text": lambda value: np.frombuffer(value, np.uint8),
            "weight": (np.float64, ()),
        }
    )
    found = decode(record)
    assert found["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["tokens"].dtype == np.int32
    assert (found["label"].shape, found["label"].dtype, int(found["label"])) == ((), np.uint8, 3)
    assert found["raw"].tolist() == raw.tolist()
    assert found["text"].tolist() == list(b"abc")
    assert found["weight"] == 1.5
    assert "skipped" not in found
    assert DecodeExample({"text": bytes})(record) == {"text": b"abc"}
    plain = pickle.loads(pickle.dumps(DecodeExample({"label": np.int32})))
    assert plain(record)["label"] == 3


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"b": np.int32}, r"no feature 'b'. It has \['a'\]"),
        ({"a": (np.int32, 3)}, r"holds 2 integers; expected int32\[3\]"),
        ({"a": (np.uint8, 2)}, "holds 300, which does not fit into uint8"),
        ({"a": bytes}, "holds 2 integers; expected one value of bytes"),
        ({"a": (np.int32, (-1, 3))}, r"expected int32\[-1, 3\]"),
    ],
)
def test_what_does_not_fit_is_a_bad_record(features: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeExample(features)(PACKED)


def test_bytes_that_are_no_array_of_one_shape() -> None:
    with pytest.raises(
        ValueError, match=r"holds one value of 3 bytes; expected uint8\[\]\. .*, such as .*DecodeImage\(224\)"
    ):
        DecodeExample({"image": np.uint8})(example(image=[b"abc"]))


@pytest.mark.parametrize("record", [b"\xff" * 20, PACKED[:-1], b"\x0a", bytes(8), b"hello, world", b"\x0f\x00"])
def test_what_is_no_example_is_a_bad_record(record: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not a tf\.train\.Example"):
        parse_example(record)


@pytest.mark.parametrize("features", [[], {}, {"a": "no such dtype"}, {"a": object}, {"a": (np.int32, (-1, -1))}])
def test_invalid_features_are_a_settings_error(features: Any) -> None:
    with pytest.raises(meshfeed.SettingsError, match="DecodeExample got"):
        DecodeExample(features)


def test_a_list_of_records_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="Pass it as decode=, not as decode_batch="):
        DecodeExample()([PACKED])  # type: ignore[arg-type]
    array_record_files.write(tmp_path / "a.array_record", [PACKED])
    for name in ("decode", "decode_batch"):
        with pytest.raises(
            meshfeed.SettingsError, match=rf"ArrayRecord got {name}=.*cannot be called as {name}\(record"
        ):
            meshfeed.sources.ArrayRecord(tmp_path / "a.array_record", **{name: lambda record, other: record})

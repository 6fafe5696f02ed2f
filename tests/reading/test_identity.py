"""The identity of a source: golden digests, since saved states hold them, and what an unreadable record changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshfeed._src.base.errors import SourceError
from meshfeed._src.base.settings import Retry
from meshfeed._src.reading.identity import (
    content_digest,
    digest_raw,
    digest_tree,
    probe_digest,
    probe_ids,
    source_identity,
)

NOW = Retry(attempts=2, initial_seconds=0)


@pytest.mark.parametrize(
    ("num_records", "ids"),
    [
        (1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 4]), (100, [0, 33, 66, 99]),
        (10**12, [0, 333333333333, 666666666666, 10**12 - 1]),
    ],
)  # fmt: skip
def test_four_records_from_the_first_to_the_last_are_probed(num_records: int, ids: list[int]) -> None:
    found = probe_ids(num_records)
    assert (found.tolist(), found.dtype) == (ids, np.int64)


def test_digests_stay_the_same_for_ever() -> None:
    tree = {"b": np.arange(6, dtype=np.int32).reshape(2, 3), "a": [np.float16(1.5)]}
    assert digest_tree(tree) == "ebc866d1a0e526ae"
    assert digest_raw([b"ab", b"", b"c"]) == "12827121b2f862cb"
    assert content_digest(Numbers(20), NOW) == "72f021ef1578f1b2"
    assert content_digest(Raw([b"abc", b"de"]), NOW) == "2a6511abd4c041a2"
    assert probe_digest(20, fail_at(19), NOW) == "845ab7463d0388f1"


def test_every_part_of_a_tree_is_in_its_digest() -> None:
    base = np.arange(6, dtype=np.int32)
    trees: list[Any] = [
        {"a": base}, {"b": base}, {"a": base.reshape(2, 3)}, {"a": base.view(np.uint32)}, {"a": base + 1}, [base],
    ]  # fmt: skip
    assert len({digest_tree(tree) for tree in trees}) == len(trees)
    assert digest_tree({"a": np.arange(12, dtype=np.int32)[::2] // 2}) == digest_tree({"a": base}), "strides are not"


def test_where_raw_records_end_is_in_their_digest() -> None:
    assert len({digest_raw(records) for records in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""])}) == 4


class Numbers:
    """Record i is i + 1."""

    def __init__(self, count: int) -> None:
        self.count, self.read = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, record_id: int) -> Any:
        self.read.append(record_id)
        return {"x": np.int64(record_id + 1)}


class Raw:
    """Undecoded records."""

    kind = "raw_records"

    def __init__(self, records: list[bytes]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, record_id: int) -> Any:
        raise AssertionError("read_raw is there")

    def read_raw(self, record_ids: Any) -> list[bytes]:
        return [self.records[record_id] for record_id in record_ids.tolist()]

    def decode(self, record: bytes, rng: Any) -> Any:
        raise AssertionError("the bytes identify the source")


def fail_at(*bad: int) -> Any:
    def digest(ids: np.ndarray) -> str:
        for record_id in ids.tolist():
            if record_id in bad:
                raise KeyError(record_id)
        return ",".join(map(str, ids.tolist()))

    return digest


def test_a_source_is_its_kind_its_length_and_its_content() -> None:
    source = Numbers(20)
    assert source_identity(source, NOW) == {
        "kind": "Numbers",
        "records": 20,
        "content": content_digest(Numbers(20), NOW),
    }
    assert source.read == [0, 6, 12, 19]
    raw = Raw([b"abc", b"de"])
    assert source_identity(raw, NOW) == {
        "kind": "raw_records", "records": 2, "content": digest_raw([b"abc", b"de"]),
    }  # fmt: skip


def test_a_source_that_decodes_at_random_has_no_probe() -> None:
    class Random(Numbers):
        def decode(self, record: Any, rng: Any) -> Any:
            raise AssertionError("not for the identity")

    source = Random(20)
    assert source_identity(source, NOW) == {"kind": "Random", "records": 20, "content": None}
    assert source.read == []


@pytest.mark.parametrize(
    ("value", "identity"),
    [
        ("abc", {"kind": "Own", "records": 20, "fingerprint": "abc"}),
        ({"files": 3, "kind": "files"}, {"kind": "files", "records": 20, "files": 3}),
        (None, {"kind": "Own", "records": 20, "fingerprint": None}),
    ],
)
def test_a_fingerprint_of_its_own_replaces_the_probe(value: Any, identity: dict[str, Any]) -> None:
    failures = [OSError("a blip")]

    class Own(Numbers):
        def fingerprint(self) -> Any:
            if failures:
                raise failures.pop()
            return value

    source = Own(20)
    assert source_identity(source, NOW) == identity
    assert source.read == []


def test_stop_iteration_of_a_fingerprint_is_an_error_with_a_message() -> None:
    class Own(Numbers):
        def fingerprint(self) -> Any:
            return next(iter(()))

    with pytest.raises(SourceError, match=r"fingerprint\(\) of a Own raised StopIteration"):
        source_identity(Own(20), NOW)


def test_a_stream_is_not_opened_for_its_identity() -> None:
    class Stream:
        def open(self, lane_index: int, num_lanes: int) -> Any:
            raise AssertionError("not for the identity")

    assert source_identity(Stream(), NOW) == {"kind": "Stream"}


def test_an_unreadable_record_is_part_of_the_digest(caplog: pytest.LogCaptureFixture) -> None:
    digests = [probe_digest(20, fail_at(*bad), NOW) for bad in ((), (19,), (0,), (0, 19), (6,), (7,))]
    assert digests[0] == digests[5] == "0,6,12,19"
    assert len(set(digests)) == 5
    assert caplog.messages[0] == (
        "record 19 cannot be read (KeyError: 19); the source's fingerprint marks it as unreadable"
    )
    assert caplog.messages[2] == (
        "records 0, 19 cannot be read (KeyError: 0); the source's fingerprint marks them as unreadable"
    )
    assert len(caplog.messages) == 4
    assert {(record.name, record.levelname) for record in caplog.records} == {("meshfeed.feed", "WARNING")}


@pytest.mark.parametrize("num_records", [20, 1])
def test_a_source_without_a_readable_record_has_no_identity(num_records: int, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError) as caught:
        probe_digest(num_records, fail_at(0, 6, 12, 19), NOW)
    assert caught.value.args == (0,)
    ids = {20: "4 records (0, 6, 12, 19)", 1: "one record (0)"}[num_records]
    assert caught.value.__notes__ == [f"in identifying the source by {ids}, none of which can be read on this host"]
    assert not caplog.messages


def test_a_store_that_is_busy_with_one_record_is_an_error() -> None:
    """Or the states of a job that starts meanwhile could not be restored once the store answers."""
    busy = OSError("503, message='Service Unavailable'")
    busy.status = 503  # type: ignore[attr-defined]

    def digest(ids: np.ndarray) -> str:
        if 19 in ids.tolist():
            raise OSError("the file of record 19 cannot be read") from busy
        return "read"

    with pytest.raises(OSError, match="the file of record 19"):
        probe_digest(20, digest, NOW)


def test_a_probe_that_fails_in_passing_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    failures = [OSError("a blip")]

    def digest(ids: np.ndarray) -> str:
        if failures:
            raise failures.pop()
        return "read"

    assert probe_digest(20, digest, NOW) == "read"
    assert caplog.messages[0].startswith("reading four records to identify the source failed (OSError: a blip)")


class Own(Numbers):
    def __init__(self, value: Any) -> None:
        super().__init__(20)
        self.value = value

    def fingerprint(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize("value", [object(), np.int64(3), b"abc", {1, 2}, {"a": np.arange(3)}, {"a": {(1, 2): 3}}])
def test_a_fingerprint_that_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(
        SourceError, match=rf"fingerprint\(\) of a Own returned a {type(value).__name__} that is not JSON"
    ):
        source_identity(Own(value), NOW)


def test_a_fingerprint_is_what_a_state_holds() -> None:
    assert source_identity(Own({"a": (1, 2), 3: 4}), NOW)["3"] == 4
    assert source_identity(Own(("a", 1)), NOW)["fingerprint"] == ["a", 1]


def test_a_large_fingerprint_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert source_identity(Own("x" * 100_000), NOW)["fingerprint"] == "x" * 100_000, "saved states hold it"
    assert caplog.messages == [
        "fingerprint() of a Own returned 100,002 characters of JSON, which every state holds; return a digest of them instead"
    ]


def test_an_error_of_a_fingerprint_names_it() -> None:
    with pytest.raises(ValueError, match="no") as raised:
        source_identity(Own(ValueError("no")), NOW)
    assert raised.value.__notes__ == ["in fingerprint() of a Own"]


def test_attempts_to_read_the_records_of_a_fingerprint_are_not_multiplied() -> None:
    calls: list[int] = []

    def digest(ids: np.ndarray) -> str:
        calls.append(len(ids))
        raise OSError("the disk fails")

    class Mapped(Numbers):
        def fingerprint(self) -> str:
            return probe_digest(len(self), digest, NOW)

    with pytest.raises(OSError, match="the disk fails"):
        source_identity(Mapped(20), NOW)
    assert calls == [4, 4, 1, 1, 1, 1]

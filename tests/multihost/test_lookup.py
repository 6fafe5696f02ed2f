"""Hosts divide the files of a store among them: each file is looked at once per job."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "sources"))

import array_record_files
import http_store
import lookup_jobs

from meshfeed import ShardCache
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.sources.files.manifest import FileEntry, write_manifest
from meshfeed.sources import ArrayRecord, Mixture
from meshfeed.testing import HostPool, run_hosts

HOSTS, FILES = 4, 36


class CountingHandler(http_store._Handler):
    """Counts the requests for each file by the host that sends them."""

    counts: ClassVar[collections.Counter[tuple[str, str, str]]] = collections.Counter()

    def do_HEAD(self) -> None:
        self.counts["HEAD", self.path, self.headers.get("X-Host", "")] += 1
        super().do_HEAD()

    def do_GET(self) -> None:
        self.counts["GET", self.path, self.headers.get("X-Host", "")] += 1
        super().do_GET()


class HostsHandler(CountingHandler):
    """Host 2 gets other bytes of the files that ``others`` lists, of the same number."""

    others: ClassVar[set[str]] = set()

    def _answer(self, *, body: bool) -> None:
        if self.headers.get("X-Host") == "2" and self.path.lstrip("/") in self.others:
            self.path += ".other"
        super()._answer(body=body)


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    with HostPool(HOSTS, 1, timeout_seconds=240) as pool:
        yield pool


def make_mixture(folder: Path, store: http_store.Store) -> dict[str, str]:
    """Five components with a manifest each, and for each file another one of the same size; name → manifest."""
    manifests = {}
    for number in range(5):
        name, paths = f"c{number}", []
        for kind in ("", ".other"):
            records = [(100 * number + row + 1000 * bool(kind)).to_bytes(4, "little") * 4 for row in range(16)]
            paths.append(Path(array_record_files.write(folder / f"{name}{kind}", records)))
            store.put(f"{name}{kind}", paths[-1].read_bytes())
        assert paths[0].stat().st_size == paths[1].stat().st_size
        entry = FileEntry(store.url(name), paths[0].stat().st_size, 16, None, {"group_size": 1})
        manifests[name] = str(folder / f"{name}.json")
        write_manifest(manifests[name], "ArrayRecord", [entry])
    return manifests


def test_two_hosts_read_what_identifies_a_component(pool: HostPool, tmp_path: Path) -> None:
    store = http_store.Store()
    store.RequestHandlerClass = HostsHandler
    HostsHandler.others = set()
    manifests = make_mixture(tmp_path, store)
    found = [result.value for result in pool.run(lookup_jobs.first_batch, manifests)]
    alone = Mixture({name: ArrayRecord(path) for name, path in manifests.items()}, dict.fromkeys(manifests, 1))
    assert found == [[list(item) for item in alone.components.identities().items()]] * HOSTS


@pytest.mark.parametrize("other", ["c1", "c2"])  # which host 2 reads as one of two hosts
def test_a_host_that_sees_other_bytes_at_a_url_is_named(pool: HostPool, tmp_path: Path, other: str) -> None:
    store = http_store.Store()
    store.RequestHandlerClass = HostsHandler
    HostsHandler.others = {other}
    for result in pool.run(lookup_jobs.first_batch, make_mixture(tmp_path, store)):
        assert result.value.startswith("AgreementError: hosts differ in mixture.components"), result.value
        assert "hosts 0, 1, 3: " in result.value
        assert "host 2: " in result.value


def test_each_file_is_looked_at_by_one_host(tmp_path: Path) -> None:
    store = http_store.Store()
    store.RequestHandlerClass = CountingHandler
    urls = [
        store.put(path, Path(array_record_files.write(tmp_path / path, [b"abc"] * (1 + part % 5))).read_bytes())
        for part, path in enumerate(f"good-{part:02}" for part in range(FILES))
    ]
    for name in ("other-1", "other-2", "after", "last"):
        store.put(name, store.files["good-00"])
    once = [store.put(name.replace("good", "once"), content) for name, content in list(store.files.items())[:FILES]]
    first = [store.put("first", store.files["good-00"]), store.url("good-01")]
    other = [store.url(name) for name in ("other-1", "other-2")]
    missing = [*other, store.url("gone"), store.url("also-gone")]
    corrupt = [store.url("after"), store.put("damaged", b"x" * 100_000), store.url("last")]
    results = run_hosts(
        lookup_jobs.look, once, first, urls, other, missing, corrupt, str(tmp_path), num_hosts=HOSTS, devices_per_host=1
    )
    values = [result.value for result in results]

    records = sum(1 + part % 5 for part in range(FILES))
    names = ("once", "good", "other", "again")
    assert [[value[name] for name in names] for value in values] == [[records, records, 2, records]] * HOSTS
    asked = {key: count for key, count in CountingHandler.counts.items() if key[1].startswith("/once")}
    assert list(asked.values()) == [1] * FILES  # the size and the footer of each in one request, by one host
    assert {method for method, _, _ in asked} == {"GET"}
    assert sorted(collections.Counter(by for _, _, by in asked).values()) == [9] * 4
    # The host that looked at it tells the others what it found: they ask only for its bytes, and whether it has changed.
    assert [value["first"] for value in values] == [(3, b"abc")] * HOSTS
    heads = [
        count for (method, path, _), count in CountingHandler.counts.items() if (method, path) == ("HEAD", "/first")
    ]
    assert heads == [1] * HOSTS
    kind, message, path = values[0]["missing"]
    assert (kind, "there is no file" in message, "gone" in message) == ("SourceError", True, True)
    assert [value["missing"] for value in values] == [[kind, message, path]] * HOSTS
    kind, message, path = values[0]["corrupt"]
    assert (kind, path) == ("CorruptDataError", store.url("damaged"))
    assert [value["corrupt"] for value in values] == [[kind, message, path]] * HOSTS
    assert [value["some"] for value in values] == [sum(1 + part % 5 for part in range(5))] * 2 + [None] * 2
    assert [value["not the lowest"] for value in values] == [None] * 2 + [records - 1] * 2
    alone = source_identity(ArrayRecord(urls, cache=ShardCache(tmp_path / "alone")))
    assert [value["identity"] for value in values] == [alone] * HOSTS

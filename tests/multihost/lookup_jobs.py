"""Sources over a store on real hosts, for tests/multihost/test_lookup.py."""

from __future__ import annotations

from typing import Any

import fsspec
import jax
from jax.sharding import AxisType

import meshfeed
from meshfeed import ShardCache
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.sources.files import lookup
from meshfeed.sources import ArrayRecord, DecodeRaw, Mixture


def outcome(urls: list[str], folder: str) -> Any:
    """Number of records, or the error."""
    cache = ShardCache(f"{folder}/{jax.process_index()}")
    try:
        source = ArrayRecord(urls, cache=cache)
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "path", None)]
    return len(source)


def read_first(urls: list[str], folder: str) -> tuple[int, bytes]:
    """Number of records, and the first one, whose file every host fetches."""
    source = ArrayRecord(urls, cache=ShardCache(f"{folder}/first/{jax.process_index()}"))
    return len(source), source[0]


def first_batch(manifests: dict[str, str]) -> Any:
    """Identities of the components of a mixture, or the error of the feed."""
    fsspec.config.conf["http"] = {"client_kwargs": {"headers": {"X-Host": str(jax.process_index())}}}
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    decode = DecodeRaw("int32", 4)
    try:
        source = Mixture(
            {name: ArrayRecord(path, decode_batch=decode) for name, path in manifests.items()},
            dict.fromkeys(manifests, 1),
        )
        with meshfeed.Feed(source, mesh, global_batch_size=2 * jax.device_count(), timeout_seconds=60) as feed:
            next(feed)
            return feed.get_state()["fingerprint"]["mixture"]["components"]
    except meshfeed.MeshfeedError as error:
        return f"{type(error).__name__}: {error}"


def look(
    once: list[str],
    first: list[str],
    good: list[str],
    other: list[str],
    missing: list[str],
    corrupt: list[str],
    folder: str,
) -> dict[str, Any]:
    host = jax.process_index()
    # The server counts by this header.
    fsspec.config.conf["http"] = {"client_kwargs": {"headers": {"X-Host": str(host)}}}
    found: dict[str, Any] = {}
    found["once"] = outcome(once, folder)
    found["first"] = read_first(first, folder)
    pairs = [("good", good), ("other", other)]
    for name, urls in pairs if host % 2 else pairs[::-1]:  # in any order
        found[name] = outcome(urls, folder)
    found["missing"] = outcome(missing, folder)
    found["corrupt"] = outcome(corrupt, folder)
    found["again"] = outcome(good, folder)
    lookup._MIN_WAIT_SECONDS = lookup._MAX_WAIT_SECONDS = 0.2
    # Only some hosts create these: the others do not make them wait for ever, with and without the lowest.
    found["some"] = outcome(good[:5], folder) if host < 2 else None
    found["not the lowest"] = outcome(good[1:], folder) if host > 1 else None
    source = ArrayRecord(good, cache=ShardCache(f"{folder}/{host}"))
    found["identity"] = source_identity(source)
    return found

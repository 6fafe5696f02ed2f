"""What makes a source the same source: kind, files, number of records, and a probe of its content."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import xxhash

from meshfeed._read import BAD_RECORD, read_records, wants_rng

_PROBES = 4


def probe_ids(num_records: int) -> np.ndarray:
    """Up to four record ids spread over a source: the first, two between and the last."""
    return np.unique(np.linspace(0, num_records - 1, min(_PROBES, num_records)).astype(np.int64))


def digest_tree(tree: Any) -> str:
    """xxh3-64 of all leaves' paths, dtypes, shapes and bytes."""
    hasher = xxhash.xxh3_64()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.ascontiguousarray(leaf)
        hasher.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()


def content_digest(source: Any) -> str | None:
    """Digest of the probed records, raw bytes where there are any; None where decoding them would draw at random."""
    if not hasattr(source, "read_raw") and wants_rng(source):
        return None
    ids = probe_ids(len(source))
    try:
        return _digest_records(source, ids)
    except BAD_RECORD:  # a damaged record is damaged on every host, and no reason to refuse the others
        return digest_tree([_digest_or_bad(source, ids[i : i + 1]) for i in range(len(ids))])


def _digest_or_bad(source: Any, record_id: np.ndarray) -> np.ndarray:
    try:
        text = _digest_records(source, record_id)
    except BAD_RECORD:
        text = "bad"
    return np.frombuffer(text.encode(), np.uint8)


def _digest_records(source: Any, ids: np.ndarray) -> str:
    if not hasattr(source, "read_raw"):
        return digest_tree(read_records(source, ids))
    hasher = xxhash.xxh3_64()
    for raw in source.read_raw(ids):
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return hasher.hexdigest()


def source_identity(source: Any) -> dict[str, Any]:
    """The part of the fingerprint that tells sources apart, JSON.

    A source's own ``fingerprint()`` replaces the probe of four records; kind and number of records are always there.
    """
    own = getattr(source, "fingerprint", None)
    identity: dict[str, Any] = {"kind": getattr(source, "kind", None) or type(source).__name__}
    if hasattr(source, "__len__"):
        identity["records"] = len(source)
    if callable(own):
        value = own()
        return {**identity, **value} if isinstance(value, dict) else {**identity, "fingerprint": value}
    if "records" in identity:  # a stream cannot be probed: opening it might cost, and say nothing about the rest
        identity["content"] = content_digest(source)
    return identity

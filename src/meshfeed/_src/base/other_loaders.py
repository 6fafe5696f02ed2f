"""What the keywords of other loaders are called here, for the error about an unknown keyword of a feed."""

from __future__ import annotations

from collections.abc import Mapping

_LAST = 'pass end="drop" or end="pad" for the last batch.'
_HOSTS = "leave it out: the sharding divides the rows among the hosts."
_SEED = "pass seed=; a function that draws random numbers takes them from its parameter rng."
_RECORDS = "change records in the source, with its decode= or meshfeed.sources.Map."
_WORKERS = "leave it out: workers live as long as the feed."
_DEVICES = "leave it out: batches arrive on the devices of the sharding."

KEYWORDS: Mapping[str, str] = {
    **dict.fromkeys(("drop_last", "drop_remainder"), _LAST),
    **dict.fromkeys(
        ("num_replicas", "rank", "sampler", "shard_options", "num_canonical_nodes", "worker_config"), _HOSTS
    ),
    **dict.fromkeys(("generator", "worker_init_fn", "shuffle_seed"), _SEED),
    **dict.fromkeys(("operations", "transform", "transforms"), _RECORDS),
    "collate_fn": f"rows are stacked, so records must have one shape: {_RECORDS}",
    "persistent_workers": _WORKERS,
    **dict.fromkeys(("device", "pin_memory"), _DEVICES),
    "mesh": "pass it as the second argument, sharding.",
    "worker_count": "did you mean num_workers=?",
    "worker_buffer_size": "did you mean prefetch=?",
    "read_options": "did you mean num_threads=?",
}
"""Keywords of torch, Grain, Mosaic Streaming and Megatron-Energon, and what to do instead, as the end of a sentence."""

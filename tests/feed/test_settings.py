"""What each keyword of a feed changes, over the declaration: the fingerprint, what hosts compare, or neither."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.agreement.handshake import agreed_settings
from meshfeed._src.base.settings import SETTINGS

# Two values of each keyword, with the keywords that they need.
PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "global_batch_size": (16, 8, {}),
    "shuffle": (False, True, {}),
    "seed": (0, 1, {"shuffle": True}),
    "num_epochs": (1, 2, {}),
    "end": ("drop", "pad", {}),
    "mask_key": (None, "mask", {"end": "pad"}),
    "balance": ("attention", "tokens", {}),
    "num_lanes": (8, 16, {}),
    "load": ("sharded", "once", {}),
    "prefetch": (0, 2, {}),
    "num_workers": (0, 1, {}),
    "num_threads": (None, 2, {}),
    "retry": (meshfeed.Retry(), meshfeed.Retry(1), {}),
    "bad_records": (None, meshfeed.SkipBad(), {}),
    "check_replicas": (False, True, {}),
    "timeout_seconds": (300, 5, {}),
    "name": ("a", "b", {}),
}


class Lengths:
    """Records of one segment, of known length."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        return {"x": np.full(4, record_id, np.int32)}

    def lengths(self) -> np.ndarray:
        return np.full(64, 4)


def lane(lane_index: int, num_lanes: int) -> Any:
    return iter({"x": np.full(4, i, np.int32)} for i in range(lane_index, 64, num_lanes))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_hosts_compare_what_the_declaration_names(name: str) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    one, other, needed = PAIRS[name]
    compared, fingerprints, shown = [], [], []
    for value in (one, other):
        source = meshfeed.sources.Stream(lane, fingerprint="numbers") if name == "num_lanes" else Lengths()
        with meshfeed.Feed(source, mesh, **{"global_batch_size": 16, **needed, name: value}) as feed:
            fingerprint = feed._stream.fingerprint(feed._cursor)
            compared.append(agreed_settings(feed._settings, fingerprint, feed._cursor, ""))
            fingerprints.append(fingerprint)
            shown.append(feed.config()[name])
    hosts = SETTINGS[name].hosts
    assert (fingerprints[0] != fingerprints[1]) == (hosts == "stream")
    assert (compared[0] != compared[1]) == (hosts != "free")
    assert shown[0] != shown[1]


def test_every_keyword_is_here() -> None:
    assert list(PAIRS) == list(SETTINGS)

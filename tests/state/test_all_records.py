"""States from before identities held a digest of all records still resume; states with one notice every record."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed

SAVED = pathlib.Path(__file__).parent.parent / "data" / "memory_states_before_all_records.json"
MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def sources(changed: int | None = None) -> dict[str, Any]:
    values = np.arange(40, dtype=np.int32)
    if changed is not None:
        values[changed] += 100
    arrays = {"x": values}
    mapped = meshfeed.sources.Map(meshfeed.sources.Memory(arrays), lambda record: {"x": record["x"] + 1})
    both = {"memory": arrays, "map": mapped}
    mixture = meshfeed.sources.Mixture(both, weights={"memory": 1, "map": 1})
    return {**both, "mixture": mixture}


def resume(source: Any, state: Any) -> list[int]:
    with meshfeed.Feed(source, MESH, global_batch_size=8) as feed:
        if state is not None:
            feed.set_state(state)
        return np.asarray(next(feed)["x"]).tolist()


@pytest.mark.parametrize("kind", ["memory", "map", "mixture"])
def test_a_state_without_a_digest_of_all_records_resumes(kind: str) -> None:
    state = json.loads(SAVED.read_text())[kind]
    with meshfeed.Feed(sources()[kind], MESH, global_batch_size=8) as feed:
        next(feed)
        wanted = np.asarray(next(feed)["x"]).tolist()
    assert resume(sources()[kind], state) == wanted
    with pytest.raises(meshfeed.StateMismatchError, match=r"content|source"):
        resume(sources(changed=0)[kind], state)  # one of the four records


@pytest.mark.parametrize("kind", ["memory", "map", "mixture"])
def test_a_state_with_one_notices_any_record(kind: str) -> None:
    with meshfeed.Feed(sources()[kind], MESH, global_batch_size=8) as feed:
        next(feed)
        state = json.loads(json.dumps(feed.get_state()))
    resume(sources()[kind], state)
    with pytest.raises(meshfeed.StateMismatchError, match="all_records"):
        resume(sources(changed=5)[kind], state)

"""Stages of the feed show in traces of the JAX profiler."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed


class Raw:
    """Records as bytes."""

    decode = staticmethod(lambda record: np.frombuffer(record, np.int32))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> np.ndarray:
        return self.decode(self.read_raw([record_id])[0])

    def read_raw(self, record_ids) -> list[bytes]:
        return [np.full(4, record_id, np.int32).tobytes() for record_id in record_ids]


@pytest.mark.parametrize("load", ["sharded", "once"])
def test_every_stage_is_in_the_trace(tmp_path, load: str) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call otherwise, which takes a minute
    with meshfeed.MultiHostDataLoadIterator(Raw(), mesh, global_batch_size=8, load=load) as feed:
        with jax.profiler.trace(str(tmp_path), profiler_options=options):
            for batch in feed:
                batch.block_until_ready()
    found = b"".join(path.read_bytes() for path in tmp_path.rglob("*.xplane.pb"))
    stages = ["wait", "host_batch", "read", "decode", "assemble", "transfer", *(["reshard"] if load == "once" else [])]
    assert [stage for stage in stages if f"meshfeed.{stage}".encode() not in found] == []

"""Four processes read a cold epoch through one cache folder, over HTTP and S3: the local epoch, bit for bit."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from http_store import Store

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

SHARDS, ROWS = 6, 50
READER = """
import json, sys
import jax, numpy as np, xxhash
import meshfeed
folder, *paths = sys.argv[1:]
cache = meshfeed.ShardCache(folder) if folder else None
source = meshfeed.sources.Parquet(paths, cache=cache)
digest = xxhash.xxh3_64()
with meshfeed.Feed(source, jax.make_mesh((1,), ("data",)), global_batch_size=16, shuffle=True, seed=5, end="pad") as feed:
    for batch in feed:
        for name in sorted(batch):
            digest.update(np.asarray(batch[name]).tobytes())
print(json.dumps({"digest": digest.hexdigest(), "fetched": cache.stats().fetched if cache else 0}))
"""


@pytest.fixture
def shards(tmp_path: pathlib.Path) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    for shard in range(SHARDS):
        table = pa.table({"x": rng.integers(0, 1 << 30, ROWS), "y": rng.random(ROWS)})
        pq.write_table(table, tmp_path / f"{shard}.parquet")
    return {f"{shard}.parquet": (tmp_path / f"{shard}.parquet").read_bytes() for shard in range(SHARDS)}


def read_all(calls: list[list[str]], **environment: str) -> list[dict[str, object]]:
    """Runs a reader with each list of arguments, at the same time."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, *call], stdout=subprocess.PIPE, text=True, env=environment)
        for call in calls
    ]
    answers = [reader.communicate(timeout=300)[0] for reader in readers]
    assert [reader.returncode for reader in readers] == [0] * len(readers)
    return [json.loads(answer) for answer in answers]


@pytest.fixture
def s3(shards: dict[str, bytes]) -> Iterator[str]:
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=endpoint, **keys)
    client.create_bucket(Bucket="epoch")
    for name, content in shards.items():
        client.put_object(Bucket="epoch", Key=name, Body=content)
    yield endpoint
    server.stop()


@pytest.mark.slow
def test_a_cold_epoch_is_the_local_one_and_each_shard_is_fetched_once(
    shards: dict[str, bytes], s3: str, tmp_path: pathlib.Path
) -> None:
    with Store() as store:
        urls = [store.put(name, content) for name, content in shards.items()]
        local = ["", *(str(tmp_path / name) for name in shards)]
        found = read_all([local, *([str(tmp_path / "http"), *urls] for _ in range(4))])
        fetches = sorted(store.fetches)
        store.shutdown()
    objects = [f"s3://epoch/{name}" for name in shards]
    environment = {
        "FSSPEC_S3_ENDPOINT_URL": s3,
        "FSSPEC_S3_KEY": "a",
        "FSSPEC_S3_SECRET": "b",
    }
    found += read_all([[str(tmp_path / "s3"), *objects] for _ in range(4)], **environment)
    assert {answer["digest"] for answer in found} == {found[0]["digest"]}
    assert sum(int(str(answer["fetched"])) for answer in found[1:5]) == SHARDS
    assert sum(int(str(answer["fetched"])) for answer in found[5:]) == SHARDS
    assert fetches == sorted(shards)

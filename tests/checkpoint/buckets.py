"""Buckets for tests: an emulated S3 in this process or one of its own, and the environment with which clients find it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

BUCKET = "s3://bucket"


def environment_for(endpoint: str) -> dict[str, str]:
    """Returns the environment with which clients of S3 use an endpoint."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": endpoint,
    }


@contextlib.contextmanager
def clients_of(endpoint: str) -> Iterator[None]:
    """Makes clients of S3 in this process use an endpoint: they keep the one that they were made with."""
    before: Mapping[str, str] = dict(os.environ)
    os.environ.update(environment_for(endpoint))
    forget_clients()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget_clients()


def forget_clients() -> None:
    import s3fs

    from meshfeed._src.base import stores

    stores._file_system.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@contextlib.contextmanager
def emulated_s3() -> Iterator[str]:
    """Starts an S3 with the bucket ``BUCKET``, for this process; yields its endpoint."""
    import pytest

    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    try:
        with clients_of(endpoint):
            from meshfeed._src.base.stores import ask

            ask(BUCKET, "mkdir")
            yield endpoint
    finally:
        server.stop()

"""Requests to stores behind URLs: what fails names the URL and where credentials were looked for; a retry is bounded."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from meshfeed._src.base import stores
from meshfeed._src.base.errors import CheckpointError, SourceError
from meshfeed._src.base.stores import ask, credentials_looked_at, open_store, store_errors

VARIABLES = (*stores._VARIABLES["s3"], "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[pytest.MonkeyPatch]:
    s3fs = pytest.importorskip("s3fs")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with forgotten(s3fs):
        yield monkeypatch


@contextlib.contextmanager
def forgotten(s3fs) -> Iterator[None]:
    """Clients keep the endpoint and credentials that they were made with."""
    for _ in range(2):
        stores._file_system.cache_clear()
        s3fs.S3FileSystem.clear_instance_cache()
        if not _:
            yield


def test_missing_credentials_name_what_was_looked_at(s3, tmp_path):
    s3.setenv("AWS_ACCESS_KEY_ID", "")
    with pytest.raises(CheckpointError) as raised:
        ask("s3://bucket/run/x", "cat_file")
    text = str(raised.value)
    assert text.startswith("s3://bucket/run/x: NoCredentialsError: Unable to locate credentials.")
    assert "AWS_ACCESS_KEY_ID (not set)" in text
    assert f"{tmp_path}/.aws/credentials (does not exist)" in text


def test_refused_credentials_are_not_shown(s3):
    moto = pytest.importorskip("moto.server")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        s3.setenv(name, "do-not-show")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        s3.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        ask("s3://of-stores", "mkdir")
        ask("s3://of-stores/x", "pipe_file", b"content")
        assert ask("s3://of-stores/x", "cat_file", start=1, end=3) == b"on"
        with pytest.raises(FileNotFoundError):
            ask("s3://of-stores/y", "cat_file")
    finally:
        server.stop()
    with pytest.raises(SourceError) as raised, store_errors("s3://bucket/x", SourceError):
        raise PermissionError("The provided token has expired. https://bucket/x?X-Amz-Signature=secret")
    text = str(raised.value)
    assert "PermissionError: The provided token has expired" in text
    assert "AWS_ACCESS_KEY_ID (set)" in text
    assert "secret" not in text
    assert "do-not-show" not in text


def test_a_store_that_is_down(s3, caplog):
    s3.setenv("AWS_ACCESS_KEY_ID", "a")
    s3.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with socket.socket() as closed:  # bound and not listening: refuses connections
        closed.bind(("127.0.0.1", 0))
        s3.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        s3.setattr(stores, "ANSWER_SECONDS", 1.0)
        with pytest.raises(CheckpointError, match=r"s3://bucket/x: .*Check the network and that the store is up"):
            ask("s3://bucket/x", "info")


def test_what_cannot_be_opened():
    with pytest.raises(SourceError, match=r"^nothing://a/b: Protocol not known: nothing. Install fsspec"):
        open_store("nothing://a/b", SourceError)
    with pytest.raises(CheckpointError, match=r"^ftp://…@host/x: the URL holds a password") as raised:
        open_store("ftp://me:word@host/x")
    assert "word" not in str(raised.value).replace("password", "")
    assert credentials_looked_at("memory://x") == "Check the credentials."


def test_a_store_without_an_event_loop():
    pytest.importorskip("fsspec")
    ask("memory://stores/x", "pipe_file", b"abc")
    assert ask("memory://stores/x", "cat_file") == b"abc"
    assert open_store("memory://stores/x")[1] == "/stores/x"

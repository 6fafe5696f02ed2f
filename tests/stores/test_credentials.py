"""Credentials: errors name where clients looked for them, and neither errors nor logs hold a secret."""

from __future__ import annotations

import logging
import pathlib

import pytest
from store_servers import S3, SECRET, Hub, forget_clients, running

import meshfeed
from meshfeed._src.base.errors import without_signatures
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings
from meshfeed._src.sources.files import paths


def test_a_source_without_credentials(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(S3):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        forget_clients()
        expected = (
            rf"AWS_ACCESS_KEY_ID \(not set\), AWS_SECRET_ACCESS_KEY \(not set\), .*{tmp_path}/.aws/credentials "
            r"\(does not exist\).* and the metadata service of the machine\. Set or renew one of them\."
        )
        with pytest.raises(meshfeed.SourceError, match=expected):
            meshfeed.sources.ArrayRecord("s3://meshfeed/a/*.array_record")
        (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
        with pytest.raises(meshfeed.MeshfeedError, match=expected):
            convert([str(tmp_path / "a.jsonl")], "s3://meshfeed/out", Settings(), run_here)


@pytest.mark.parametrize("kind", [S3, Hub])
def test_no_secret_is_logged(
    kind: type[S3] | type[Hub],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "meshfeed")
    monkeypatch.setattr(paths, "_RETRY", meshfeed.Retry(attempts=2, initial_seconds=0.01))
    with running(kind) as store:
        url = store.put("a.jsonl", b'{"n": 1}\n')
        convert([url], str(tmp_path / "out"), Settings(), run_here)
        texts = []
        for call in (
            lambda: meshfeed.sources.ArrayRecord(f"{store.root}/none/*.array_record"),
            lambda: convert([f"{store.root}/none.jsonl"], str(tmp_path / "other"), Settings(), run_here),
        ):
            with pytest.raises(meshfeed.MeshfeedError) as caught:
                call()
            texts.append(str(caught.value))
    assert all(store.root in text for text in texts)
    assert SECRET not in "".join(texts) + caplog.text


def test_signatures_of_urls_are_left_out() -> None:
    url = "https://host/a.parquet?X-Amz-Signature=secret&x=1"
    assert without_signatures(f"reading {url!r}, s3://b/x?.csv") == "reading 'https://host/a.parquet?…', s3://b/x?.csv"

    class Refused(Exception):
        status = 403

    with pytest.raises(
        meshfeed.SourceError, match=r"to read 'https://host/a.parquet\?…': .*; a signed URL may have expired"
    ):
        with paths.remote_errors(url, "Parquet"):
            raise Refused(f"403, message='Forbidden', url='{url}'")
    for problem in (FileNotFoundError(url), OSError(f"cannot read {url}"), ValueError(url)):
        with pytest.raises((OSError, meshfeed.SourceError)) as caught, paths.remote_errors(url, "Parquet"):
            raise problem
        assert "https://host/a.parquet?…" in str(caught.value)
        assert "secret" not in str(caught.value)

"""URLs that name an account or a host before the path, as abfs://container@account/… and ftp://host/… do."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import meshfeed
from meshfeed._src.base.stores import ask
from meshfeed._src.convert.formats import download
from meshfeed.sources import Tokens

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


class Accounts(MemoryFileSystem):
    """A file system in memory for each account: ``accounts://name@folder/file``."""

    protocol = "accounts"
    contents: dict[str, tuple[dict[str, Any], list[str]]] = {}  # noqa: RUF012

    def __init__(self, account: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.store, self.pseudo_dirs = self.contents.setdefault(account, ({}, [""]))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("accounts://").rpartition("@")[2])

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        account = path.removeprefix("accounts://").partition("/")[0].rpartition("@")[0]
        return {"account": account} if account else {}


@pytest.fixture(autouse=True)
def accounts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs of a folder of two accounts, with files of equal names and sizes."""
    monkeypatch.setattr(Accounts, "contents", {})
    Accounts.clear_instance_cache()
    fsspec.register_implementation("accounts", Accounts, clobber=True)
    folders = [f"accounts://{name}@data" for name in ("one", "two")]
    for first, folder in zip((0, 1000), folders, strict=True):
        for part in range(2):
            tokens = np.arange(first + 100 * part, first + 100 * part + 40, dtype=np.uint16)
            fsspec.core.url_to_fs(folder)[0].pipe_file(f"/data/{part}.bin", tokens.tobytes())
    return folders


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("pattern", ["{0..1}.bin", "*.bin"])
def test_files_of_two_accounts_are_read_together(
    accounts: list[str], pattern: str, cached: bool, tmp_path: pathlib.Path
) -> None:
    cache = meshfeed.ShardCache(tmp_path) if cached else None
    source = Tokens([f"{folder}/{pattern}" for folder in accounts], 9, dtype=np.uint16, cache=cache)
    assert source.file_names() == [f"{folder}/{part}.bin" for folder in accounts for part in range(2)]
    batch = source.read_batch([0, 4, 8, 12])["tokens"]
    assert batch[:, 0].tolist() == [0, 100, 1000, 1100]


def test_a_folder_of_an_account_is_downloaded(accounts: list[str], tmp_path: pathlib.Path) -> None:
    for first, folder in zip((0, 1000), accounts, strict=True):
        download(folder, tmp_path / str(first))
        assert np.fromfile(tmp_path / str(first) / "1.bin", np.uint16)[0] == first + 100


def test_a_request_goes_to_the_account_of_its_url(accounts: list[str]) -> None:
    for first, folder in zip((0, 1000), accounts, strict=True):
        assert np.frombuffer(ask(f"{folder}/0.bin", "cat_file"), np.uint16)[0] == first

"""Reads ranges of an object that is replaced in an emulated Google Cloud Storage, in a process with its own environment."""

from __future__ import annotations

import hashlib
from typing import Any

import fsspec
from gcp_storage_emulator.handlers import objects

from meshfeed import SourceError
from meshfeed._src.sources.files import direct
from meshfeed._src.sources.files.paths import stored_file

plain_download = objects.download


def download(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    """Adds the headers that Google sends and the emulator leaves out."""
    plain_download(request, response, storage, *args, **kwargs)
    entry = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
    response["x-goog-generation"] = entry["generation"]
    response["x-goog-hash"] = f"crc32c={entry['crc32c']},md5={entry['md5Hash']}"


def main() -> None:
    objects.download = download
    from gcp_storage_emulator import server  # takes the function above

    emulator = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    try:
        endpoint = f"http://127.0.0.1:{emulator._api._httpd.server_address[1]}"
        fsspec.config.conf["gs"] = {"token": "anon", "endpoint_url": endpoint, "project": "test"}
        files = fsspec.filesystem("gs")
        files.pipe_file("bucket/x", b"1" * 100)
        with_part = direct._look_up_with("gs://bucket/x", "test", slice(-10, None))
        assert with_part is not None, "no answer to a look-up by range"
        assert with_part.file == stored_file(files.info("bucket/x")), with_part
        assert with_part.content[-10:] == b"1" * 10
        file, version = direct.identify("gs://bucket/x", None, source="test")
        assert version.startswith("generation=")
        assert file.read(3, 5) == b"11"
        assert direct.digest_remote(file) == f"md5:{hashlib.md5(b'1' * 100).hexdigest()}"  # without a read
        files.pipe_file("bucket/x", b"2" * 100)
        try:
            file.read(3, 5)
        except SourceError as error:
            print(error)
    finally:
        emulator.stop()


if __name__ == "__main__":
    main()

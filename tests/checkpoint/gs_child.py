"""Saves to and restores from an emulated Google Cloud Storage; a process of its own, as libraries read the environment."""

from __future__ import annotations

import http
import json
import os

from gcp_storage_emulator import server, settings
from gcp_storage_emulator.handlers import objects

plain_download = objects.download


def download(request, response, storage, *args, **kwargs):
    plain_download(request, response, storage, *args, **kwargs)
    try:  # TensorStore needs the header, which the emulator leaves out
        entry = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["x-goog-generation"] = entry["generation"]
    except Exception:
        pass  # the object is absent, as the response says


def move(request, response, storage, *args, **kwargs):
    """Renames an object. The emulator answers 501, which gcsfs asks again for 30 s before it copies and deletes."""
    bucket = request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    if response.status == http.HTTPStatus.OK:
        storage.delete_file(bucket, request.params["object_id"])


MOVE = rf"^{settings.API_ENDPOINT}/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.+)/moveTo/o/(?P<dest_object_id>.+)$"


def main() -> None:
    import numpy as np
    from checkpoint_feeds import CountingFeed
    from checkpoint_trees import abstract, assert_same, make_mesh, place, special_floats
    from etils import epath

    from meshfeed.checkpoint import Checkpointer, restore_once, verify

    mesh, directory = make_mesh(2, 1), "gs://bucket/run"

    def state_at(step):
        w = place(np.full((256, 1024), step, np.float32), mesh, "data")
        return {"w": w, "f8": place(special_floats("float8_e5m2", 256), mesh), "n": np.arange(3), "step": step}

    feed = CountingFeed()
    with Checkpointer(directory, save_interval_steps=2, max_to_keep=2) as ckpt:
        assert ckpt.restore(state_at(0), feed)[0] == 0
        for step in (2, 4, 6, 7):  # the last by leaving
            next(feed)
            ckpt.save(step, state_at(step), feed)
    (epath.Path(directory) / "7/iterator/state.json").write_text("{}")
    other = CountingFeed()
    with Checkpointer(directory, save_interval_steps=1) as ckpt:
        assert ckpt.steps() == [6, 7]
        step, state = ckpt.restore(abstract(state_at(0)), other)
        assert (step, other.position) == (6, 12)
        assert_same(state_at(6), state)
        assert ckpt.metadata(6).position == 12
        next(other)
        assert ckpt.save(7, state_at(7), other)  # over the damaged one, which is set aside
        ckpt.wait()
        assert ckpt.restore(abstract(state_at(0)), CountingFeed())[0] == 7
    assert_same(state_at(6), restore_once(f"{directory}/6/arrays", abstract(state_at(6))))
    print(json.dumps([finding.intact for finding in verify(directory)]))


if __name__ == "__main__":
    objects.download = download
    server.HANDLERS = ((MOVE, {server.POST: move}), *server.HANDLERS)
    emulator = server.create_server("localhost", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    url = f"http://localhost:{emulator._api._httpd.socket.getsockname()[1]}"
    os.environ |= {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}
    try:
        main()
    finally:
        emulator.stop()

"""Files of the state: who writes which, what a killed or damaged writer leaves, and what hosts' parts come to."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
from typing import Any, ClassVar

import pytest
from etils import epath

from meshfeed._src.base.errors import CheckpointError, CorruptDataError
from meshfeed._src.base.store_path import StorePath
from meshfeed._src.base.stores import RefusedError
from meshfeed._src.state import files
from meshfeed._src.state.state import digest_of

STATE: dict[str, Any] = {
    "meshfeed": 1, "kind": "random_access", "position": 8, "segments": [[0, 0, 4]], "fingerprint": {"seed": 0},
}  # fmt: skip
SKIPPED = {**STATE, "skipped": {"1": [[3, 0, "bad", 1]]}}
LANES = {**STATE, "kind": "lanes", "step": 2, "num_lanes": 12}
IDENTITY = {"id": "abc", "step": 7}
REMEDY = "The file is damaged or was changed by hand; restore an earlier step."


def lanes(*indices: int) -> dict[str, Any]:
    return {**LANES, "lanes": {str(index): {"records": index} for index in indices}}


def names(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def message(kind: type[Exception], call: Any, *arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert type(caught.value) is kind
    return str(caught.value)


# --- who writes what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "process", "name"),
    [
        (STATE, 0, "state.json"),
        (STATE, 1, None),
        ({**STATE, "skipped": {}}, 0, "state.json"),
        ({**STATE, "skipped": {}}, 1, None),
        (SKIPPED, 0, "part-0.json"),
        (SKIPPED, 11, "part-11.json"),
        (lanes(0), 0, "part-0.json"),
        (lanes(1), 3, "part-3.json"),
        ({**STATE, "kind": "host_batches"}, 2, "part-2.json"),
    ],
)
def test_a_host_writes_the_state_of_all_or_its_part_or_nothing(
    tmp_path: pathlib.Path, state: dict[str, Any], process: int, name: str | None
) -> None:
    files.write_state(tmp_path, state, identity=IDENTITY, process=process)
    assert names(tmp_path) == ([] if name is None else [name])
    assert files.must_write(state, process) == (name is not None)
    if name is not None:
        document = json.loads((tmp_path / name).read_text())
        digest = document.pop("digest")
        assert document == {"meshfeed_iterator": 1, "identity": IDENTITY, "part": process, "state": state}
        assert digest == digest_of(document)
        assert files.read_document(tmp_path) == document
        assert files.read_state(tmp_path) == state


def test_a_document_stays_the_same_for_ever() -> None:
    document = files.make_document({"kind": "lanes", "lanes": {0: (1, 2)}}, None, 3)
    assert document == {
        "meshfeed_iterator": 1,
        "identity": None,
        "part": 3,
        "state": {"kind": "lanes", "lanes": {"0": [1, 2]}},
        "digest": "64e72a34f0a1cd66",
    }


def test_by_default_the_process_is_that_of_jax(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "process_index", lambda: 5)
    files.write_state(tmp_path, lanes(1))
    assert names(tmp_path) == ["part-5.json"]
    assert files.read_document(tmp_path) == {"meshfeed_iterator": 1, "identity": None, "part": 5, "state": lanes(1)}


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = epath.Path(tmp_path / "state.json")
    files.write_json(path, {"a": [1, "é"]})
    assert path.read_text() == '{"a":[1,"\\u00e9"]}'
    assert names(tmp_path) == ["state.json"]

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": [1, "é"]}
    left = [name for name in names(tmp_path) if name != "state.json"]
    assert left == [f"state.json.writing-{os.getpid()}"], "complete beside the file, and under a name no reader takes"
    assert json.loads((tmp_path / left[0]).read_text()) == {"a": 2}
    assert files.state_paths(tmp_path) == [path]


def test_the_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}") + ":" + str(os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", sync)
    files.write_json(epath.Path(tmp_path / "state.json"), [1])
    assert synced == [f"{tmp_path}/state.json.writing-{os.getpid()}:3"]


def test_a_file_in_an_object_store_is_written_with_one_call() -> None:
    class Remote:
        written: ClassVar[list[str]] = []

        def __fspath__(self) -> str:
            return "gs://bucket/state.json"

        def write_text(self, text: str) -> None:
            self.written.append(text)

    files.write_json(Remote(), {"a": [1]})  # type: ignore[arg-type]
    assert Remote.written == ['{"a":[1]}']


# --- reading --------------------------------------------------------------------------------------------------------


def test_parts_of_hosts_are_merged_in_the_order_of_the_hosts(tmp_path: pathlib.Path) -> None:
    for process in (10, 9, 0, 2):
        files.write_state(tmp_path, lanes(process, process + 1), identity=IDENTITY, process=process)
    (tmp_path / "part-1.json.writing-77").write_text("{")
    (tmp_path / "notes.json").write_text("not of the state")
    assert [path.name for path in files.state_paths(tmp_path)] == [
        "part-0.json", "part-2.json", "part-9.json", "part-10.json",
    ]  # fmt: skip
    document = files.read_document(tmp_path)
    assert document == {
        "meshfeed_iterator": 1, "identity": IDENTITY, "part": 0, "state": lanes(0, 1, 2, 3, 9, 10, 11),
    }  # fmt: skip
    assert list(document["state"]["lanes"]) == ["0", "1", "2", "3", "9", "10", "11"]


def test_parts_become_one_file(tmp_path: pathlib.Path) -> None:
    for process in (0, 1):
        files.write_state(tmp_path, lanes(process), identity=IDENTITY, process=process)
    expected = files.read_document(tmp_path)
    parts = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    files.merge_files(tmp_path)
    assert names(tmp_path) == ["state.json"]
    assert files.read_document(tmp_path) == expected
    assert files.read_state(tmp_path) == lanes(0, 1)
    whole = (tmp_path / "state.json").read_bytes()
    files.merge_files(tmp_path)
    assert (tmp_path / "state.json").read_bytes() == whole
    # A kill between writing the merged file and deleting the parts
    for name, content in parts.items():
        (tmp_path / name).write_bytes(content)
    assert [path.name for path in files.state_paths(tmp_path)] == ["state.json", "part-0.json", "part-1.json"]
    assert files.read_document(tmp_path) == expected
    files.merge_files(tmp_path)
    assert (names(tmp_path), files.read_document(tmp_path)) == (["state.json"], expected)


def test_a_folder_without_a_state(tmp_path: pathlib.Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        assert message(CheckpointError, files.read_document, directory) == (
            f"{directory}: no iterator state, expected state.json. Restore without a feed, or read files of "
            "MaxText and Grain with `meshfeed import-position`."
        )
    files.merge_files(tmp_path)
    assert names(tmp_path) == []


def test_parts_of_different_saves_are_not_merged(tmp_path: pathlib.Path) -> None:
    other = {**IDENTITY, "id": "xyz"}
    for process, identity in ((0, IDENTITY), (1, IDENTITY), (2, other)):
        files.write_state(tmp_path, lanes(process), identity=identity, process=process)
    assert message(CheckpointError, files.read_document, tmp_path) == (
        f"{tmp_path}: part-0.json and part-2.json belong to different saves ({IDENTITY} and {other}). Restore another step."
    )


def test_parts_of_different_steps_are_not_merged(tmp_path: pathlib.Path) -> None:
    files.write_state(tmp_path, lanes(0), process=0)
    files.write_state(tmp_path, {**lanes(1), "position": 12}, process=1)
    assert message(CheckpointError, files.read_document, tmp_path) == (
        f"{tmp_path}: the parts do not belong together: state mismatch in 'position': saved 8, current 12. Merge states "
        "that the hosts took after the same step of one feed."
    )


def test_a_damaged_file_is_named(tmp_path: pathlib.Path) -> None:
    files.write_state(tmp_path, STATE, process=0)
    path = tmp_path / "state.json"
    good = json.loads(path.read_text())

    def damage() -> str:
        with pytest.raises(files.DamagedStateError) as caught:
            files.read_document(tmp_path)
        assert isinstance(caught.value, CheckpointError)
        assert isinstance(caught.value, CorruptDataError)
        assert (caught.value.path, caught.value.step) == (str(path), None)
        return str(caught.value)

    path.write_text(path.read_text()[:2])
    assert damage().startswith(f"{path}: not JSON (")
    assert damage().endswith(f"), expected a state of a feed. {REMEDY}")
    for text in ("[1]", "{}", '{"digest": 1}'):
        path.write_text(text)
        assert damage() == f"{path}: not the state of a feed. {REMEDY}"
    # A flipped bit in any field, the version among them, asks for no upgrade
    for field, value in (("state", {**STATE, "position": 9}), ("meshfeed_iterator", 2), ("identity", 0), ("part", 1)):
        changed = {**good, field: value}
        path.write_text(json.dumps(changed))
        wrong = digest_of({key: part for key, part in changed.items() if key != "digest"})
        assert damage() == f"{path}: digest is {wrong}, expected {good['digest']}. {REMEDY}"
    path.write_text(json.dumps({key: value for key, value in good.items() if key != "digest"}))
    assert damage() == f"{path}: digest is {good['digest']}, expected None. {REMEDY}"


def test_a_file_of_a_newer_version_asks_for_an_upgrade(tmp_path: pathlib.Path) -> None:
    bare = {"meshfeed_iterator": 2, "identity": None, "part": 0, "state": STATE}
    (tmp_path / "state.json").write_text(json.dumps({**bare, "digest": digest_of(bare)}))
    path = tmp_path / "state.json"
    assert message(CheckpointError, files.read_document, tmp_path) == (
        f"{path}: has format 2, but this version of meshfeed reads up to 1. Upgrade meshfeed."
    )


def test_damage_found_in_a_step_can_name_the_step() -> None:
    error = files.DamagedStateError("broken", path="a/b", step=3)
    assert (str(error), error.path, error.step, error.record_id) == ("broken", "a/b", 3, None)


# --- paths ----------------------------------------------------------------------------------------------------------


def test_a_url_that_cannot_be_read_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.readable_path(str(tmp_path)) == epath.Path(tmp_path)
    assert message(RefusedError, files.readable_path, "nothing://a/b") == (
        "nothing://a/b: Protocol not known: nothing. Install fsspec and the package that brings this protocol."
    )
    assert files.readable_path("memory://a/b") == StorePath("memory://a/b")

    def fail(path: Any) -> bool:
        raise PermissionError(f"no access to {path}")

    url = "gs://bucket/run"
    monkeypatch.setattr(type(epath.Path(url)), "exists", fail)
    assert message(CheckpointError, files.readable_path, url) == (
        f"{url}: cannot be read here: PermissionError: no access to {url}. Check credentials and network, "
        "or copy the checkpoint into a folder."
    )
    monkeypatch.setattr(type(epath.Path(url)), "exists", lambda path: True)
    assert files.readable_path(url) == epath.Path(url)
    assert files.readable_path(tmp_path) == epath.Path(tmp_path), "a folder is not looked for"


def test_a_path_in_a_folder_without_permission_is_not_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        found = message(CheckpointError, files.readable_path, "/closed/run")
    assert found == (
        "/closed/run: cannot be read here: [Errno 13] Permission denied: '/closed/run'. Check the user and the permissions."
    )


# --- Orbax v1 -------------------------------------------------------------------------------------------------------


class Feed(files.Checkpointable):
    def __init__(self) -> None:
        self.state = dict(STATE)

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state


class Awaited:
    """Orbax's path that is still being made."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    async def await_creation(self) -> pathlib.Path:
        self.path.mkdir()
        return self.path


@pytest.mark.parametrize("awaited", [False, True])
def test_the_state_saved_is_that_of_the_call(tmp_path: pathlib.Path, awaited: bool) -> None:
    path = tmp_path / "feed" if awaited else tmp_path
    feed = Feed()

    async def save_then_advance() -> None:
        writing = await feed.save(Awaited(path) if awaited else path)
        feed.state = {**STATE, "position": 12}
        assert not (path / "state.json").exists()
        await writing

    asyncio.run(save_then_advance())
    assert files.read_state(path) == STATE

    async def load() -> None:
        reading = await feed.load(path)
        assert feed.state["position"] == 12, "set only when awaited"
        await reading

    asyncio.run(load())
    assert feed.state == STATE


def test_a_user_who_calls_save_or_load_is_shown_the_checkpointer(tmp_path: pathlib.Path) -> None:
    called = r"which Orbax calls and awaits \(to save or restore, use meshfeed\.checkpoint\.Checkpointer\)"

    async def await_once() -> str:
        return repr(await Feed().save(tmp_path))

    for name, call in (("save", Feed().save), ("load", Feed().load)):
        with pytest.warns(RuntimeWarning, match=rf"'Checkpointable\.{name}, {called}' was never awaited"):
            call(tmp_path)
    with pytest.warns(RuntimeWarning, match=called):
        assert re.search(called, asyncio.run(await_once()))
    assert not list(tmp_path.iterdir())

"""Every source on 1, 2, 3 and 4 real hosts with 12 lanes: the same batches, and resume from each to each."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import source_jobs
from host_pools import host_pools
from source_pipelines import DOCUMENT_LENGTHS, NAMES, PACKED, RANDOM, STREAMS, write_files

pytest.importorskip("datasets")
TOPOLOGIES = {1: 4, 2: 2, 3: 2, 4: 1}
SAVE_AT = 3


@pytest.fixture(scope="module")
def pools() -> Any:
    with host_pools({hosts: (hosts, devices) for hosts, devices in TOPOLOGIES.items()}, timeout_seconds=500) as pools:
        yield pools


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("files")
    write_files(str(path))
    return str(path)


def join(parts: list[list[dict[int, str]]]) -> list[dict[int, str]]:
    """Steps of all hosts as steps of the global batch."""
    assert len({len(part) for part in parts}) == 1, "all hosts end at the same step"
    return [{row: text for part in step for row, text in part.items()} for step in zip(*parts, strict=True)]


@pytest.fixture(scope="module")
def runs(pools: Any, folder: str) -> dict[int, dict[str, Any]]:
    found = {}
    for hosts, pool in pools.items():
        values = [result.value for result in pool.run(source_jobs.run, list(NAMES), folder, SAVE_AT)]
        found[hosts] = {
            name: {
                "steps": join([value[name]["steps"] for value in values]),
                "states": [value[name]["state"] for value in values],
                "positions": {value[name]["position"] for value in values},
            }
            for name in NAMES
        }
    return found


@pytest.mark.parametrize("name", NAMES)
def test_global_batches_are_the_same_on_any_number_of_hosts(runs: dict[int, dict[str, Any]], name: str) -> None:
    reference = runs[1][name]
    assert len(reference["steps"]) > SAVE_AT
    for hosts in (2, 3, 4):
        assert runs[hosts][name]["steps"] == reference["steps"]
        assert runs[hosts][name]["positions"] == reference["positions"]


def ids_of(steps: list[dict[int, str]]) -> list[int]:
    rows = [text for step in steps for text in step.values() if "mask=True" in text]
    return sorted(int(i) for text in rows for i in re.findall(r"\d+", re.search(r"id=(.*?);", text)[1]))  # type: ignore[index]


def test_no_record_is_lost_or_repeated(runs: dict[int, dict[str, Any]]) -> None:
    expected = {name: entry[-1] for name, entry in {**RANDOM, **STREAMS}.items() if entry[-1] is not None}
    assert len(expected) == len(NAMES) - len(PACKED) - 3, "the others are three mixtures"
    for name, ids in expected.items():
        assert ids_of(runs[4][name]["steps"]) == sorted(ids), name


@pytest.mark.parametrize("name", PACKED)
def test_no_token_is_lost_or_repeated_by_packing(runs: dict[int, dict[str, Any]], name: str) -> None:
    counts: dict[int, int] = {}
    for step in runs[3][name]["steps"]:
        for text in step.values():
            if "mask=True" in text:
                for token in re.search(r"tokens=\[([^\]]*)\]", text)[1].split(","):  # type: ignore[index]
                    counts[int(token)] = counts.get(int(token), 0) + 1
    counts.pop(0, None)  # padding of the packing
    assert counts == {index + 1: int(length) for index, length in enumerate(DOCUMENT_LENGTHS)}


def test_no_image_is_lost_or_repeated_by_packing(runs: dict[int, dict[str, Any]]) -> None:
    found = []
    for step in runs[3]["packed within limits"]["steps"]:
        for text in step.values():
            if "mask=True" in text:
                images, mask, segments = (
                    json.loads(re.search(rf"{name}=(.*?);", text)[1].lower())  # type: ignore[index]
                    for name in ("images", "images_mask", "images_segment")
                )
                assert [segment > 0 for segment in segments] == mask
                found += [image[0] for image, real in zip(images, mask, strict=True) if real]
    assert sorted(found) == [i + 1 for i in range(len(DOCUMENT_LENGTHS)) for _ in range(i % 3)]


@pytest.mark.parametrize("target", TOPOLOGIES)
def test_resume_from_any_number_of_hosts_on_any_other(pools: Any, runs: Any, folder: str, target: int) -> None:
    states = {name: {str(origin): runs[origin][name]["states"] for origin in TOPOLOGIES} for name in NAMES}
    results = pools[target].run(source_jobs.go_on, list(NAMES), folder, states)
    for name in NAMES:
        for origin in TOPOLOGIES:
            found = join([result.value[f"{name} from {origin}"] for result in results])
            assert found == runs[1][name]["steps"][SAVE_AT:], f"{name}: {origin} → {target} hosts"


def test_workers_may_change_on_resume(pools: Any, runs: Any, folder: str) -> None:
    """3 hosts without workers, then 2 hosts with one each, then 1 host with two and with one."""
    names = list(NAMES)
    states = {name: runs[3][name]["states"] for name in names}
    on_two = [r.value for r in pools[2].run(source_jobs.go_on_with_workers, names, folder, states, [1], [1])]
    states = {name: [value[name]["state"] for value in on_two] for name in names}
    (on_one,) = pools[1].run(source_jobs.go_on_with_workers, names, folder, states, [2, 1], [1, None])
    for name in names:
        steps = join([value[name]["steps"] for value in on_two]) + on_one.value[name]["steps"]
        assert steps == runs[1][name]["steps"][SAVE_AT:], name

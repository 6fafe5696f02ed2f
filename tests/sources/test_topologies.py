"""Every source on 1, 2, 3 and 4 simulated hosts with 12 lanes: the same batches, and resume on each.

``tests/multihost/test_sources.py`` does the same with one source of each kind on real hosts.
"""

from __future__ import annotations

import functools
import json
import re

import pytest
from source_pipelines import DOCUMENT_LENGTHS, NAMES, PACKED, RANDOM, STREAMS, make_feed, write_files
from source_topologies import SourceTopologies

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def topologies(tmp_path_factory: pytest.TempPathFactory) -> SourceTopologies:
    """Plays all sources, and checks that the batches are the same on any number of hosts."""
    folder = str(tmp_path_factory.mktemp("files"))
    write_files(folder)
    return SourceTopologies(functools.partial(make_feed, folder=folder), NAMES, save_at=3)


def ids_of(steps: list[dict[int, str]]) -> list[int]:
    rows = [text for step in steps for text in step.values() if "mask=True" in text]
    return sorted(int(i) for text in rows for i in re.findall(r"\d+", re.search(r"id=(.*?);", text)[1]))  # type: ignore[index]


def test_no_record_is_lost_or_repeated(topologies: SourceTopologies) -> None:
    expected = {name: entry[-1] for name, entry in {**RANDOM, **STREAMS}.items() if entry[-1] is not None}
    assert len(expected) == len(NAMES) - len(PACKED) - 3, "the others are three mixtures"
    for name, ids in expected.items():
        assert ids_of(topologies.steps[name]) == sorted(ids), name


def test_no_token_is_lost_or_repeated_by_packing(topologies: SourceTopologies) -> None:
    expected = {index + 1: int(length) for index, length in enumerate(DOCUMENT_LENGTHS)}
    for name in PACKED:
        counts: dict[int, int] = {}
        for step in topologies.steps[name]:
            for text in step.values():
                if "mask=True" in text:
                    for token in re.search(r"tokens=\[([^\]]*)\]", text)[1].split(","):  # type: ignore[index]
                        counts[int(token)] = counts.get(int(token), 0) + 1
        counts.pop(0, None)  # padding of the packing
        assert counts == expected, name


@pytest.mark.parametrize("name", ["packed within limits", "packed over a join"])
def test_no_image_is_lost_or_repeated_by_packing(topologies: SourceTopologies, name: str) -> None:
    found = []
    for step in topologies.steps[name]:
        for text in step.values():
            if "mask=True" in text:
                images, mask, segments = (
                    json.loads(re.search(rf"{leaf}=(.*?);", text)[1].lower())  # type: ignore[index]
                    for leaf in ("images", "images_mask", "images_segment")
                )
                assert [segment > 0 for segment in segments] == mask
                found += [image[0] for image, real in zip(images, mask, strict=True) if real]
    assert sorted(found) == [i + 1 for i in range(len(DOCUMENT_LENGTHS)) for _ in range(i % 3)]


def test_each_resumes_on_any_number_of_hosts(topologies: SourceTopologies) -> None:
    topologies.resume()


def test_workers_may_change_on_resume(topologies: SourceTopologies) -> None:
    topologies.resume_with_workers()

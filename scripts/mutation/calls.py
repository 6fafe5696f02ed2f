"""A pytest plugin: writes which mutated functions each test calls, and the seconds that it takes.

The wrappers of mutmut report the names of functions while MUTANT_UNDER_TEST is "stats". Child processes of tests append them
to a file (``sitecustomize.py``).
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Generator, Iterator

import mutmut.mutation.trampoline
import pytest

FOLDER = pathlib.Path(os.environ["MUTATION_CALLS"])
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
OF_CHILDREN = FOLDER / f"children-{WORKER}"
_calls: set[str] = set()
_found: dict[str, tuple[float, list[str]]] = {}


def pytest_configure() -> None:
    """Listens, in the processes that run tests."""
    if WORKER:
        mutmut.mutation.trampoline.record_trampoline_hit = lambda name, caller=None: _calls.add(name)
        os.environ["MUTATION_CALLS_OF_CHILDREN"] = str(OF_CHILDREN)


def _take() -> Iterator[str]:
    """Yields the names since the last call."""
    while _calls:  # other threads may add some
        yield _calls.pop()
    if OF_CHILDREN.exists():
        yield from OF_CHILDREN.read_text().split()
        OF_CHILDREN.unlink()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps what a test calls, and the fixtures before it; a test that fails or is skipped is left out."""
    report = yield
    if call.when == "setup":
        _found[item.nodeid] = 0.0, []
    seconds, names = _found.pop(item.nodeid, (0.0, None))
    if report.passed and names is not None:
        _found[item.nodeid] = seconds + call.duration, sorted({*names, *_take()})
    return report


def pytest_sessionfinish() -> None:
    """Writes them."""
    if WORKER:
        (FOLDER / f"{WORKER}.json").write_text(json.dumps(_found))

"""The examples in the docstrings of public names, run as they stand, each in a folder of its own."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pathlib

import pytest

FACADES = ["meshfeed", *(f"meshfeed.{name}" for name in ("checkpoint", "maxtext", "monitoring", "sources", "testing"))]
NEEDS_AT_LEAST = 20  # of the names that most programs use
NEEDS = {"ArrayRecord": "array_record", "Parquet": "pyarrow"}


def examples() -> dict[str, str]:
    """Name → docstring with examples; an alias has those of what it names."""
    found: dict[str, str] = {}
    for facade in FACADES:
        module = importlib.import_module(facade)
        for name in module.__all__:
            text = inspect.getdoc(getattr(module, name)) or ""
            if ">>>" in text and text not in found.values():
                found[name] = text
    return found


@pytest.mark.parametrize("name", sorted(examples()))
def test_an_example_runs(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDS.get(name, "meshfeed"))
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(examples()[name], {}, name, None, 0)
    assert test.examples
    output = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()):
        result = doctest.DocTestRunner(verbose=False).run(test, out=output.write)
    assert not result.failed, output.getvalue()


def test_the_most_used_names_have_one() -> None:
    assert len(examples()) >= NEEDS_AT_LEAST, sorted(examples())

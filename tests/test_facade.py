"""The public names: sorted, all importable, all documented."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import pickle
import re
import tomllib
import traceback

import pytest

import meshfeed

ROOT = pathlib.Path(__file__).parent.parent

# TFDS, TFData and the like import their library when they are used, so the names are there without it.
FACADES = [
    "meshfeed",
    *(f"meshfeed.{name}" for name in ("checkpoint", "maxtext", "monitoring", "remote", "sources", "testing")),
]


@pytest.mark.parametrize("facade", FACADES)
def test_all_is_sorted_and_without_doubles(facade: str) -> None:
    names = importlib.import_module(facade).__all__
    assert list(names) == sorted(set(names))


def test_a_class_of_another_module_is_found_for_the_message() -> None:
    for name, where in (("Checkpointer", "checkpoint"), ("ArrayRecord", "sources"), ("RemoteFeed", "remote")):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; it is meshfeed.{where}.{name}$"):
            getattr(meshfeed, name)
    for name in ("Nothing", "checkpointer", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
            getattr(meshfeed, name)


@pytest.mark.parametrize("facade", FACADES)
def test_every_name_is_there(facade: str) -> None:
    module = importlib.import_module(facade)
    for name in module.__all__:
        assert getattr(module, name) is not None, name
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("facade", FACADES)
def test_every_class_and_function_has_a_docstring(facade: str) -> None:
    module = importlib.import_module(facade)
    values = {name: getattr(module, name) for name in module.__all__}
    without = [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and not (value.__doc__ or "").strip()
    ]
    assert not without


@pytest.mark.parametrize("facade", FACADES)
def test_an_unknown_name_is_an_attribute_error(facade: str) -> None:
    module = importlib.import_module(facade)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


# Orbax writes the module and name of these into checkpoints, and looks them up there when it restores.
NAMED_IN_CHECKPOINTS = {"ArrayHandler", "ArraysHandler", "IteratorHandler"}


@pytest.mark.parametrize("facade", FACADES)
def test_classes_and_functions_carry_the_name_under_which_they_are_imported(facade: str) -> None:
    module = importlib.import_module(facade)
    values = {name: getattr(module, name) for name in set(module.__all__) - NAMED_IN_CHECKPOINTS}
    values = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert values
    assert {name: value.__module__ for name, value in values.items() if value.__module__ != facade} == {}
    assert [name for name, value in values.items() if pickle.loads(pickle.dumps(value)) is not value] == []


@pytest.mark.parametrize("facade", FACADES)
def test_the_reference_has_every_public_name_and_no_other(facade: str) -> None:
    """The site takes signature and docstring of each name that a page lists as ``::: meshfeed.Feed``."""
    page = ROOT / "docs" / "reference" / "api" / f"{facade.rpartition('.')[2]}.md"
    listed = re.findall(rf"^::: {re.escape(facade)}\.(\w+)$", page.read_text(), re.MULTILINE)
    modules = {name.rpartition(".")[2] for name in FACADES}
    assert sorted(listed) == sorted(set(importlib.import_module(facade).__all__) - modules)
    assert len(listed) == len(re.findall(r"^:::", page.read_text(), re.MULTILINE))


def test_an_error_is_printed_under_its_public_name() -> None:
    last = traceback.format_exception_only(meshfeed.PeerError("host 1 failed", host=1))[-1]
    assert last == "meshfeed.PeerError: host 1 failed\n"


def test_the_feed_has_a_short_and_a_long_name() -> None:
    assert meshfeed.Feed is meshfeed.MultiHostDataLoadIterator
    assert (meshfeed.Feed.__module__, meshfeed.Feed.__qualname__) == ("meshfeed", "Feed")


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert meshfeed.__version__ == project["version"]

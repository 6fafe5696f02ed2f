"""Objects with threads, processes or device arrays refuse to be copied and pickled, and say what to do instead."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import meshfeed
from meshfeed import checkpoint, maxtext, monitoring, remote, testing

MODULES = (meshfeed, checkpoint, maxtext, monitoring, remote, testing)


def make_source() -> Any:
    return meshfeed.sources.Memory({"x": np.arange(32, dtype=np.int32)})


def make_dataset(**_: int) -> Any:
    return [{"x": np.arange(16, dtype=np.int32)}] * 2


def same_dataset(dataset: Any) -> Any:
    return dataset


MAKERS: dict[str, Callable[[Mesh, Path], Any]] = {
    "Feed": lambda mesh, _: meshfeed.Feed(make_source(), mesh, global_batch_size=16),
    "RemoteFeed": lambda mesh, _: remote.RemoteFeed(make_source, mesh, global_batch_size=16),
    "Checkpointer": lambda _, path: checkpoint.Checkpointer(path),
    "MultiHostDataLoadIterator": lambda mesh, _: maxtext.MultiHostDataLoadIterator(make_dataset(), mesh),
    "RemoteIterator": lambda *_: maxtext.RemoteIterator(make_dataset, same_dataset, (16,), ""),
    "RemoteIteratorWrapper": lambda mesh, _: maxtext.RemoteIteratorWrapper(make_dataset, same_dataset, mesh, (16,)),
    "HostPool": lambda *_: testing.HostPool(),
    "Exporter": lambda mesh, path: monitoring.log(meshfeed.Feed(make_source(), mesh, global_batch_size=16), path),
}


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", MAKERS)
def test_it_cannot_be_copied(name: str, call: Callable[[Any], Any], mesh: Mesh, tmp_path: Path) -> None:
    made = MAKERS[name](mesh, tmp_path)
    iterator = getattr(made, "local_iterator", made)
    for one in (made, iterator):
        remedy = r"get_state\(\) with set_state" if hasattr(one, "set_state") else "where it is needed"
        with pytest.raises(TypeError, match=rf"cannot be pickled or copied.*{remedy}"):
            call(one)
    made.close()


def test_every_public_object_that_is_closed_is_tested() -> None:
    closed = {
        name
        for module in MODULES
        for name in module.__all__
        if inspect.isclass(kind := getattr(module, name)) and hasattr(kind, "close") and not name.endswith("Handler")
    }
    assert closed == set(MAKERS)  # Feed is also meshfeed.MultiHostDataLoadIterator

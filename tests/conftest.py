"""Eight CPU devices in this process, and programs that compile quickly; set before anything imports JAX."""

from __future__ import annotations

import atexit
import gc
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a background job of a script. Tests of Ctrl-C would wait for it, and so would the processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
# Two threads per device: with one, a loop that never waits for a result aborts (docs/how-to/failures.md).
os.environ["NPROC"] = str(max(16, int(os.environ.get("NPROC", 0))))
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # Programs of tests run a few times only. Those of examples take a third less time, child processes included.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
# Many tests, and the processes that they start, compile the same programs: the first one keeps them for the others.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="meshfeed-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# TensorFlow imports Keras 3, and that imports scikit-learn, which take two fifths of its 6 s, unless it shall use Keras 2. No
# test uses either.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import hypothesis
import jax  # noqa: F401 (reads the environment now)
import pytest

# No example may fail for being slow: speed is measured in benchmarks/, and CI machines are noisy.
hypothesis.settings.register_profile(
    "meshfeed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("meshfeed")


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of libraries and child processes go below the folder that pytest removes (AutoGraph keeps its)."""
    folder = tmp_path_factory.mktemp("tempfile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, which is empty again afterwards."""
    fsspec = pytest.importorskip("fsspec")
    yield fsspec.filesystem("memory")
    _clear_memory()


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Collections look only at what a file of tests makes: all that tests import takes up to a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def light_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Worker processes get the classes of a file of tests by value, and import neither the file nor pytest and JAX."""
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="module", autouse=True)
def _memory_of_a_file() -> Iterator[None]:
    """No file of tests finds in memory what another left there: all use the same few URLs."""
    yield
    _clear_memory()


def _clear_memory() -> None:
    if module := sys.modules.get("fsspec.implementations.memory"):
        module.MemoryFileSystem.store.clear()
        module.MemoryFileSystem.pseudo_dirs[:] = [""]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of the pass over the tests with a second Python."""
    parser.addoption("--two-cases", action="store_true", help="run the first and the last case of each test only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what starts processes, and runs files with slow tests first.

    Whatever is in tests/multihost/ starts processes. Workers of pytest-xdist take one file after the other, so the files
    that take longest must not come last, or one worker would wait for the other.
    """
    folder = pathlib.Path(__file__).parent / "multihost"
    marked: dict[str, set[pathlib.Path]] = {"multihost": set(), "slow": set()}
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.multihost)
        for name, paths in marked.items():
            if item.get_closest_marker(name):
                paths.add(item.path)
    items.sort(key=lambda item: (item.path not in marked["multihost"], item.path not in marked["slow"]))
    if config.getoption("--two-cases"):
        cases: dict[tuple[str, bool], list[pytest.Item]] = {}
        for item in items:
            slow = item.get_closest_marker("slow") is not None
            cases.setdefault((item.nodeid.partition("[")[0], slow), []).append(item)
        left_out = {item for ends in cases.values() for item in ends[1:-1]}
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]

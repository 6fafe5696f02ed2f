"""Runs Orbax's own tests with meshfeed's array handler in place of Orbax's: scripts/test-orbax CHECKOUT [file …].

CHECKOUT is a copy of Orbax's repository at the installed version or near it: neither the wheel nor the source distribution
on PyPI holds these tests. Each file runs twice, with Orbax's handler and with ours; it fails if a test fails with ours
alone and is not one of EXCEPTIONS, or if one of those passes. They run in one process; the tests that need two fail with
both.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

# docs/decisions/checkpoints.md has the reasons at length.
EXCEPTIONS = {
    "test_concurrent_gb_restore0": "the limit bounds the memory of our restore, which does not ask Orbax's limiter",
    "test_concurrent_gb_restore1": "likewise",
    "test_zero_size_array0": "Orbax refuses to save an empty array; ours saves it",
}
FILES = (
    "_src/serialization/type_handlers_test.py",
    "_src/handlers/pytree_checkpoint_handler_test.py",
    "checkpoint_manager_test.py",
)


def pytest_configure(config: object) -> None:
    """Lets the tests import their helpers from the checkout, joins the job, and registers the handler."""
    import jax
    import orbax.checkpoint as ocp
    import orbax.checkpoint._src.testing as helpers
    from absl import flags
    from orbax.checkpoint._src.serialization import type_handler_registry, type_handlers

    helpers.__path__.append(os.environ["ORBAX_HELPERS"])
    flags.FLAGS.mark_as_parsed()
    jax.distributed.initialize(os.environ["ORBAX_JOB"], 1, 0)
    if os.environ["ORBAX_HANDLER"] == "plain":
        return
    import meshfeed.checkpoint

    class ArrayHandler(meshfeed.checkpoint.ArrayHandler):
        """Slices arrays among replicas as finely as Orbax does by default, since tests compare the shapes written."""

        def __init__(self, *args: object, **settings: object) -> None:
            settings.setdefault("min_slice_bytes_for_replica_parallel", 1)
            super().__init__(*args, **settings)

    type_handlers.ArrayHandler = ocp.type_handlers.ArrayHandler = ArrayHandler
    type_handler_registry.register_type_handler(jax.Array, ArrayHandler(), override=True)


def run(package: pathlib.Path, file: str, handler: str) -> set[str]:
    """Runs one file of tests; returns the names of those that failed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        job = f"localhost:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        # Without the package's folders around it, pytest would import the checkout's package.
        copy = pathlib.Path(folder, pathlib.Path(file).name)
        copy.write_bytes((package / file).read_bytes())
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "TEST_TMPDIR": f"{folder}/scratch",
            "ORBAX_HELPERS": str(package / "_src/testing"),
            "ORBAX_HANDLER": handler,
            "ORBAX_JOB": job,
        }
        options = ["-q", "-p", "orbax_tests", "-p", "no:cacheprovider", "--import-mode=importlib", "--timeout=180"]
        command = [sys.executable, "-m", "pytest", *options, f"--junit-xml={folder}/report.xml", "-c", os.devnull, copy]
        ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if not os.path.exists(f"{folder}/report.xml"):
            sys.exit(f"{file} did not run:\n{(ended.stdout + ended.stderr)[-4000:]}")
        tests = xml.etree.ElementTree.parse(f"{folder}/report.xml").iter("testcase")
        return {
            f"{test.get('classname', '').rpartition('.')[2]}.{test.get('name')}"
            for test in tests
            if test.find("failure") is not None or test.find("error") is not None
        }


def main() -> None:
    """Compares the failures of both handlers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("files", nargs="*", default=FILES, help=f"of {', '.join(FILES)}")
    arguments = parser.parse_args()
    package, wrong = (arguments.checkout / "checkpoint/orbax/checkpoint").resolve(), 0
    for file in arguments.files:
        plain, ours = (run(package, file, handler) for handler in ("plain", "ours"))
        print(f"{file}: {len(plain)} tests fail with Orbax's handler, {len(ours)} with ours")
        text = (package / file).read_text()
        known: set[str] = set()
        for test, reason in EXCEPTIONS.items():
            of_test = {name for name in ours - plain if name.rpartition(".")[2] == test}
            known |= of_test
            print(*(f"  known: {name}: {reason}" for name in of_test), sep="\n", end="\n" if of_test else "")
            if f"def {test.rstrip('0123456789')}(" in text and not of_test:
                wrong += 1
                print(f"  {test} passes with ours too: it is no exception any more")
        for name in sorted(ours - plain - known):
            wrong += 1
            print(f"  FAILS: {name}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

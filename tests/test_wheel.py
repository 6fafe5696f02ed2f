"""The built wheel, not the source tree: what people install."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
pytest.importorskip("setuptools", minversion="77")

pytestmark = pytest.mark.slow  # builds the wheel


def _run(command: list[str], cwd: pathlib.Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, env=clean | env)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended


def _build(folder: pathlib.Path, **env: str) -> pathlib.Path:
    """A wheel of a copy of the source tree, by the build backend itself: nothing is downloaded."""
    source = folder / "source"
    names = ("src", "examples", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
    source.mkdir()
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    for built in source.rglob("*.so"):
        built.unlink()
    script = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    _run([sys.executable, "-c", script], source, **env)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return _build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A virtual environment with the wheel, which sees this one's libraries but not its meshfeed."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(venv)], venv.parent)
    site = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    libraries = venv.parent / "libraries"
    libraries.mkdir()
    for kind in ("purelib", "platlib"):
        for path in pathlib.Path(sysconfig.get_path(kind)).iterdir():
            # not meshfeed itself, nor the .pth file of an editable install
            if "meshfeed" not in path.name and path.suffix != ".pth" and not (libraries / path.name).exists():
                (libraries / path.name).symlink_to(path)
    (site / "libraries.pth").write_text(f"{libraries}\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return venv


def test_it_holds_the_package_and_nothing_else(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= set(names)
    assert {"meshfeed/py.typed", "meshfeed/_examples/train_lm.py"} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"meshfeed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.skipif(not shutil.which(sysconfig.get_config_var("CC").split()[0]), reason="no C compiler")
def test_it_holds_the_extension(wheel: pathlib.Path, installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    script = "from meshfeed._src.sources.array_record.readers import riegeli; print(riegeli.hash(b''))"
    ended = _run([str(installed / "bin" / "python"), "-c", script], tmp_path, JAX_PLATFORMS="cpu")
    assert int(ended.stdout) == int.from_bytes(bytes.fromhex("e19f13c0e9b1c372"), "little")


def test_it_is_built_without_a_compiler_too(tmp_path: pathlib.Path) -> None:
    wheel = _build(tmp_path, CC="/nowhere/cc")
    names = zipfile.ZipFile(wheel).namelist()
    assert "meshfeed/_src/sources/array_record/readers.py" in names
    assert not [name for name in names if name.endswith((".so", ".c"))]


def test_its_metadata_says_what_it_needs(wheel: pathlib.Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    lines = archive.read(metadata).decode().splitlines()
    core = {
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist") and ";" not in line
    }
    assert {"jax", "numpy", "grain", "array-record", "orbax-checkpoint", "tensorstore"} <= {
        line.partition(">")[0].partition("[")[0] for line in core
    }
    assert "Requires-Python: >=3.11" in lines


def test_it_imports_away_from_the_source_tree(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = (
        "import meshfeed, meshfeed.sources, meshfeed.checkpoint, meshfeed.testing\n"
        "for module in (meshfeed, meshfeed.sources, meshfeed.checkpoint, meshfeed.testing):\n"
        "    for name in module.__all__: getattr(module, name)\n"
        "print(meshfeed.__file__)\n"
    )
    ended = _run([str(installed / "bin" / "python"), "-c", script], tmp_path, JAX_PLATFORMS="cpu")
    assert pathlib.Path(ended.stdout.strip()).is_relative_to(installed)


def test_its_command_runs(wheel: pathlib.Path, installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "meshfeed = meshfeed.__main__:run" in archive.read(entry_points).decode()
    ended = _run([str(installed / "bin" / "python"), "-m", "meshfeed", "--help"], tmp_path, JAX_PLATFORMS="cpu")
    assert "plan" in ended.stdout

"""The tutorial's notebook in a real kernel: each cell prints what the notebook shows."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


def shown(notebook: Any) -> list[tuple[str, list[object]]]:
    """Of each cell of code, its first line and its output: the text, or the kinds of a picture."""
    cells: list[tuple[str, list[object]]] = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cells.append((cell.source.split("\n")[0], []))
            for output in cell.outputs:
                found = output.get("text") or sorted(output.get("data", {}))
                if isinstance(found, str) and cells[-1][1] and isinstance(before := cells[-1][1][-1], str):
                    cells[-1][1][-1] = before + found  # a slow cell sends its text in several messages
                else:
                    cells[-1][1].append(found)
    return cells


@pytest.mark.multihost
@pytest.mark.filterwarnings("default")  # those of Jupyter's own libraries
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # no start-up files of whoever runs the tests
    (folder := tmp_path / "notebook").mkdir()
    expected, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()  # but not the cell that installs meshfeed, which has the tag skip-execution
    assert shown(notebook) == shown(expected)


def test_devices_are_set_before_jax_is_imported_and_meshfeed_is_installed_from_a_checkout() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells[0].source == "%pip install --quiet path/to/checkout"  # the name on PyPI is not ours
    assert cells[0].metadata.tags == ["skip-execution"]
    flags = next(number for number, cell in enumerate(cells) if "XLA_FLAGS" in cell.source)
    imports = next(number for number, cell in enumerate(cells) if "import jax" in cell.source)
    assert flags < imports

"""What the source imports is what pyproject.toml asks for, and the lock knows only PyPI."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "absl": "absl-py",
    "orbax": "orbax-checkpoint",
}  # where the import has another name than the distribution


def _imports() -> dict[str, set[str]]:
    """Top-level name of each library → files that import it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(_parsed(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"meshfeed"}:
                found.setdefault(name, set()).add(path.name)
    return found


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SystemError:  # Python before 3.11.5, while another thread parses too (gh-106905)
        return ast.parse(text)


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;~! ]", requirement, maxsplit=1)[0] for requirement in requirements}


def test_every_imported_library_is_asked_for() -> None:
    asked = _names(PROJECT["dependencies"])
    for requirements in PROJECT["optional-dependencies"].values():
        asked |= _names(requirements)
    imported = _imports()
    assert {"jax", "numpy", "grain", "orbax"} <= imported.keys()
    missing = {
        name: sorted(files)
        for name, files in imported.items()
        if DISTRIBUTIONS.get(name, name.replace("_", "-")) not in asked
    }
    assert not missing, f"add to pyproject.toml, and run `uv lock`: {missing}"


def test_no_requirement_is_listed_twice() -> None:
    for requirements in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        assert len(requirements) == len(_names(requirements))


def test_no_extra_only_repeats_what_is_always_installed() -> None:
    always = _names(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"].items()
    assert [name for name, requirements in extras if _names(requirements) <= always] == []


def test_every_extra_is_used_or_offered() -> None:
    readme = (ROOT / "README.md").read_text()
    scripts = "".join(path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file())
    for name in PROJECT["optional-dependencies"]:
        assert f"`{name}`" in readme or re.search(rf"meshfeed_environment (\w+,)*{name}\b", scripts), name


def test_only_test_asks_for_extras_that_ask_for_others() -> None:
    """uv leaves out what an extra in ``conflicts`` asks for by other extras, if a third one asks for it."""
    extras = PROJECT["optional-dependencies"].values()
    assert [one for extra in extras for one in extra if one.startswith("meshfeed[") and "test" in one] == []


def test_what_a_message_or_page_says_to_install_can_be_installed() -> None:
    """meshfeed is not on PyPI: `pip install 'meshfeed[cloud]'` would fail, `pip install '.[cloud]'` in a checkout works."""
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    commands = [
        (path.name, command) for path in places for command in re.findall(r"pip install [^`\n]*", path.read_text())
    ]
    assert len(commands) >= 8
    assert [found for found in commands if "meshfeed" in found[1]] == []
    extras = re.findall(r"\.\[([\w,]+)\]", " ".join(command for _, command in commands))
    assert {name for listed in extras for name in listed.split(",")} <= PROJECT["optional-dependencies"].keys()


def test_every_requirement_has_a_lower_bound() -> None:
    extras = PROJECT["optional-dependencies"].values()
    requirements = [*PROJECT["dependencies"], *(requirement for extra in extras for requirement in extra)]
    assert not [r for r in requirements if ">=" not in r and not r.startswith("meshfeed[")]


def test_all_holds_every_extra_that_users_need() -> None:
    extras = PROJECT["optional-dependencies"]
    ((_, listed),) = [requirement.split("[") for requirement in extras["all"]]
    assert set(listed.rstrip("]").split(",")) == extras.keys() - {
        "all",
        "beam",
        "check",
        "demo",
        "docs",
        "mutate",
        "test",
    }


def test_the_lock_names_pypi_only_and_belongs_to_this_project() -> None:
    text = (ROOT / "uv.lock").read_text()
    places = set(
        re.findall(r"(?:registry|url|path|git|directory|editable|virtual) = \"([^\"]*?)(?:/packages/[^\"]*)?\"", text)
    )
    assert places == {"https://pypi.org/simple", "https://files.pythonhosted.org", "."}
    package = next(package for package in tomllib.loads(text)["package"] if package["name"] == "meshfeed")
    locked = {entry["name"] for entry in package["dependencies"]}
    assert locked == _names(PROJECT["dependencies"]), "run `uv lock`"


def test_the_lock_has_every_extra() -> None:
    """Otherwise the scripts cannot use it, and install the newest versions."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    package = next(package for package in packages if package["name"] == "meshfeed")
    locked: dict[str, set[str]] = {extra: set() for extra in PROJECT["optional-dependencies"]}
    for entry in package["metadata"]["requires-dist"]:
        if extra := re.search(r"extra == '(.+?)'", entry.get("marker", "")):
            locked[extra[1]].add(entry["name"] + entry.get("specifier", ""))
    for extra, requirements in PROJECT["optional-dependencies"].items():
        asked = {re.sub(r"\[.*?\]|;.*", "", requirement).strip().lower() for requirement in requirements}
        assert locked[extra] == asked, f"run `uv lock`: {extra}"


@pytest.mark.parametrize(
    ("file", "requirement"),
    [
        ("grain/internals.py", "grain"),
        ("huggingface/internals.py", "datasets"),
        ("tf_internals.py", "tensorflow"),
    ],
)
def test_errors_of_private_names_advise_the_oldest_supported_version(file: str, requirement: str) -> None:
    text = (ROOT / "src/meshfeed/_src/sources" / file).read_text()
    advised = re.search(r'^OLDEST = "(.+)"', text, re.MULTILINE)
    assert advised
    wanted = [*PROJECT["dependencies"], *(w for extra in PROJECT["optional-dependencies"].values() for w in extra)]
    assert any(line.startswith(f"{requirement}>={advised[1]}") for line in wanted)

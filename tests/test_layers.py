"""The floors of the house: who may import whom. Read from the source, nothing is run.

A module imports only from floors below its own. Modules of one package and one floor may import each other, without a
cycle. A new module adds its line to FLOORS, or the test fails.
"""

from __future__ import annotations

import ast
import fnmatch
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent / "src" / "meshfeed"

FLOORS: dict[str, str] = {
    "0": "_errors _names _border _types _fork",
    "1": (
        "_exact_json _state _state_files _file_sets _ledger _step_schedule _settings _second_pass _retry _threads _process _order "
        "_record_random _mixture_order _mixture_stages _plan _plan_table _shardings _topology _reshard _aligned _tree_json "
        "_launcher _ownership"
    ),
    # The second floor has a gallery: sources that are made of other sources read records too.
    "2a": "_host_batch _read _identity",
    "2b": (
        "sources sources.* checkpoint checkpoint.* _stats _steplog "  # records and arrays, from and to storage
        "_narrow _put _global _load _load_move _placer _replicas "  # onto the devices
        "_reader* _course_* _lane _lanes _lane_* _local_iterator "  # what comes at which step
        "_prefetch _pipeline _window _workers _worker_* "  # when
        "_agree _agree_* _window_reports"  # with the others' consent
    ),
    "3": "_iterator _courses _replay",
    "4": "remote _remote_* maxtext _maxtext_* testing _resumable _spawn _spawn_host _spawn_child",
    "5": "__init__",  # the façade: it names what the floors below have
    "6": "cli _cli_* _demo _demo_*",  # programs: they use the library as anybody would
}

# Only here: what a process is, and who else is there.
PROCESS_MODULES = {"_process", "_spawn_child"}


def _module_name(path: pathlib.Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


MODULES = {_module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _floor(module: str) -> str | None:
    found = [floor for floor, names in FLOORS.items() for name in names.split() if fnmatch.fnmatchcase(module, name)]
    assert len(found) <= 1, f"{module} stands on several floors: {found}"
    return found[0] if found else None


def _package(module: str) -> str:
    first = module.partition(".")[0]
    return first if (ROOT / first).is_dir() else ""


def _imports(module: str, modules: dict[str, pathlib.Path] | None = None) -> set[str]:
    """Own modules that ``module`` imports anywhere, inside functions included."""
    modules = MODULES if modules is None else modules
    found: set[str] = set()

    def add(name: str) -> None:
        if name == "meshfeed":
            found.add("__init__")
        elif name.startswith("meshfeed."):
            found.add(name.removeprefix("meshfeed."))

    for node in ast.walk(ast.parse(modules[module].read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            name = node.module or ""
            for alias in node.names:
                inner = f"{name}.{alias.name}"
                add(inner if inner.removeprefix("meshfeed.") in modules else name)
    return found - {module}


def _violations(module: str) -> list[str]:
    floor = _floor(module)
    assert floor is not None
    wrong = []
    for other in sorted(_imports(module)):
        below = _floor(other)
        siblings = below == floor and _package(other) == _package(module)
        if below is None:
            wrong.append(f"{module} imports {other}, which is not a module of meshfeed or stands on no floor")
        elif below >= floor and not siblings:
            wrong.append(f"{module} (floor {floor}) imports {other} (floor {below})")
    return wrong


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph.get(module, ())):
            if cycle := visit(other, [*path, module]):
                return cycle
        done.add(module)
        return []

    for module in sorted(graph):
        if cycle := visit(module, []):
            return cycle
    return []


def test_every_module_stands_on_a_floor() -> None:
    unknown = [module for module in MODULES if _floor(module) is None]
    assert not unknown, f"add to FLOORS in {__file__}: {unknown}"


@pytest.mark.parametrize("module", [module for module in MODULES if _floor(module) is not None])
def test_imports_go_down(module: str) -> None:
    assert not _violations(module), "\n".join(_violations(module))


def test_no_cycle() -> None:
    cycle = _cycle({module: _imports(module) for module in MODULES if module != "__init__"})
    assert not cycle, " → ".join(cycle)


def test_the_cycle_search_finds_one() -> None:
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert _cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_import_reader_sees_every_form(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import meshfeed\nimport meshfeed._a\nfrom meshfeed import _b\nfrom meshfeed import Name\n"
        "def f():\n    from meshfeed.sources import c\n    from meshfeed._d import something\n"
    )
    modules = dict.fromkeys(("x", "_a", "_b", "sources", "sources.c", "_d", "__init__"), path)
    assert _imports("x", modules) == {"__init__", "_a", "_b", "sources.c", "_d"}


def test_only_one_module_asks_jax_about_processes() -> None:
    wrong = []
    for module in MODULES.keys() - PROCESS_MODULES:
        for node in ast.walk(ast.parse(MODULES[module].read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("process_index", "process_count", "process_indices", "distributed")
                and isinstance(node.value, ast.Name)
                and node.value.id == "jax"
            ):
                wrong.append(f"{module}:{node.lineno}: jax.{node.attr}; use meshfeed._src.base.coordination")
    assert not wrong, "\n".join(sorted(wrong))

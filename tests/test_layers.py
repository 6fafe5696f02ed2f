"""Who may import whom: the packages of docs/architecture.md. Read from the source; nothing is run."""

from __future__ import annotations

import ast
import collections
import pathlib
import re
from collections.abc import Iterator

import pytest

SRC = pathlib.Path(__file__).resolve().parent.parent / "src" / "meshfeed"

# Package → packages that it imports. A package that is not listed, an import that is not listed, and an entry that no import
# needs any more are errors. "public" is what users import, above the packages.
MAY_IMPORT = {
    "base": "",
    "order": "base",
    "plan": "base",
    "state": "base",
    "pictures": "base plan",
    "reading": "base order",
    "arrays": "base plan reading",
    "streams": "base order plan reading state",
    "sources": "base order reading state",
    "agreement": "base reading state streams",
    "convert": "base reading sources",
    "feed": "agreement arrays base pictures plan reading sources state streams",
    "checkpoint": "arrays base state",
    "monitoring": "base feed pictures",
    "remote": "arrays base feed pictures plan state",
    "simulation": "agreement base order pictures reading sources streams",
    "maxtext": "arrays base feed plan remote sources state streams",
    "testing": "base",
    "demo": "base public testing",
    "cli": "base checkpoint convert demo feed monitoring order pictures public reading simulation sources state",
    "public": "base checkpoint feed maxtext monitoring pictures plan remote simulation sources state testing",
}
# From the bottom up. A package imports only from those of layers before its own; streams and sources do not know each other.
LAYERS = (
    "base",
    "order plan state",
    "reading pictures",
    "arrays",
    "streams sources checkpoint",
    "agreement convert",
    "feed",
    "remote monitoring simulation",
    "maxtext",
    "testing",
    "public",
    "demo",
    "cli",
)
# Only these may ask JAX what a process is.
PROCESS_MODULES = {"meshfeed._src.base.coordination", "meshfeed._src.testing.hosts"}
LOADED_BY_WORKERS = ("base", "order", "state", "reading", "streams", "sources")
# Modules that import own modules when they are called: façades over heavy libraries, and the command line.
LAZY = {
    "meshfeed": "public names",
    "meshfeed.__main__": "the command line, once Ctrl-C is handled",
    "meshfeed.checkpoint": "public names",
    "meshfeed.sources": "public names",
    "meshfeed._src.base.ended": "the key-value store, at exit: `import meshfeed` loads this module",
    "meshfeed._src.cli.main": "commands",
    "meshfeed._src.cli.doctor": "what a process is, which imports JAX",
    "meshfeed._src.cli.bench": "sources of the user's choice",
    "meshfeed._src.cli.checkpoint": "Orbax",
    "meshfeed._src.cli.data": "pyarrow, array_record",
    "meshfeed._src.cli.plan": "the plan of a mesh, and sources, which import JAX",
    "meshfeed._src.cli.replay": "sources of the user's choice",
    "meshfeed._src.feed.inspection": "pictures, once one is drawn: every start of a feed would pay for them",
    "meshfeed._src.reading.workers": "Ray",
    "meshfeed._src.convert.run": "ArrayRecord files at URLs, which import JAX",
    "meshfeed._src.convert.readers": "MDS and tar archives, which import JAX",
    "meshfeed._src.sources.host_batches": "Grain",
    "meshfeed._src.sources.parquet": "pyarrow",
    "meshfeed._src.sources.recognize": "the library of what was passed",
    "meshfeed._src.sources.files.shard_reader": "the cache of remote files, which a start without one would pay for",
}


def name_of(path: pathlib.Path) -> str:
    return ".".join(("meshfeed", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(SRC.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def room_of(module: str) -> str:
    if module == "meshfeed.__main__":
        return "cli"
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["_src"] and len(parts) > 2 else "public"


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str | None, bool]]:
    """Own modules, the name imported from each, and whether that happens inside a function."""

    def walk(node: ast.AST, late: bool) -> Iterator[tuple[str, str | None, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, late) for alias in node.names if alias.name.split(".")[0] == "meshfeed")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshfeed":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, None, late) if inner in MODULES else (node.module or "", alias.name, late)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, late)

    yield from walk(tree, False)


def test_layers_import_what_they_may_and_no_entry_is_stale() -> None:
    found: dict[str, set[str]] = collections.defaultdict(set)
    for module, tree in TREES.items():
        if module != "meshfeed._src":
            found[room_of(module)] |= {room_of(other) for other, _, _ in imports_of(tree)} - {room_of(module)}
    assert {package: " ".join(sorted(others)) for package, others in sorted(found.items())} == dict(
        sorted(MAY_IMPORT.items())
    )


def test_imports_go_down() -> None:
    layer = {package: number for number, packages in enumerate(LAYERS) for package in packages.split()}
    assert set(layer) == set(MAY_IMPORT)
    wrong = [
        (package, other)
        for package, others in MAY_IMPORT.items()
        for other in others.split()
        if layer[other] >= layer[package]
    ]
    assert not wrong


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
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


def test_no_cycle() -> None:
    graph = {
        name: {other for other, _, _ in imports_of(tree)} - {name} for name, tree in TREES.items() if "_src" in name
    }
    cycle = cycle_in(graph)
    assert not cycle, " → ".join(cycle)


def test_the_cycle_search_finds_one() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_own_modules_are_imported_late_only_by_lazy_facades() -> None:
    late = {name for name, tree in TREES.items() if any(inside for _, _, inside in imports_of(tree))}
    assert late <= set(LAZY), f"import at the top, or give a reason in LAZY: {sorted(late - set(LAZY))}"
    lazily = {"meshfeed", "meshfeed.checkpoint", "meshfeed.sources"}  # by importlib
    assert set(LAZY) - lazily <= late, f"stale in LAZY: {sorted(set(LAZY) - lazily - late)}"


def test_no_private_name_crosses_rooms() -> None:
    wrong = [
        f"{module}: from {other} import {name}"
        for module, tree in TREES.items()
        for other, name, _ in imports_of(tree)
        if name is not None and name.startswith("_") and name != "__version__" and room_of(other) != room_of(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_class_name_stands_once() -> None:
    where = collections.defaultdict(list)
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(module)
    # The same name on purpose: MaxText's own, under which its users know it.
    twice = {name: modules for name, modules in where.items() if len(modules) > 1}
    assert not twice


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in (SRC / "_src").rglob("*.py")}), ids=lambda path: path.name
)
def test_each_package_says_what_it_contains(folder: pathlib.Path) -> None:
    path = folder / "__init__.py"
    tree = ast.parse(path.read_text())
    text = ast.get_docstring(tree) or ""
    assert len(text) > 20
    assert len(tree.body) == 1, "an __init__ says what its package contains, and runs nothing"
    for name in [word.strip("`.,;") for word in text.split() if word.strip("`.,;").endswith((".py", ".c"))]:
        assert (folder / name).exists(), f"{path} names {name}"


def test_layers_list_what_they_may_import() -> None:
    listed = {}
    for package in MAY_IMPORT.keys() - {"public"}:
        text = ast.get_docstring(ast.parse((SRC / "_src" / package / "__init__.py").read_text())) or ""
        found = re.search(r"May import: ([\w, ()]+)", text.replace("\n", " "))
        if found:
            listed[package] = " ".join(sorted(re.sub(r" \(.*?\)", "", found[1]).split(", ")))
    assert len(listed) >= 10
    assert listed == {package: MAY_IMPORT[package] for package in listed}


def test_only_one_module_asks_jax_about_processes() -> None:
    wrong = []
    for module in MODULES.keys() - PROCESS_MODULES:
        for node in ast.walk(TREES[module]):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("process_index", "process_count", "process_indices", "distributed")
                and isinstance(node.value, ast.Name)
                and node.value.id == "jax"
            ):
                wrong.append(f"{module}:{node.lineno}: jax.{node.attr}; use meshfeed._src.base.coordination")
    assert not wrong, "\n".join(sorted(wrong))


def test_what_workers_load_imports_no_jax() -> None:
    """``import jax`` would take most of the time that a worker process needs to start."""
    wrong = [
        f"{module}:{node.lineno}; use meshfeed._src.base.trees, or import it in the function that needs it"
        for module, tree in TREES.items()
        if module.startswith(tuple(f"meshfeed._src.{package}." for package in LOADED_BY_WORKERS))
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(
            name.split(".")[0] == "jax" for name in [getattr(node, "module", None) or "", *(a.name for a in node.names)]
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_no_relative_imports() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (SRC.parent.parent / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.(?:py|md)|[\w/]+/)`", page))
    roots = (SRC / "_src", SRC, SRC.parent.parent)
    assert len(named) > 30
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []
    assert [package for package in MAY_IMPORT if package != "public" and not re.search(rf"\b{package}\b", page)] == []

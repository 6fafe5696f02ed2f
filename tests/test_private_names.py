"""Private names of other libraries are reached in one file each: docs/decisions/private-names.md. Nothing is run."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "meshfeed" / "_src"
# Library → the file that reaches its private parts.
INTERNALS = {
    "jax": "base/jax_internals.py",
    "jaxlib": "base/jaxlib_internals.py",
    "orbax": "checkpoint/orbax_internals.py",
    "grain": "sources/grain/internals.py",
    "array_record": "sources/grain/internals.py",
    "datasets": "sources/huggingface/internals.py",
    "tensorflow": "sources/tf_internals.py",
}
# Modules without documentation: what they hold may move.
UNDOCUMENTED = (
    "datasets.features.features",
    "datasets.formatting",
    "datasets.iterable_dataset",
    "datasets.packaged_modules",
    "datasets.utils",
)
# Private-looking names that belong to no other library's objects, or are documented.
ALLOWED = {
    "_exit": "os",
    "_get_kwargs_from_urls": "fsspec, which describes it for those who write file systems",
    "_is_protocol": "Python's typing",
    "_fields": "named tuples",
    "_replace": "named tuples",
    "_register_atexit": "Python's threading",
    "_current_frames": "sys, which documents it",
    "_per_second": "the end of a name",
    "_METADATA": "a file of Orbax's checkpoints",
    "_cat_file": "fsspec, whose page on async use documents the coroutines of its file systems",
    "_CHECKPOINT_METADATA": "a file of Orbax's checkpoints",
    "_data_files": "a key of state.json in a folder of Hugging Face datasets",
    "_type": "a key of the features in the schema of a file of Hugging Face datasets",
    "_examples": "the end of a name",
    "_seconds": "the end of a name",
}
_CLASS_OF_A_NODE = re.compile(r"_?[A-Z]\w+(IterDataset|MapDataset|Iterable|ElasticIterator)")
PATHS = {str(path.relative_to(SRC)): path for path in sorted(SRC.rglob("*.py"))}


def names_defined(tree: ast.AST) -> set[str]:
    """Names that a file assigns, on anything, or defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None and name not in ALLOWED


def private_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in full:
            library, *parts = name.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if library in INTERNALS and (private or f"{name}.".startswith(tuple(f"{u}." for u in UNDOCUMENTED))):
                yield node.lineno, name


def names_used(tree: ast.AST) -> set[str]:
    """Attributes that a file reads, and its strings, with and without an underscore before them."""
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | strings | {f"_{string}" for string in strings}


def private_names(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Private attributes and strings that name them, unless the name is one of ``ours``, or the file defines it."""
    own = names_defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in ours | own:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            private = is_private(node.value) and node.value not in ours | own
            if private or _CLASS_OF_A_NODE.fullmatch(node.value):
                yield node.lineno, repr(node.value)


def found_in(tree: ast.AST, ours: set[str]) -> list[str]:
    return [f"{line}: {name}" for line, name in sorted({*private_imports(tree), *private_names(tree, ours)})]


@pytest.mark.slow
def test_only_one_file_a_library_reaches_private_names() -> None:
    trees = {name: ast.parse(path.read_text()) for name, path in PATHS.items()}
    ours = {defined for tree in trees.values() for defined in names_defined(tree)}
    # Of our sources over files, and of our feeds; to datasets one is a key of arguments, to Grain the other its own figures.
    same_name = {"_shards", "_stats"}
    theirs = {used for name in INTERNALS.values() for used in names_used(trees[name])} - same_name
    wrong = [
        f"{name}:{found}"
        for name, tree in trees.items()
        if name not in INTERNALS.values()
        for found in found_in(tree, ours - theirs)
    ]
    assert not wrong, "reach it in the file of its library, and say what happens without it:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "from jax._src import distributed",
        "from jaxlib._jax import pytree",
        "import orbax.checkpoint._src.metadata",
        "from grain._src.python import dataset",
        "from datasets.iterable_dataset import _BaseExamplesIterable",
        "from datasets.utils.file_utils import xopen",
        "dataset._ex_iterable",
        "getattr(node, '_parents', ())",
        "type(node).__name__ == 'PrefetchIterDataset'",
        "kind == 'MappedExamplesIterable'",
    ],
)
def test_a_private_name_elsewhere_is_found(source: str) -> None:
    assert found_in(ast.parse(source), set())


@pytest.mark.parametrize("library", list(INTERNALS))
def test_the_page_lists_every_private_name(library: str) -> None:
    tree = ast.parse(PATHS[INTERNALS[library]].read_text())
    page = (ROOT / "docs" / "decisions" / "private-names.md").read_text()
    assert f"`{INTERNALS[library]}`" in page
    strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.startswith("__")
    }
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} - names_defined(tree)
    named = {name for name in strings | attributes if is_private(name)}
    named |= {name.rpartition(".")[2] for _, name in private_imports(tree)}
    # Names of nodes are listed in the file alone.
    assert [name for name in sorted(named) if name not in page and not _CLASS_OF_A_NODE.fullmatch(name)] == []

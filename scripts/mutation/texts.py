"""Which mutants change only what people read, or nothing: ``scripts/mutate`` and ``mutate-by-model`` do not count them.

A mutant does not count if all that it changes is

- inside a call of a logger: the text of an entry or what is put into it. That an entry is written still counts;
- the words of a text of at least two words, as in the message of an error. That a message is there, and what is put into
  it, still counts;
- the type that ``cast`` is given, which it ignores.

``python scripts/mutation/texts.py FILE…`` prints the mutants of mutated files that count.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

_WORDS = re.compile(r"[a-zA-Z]+[^a-zA-Z]*\s[^a-zA-Z]*[a-zA-Z]{2,}")
_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def _is_log_call(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "_log" and function.attr in _LEVELS


def _only_read(before: ast.AST, after: ast.AST) -> bool:
    """Whether two versions of a piece of code, which differ, differ only in what people read."""
    if type(before) is not type(after):
        return False
    if _is_log_call(before):
        return _is_log_call(after)
    if isinstance(before, ast.Constant):
        return isinstance(before.value, str) and before.value != after.value and bool(_WORDS.search(before.value))  # type: ignore[attr-defined]
    if isinstance(before, ast.Call) and ast.unparse(before.func) == "cast" and len(before.args) == len(after.args) == 2:  # type: ignore[attr-defined]
        before, after = before.args[1], after.args[1]  # type: ignore[attr-defined]
        return ast.dump(before) == ast.dump(after) or _only_read(before, after)
    for (name, one), (_, other) in zip(ast.iter_fields(before), ast.iter_fields(after), strict=True):
        ones, others = (one, other) if isinstance(one, list) else ([one], [other])
        if len(ones) != len(others):
            return False
        for a, b in zip(ones, others, strict=True):
            if isinstance(a, ast.AST) and isinstance(b, ast.AST):
                if ast.dump(a) != ast.dump(b) and not _only_read(a, b):
                    return False
            elif a != b and name not in ("name", "kind"):  # each version has a name of its own
                return False
    return True


def counted(path: pathlib.Path) -> Iterator[str]:
    """Yields the names of the mutants of a mutated file, in a folder ``src``, that count."""
    parts = path.with_suffix("").parts
    module = ".".join(parts[len(parts) - parts[::-1].index("src") :])
    tree = ast.parse(path.read_text())
    scopes = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for scope in scopes:
        functions = {node.name: node for node in scope if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        for name, function in functions.items():
            start, mark, number = name.rpartition("__mutmut_")
            if not mark or not number.isdecimal():
                continue
            original = functions[f"{start}__mutmut_orig"]
            if not _only_read(original, function):
                yield f"{module}.{name}"


def main() -> None:
    """Prints the names, in the order of files and functions."""
    for argument in sys.argv[1:]:
        print(*counted(pathlib.Path(argument)), sep="\n")


if __name__ == "__main__":
    main()

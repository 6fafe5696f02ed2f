"""Writes the keywords of the feed, declared in ``base/settings.py``, into the constructors and the docstring of the feeds.

scripts/signatures.py          prints the files that differ from the declaration, and exits with 1 if there are any
scripts/signatures.py --fix    writes them
"""

from __future__ import annotations

import ast
import inspect
import itertools
import pathlib
import sys
import textwrap
from typing import NamedTuple

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "src" / "meshfeed" / "_src"
DECLARATION = SOURCE / "base" / "settings.py"
CONSTRUCTORS = {SOURCE / "feed" / "iterator.py": "Feed", SOURCE / "remote" / "feed.py": "RemoteFeed"}
WIDTH = 125


class Keyword(NamedTuple):
    """A field of ``FeedSettings``, as source code."""

    name: str
    annotation: str
    default: str
    doc: str


def find_class(text: str, name: str) -> ast.ClassDef:
    """Returns a class of a module."""
    return next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)


def declared() -> list[Keyword]:
    """Returns the declared keywords, in order."""
    text = DECLARATION.read_text()
    body = find_class(text, "FeedSettings").body
    found = []
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call):
            assert isinstance(field.target, ast.Name)
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), f"{field.target.id}: no text"  # noqa: PT018
            annotation, default = ast.get_source_segment(text, field.annotation), ast.unparse(field.value.args[0])
            found.append(Keyword(field.target.id, annotation or "", default, " ".join(after.value.value.split())))
    return found


def with_keywords(text: str, class_name: str, keywords: list[Keyword]) -> str:
    """Returns a module with the keywords in the constructor of a class and, if it lists them, in its docstring."""
    found = find_class(text, class_name)
    init = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    lines = text.splitlines(keepends=True)
    first, last = init.args.kwonlyargs[0].lineno - 1, init.body[0].lineno - 2  # up to the line of ``) -> None:``
    parameters = []
    for keyword in keywords:
        default = keyword.default.replace("'", '"')
        parameters.append(f"        {keyword.name}: {keyword.annotation} = {default},\n")
    lines[first:last] = parameters
    docstring = inspect.cleandoc(found.body[0].value.value)  # type: ignore[attr-defined]
    if f"\n  {keywords[0].name}: " in docstring:
        at = found.body[0].lineno - 1
        begin = next(n for n in range(at, first) if lines[n].startswith(f"      {keywords[0].name}: "))
        end = next(n for n in range(begin, first) if lines[n] == "\n")
        lines[begin:end] = [
            textwrap.fill(
                f"{keyword.name}: {keyword.doc}",
                WIDTH,
                initial_indent=" " * 6,
                subsequent_indent=" " * 8,
                break_long_words=False,
                break_on_hyphens=False,
            )
            + "\n"
            for keyword in keywords
        ]
    return "".join(lines)


def outdated() -> dict[pathlib.Path, str]:
    """Returns the files that differ from the declaration, and what they should contain."""
    keywords = declared()
    wanted = {path: with_keywords(path.read_text(), name, keywords) for path, name in CONSTRUCTORS.items()}
    return {path: text for path, text in wanted.items() if text != path.read_text()}


if __name__ == "__main__":
    files = outdated()
    for path, text in files.items():
        if "--fix" in sys.argv:
            path.write_text(text)
        else:
            print(f"{path} differs from the declaration in base/settings.py; run scripts/check --fix")
    sys.exit(bool(files) and "--fix" not in sys.argv)

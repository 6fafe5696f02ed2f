"""Griffe extension: the Sphinx roles of docstrings, such as ``:class:`Feed```, become code or links of Markdown."""

from __future__ import annotations

import re

from griffe import Extension, Object

MODULES = r"(?:sources|checkpoint|maxtext|remote|testing)"
PUBLIC = re.compile(rf"~?(meshfeed(?:\.{MODULES})?\.(?!_|{MODULES}$)\w+)")


def _to_markdown(match: re.Match[str]) -> str:
    name = match[1]
    public = PUBLIC.fullmatch(name)
    shown = name.removeprefix("~")
    return f"[`{shown}`][{public[1]}]" if public else f"`{shown}`"


class DocstringRoles(Extension):
    """Rewrites each docstring once, when its object is loaded."""

    def on_object(self, *, obj: Object, **kwargs: object) -> None:
        """Rewrites the docstring of ``obj``."""
        if obj.docstring:
            text = re.sub(r":\w+:`([^`]+)`", _to_markdown, obj.docstring.value)
            obj.docstring.value = re.sub(r"::\n\n", ":\n\n", text)

"""Griffe extension: the Sphinx roles of docstrings, such as ``:class:`Feed```, become code or links of Markdown."""

from __future__ import annotations

import ast
import pathlib
import re

from griffe import Class, Extension, Object

MODULES = r"(?:sources|checkpoint|maxtext|monitoring|remote|testing)"
PUBLIC = re.compile(rf"~?(meshfeed(?:\.{MODULES})?\.(?!_|{MODULES}$)\w+)")


def _to_markdown(match: re.Match[str]) -> str:
    name = match[1]
    public = PUBLIC.fullmatch(name)
    shown = name.removeprefix("~")
    return f"[`{shown}`][{public[1]}]" if public else f"`{shown}`"


ROOT = pathlib.Path(__file__).parents[1]
_PAGES = (ROOT / "docs/reference/api").glob("*.md")
_DOCUMENTED = {name for page in _PAGES for name in re.findall(r"^::: meshfeed[\w.]*\.(\w+)$", page.read_text(), re.M)}
# What sources offer to feeds; a user calls none of it.
_HOOKS = {
    function.name
    for protocol in ast.parse((ROOT / "src/meshfeed/_src/base/hooks.py").read_text()).body
    if isinstance(protocol, ast.ClassDef)
    for function in protocol.body
    if isinstance(function, ast.FunctionDef)
} - {"close", "file_names", "fingerprint", "lengths"}


class DocstringRoles(Extension):
    """Rewrites each docstring once, when its object is loaded; leaves out the hooks of sources and private bases."""

    def on_class_members(self, *, cls: Class, **kwargs: object) -> None:
        """Removes what is not for users."""
        private = [base for base in cls.bases if getattr(base, "canonical_path", "").startswith("meshfeed._src.")]
        cls.bases = [base for base in cls.bases if base not in private or base.canonical_name in _DOCUMENTED]
        for name in _HOOKS & cls.members.keys():
            cls.del_member(name)

    def on_object(self, *, obj: Object, **kwargs: object) -> None:
        """Rewrites the docstring of ``obj``."""
        if obj.docstring:
            text = re.sub(r":\w+:`([^`]+)`", _to_markdown, obj.docstring.value)
            obj.docstring.value = re.sub(r"::\n\n", ":\n\n", text)

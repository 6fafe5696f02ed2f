"""MkDocs hooks of the documentation site: pages for the examples, and links that leave docs/."""

from __future__ import annotations

import ast
import json
import pathlib
import posixpath
import re
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parent.parent
README_PAGE = "readme.md"  # MkDocs takes a README.md for the start page
BOOST = {"decisions": 0.2, "examples": 0.5, "how-to": 2.0}  # of the results of a search, by folder
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".ipynb": "json"}


def _cell_page(cell: dict[str, Any]) -> str:
    """A cell of a notebook: its text, or its code and what it printed or drew."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        drawing, printed = output.get("data", {}).get("text/html"), output.get("text")
        parts += ["".join(drawing)] if drawing else []
        parts += [f"```text\n{''.join(printed).rstrip()}\n```"] if printed else []
    return "\n\n".join(parts)


def _example_page(path: pathlib.Path) -> str:
    if path.suffix == ".ipynb":
        return "\n\n".join(map(_cell_page, json.loads(path.read_text())["cells"])) + "\n"
    text, language = path.read_text(), LANGUAGES.get(path.suffix, "text")
    title = path.relative_to(ROOT / "examples")
    return f"# {title}\n\n```{language}\n{text}```\n"


def _summary(path: pathlib.Path) -> str:
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    if path.suffix == ".ipynb":
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        return first.split("\n\n")[0].lstrip("# ")
    comments = [line.lstrip("# ") for line in path.read_text().splitlines() if re.match(r"# \w", line)]
    return comments[0] if comments else ""


def _examples() -> list[pathlib.Path]:
    return sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in LANGUAGES)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds all decisions and examples to the navigation, and the how-to pages that mkdocs.yml does not place."""
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "README.md")
    pages = [{"Overview": "decisions/README.md"}, *(f"decisions/{name}" for name in decisions)]
    examples = [{"Overview": "examples/index.md"}, *(f"{path.relative_to(ROOT)}.md" for path in _examples())]
    assert config.nav is not None
    how_to = next(part["How-to"] for part in config.nav if "How-to" in part)
    found = sorted(f"how-to/{path.name}" for path in (ROOT / "docs" / "how-to").glob("*.md"))
    how_to += [page for page in found if page not in str(how_to)]
    config.nav += [{"Examples": examples}, {"Decisions": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each example and one that lists them, and the README."""
    rows = []
    for path in _examples():
        name = path.relative_to(ROOT)
        files.append(File.generated(config, f"{name}.md", content=_example_page(path)))
        link = path.relative_to(ROOT / "examples")
        rows.append(f"| [`{link}`]({link}.md) | {_summary(path)} |")
    head = "# Examples\n\nComplete programs, which the tests run. Files for clusters are parsed.\n\n"
    head += "| file | shows |\n|---|---|\n"
    readme = (ROOT / "README.md").read_text().replace("](docs/images/", "](images/")
    files.append(File.generated(config, README_PAGE, content=readme))
    files.append(File.generated(config, "examples/index.md", content=head + "\n".join(rows) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to examples and the README to their pages; other links that leave docs/ become plain text.

    Also ranks the page in the results of a search: how to do something comes before why it was built so.
    """
    here = posixpath.dirname(page.file.src_uri)
    page.meta.setdefault("search", {"boost": BOOST.get(page.file.src_uri.partition("/")[0], 1.0)})
    is_readme = page.file.src_uri == README_PAGE
    folder = "" if is_readme else f"docs/{here}"

    def replace(match: re.Match[str]) -> str:
        text, link = match[1], match[2]
        if "://" in link or link.startswith(("#", "mailto:")) or (page.file.generated_by and not is_readme):
            return match[0]
        path, hash_sign, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        uri = {"README.md": README_PAGE, "examples": "examples/index.md"}.get(target, f"{target}.md")
        if target.startswith("docs/"):
            uri = target.removeprefix("docs/")
        elif files.get_file_from_path(uri) is None:
            return text
        return f"[{text}]({posixpath.relpath(uri, here or '.')}{hash_sign}{anchor})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", replace, markdown)

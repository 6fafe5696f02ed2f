"""What commands share: options, and how results are printed."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import local_path
from meshfeed._src.base.stores import is_url

_WIDTH = 77  # 80 columns minus click's margins
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
INTERRUPTED = 128 + signal.SIGINT  # the exit status, as shells report it


class LocalPath(click.Path):
    """A path to write, on a local or shared disk; a URL is refused, as it would become a folder named after its scheme."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See :class:`click.ParamType`."""
        try:
            path = local_path("path" if param is None or param.name is None else param.name, value)
        except SettingsError as error:
            self.fail(str(error), param, ctx)
        return super().convert(str(path), param, ctx)


class OutputPath(click.Path):
    """A file to write, on a disk or at a URL."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See :class:`click.ParamType`. Returns text."""
        if is_url(str(value)):
            return str(value)
        return super().convert(str(local_path("path", value)), param, ctx)


F = TypeVar("F", bound=Callable[..., object])


def json_option(text: str = "Print JSON.") -> Callable[[F], F]:
    """Returns the option ``--json``, the parameter ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def at_least(minimum: int, *names: str, **settings: Any) -> Callable[[F], F]:
    """Returns an option that takes an integer; its default is shown if it has one."""
    return click.option(*names, type=click.IntRange(min=minimum), show_default="default" in settings, **settings)


def example(*commands: str) -> str:
    """Returns the end of a help text: commands to copy."""
    whole = [f"  meshfeed {command}" for command in commands]
    lines = [line if len(line) <= _WIDTH else line.replace(" --", " \\\n      --") for line in whole]
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(("\b", title, *lines))  # \b keeps click from rewrapping the paragraph


def show(found: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Prints a result as JSON, or as lines of text."""
    click.echo(json.dumps(found) if as_json else printable("\n".join(lines)))


def printable(text: str) -> str:
    """Returns the text with control characters escaped: a file name must not reprogram the terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes with four digits and a unit: ``"1.482 KB"``."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def shortened(text: str, width: int) -> str:
    """Returns the text, cut off with an ellipsis if it is longer than ``width`` characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is 1: ``"2 files"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

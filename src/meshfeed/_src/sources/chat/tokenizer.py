"""Tokenizers of Hugging Face: from a file, or from what the user has loaded, with the chat template beside them."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshfeed._src.base.errors import SettingsError

if TYPE_CHECKING:
    import tokenizers

_FILE, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


@dataclasses.dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer that neither pads nor truncates, and what belongs to it.

    Attributes:
      tokenizer: a copy, which can be pickled and used by several threads.
      chat_template: text of its Jinja template, or None.
      special_tokens: the tokens that templates may use, such as ``"bos_token"`` → ``"<s>"``.
    """

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]


def load(tokenizer: object) -> LoadedTokenizer:
    """Returns the tokenizer that the user passed, with its template.

    That is a fast tokenizer of transformers, a ``tokenizers.Tokenizer``, or the path of a ``tokenizer.json`` or its folder.

    Raises:
      ImportError: tokenizers is not installed.
      SettingsError: it is none of these, or a file is missing or damaged; names the file.
    """
    import tokenizers

    if isinstance(tokenizer, str | os.PathLike):
        path = pathlib.Path(tokenizer)
        path = path / _FILE if path.is_dir() else path
        template, special_tokens = _beside(path)
        return LoadedTokenizer(parse(read(str(path)), str(path)), template, special_tokens)
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise SettingsError(
            f"tokenizer={tokenizer!r:.80}. It takes a fast tokenizer of transformers, a tokenizers.Tokenizer, or the path "
            "of a tokenizer.json: tokens must have offsets in the text.",
            setting="tokenizer",
        )
    special = getattr(tokenizer, "special_tokens_map", {})
    plain = _plain(backend)
    if getattr(tokenizer, "split_special_tokens", False):  # as transformers passes it with each text
        plain.encode_special_tokens = True
    return LoadedTokenizer(
        plain,
        _default(getattr(tokenizer, "chat_template", None)),
        {name: str(token) for name, token in special.items() if isinstance(token, str)},
    )


def read(path: str) -> bytes:
    """Returns the content of a tokenizer's file; raises SettingsError if there is none."""
    if not os.path.isfile(path):
        raise SettingsError(
            f"there is no tokenizer file {path!r}. Give the path of a tokenizer.json.", setting="tokenizer"
        )
    return pathlib.Path(path).read_bytes()


def parse(content: bytes, path: str) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a file, without the padding and truncation that the file may set; keeps the last one."""
    try:
        return _parse(content)
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises a bare Exception
        raise SettingsError(
            f"{path} is not a tokenizer of Hugging Face tokenizers: {error}. Give a tokenizer.json.",
            setting="tokenizer",
        ) from error


@functools.lru_cache(1)
def _parse(content: bytes) -> tokenizers.Tokenizer:
    import tokenizers

    return _plain(tokenizers.Tokenizer.from_str(content.decode()))


def _plain(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy without padding and truncation, which change the tokens of a text."""
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.encode_special_tokens = tokenizer.encode_special_tokens  # not part of the text, nor of a pickle
    copy.no_padding()
    copy.no_truncation()
    return copy


def _beside(path: pathlib.Path) -> tuple[str | None, dict[str, str]]:
    """The chat template and the special tokens from the files beside a tokenizer."""
    config: dict[str, Any] = {}
    found = path.with_name(_CONFIG)
    if found.is_file():
        try:
            config = dict(json.loads(found.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise SettingsError(f"{found} is not a JSON object: {error}.", setting="tokenizer") from error
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    special = {
        name: token for name, token in tokens.items() if name.split("_")[-1] == "token" and isinstance(token, str)
    }
    own = path.with_name(_TEMPLATE)
    template = own.read_text(encoding="utf-8") if own.is_file() else _default(config.get("chat_template"))
    return template, special


def _default(templates: Any) -> str | None:
    """The template of that name if a tokenizer has several: {name: text}, or [{"name": name, "template": text}, …]."""
    if isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    if isinstance(templates, Mapping):
        if "default" not in templates:
            raise SettingsError(
                f"the tokenizer has the chat templates {sorted(templates)}, and none named 'default'. Pass the text of "
                "one as chat_template=.",
                setting="chat_template",
            )
        return templates["default"]
    return templates

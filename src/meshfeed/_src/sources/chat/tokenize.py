"""Chats, completions and preferences as tokens, with what of them the model must learn to write."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base.errors import SettingsError, hides_own_frames, missing_package
from meshfeed._src.base.types import public
from meshfeed._src.sources.chat.template import ChatTemplate, Message, Spans
from meshfeed._src.sources.chat.tokenizer import load

if TYPE_CHECKING:
    import tokenizers

_FORMATS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("prompt", "completion"), ("messages",))
_WANTED = "messages; prompt and completion; or prompt, chosen and rejected"


@public("meshfeed.sources")
class TokenizeChat:
    """Turns chats into tokens and a loss mask, as the function of :func:`Map`. Can be pickled and sent to workers.

    The fields of a record decide::

        {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
        {"prompt": …, "completion": …}
        {"prompt": …, "chosen": …, "rejected": …}

    Prompts and answers are all texts, or all lists of messages; lists ``chosen`` and ``rejected`` may begin with the same
    messages instead of a ``prompt``. Messages are written by the chat template, with the list ``tools`` of a record if there
    is one; fields of a message that are None are left out. Texts are put end to end, with the special tokens that the
    tokenizer adds, and one ``eos_token`` at the end. Other fields of the record are left out.

    The mask is exact: the text is tokenized once, as a whole, and a token counts if one of its characters is the
    assistant's. ``{% generation %}`` in the template marks these characters. In a template without this mark, a turn begins
    after the text of the messages before it and the head of the assistant's turn, and ends where the text of the messages up
    to it ends; this mostly includes the token that ends a turn.

    Needs the extra ``chat``.

    Args:
      tokenizer: a fast tokenizer of ``transformers``, a ``tokenizers.Tokenizer``, or the path of a ``tokenizer.json`` or its
        folder, beside which ``tokenizer_config.json`` and ``chat_template.jinja`` are read.
      chat_template: text of a Jinja template; None for that of the tokenizer.
      template_variables: further variables of the template, such as ``{"enable_thinking": False}``.
      date: the date for templates that write one (by ``strftime_now``). That of today would change the records of a stream.
      eos_token: what ends an answer that is a text, such as ``"</s>"``; None for that of the tokenizer, "" for nothing.
      key: leaf of the tokens.
      mask_key: leaf of the loss mask.

    Raises:
      SettingsError: a setting is invalid, a file is missing, or a library is not installed.
    """

    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self,
        tokenizer: object,
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
        eos_token: str | None = None,
        key: str = "tokens",
        mask_key: str = "loss_mask",
    ) -> None:
        if not isinstance(key, str) or not isinstance(mask_key, str) or not key or not mask_key or key == mask_key:
            raise SettingsError(f"key={key!r} and mask_key={mask_key!r}; they take two different names.", setting="key")
        if date is not None and not isinstance(date, datetime.date):
            raise SettingsError(f"date={date!r}; it takes a datetime.date or None.", setting="date")
        if chat_template is not None and (not isinstance(chat_template, str) or "{" not in chat_template):
            raise SettingsError(
                f"chat_template={chat_template!r:.80}; it takes the text of a Jinja template, such as "
                "pathlib.Path('chat_template.jinja').read_text().",
                setting="chat_template",
            )
        try:
            loaded = load(tokenizer)
            text = loaded.chat_template if chat_template is None else chat_template
            variables = {**loaded.special_tokens, **(template_variables or {})}
            self._template = None if text is None else ChatTemplate(text, variables, date)
        except ImportError as error:
            raise missing_package("TokenizeChat", error, "chat", setting="tokenizer") from error
        self._tokenizer: tokenizers.Tokenizer = loaded.tokenizer
        self._key, self._mask_key = key, mask_key
        self._eos = _find_eos(self._tokenizer, eos_token, loaded.special_tokens.get("eos_token"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "encodes_special_tokens": self._tokenizer.encode_special_tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = self.__dict__.pop("encodes_special_tokens")

    @hides_own_frames
    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tokens of a record.

        Args:
          record: a dict with the fields of one of the formats above.

        Returns:
          For a chat or a completion, ``tokens`` int32 ``[n]`` and ``loss_mask`` bool ``[n]``. For a preference, ``chosen``
          int32 ``[n]`` and ``rejected`` int32 ``[m]``, each with the prompt, and ``chosen_start`` and ``rejected_start``,
          int32: the first token of the answer.

        Raises:
          ValueError: the record has other fields, or the template cannot write its messages, or has no exact mask.
        """
        fields = _format_of(record)
        tools = _tools(record)
        if fields == ("messages",):
            tokens, mask = self._tokenize(_messages(record, "messages"), 0, tools)
            return {self._key: tokens, self._mask_key: mask}
        parts = {name: _part(record, name) for name in fields}
        kinds = {name: "text" if isinstance(part, str) else "messages" for name, part in parts.items()}
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"the record has fields of different kinds: {kinds}. Write all of them as text, or all as lists of "
                "messages: a text is [{'role': 'user' or 'assistant', 'content': text}]."
            )
        prompt = parts.pop("prompt") if "prompt" in parts else _take_prompt(parts)
        if "completion" in parts:
            tokens, mask = self._answer(prompt, parts["completion"], tools)
            return {self._key: tokens, self._mask_key: mask}
        pair: dict[str, Any] = {}
        for name, answer in parts.items():
            tokens, mask = self._answer(prompt, answer, tools)
            if not mask.any():
                raise ValueError(f"{name!r} has nothing that the assistant writes after the prompt: {answer!r:.80}")
            pair |= {name: tokens, f"{name}_start": np.int32(mask.argmax())}
        return pair

    def _answer(self, prompt: Any, answer: Any, tools: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a prompt and an answer, and which of them are the answer's."""
        if not isinstance(prompt, str):
            return self._tokenize([*prompt, *answer], len(prompt), tools)
        if self._eos is None:
            raise ValueError(
                "the tokenizer does not name its end of text, so the model would not learn where an answer ends. Pass "
                "TokenizeChat(…, eos_token='</s>'), or eos_token='' for none."
            )
        text = prompt + answer
        tokens, mask = self._encode(text, [(len(prompt), len(text))], add_special_tokens=True)
        if not self._eos:
            return tokens, mask
        if len(tokens) and tokens[-1] == self._eos[0]:
            mask[-1] = True
            return tokens, mask
        return np.append(tokens, np.int32(self._eos[0])), np.append(mask, True)

    def _tokenize(self, messages: Sequence[Message], num_given: int, tools: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of messages, and which of them the assistant writes after the first ``num_given`` messages."""
        if self._template is None:
            raise ValueError("the tokenizer has no chat template. Pass TokenizeChat(…, chat_template=…).")
        text, spans = self._template.learned(messages, num_given, tools)
        return self._encode(text, spans, add_special_tokens=False)  # the template has written them

    def _encode(self, text: str, spans: Spans, *, add_special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # as tokenizers calls it
            raise ValueError(f"the text cannot be tokenized: {_why_not(text) or error}") from error
        tokens = np.array(encoded.ids, np.int32)
        starts, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(len(tokens), np.bool_)
        for start, end in spans:
            # A token of spaces has no characters if the tokenizer trims offsets: its start is its end.
            mask |= (ends > start) & np.where(starts == ends, ends <= end, starts < end)
        return tokens, mask


def _why_not(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is {text[error.start]!r}, half of a surrogate pair, which is not Unicode text."
    return None


def _find_eos(tokenizer: tokenizers.Tokenizer, given: str | None, own: str | None) -> tuple[int, ...] | None:
    """The id of the token that ends a text; empty if the user wants none, None if it is not known."""
    name = own if given is None else given
    if name is None or name == "":
        return None if name is None else ()
    found = tokenizer.token_to_id(name)
    if found is None:
        raise SettingsError(f"eos_token={name!r} is not a token of the tokenizer.", setting="eos_token")
    return (found,)


def _format_of(record: Any) -> tuple[str, ...]:
    """The fields of a record that hold its chat."""
    if not isinstance(record, Mapping):
        raise ValueError(f"a chat is {type(record).__name__}. Expected a dict with the fields {_WANTED}.")
    complete = [names for names in _FORMATS if all(record.get(name) is not None for name in names)]
    if not complete:
        raise ValueError(
            f"the record has the fields {sorted(map(str, record))}. Expected {_WANTED}. Rename yours in a function: "
            "Map(source, lambda record: tokenize({'messages': record['…']}))."
        )
    fields = complete[0]
    others = [names for names in complete[1:] if not set(names) <= set(fields)]
    if others:
        raise ValueError(
            f"the record has {' and '.join(fields)}, and also {' and '.join(others[0])}. Pass those of one format: "
            f"Map(source, lambda record: tokenize({{name: record[name] for name in {fields!r}}}))."
        )
    return fields


def _part(record: Mapping[str, Any], name: str) -> Any:
    value = record[name]
    return value if isinstance(value, str) else _messages(record, name)


def _messages(record: Mapping[str, Any], name: str) -> list[Message]:
    messages = record[name]
    if isinstance(messages, np.ndarray):
        messages = messages.tolist()
    if isinstance(messages, Mapping):  # one message
        messages = [messages]
    if not isinstance(messages, Sequence) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    ):
        raise ValueError(
            f"{name!r} is {messages!r:.80}. Expected a list of messages, {{'role': …, 'content': …}} each"
            f"{'' if name == 'messages' else ', or a text'}."
        )
    return [_without_none(message) for message in messages]


def _without_none(value: Any) -> Any:
    """Arrow gives every message of a column the fields of all: those that are None were not in the file."""
    if isinstance(value, Mapping):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _tools(record: Mapping[str, Any]) -> Any:
    tools = record.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"'tools' is a text that is not JSON: {error}. It begins with {tools[:40]!r}.") from error
    return _without_none(tools) or None


def _take_prompt(answers: dict[str, Any]) -> list[Message]:
    """The messages with which both answers of a preference begin, which it takes from them; each keeps its last one."""
    if any(isinstance(answer, str) for answer in answers.values()):
        raise ValueError(
            "the record has texts 'chosen' and 'rejected' and no 'prompt'. Put what they share into 'prompt'."
        )
    pairs = zip(*(answer[:-1] for answer in answers.values()), strict=False)
    prompt = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    answers |= {name: answer[len(prompt) :] for name, answer in answers.items()}
    return prompt

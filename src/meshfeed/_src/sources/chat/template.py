"""Chat templates: the text that a template makes of messages, and the parts of it that the assistant writes."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshfeed._src.base.errors import SettingsError, shorten

if TYPE_CHECKING:
    import jinja2
    from jinja2 import ext

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
"""First character of each part, and the one after its last."""

_SHOWN = 40
_RENDERED = "meshfeed_rendered"  # variable of a template: the parts of the text before the place that is being rendered


class ChatTemplate:
    """A Jinja template as tokenizers have it, with the extensions that transformers gives to templates.

    Can be pickled and used by several threads.

    Args:
      text: the template.
      variables: what it may use besides messages, tools and ``add_generation_prompt``.
      date: what ``strftime_now`` of the template formats, or None for a template that does not call it.

    Raises:
      ImportError: jinja2 is not installed.
      SettingsError: the text is not a template.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], date: datetime.date | None) -> None:
        self._text, self._variables, self._date = text, dict(variables), date
        self._template, self.marks_assistant = self._compile()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_template"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._template, _ = self._compile()

    def _compile(self) -> tuple[jinja2.Template, bool]:
        """The compiled template, and whether it marks what the assistant writes."""
        import jinja2
        from jinja2 import nodes, sandbox

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_marks(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        if self._date is not None:
            environment.globals["strftime_now"] = self._date.strftime
        try:
            blocks = environment.parse(self._text).find_all(nodes.CallBlock)  # also those of {% call %}
            marked = any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks)
            return environment.from_string(self._text), marked
        except jinja2.TemplateSyntaxError as error:
            raise SettingsError(
                f"the chat template is not a Jinja template: line {error.lineno}: {error.message}. Pass the text of a "
                "template as chat_template=.",
                setting="chat_template",
            ) from error

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> tuple[str, Spans]:
        """Returns the text of messages, and the parts that the template marks as the assistant's.

        Raises:
          ValueError: the template refuses the messages.
        """
        import jinja2

        parts: list[str] = []
        marks: list[tuple[int, int, str]] = []
        variables = {
            "tools": tools,
            "documents": None,
            **self._variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            _RENDERED: (parts, marks),
        }
        try:
            for part in self._template.generate(variables):
                parts.append(part)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            remedy = " Pass date=datetime.date(…), which it then formats." if "strftime_now" in str(error) else ""
            roles = [message.get("role") for message in messages]
            raise ValueError(
                f"the chat template cannot render messages of the roles {shorten(str(roles), 80)}: {error}.{remedy}"
            ) from error
        if any(marked and parts[number : number + 1] != [marked] for number, _, marked in marks):
            raise ValueError(
                "the chat template has {% generation %} within a macro or {% set %}, where its place in the text is not "
                "known. Move it to where the text is written."
            )
        return "".join(parts), [(start, start + len(marked)) for _, start, marked in marks]

    def learned(self, messages: Sequence[Message], num_given: int, tools: Any = None) -> tuple[str, Spans]:
        """Returns the text of messages, and the parts of it that the assistant writes after the first ``num_given``.

        Raises:
          ValueError: the template refuses the messages, or the parts cannot be found.
        """
        text, marked = self.render(messages, tools)
        if self.marks_assistant:
            start = self._length_before(text, messages, num_given, tools) if num_given else 0
            # A mark may begin before the head of the turn, which belongs to what is given.
            return text, [(max(first, start), end) for first, end in marked if end > start]
        spans: Spans = []
        for number in range(num_given, len(messages)):
            if messages[number].get("role") == "assistant":
                start = self._length_before(text, messages, number, tools)
                spans.append((start, self._length_of(text, messages, number + 1, tools)))
        return text, spans

    def _length_before(self, text: str, messages: Sequence[Message], number: int, tools: Any) -> int:
        """Characters before what the assistant writes as message ``number``, after the head of its turn."""
        if number and messages[number - 1].get("role") == "assistant":
            try:
                return self._length_of(text, messages, number, tools, add_generation_prompt=True)
            except ValueError:  # the template joins the turns of the assistant, so the second has no head
                return self._length_of(text, messages, number, tools, add_generation_prompt=False)
        return self._length_of(text, messages, number, tools, add_generation_prompt=True)

    def _length_of(self, text: str, messages: Sequence[Message], number: int, tools: Any, **settings: bool) -> int:
        """Characters of the first messages, whose text must be the beginning of the whole."""
        if number == len(messages) and not settings:
            return len(text)
        beginning, _ = self.render(messages[:number], tools, **settings)
        if text.startswith(beginning):
            return len(beginning)
        place = len(os.path.commonprefix([beginning, text]))  # noqa: RUF071 # of characters
        raise ValueError(
            f"the chat template writes the first {number} of {len(messages)} messages differently without the others (from "
            f"character {place}: {beginning[place : place + _SHOWN]!r} and "
            f"{text[place : place + _SHOWN]!r}), so what the assistant writes cannot be "
            "found. Pass a template as chat_template= that has {% generation %} … {% endgeneration %} around these parts; "
            "transformers reads the same marks."
        )


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    """JSON as templates expect it: Jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)


def _generation_marks() -> type[ext.Extension]:
    """The extension of Jinja for ``{% generation %} … {% endgeneration %}``, in memory of its own for each rendering."""
    from jinja2 import ext, nodes, runtime

    class GenerationMarks(ext.Extension):
        tags = {"generation"}  # noqa: RUF012 # as Jinja declares it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, context: runtime.Context, caller: Any) -> str:
            parts, marks = context[_RENDERED]
            marked = caller()
            marks.append((len(parts), sum(map(len, parts)), marked))
            return marked

    return GenerationMarks

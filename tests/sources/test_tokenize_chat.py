"""Chats as tokens: which tokens the model must learn, beside transformers' own mask, and what is refused."""

from __future__ import annotations

import datetime
import json
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfeed
from meshfeed.sources import Map, Packed, Padded, TokenizeChat

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: only the last answer keeps what the model thought.
FORGETS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% set text = message.content %}"
    "{% if not loop.last and '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}{{ text }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "How many of these are there? It is one, two or three. Straße, 東京 and naïve words too.  Two  spaces."


def bpe(trim_offsets: bool = True) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


BPE = bpe()


def decoded(tokens: Any) -> str:
    return BPE.decode(list(map(int, tokens)), skip_special_tokens=False)


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CHAT = [turn("system", "Count."), turn("user", "One?"), turn("assistant", "Two."), turn("user", "Straße?")]
CHAT = [*CHAT, turn("assistant", "  東京\n")]


def test_the_turns_of_the_assistant_are_learned() -> None:
    found = TokenizeChat(BPE, chat_template=CHATML)({"messages": CHAT, "id": "7"})
    assert {name: (leaf.dtype, leaf.ndim) for name, leaf in found.items()} == {
        "tokens": (np.int32, 1),
        "loss_mask": (np.bool_, 1),
    }
    assert decoded(found["tokens"]) == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"
        "<|im_start|>user\nStraße?<|im_end|>\n<|im_start|>assistant\n東京<|im_end|>\n"
    )
    assert decoded(found["tokens"][found["loss_mask"]]) == "Two.<|im_end|>\n東京<|im_end|>\n"


CONTENTS = st.text(st.sampled_from("abc ?.\n\tß東e\u0301🙂"), max_size=12)


@given(st.data(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_marks_are_what_transformers_returns(data: st.DataObject, trims: bool) -> None:
    transformers = pytest.importorskip("transformers")
    backend = bpe(trims)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=MARKED
    )
    pairs = data.draw(st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=4))
    messages = [turn(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    wanted = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    found = TokenizeChat(theirs)({"messages": messages})
    assert found["tokens"].tolist() == wanted["input_ids"]
    mask = np.array(wanted["assistant_masks"], bool)
    if trims:  # theirs leaves out a span whose first character is a space without an offset
        assert not (mask & ~found["loss_mask"]).any()
    else:
        assert found["loss_mask"].tolist() == mask.tolist()
    learned = "".join(message["content"] + "<|im_end|>" for message in messages[1::2])
    assert decoded(found["tokens"][found["loss_mask"]]) == learned


@given(st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_marks_are_not_needed_if_the_beginning_stays_the_same(pairs: list[tuple[str, str]]) -> None:
    messages = [turn(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    found = TokenizeChat(BPE, chat_template=CHATML)({"messages": messages})
    learned = "".join(message["content"].strip() + "<|im_end|>\n" for message in messages[1::2])
    assert decoded(found["tokens"][found["loss_mask"]]) == learned


# What published templates use: namespaces, macros, loop controls, white space control, filters and tests of Jinja.
PUBLISHED = """
{%- macro date() %}{{ strftime_now('%d %b %Y') if with_date is defined else 'no date' }}{% endmacro %}
{{- bos_token }}
{%- set ns = namespace(system='You help.', count=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\\n' ~ ns.system ~ ' ' ~ date() ~ '<|im_end|>\\n' }}
{%- if tools is not none %}
{{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- '\\n' if not loop.last }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' and not loop.first and loop.previtem.role == 'tool' %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[' ~ call.function.name ~ ' ' ~ call.function.arguments | tojson ~ ']' }}
        {%- endfor %}
    {%- else %}
        {{- message.content if message.content is string else message.content | map(attribute='text') | join(' ') }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds <b> & 'c' \"é\".", "parameters": {"a": [1, 2]}},
    }
]
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "<é>"}}}],
}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("template", [PUBLISHED, CHATML, MARKED])
def test_text_is_what_transformers_renders(template: str, tools: Any) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe(), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    answers = [turn("tool", "3"), turn("tool", "again"), turn("assistant", " It is <3>. ")]
    for messages in (CHAT, CHAT[1:3], [*CHAT[:2], CALL | {"content": ""}, *answers]):
        wanted = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        own = TokenizeChat(theirs)._template
        assert own is not None
        assert own.render(messages, tools)[0] == wanted
        prompt = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert own.render(messages, tools, add_generation_prompt=True)[0] == prompt


def test_a_template_whose_beginning_changes_is_refused_unless_it_has_marks() -> None:
    messages = [*CHAT[:2], turn("assistant", "<think>hm</think>Two."), *CHAT[3:]]
    with pytest.raises(ValueError, match=r"first 3 of 5 messages .* \(from character 90: .*generation %") as error:
        TokenizeChat(BPE, chat_template=FORGETS)({"messages": messages})
    assert "chat_template=" in str(error.value)
    marked = FORGETS.replace("{{ text }}<|im_end|>", "{% generation %}{{ text }}<|im_end|>{% endgeneration %}")
    found = TokenizeChat(BPE, chat_template=marked)({"messages": CHAT[:3]})
    assert decoded(found["tokens"][found["loss_mask"]]) == "Count.<|im_end|>One?<|im_end|>Two.<|im_end|>"


def test_marks_within_a_macro_are_refused() -> None:
    macro = (
        "{% macro show(message) %}{{ message.role }}: {% generation %}{{ message.content }}{% endgeneration %}{% endmacro %}"
        "{% for message in messages %}{{ show(message) }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="within a macro"):
        TokenizeChat(BPE, chat_template=macro)({"messages": CHAT[:3]})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_completions_are_learned_and_answers_in_the_prompt_are_not(template: str) -> None:
    tokenize = TokenizeChat(BPE, chat_template=template, template_variables={"bos_token": "<s>"})
    found = tokenize({"prompt": CHAT[:4], "completion": [turn("assistant", "Kyoto")]})
    end = "<|im_end|>\n" if template == CHATML else "<|im_end|>"
    assert decoded(found["tokens"][found["loss_mask"]]) == f"Kyoto{end}"
    assert decoded(found["tokens"]).endswith("<|im_start|>assistant\nKyoto<|im_end|>\n")


HEAD_MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
    "{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_marks_may_begin_before_the_head_of_the_turn() -> None:
    tokenize = TokenizeChat(BPE, chat_template=HEAD_MARKED)

    def learned(**record: Any) -> str:
        found = tokenize(record)
        return decoded(found["tokens"][found["loss_mask"]])

    assert learned(messages=CHAT[:3]) == "<|im_start|>assistant\nTwo.<|im_end|>\n"
    assert learned(prompt=CHAT[:2], completion=CHAT[2:3]) == "Two.<|im_end|>\n"
    two = [*CHAT[2:4], turn("assistant", "Kyoto")]
    assert learned(prompt=CHAT[:2], completion=two) == "Two.<|im_end|>\n<|im_start|>assistant\nKyoto<|im_end|>\n"
    pair = tokenize({"prompt": CHAT[:2], "chosen": CHAT[2:3], "rejected": [turn("assistant", "No.")]})
    assert decoded(pair["chosen"][pair["chosen_start"] :]) == "Two.<|im_end|>\n"


def test_the_head_of_a_second_turn_in_a_row_is_not_learned() -> None:
    tokenize, second = TokenizeChat(BPE, chat_template=CHATML), turn("assistant", "Three.")
    found = tokenize({"messages": [*CHAT[:3], second]})
    assert decoded(found["tokens"][found["loss_mask"]]) == "Two.<|im_end|>\nThree.<|im_end|>\n"
    found = tokenize({"prompt": CHAT[:3], "completion": [second]})
    assert decoded(found["tokens"][found["loss_mask"]]) == "Three.<|im_end|>\n"
    # A template that joins the turns gives the second no head.
    joins = (
        "{% for message in messages %}{% if message.role != 'assistant' or loop.previtem.role != 'assistant' %}"
        "<|im_start|>{{ message.role }}\n{% endif %}{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found = TokenizeChat(BPE, chat_template=joins)({"prompt": CHAT[:3], "completion": [second]})
    assert decoded(found["tokens"][found["loss_mask"]]) == "Three."


@pytest.mark.parametrize("of", ["tokenizers", "transformers"])
def test_special_tokens_in_a_text_are_split_if_the_tokenizer_does(of: str) -> None:
    split = bpe()
    if of == "tokenizers":
        split.encode_special_tokens = True
    else:
        transformers = pytest.importorskip("transformers")
        split = transformers.PreTrainedTokenizerFast(tokenizer_object=split, split_special_tokens=True)
    record = {"prompt": "say </s> twice", "completion": "ok"}
    end = BPE.token_to_id("</s>")
    for tokenize in (made := TokenizeChat(split, eos_token=""), pickle.loads(pickle.dumps(made))):
        assert end not in tokenize(record)["tokens"]
        assert decoded(tokenize(record)["tokens"]) == "say </s> twiceok"
    assert end in TokenizeChat(BPE, eos_token="")(record)["tokens"]


def test_a_tool_that_answers_within_a_completion_is_not_learned() -> None:
    completion = [turn("assistant", "Call."), turn("tool", "42"), turn("assistant", "It is 42.")]
    found = TokenizeChat(BPE, chat_template=CHATML)({"prompt": CHAT[:2], "completion": completion})
    assert decoded(found["tokens"][found["loss_mask"]]) == "Call.<|im_end|>\nIt is 42.<|im_end|>\n"


def test_texts_are_put_end_to_end_and_end_once() -> None:
    tokenize = TokenizeChat(BPE, eos_token="</s>")
    found = tokenize({"prompt": "One?", "completion": " Two."})
    assert decoded(found["tokens"]) == "One? Two.</s>"
    assert decoded(found["tokens"][found["loss_mask"]]) == " Two.</s>"
    ended = tokenize({"prompt": "One?", "completion": " Two.</s>"})
    assert ended["tokens"].tolist() == found["tokens"].tolist()
    adds_both = bpe()
    adds_both.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    whole = TokenizeChat(adds_both, eos_token="</s>")({"prompt": "One?", "completion": " Two."})
    assert decoded(whole["tokens"]) == "<s>One? Two.</s>"
    assert decoded(whole["tokens"][whole["loss_mask"]]) == " Two.</s>"
    bare = TokenizeChat(BPE, eos_token="")({"prompt": "One?", "completion": " Two."})
    assert decoded(bare["tokens"]) == "One? Two."
    with pytest.raises(ValueError, match="eos_token='</s>'"):
        TokenizeChat(BPE)({"prompt": "One?", "completion": " Two."})


def test_a_token_across_the_border_belongs_to_the_answer() -> None:
    tokenize = TokenizeChat(BPE, eos_token="")
    for border in range(len(TEXT)):
        found = tokenize({"prompt": TEXT[:border], "completion": TEXT[border:]})
        assert found["tokens"].tolist() == BPE.encode(TEXT).ids, "one tokenization of the whole"
        before = decoded(found["tokens"][~found["loss_mask"]])
        assert TEXT[:border].startswith(before)
        assert len(BPE.encode(TEXT[len(before) :]).tokens) == found["loss_mask"].sum()


def test_preferences_are_two_leaves_that_know_where_the_answer_begins() -> None:
    tokenize = TokenizeChat(BPE, chat_template=CHATML)
    answers = {"chosen": [turn("assistant", "Two.")], "rejected": [turn("assistant", "東京 and words")]}
    record = {"prompt": CHAT[:2], **answers}
    found = tokenize(record)
    for name, answer in answers.items():
        assert decoded(found[name]).endswith(
            f"One?<|im_end|>\n<|im_start|>assistant\n{answer[0]['content']}<|im_end|>\n"
        )
        assert decoded(found[name][found[f"{name}_start"] :]) == f"{answer[0]['content']}<|im_end|>\n"
    implicit = tokenize({name: [*CHAT[:2], *answer] for name, answer in answers.items()})
    assert {name: leaf.tolist() for name, leaf in implicit.items()} == {n: leaf.tolist() for n, leaf in found.items()}
    texts = TokenizeChat(BPE, eos_token="</s>")({"prompt": "One?", "chosen": " Two.", "rejected": " Three."})
    assert decoded(texts["rejected"][texts["rejected_start"] :]) == " Three.</s>"
    row = Padded(Map([record], tokenize), {"chosen": 64, "rejected": 64})[0]
    assert {name: leaf.shape for name, leaf in row.items()} == {
        **dict.fromkeys(("chosen", "chosen_mask", "rejected", "rejected_mask"), (64,)),
        **dict.fromkeys(("chosen_start", "rejected_start"), ()),
    }


def test_answers_that_differ_only_in_their_last_message_keep_it() -> None:
    same = [*CHAT[:2], turn("assistant", "Two.")]
    found = TokenizeChat(BPE, chat_template=CHATML)({"chosen": same, "rejected": same})
    assert decoded(found["chosen"][found["chosen_start"] :]) == "Two.<|im_end|>\n"


def test_files_beside_the_tokenizer_have_its_template_and_special_tokens(tmp_path: pathlib.Path) -> None:
    BPE.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": MARKED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    wanted = TokenizeChat(BPE, chat_template=MARKED, template_variables={"bos_token": "<s>"})({"messages": CHAT})
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        found = TokenizeChat(path)({"messages": CHAT})
        assert decoded(found["tokens"]).startswith("<s><|im_start|>")
        np.testing.assert_array_equal(found["loss_mask"], wanted["loss_mask"])
    several = [{"name": "tool_use", "template": "x{{ 1 }}"}, {"name": "default", "template": CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert decoded(TokenizeChat(tmp_path)({"messages": CHAT})["tokens"]).startswith("<|im_start|>system")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")  # newer versions write it
    assert decoded(TokenizeChat(tmp_path)({"messages": CHAT[:1]})["tokens"]) == "Count."
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several[:1]}))
    with pytest.raises(meshfeed.SettingsError, match=r"\['tool_use'\], and none named 'default'"):
        TokenizeChat(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(meshfeed.SettingsError, match=r"tokenizer_config\.json is not a JSON object"):
        TokenizeChat(tmp_path)


def test_padding_and_truncation_of_the_tokenizer_are_left_out_of_a_copy() -> None:
    own = bpe()
    own.enable_truncation(4)
    own.enable_padding(length=300)
    found = TokenizeChat(own, chat_template=CHATML)({"messages": CHAT})
    np.testing.assert_array_equal(
        found["tokens"], TokenizeChat(BPE, chat_template=CHATML)({"messages": CHAT})["tokens"]
    )
    assert own.truncation is not None
    assert own.padding is not None


def test_tools_variables_and_dates_reach_the_template() -> None:
    template = (
        "{{ tools | tojson }} {{ mood }} {{ strftime_now('%d %b %Y') }}"
        "{% for message in messages %}{{ message.content }}{% if message.tool_calls is defined %}calls{% endif %}"
        "{% break %}{% endfor %}"
    )
    tokenize = TokenizeChat(
        BPE, chat_template=template, template_variables={"mood": "<&>"}, date=datetime.date(2026, 7, 1)
    )
    tools = [{"name": "é", "of": None}]
    for given_tools in (tools, json.dumps(tools)):
        record = {"messages": [{**turn("user", "One?"), "tool_calls": None}], "tools": given_tools}
        assert decoded(tokenize(record)["tokens"]) == '[{"name": "é"}] <&> 01 Jul 2026One?'
    with pytest.raises(ValueError, match=r"'strftime_now' is undefined\. Pass date="):
        TokenizeChat(BPE, chat_template=template)({"messages": CHAT})


def test_a_copy_in_a_worker_gives_the_same() -> None:
    tokenize = TokenizeChat(BPE, chat_template=CHATML, date=datetime.date(2026, 1, 1))
    copy = pickle.loads(pickle.dumps(tokenize))
    for name, leaf in tokenize({"messages": CHAT}).items():
        np.testing.assert_array_equal(leaf, copy({"messages": CHAT})[name])


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (7, "a chat is int"),
        ({"conversations": []}, r"\['conversations'\]\. Expected messages; .*Rename yours"),
        ({"messages": [], "prompt": "a", "completion": "b"}, "prompt and completion, and also messages"),
        ({"messages": "One?"}, r"'messages' is 'One\?'\. Expected a list of messages"),
        ({"messages": [{"from": "human", "value": "One?"}]}, "Expected a list of messages"),
        ({"messages": {"role": ["user", "assistant"], "content": ["One?", "1"]}}, "Expected a list of messages"),
        ({"prompt": "One?", "completion": CHAT[2:3]}, "'prompt': 'text', 'completion': 'messages'"),
        ({"prompt": CHAT[:2], "completion": 7}, "'completion' is 7"),
        ({"chosen": "a", "rejected": "b"}, "no 'prompt'"),
        ({"prompt": CHAT[:1], "chosen": CHAT[1:2], "rejected": CHAT[1:3]}, "'chosen' has nothing that the assistant"),
        ({"messages": CHAT, "tools": "{bad"}, r"'tools' is a text that is not JSON: .*It begins with '\{bad'"),
        ({"messages": [turn("user", "a\ud800b")]}, r"character 18 is '\\ud800', half of a surrogate pair"),
    ],
)
def test_other_records_are_refused(record: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenizeChat(BPE, chat_template=CHATML, eos_token="</s>")(record)


def test_what_the_template_refuses_is_an_error_with_its_words() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    with pytest.raises(ValueError, match=r"roles \['system', .*begin with the user"):
        TokenizeChat(BPE, chat_template=template)({"messages": CHAT})
    with pytest.raises(ValueError, match=r"cannot render messages of the roles .*by zero"):
        TokenizeChat(BPE, chat_template="{{ 1 // 0 }}")({"messages": CHAT})
    with pytest.raises(ValueError, match="has no chat template"):
        TokenizeChat(BPE)({"messages": CHAT})


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"{}", b"not JSON", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(meshfeed.SettingsError) as error:
            TokenizeChat(path, chat_template=CHATML)
        assert str(error.value).startswith(f"{path} is not a tokenizer of Hugging Face tokenizers: ")
        assert str(error.value).endswith(f": {error.value.__cause__}. Give a tokenizer.json.")
        assert error.value.setting == "tokenizer"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer": 7}, "tokenizer=7"),
        ({"tokenizer": "gpt2"}, "there is no tokenizer file 'gpt2'"),
        ({"chat_template": "{% if %}"}, "line 1"),
        ({"chat_template": "chat_template.jinja"}, "read_text"),
        ({"date": "today"}, "datetime.date"),
        ({"eos_token": "<eos>"}, "'<eos>' is not a token"),
        ({"key": "loss_mask"}, "two different names"),
    ],
)
def test_settings_are_checked_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(meshfeed.SettingsError, match=words):
        TokenizeChat(**{"tokenizer": BPE, **settings})


def test_packed_chats_keep_their_masks() -> None:
    chats = [{"messages": CHAT[: 3 + 2 * (number % 2)]} for number in range(20)]
    packed = Packed(Map(chats, TokenizeChat(BPE, chat_template=CHATML)), 96, method="fit")
    learned = []
    for row in (packed[number] for number in range(len(packed))):
        for segment in range(1, row["segment_ids"].max() + 1):
            learned.append(decoded(row["tokens"][(row["segment_ids"] == segment) & row["loss_mask"]]))
    assert sorted(learned) == sorted(["Two.<|im_end|>\n"] * 10 + ["Two.<|im_end|>\n東京<|im_end|>\n"] * 10)

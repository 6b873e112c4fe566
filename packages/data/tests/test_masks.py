# ruff: noqa: E501 (templates read better in long lines)
"""Masks from the rendering of any template: templates here imitate families of models, none is known to the package."""

import copy
import json

import pytest
from posttrain_data import (
    DataError,
    SFTDataOptions,
    prepare_feedback,
    prepare_preferences,
    prepare_sft,
    render,
    terminators,
    tiny_tokenizer,
)
from posttrain_data.sft import SFTRows

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# system text is written before the LAST user turn, as are tools: prefixes of a conversation are no prefixes of the text
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- bos_token }}"
    "{%- for m in loop_messages %}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if m['role'] == 'user' %}"
    "{%- if loop.last or loop.index0 == loop_messages | length - 2 %}"
    "{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- if system is defined %}{{- '[INST] ' + system + '\n\n' + m['content'] + ' [/INST]' }}"
    "{%- else %}{{- '[INST] ' + m['content'] + ' [/INST]' }}{%- endif %}"
    "{%- else %}{{- '[INST] ' + m['content'] + ' [/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + m['content'] + eos_token }}{%- endif %}"
    "{%- endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = m['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# thinking is shown after the last user message alone; without any, an empty block is written there
QWEN3 = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- set content = m.content if m.content is string else '' %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set thinking = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thinking = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thinking = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thinking) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}"
    "{%- if c.function %}{%- set c = c.function %}{%- endif %}"
    '{{- \'\n<tool_call>\n{"name": "\' + c.name + \'", "arguments": \' }}'
    "{%- if c.arguments is string %}{{- c.arguments }}{%- else %}{{- c.arguments | tojson }}{%- endif %}"
    "{{- '}\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# the whole message inside the markers, its header too
MARKED_WIDE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIM = CHATML.replace("m['content']", "m['content'] | trim")
# refuses anything that does not end with an assistant, unless a generation prompt is asked for
WHOLE_ONLY = (
    "{% if messages[-1]['role'] != 'assistant' and not add_generation_prompt %}"
    "{{ raise_exception('the conversation must end with the assistant') }}{% endif %}" + CHATML
)
# refuses every conversation of fewer than four messages
LONG_ONLY = "{% if messages | length < 4 %}{{ raise_exception('too short') }}{% endif %}" + CHATML
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
# no end-of-turn token: the next header ends a turn
GLM4 = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# another token ends a turn that another follows than ends the last one
HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] }}"
    "{% if loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% else %}{{ '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SPECIALS = (
    "<s> </s> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
    "<start_of_turn> <end_of_turn> <|end|> <|user|> <|assistant|> <|system|> [gMASK] <sop> <|start|> <|channel|> "
    "<|message|> <|return|>"
).split()

SAY = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "It is four. Grüße, 👋🏽!"},
    {"role": "user", "content": "It is four.? Are you sure?"},
    {"role": "assistant", "content": "Yes"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
IM = "<|im_end|>"
FAMILIES = {
    "chatml": (CHATML, [IM, IM]),
    "llama3": (LLAMA3, ["<|eot_id|>", "<|eot_id|>"]),
    "mistral": (MISTRAL, ["</s>", "</s>"]),
    "gemma": (GEMMA, ["<end_of_turn>", "<end_of_turn>"]),
    "qwen3": (QWEN3, [IM, IM]),
    "marked": (MARKED, [IM, IM]),
    "marked_wide": (MARKED_WIDE, [IM, IM]),
    "trim": (TRIM, [IM, IM]),
    "whole_only": (WHOLE_ONLY, [IM, IM]),
    "phi3": (PHI3, ["<|end|>", "<|end|>\n<|endoftext|>"]),
    "glm4": (GLM4, ["", "</s>"]),
    "harmony": (HARMONY, ["<|end|>", "<|return|>"]),
}
EOS = {"mistral": "</s>", "glm4": "</s>", "llama3": "<|eot_id|>"}


@pytest.fixture(scope="module")
def base():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS, "bos_token": "<s>"})
    return tokenizer


def made(base, family, template=None):
    tokenizer = copy.deepcopy(base)
    tokenizer.chat_template = template or FAMILIES[family][0]
    tokenizer.eos_token = EOS.get(family, IM)
    return tokenizer


def prepared(tokenizer, rows, **options):
    return prepare_sft(rows, tokenizer, SFTDataOptions(**{"assistant_only": True, **options}), cache_dir=False)


def masked(tokenizer, row):
    """The text of the targets, one string for each run of them."""
    runs, last = [], -2
    for place, (token, target) in enumerate(zip(row["input_ids"], row["loss_mask"], strict=True)):
        if target:
            if place != last + 1:
                runs.append([])
            runs[-1].append(token)
            last = place
    return [tokenizer.decode(run) for run in runs]


def answers(messages):
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [False, True])
def test_targets_are_the_answers_and_their_ends(base, family, system):
    if system and family == "gemma":
        pytest.skip("this template refuses a system message")
    tokenizer = made(base, family)
    messages = ([SYSTEM] if system else []) + SAY
    result = prepared(tokenizer, [{"messages": messages}])
    row = result.dataset[0]
    thought = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
    space = " " if family == "mistral" else ""
    ends = FAMILIES[family][1]
    if family == "glm4":
        space = "\n"
    if family == "harmony":
        thought = "<|channel|>final<|message|>"
        wanted = [thought + text + end for text, end in zip(answers(messages), ends, strict=True)]
    else:
        wanted = [space + answers(messages)[0] + ends[0], space + thought + answers(messages)[1] + ends[1]]
    assert masked(tokenizer, row) == wanted
    assert result.report.target_tokens == sum(row["loss_mask"])
    assert result.report.tokens == len(row["input_ids"])
    expected = tokenizer.apply_chat_template(messages, return_dict=False)
    assert row["input_ids"][: len(expected)] == expected
    assert row["input_ids"][len(expected) :] == ([tokenizer.eos_token_id] if family == "glm4" else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_tokens_are_never_targets(base, family):
    """What a sampler is given for the last turn holds no target of that turn."""
    tokenizer = made(base, family)
    row = prepared(tokenizer, [{"messages": SAY}], train_on="last").dataset[0]
    prompt = render(tokenizer, SAY[:-1], add_generation_prompt=True)
    assert row["input_ids"][: len(prompt)] == prompt
    assert not any(row["loss_mask"][: len(prompt)])
    assert row["loss_mask"][len(prompt)]


@pytest.mark.parametrize("family", FAMILIES)
def test_completion_only_and_last_agree(base, family):
    tokenizer = made(base, family)
    last = prepared(tokenizer, [{"messages": SAY}], train_on="last").dataset[0]
    pair = prepared(tokenizer, [{"prompt": SAY[:-1], "completion": SAY[-1:]}], assistant_only=False).dataset[0]
    assert pair == last


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_split_where_a_sampler_starts_and_end_where_it_stops(base, family):
    tokenizer = made(base, family)
    rejected = {"role": "assistant", "content": "No"}
    pair = {"prompt": SAY[:-1], "chosen": SAY[-1:], "rejected": [rejected]}
    row = prepare_preferences([pair], tokenizer, cache_dir=False).dataset[0]
    assert row["prompt_ids"] == render(tokenizer, SAY[:-1], add_generation_prompt=True)
    for column, answer in (("chosen_ids", SAY[-1]), ("rejected_ids", rejected)):
        sft = prepared(tokenizer, [{"messages": [*SAY[:-1], answer]}], train_on="last").dataset[0]
        last = max(place for place, target in enumerate(sft["loss_mask"]) if target)
        assert row["prompt_ids"] + row[column] == sft["input_ids"][: last + 1]
        assert len(row[column]) == sum(sft["loss_mask"])
    whole = {"chosen": SAY, "rejected": [*SAY[:-1], rejected]}
    assert prepare_preferences([whole], tokenizer, cache_dir=False).dataset[0] == row
    feedback = prepare_feedback([{"messages": SAY, "label": False}], tokenizer, cache_dir=False).dataset[0]
    assert feedback == {"prompt_ids": row["prompt_ids"], "completion_ids": row["chosen_ids"], "label": False}


def test_pairs_that_a_template_rewrites_are_refused_by_row(base):
    """Thinking that the prompt opens and the conversation drops, and thinking of a turn that is not the last."""
    good = {"prompt": SAY[:1], "chosen": SAY[3:], "rejected": SAY[1:2]}
    template = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]").replace(
        "assistant\n' }}", "assistant\n<think>\n' }}"
    )
    with pytest.raises(DataError, match="(?s)^train: row 0: the prompt that a sampler gets is not what.*<think>"):
        prepare_preferences([good], made(base, "", template), cache_dir=False)
    thought = {"role": "assistant", "content": "It is", "reasoning_content": "Adding"}
    pair = {"prompt": SAY[:1], "chosen": [thought, SAY[2], SAY[3]], "rejected": SAY[1:2]}
    with pytest.raises(DataError, match=r"^train: row 1: messages\[1\]: the chat template hides or rewrites the 'reas"):
        prepare_preferences([good, pair], made(base, "qwen3"), cache_dir=False)
    earlier = {"prompt": [SAY[0], thought, SAY[2]], "chosen": [thought], "rejected": [SAY[3]]}
    tokenizer = made(base, "qwen3")
    row = prepare_preferences([earlier], tokenizer, cache_dir=False).dataset[0]
    assert "Adding" not in tokenizer.decode(row["prompt_ids"])
    assert tokenizer.decode(row["chosen_ids"]) == "<think>\nAdding\n</think>\n\nIt is" + IM


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral", "gemma", "marked", "trim", "phi3"])
@pytest.mark.parametrize(
    "content", ["", "x", " \n lots of space \t\n", "日本語 🧑‍🚀\u0301", "assistant\n", "a" * 20_000, "Qz"]
)
def test_odd_contents(base, family, content):
    tokenizer = made(base, family)
    messages = [*copy.deepcopy(SAY[:3]), {"role": "assistant", "content": content}]
    row = prepared(tokenizer, [{"messages": messages}], train_on="last", max_length=None).dataset[0]
    end = FAMILIES[family][1][1]
    (text,) = masked(tokenizer, row)
    assert text.endswith(end)
    assert text.removesuffix(end).strip() == content.strip()


def test_the_end_of_turn_is_a_target_even_where_the_author_left_it_out(base):
    tokenizer = made(base, "marked")
    assert masked(tokenizer, prepared(tokenizer, [{"messages": SAY}]).dataset[0])[0].endswith(IM)


@pytest.mark.parametrize("family", ["chatml", "llama3", "gemma", "marked", "marked_wide", "whole_only", "phi3"])
def test_contents_that_look_like_the_template(base, family):
    tokenizer = made(base, family)
    pieces = [
        "",
        "\n",
        " ",
        "a",
        "assistant",
        IM,
        IM + "\n",
        "<|im_start|>assistant\n",
        "é",
        "👋🏽",
        "<",
        "<|eot_id|>",
        "</s>",
    ]
    contents = [one + other for one in pieces for other in pieces]
    end, last_end = FAMILIES[family][1]
    for first, second, third in zip(contents[::3], contents[1::3], contents[2::3], strict=False):
        messages = copy.deepcopy(SAY)
        messages[1]["content"], messages[2]["content"], messages[3]["content"] = first, second, third
        row = prepared_row(tokenizer, messages)
        texts = [text.strip() if family in ("llama3", "gemma") else text for text in (first, third)]
        wanted = texts[0] + end + texts[1] + last_end
        assert "".join(masked(tokenizer, row)).replace("\n", "") == wanted.replace("\n", "")


def prepared_row(tokenizer, messages):
    """One row without the cost of a data set."""
    maker = SFTRows(tokenizer, SFTDataOptions(assistant_only=True), "train")
    return maker([{"messages": messages}], [0])[0][0].columns


def test_markers_narrow_the_targets(base):
    template = MARKED.replace("{% if m['role'] == 'assistant' %}", "{% if m['role'] == 'assistant' and loop.last %}")
    tokenizer = made(base, "", template)
    assert masked(tokenizer, prepared(tokenizer, [{"messages": SAY}]).dataset[0]) == ["Yes" + IM]


def test_thinking_in_the_last_turn_is_trained(base):
    tokenizer = made(base, "qwen3")
    for last in (
        {"role": "assistant", "content": "Yes", "reasoning_content": "Let me see"},
        {"role": "assistant", "content": "<think>Let me see</think>Yes"},
    ):
        row = prepared(tokenizer, [{"messages": [*SAY[:3], last]}]).dataset[0]
        assert masked(tokenizer, row)[1] == "<think>\nLet me see\n</think>\n\nYes" + IM


def test_thinking_that_the_template_drops_refuses_the_row(base):
    tokenizer = made(base, "qwen3")
    messages = copy.deepcopy(SAY)
    messages[1]["reasoning_content"] = "One and one"
    good = {"messages": SAY}
    with pytest.raises(DataError, match=r"train: row 1: messages\[1\].*reasoning_content.*One and one"):
        prepared(tokenizer, [good, {"messages": messages}])
    assert masked(tokenizer, prepared(tokenizer, [{"messages": messages}], train_on="last").dataset[0])
    messages[1] = {"role": "assistant", "content": "<think>One and one</think>Four"}
    with pytest.raises(DataError, match=r"row 0: messages\[1\].*rewrites the content"):
        prepared(tokenizer, [{"messages": messages}])


def test_what_the_generation_prompt_writes_is_no_target(base):
    tokenizer = made(base, "qwen3")
    row = {"messages": SAY, "chat_template_kwargs": {"enable_thinking": False}}
    assert masked(tokenizer, prepared(tokenizer, [row]).dataset[0]) == [SAY[1]["content"] + IM, "Yes" + IM]
    both = prepared(tokenizer, [row, {"messages": SAY}])
    assert sum(both.dataset[1]["loss_mask"]) > sum(both.dataset[0]["loss_mask"])
    option = prepared(tokenizer, [{"messages": SAY}], chat_template_kwargs={"enable_thinking": False})
    assert option.dataset[0] == both.dataset[0]


def test_a_generation_prompt_that_opens_thinking(base):
    """Earlier turns have no thinking, the last one starts inside the block that the prompt has opened."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% set content = m['content'] %}"
        "{% if m['role'] == 'assistant' and '</think>' in content %}"
        "{% if loop.last %}{{ '<think>\n' }}{% set content = content.split('<think>')[-1].lstrip() %}"
        "{% else %}{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}{% endif %}"
        "{{ content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    tokenizer = made(base, "", template)
    messages = [*SAY[:3], {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes"}]
    row = prepared(tokenizer, [{"messages": messages}]).dataset[0]
    assert masked(tokenizer, row) == [SAY[1]["content"] + IM, "Hm\n</think>\n\nYes" + IM]


def test_rewritten_content_refuses_the_row(base):
    tokenizer = made(base, "", CHATML.replace("m['content']", "m['content'] | upper"))
    with pytest.raises(DataError, match=r"row 0: messages\[1\].*hides or rewrites the content"):
        prepared(tokenizer, [{"messages": SAY}])
    assert sum(prepared(tokenizer, [{"messages": SAY}], assistant_only=False).dataset[0]["loss_mask"]) > 10


def test_template_that_refuses_short_conversations(base):
    tokenizer = made(base, "", LONG_ONLY)
    assert masked(tokenizer, prepared(tokenizer, [{"messages": SAY}]).dataset[0])[1] == "Yes" + IM


def test_moving_system_and_tools(base):
    """Mistral writes system text and tools before the last user turn: an earlier turn's prompt is no prefix."""
    tokenizer = made(base, "mistral")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"messages": [SYSTEM, *SAY], "tools": tools}
    text = masked(tokenizer, prepared(tokenizer, [row]).dataset[0])
    assert text == [" " + SAY[1]["content"] + "</s>", " Yes</s>"]


def test_template_without_special_tokens(base):
    tokenizer = made(base, "", PLAIN)
    result = prepared(tokenizer, [{"messages": SAY}])
    assert masked(tokenizer, result.dataset[0]) == [" " + SAY[1]["content"] + "\n", " Yes\n" + IM]
    assert "eos_token is appended" in str(result.report)


def test_tool_calls(base):
    tokenizer = made(base, "qwen3")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1, None], "c": 'é"x'}}}
    text_call = copy.deepcopy(call)
    text_call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    rows = []
    for one in (call, text_call, call["function"], text_call["function"]):
        messages = [
            SAY[0],
            {"role": "assistant", "content": None, "tool_calls": [one]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "Four"},
        ]
        rows += [{"messages": messages}, {"messages": json.dumps(messages)}]
    result = prepared(tokenizer, rows)
    assert all(row == result.dataset[0] for row in result.dataset)
    arguments = '{"a": 2, "b": [1, null], "c": "é\\"x"}'
    first = '\n<tool_call>\n{"name": "add", "arguments": ' + arguments + "}\n</tool_call>" + IM
    assert masked(tokenizer, result.dataset[0]) == [first, "<think>\n\n</think>\n\nFour" + IM]


def test_templates_that_join_arguments_as_text(base):
    joined = QWEN3.replace(
        "{%- if c.arguments is string %}{{- c.arguments }}{%- else %}{{- c.arguments | tojson }}{%- endif %}",
        "{{- '' + c.arguments }}",
    )
    shown = joined.replace("'' + c.arguments", "c.arguments")
    messages = [
        SAY[0],
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": True}}]},
        {"role": "tool", "content": "4"},
    ]
    for template in (joined, shown):
        text = masked(made(base, "", template), prepared(made(base, "", template), [{"messages": messages}]).dataset[0])
        assert '"arguments": {"a": true}}' in text[0]


def test_calls_become_content_where_the_template_has_none(base):
    tokenizer = made(base, "chatml")
    rows = [
        {
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "Four"},
            ],
            "tools": '[{"name": "add", "parameters": {}}]',
        }
    ]
    result = prepared(tokenizer, rows)
    assert masked(tokenizer, result.dataset[0]) == ['{"name": "add", "arguments": {"a": 2}}' + IM, "Four" + IM]
    assert "does not show tools" in str(result.report) and "no tool calls" in str(result.report)


def test_slow_tokenizers_get_the_same_masks(base):
    """Without offsets, the tokens of prefixes are compared."""

    class Slow:
        is_fast = False

        def __init__(self, tokenizer):
            self.inner = tokenizer

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __call__(self, texts, add_special_tokens=True, verbose=True):
            return self.inner(texts, add_special_tokens=add_special_tokens)

    for family in FAMILIES:
        tokenizer = made(base, family)
        fast = prepared(tokenizer, [{"messages": SAY}]).dataset[0]
        slow = prepare_sft([{"messages": SAY}], Slow(tokenizer), SFTDataOptions(assistant_only=True), cache_dir=False)
        assert slow.dataset[0] == fast, family


def test_a_token_across_the_border_is_a_target(base):
    """The header's line end and the answer's first one are one token; the sampler has to write half of it."""
    tokenizer = tiny_tokenizer()
    text = "ab"
    assert len(tokenizer(text)["input_ids"]) in (1, 2)
    word = next(w for w in ("the", "is", "an", "in", "to") if len(tokenizer(w)["input_ids"]) == 1)
    result = prepare_sft([{"prompt": word[0], "completion": word[1:]}], tokenizer, cache_dir=False)
    assert result.report.rows_kept == 1
    row = prepare_sft([{"prompt": "x " + word[0], "completion": word[1:]}], tokenizer, cache_dir=False).dataset[0]
    assert tokenizer.decode([t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]).strip() == (
        word + IM
    )


def test_terminators(base):
    def ends(family):
        tokenizer = made(base, family)
        return tokenizer.convert_ids_to_tokens(terminators(tokenizer))

    assert ends("chatml") == [IM]
    assert ends("llama3") == ["<|eot_id|>"]
    assert ends("gemma") == ["<end_of_turn>", IM]
    assert ends("phi3") == ["<|end|>", "<|endoftext|>", IM]
    assert ends("glm4") == ["</s>"]
    assert ends("harmony") == ["<|return|>", "<|end|>", IM]
    assert ends("qwen3") == [IM]


def test_render_is_what_transformers_renders(base):
    tools = [{"type": "function", "function": {"name": "add", "description": "x", "parameters": {}}}]
    for family in FAMILIES:
        tokenizer = made(base, family)
        for prompt in (False, True):
            if family == "whole_only" and not prompt:
                continue
            for given in (None, tools):
                ours = render(tokenizer, SAY[:3], tools=given, add_generation_prompt=prompt)
                theirs = tokenizer.apply_chat_template(
                    SAY[:3], tools=given, add_generation_prompt=prompt, return_dict=False
                )
                assert ours == theirs, family
    tokenizer = made(base, "qwen3")
    assert render(tokenizer, SAY, tools=[]) == render(tokenizer, SAY) == render(tokenizer, SAY, tools="[]")
    assert render(tokenizer, SAY, tools=json.dumps(tools)) == render(tokenizer, SAY, tools=tools)
    assert render(tokenizer, SAY, tools=[tools[0]["function"]]) == render(tokenizer, SAY, tools=tools)
    with pytest.raises(DataError, match="add_generation_prompt"):
        render(tokenizer, SAY, chat_template_kwargs={"add_generation_prompt": True})


def test_templates_that_take_content_in_parts(base):
    template = CHATML.replace(
        "+ m['content'] + '<|im_end|>\n' }}",
        "}}{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}",
    )
    tokenizer = made(base, "", template)
    plain = prepared(tokenizer, [{"messages": SAY}]).dataset[0]
    assert masked(tokenizer, plain)[1] == "Yes" + IM
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in SAY]
    assert prepared(tokenizer, [{"messages": parts}]).dataset[0] == plain


def test_processors_lend_their_tokenizer(base):
    class Processor:
        tokenizer = made(base, "chatml")
        chat_template = None

    result = prepare_sft([{"messages": SAY}], Processor(), SFTDataOptions(assistant_only=True), cache_dir=False)
    assert masked(Processor.tokenizer, result.dataset[0])[1] == "Yes" + IM

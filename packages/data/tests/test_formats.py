"""Row formats, and the errors that name row, column and what to write."""

import copy
import json

import datasets
import pytest
from posttrain_data import DataError, SFTDataOptions, prepare_sft, tiny_tokenizer

IM = "<|im_end|>"
TOKENIZER = tiny_tokenizer()
ASK = {"role": "user", "content": "Hi"}
SAY = {"role": "assistant", "content": "Hello"}


def prepared(rows, **options):
    return prepare_sft(rows, TOKENIZER, SFTDataOptions(**options), cache_dir=False)


def shown(row):
    """The whole text, targets in brackets."""
    text, inside = "", False
    for token, target in zip(row["input_ids"], row["loss_mask"], strict=True):
        if target != inside:
            text += "[" if target else "]"
            inside = target
        text += TOKENIZER.decode([token])
    return text + ("]" if inside else "")


def only(row, **options):
    return shown(prepared([row], **options).dataset[0])


def test_text_gets_one_end():
    for text in ("one", "one" + IM):
        assert only({"text": text}) == "o[ne" + IM + "]"
    assert only({"body": "one"}, text_field="body") == "o[ne" + IM + "]"


def test_tokenizers_that_add_their_own_ends():
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    ids = [("<s>", tokenizer.bos_token_id), (IM, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"<s> $A {IM}", special_tokens=ids)
    for text in ("one", "<s>one", "one" + IM):
        row = prepare_sft([{"text": text}], tokenizer, cache_dir=False).dataset[0]
        assert tokenizer.decode(row["input_ids"]).count(IM) in (1, 1 + text.endswith(IM))
        assert row["input_ids"].count(tokenizer.bos_token_id) == 1
        assert row["input_ids"][-1] == tokenizer.eos_token_id and row["loss_mask"][-1]
    pair = prepare_sft([{"prompt": "on", "completion": "e"}], tokenizer, cache_dir=False).dataset[0]
    assert pair["loss_mask"][-1]


def test_prompt_and_completion_strings():
    assert only({"prompt": "2+2=", "completion": "4"}) == "2+2=[4" + IM + "]"
    assert only({"prompt": "2+2=", "completion": "4"}, completion_only=False) == "2[+2=4" + IM + "]"
    assert only({"prompt": "2+2=", "completion": ""}) == "2+2=[" + IM + "]"


def test_conversations_in_every_spelling():
    wanted = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello<|im_end|>]\n"
    rows = [
        {"messages": [ASK, SAY]},
        {"messages": json.dumps([ASK, SAY])},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hello"}]},
        {"messages": [ASK, {**SAY, "tool_calls": None, "name": None}], "tools": [], "chat_template_kwargs": None},
        {"messages": [ASK, SAY], "tools": "[]", "prompt": None},
        {"prompt": [ASK], "completion": [SAY]},
        {"prompt": [ASK], "completion": SAY},
        {"prompt": [ASK], "completion": [ASK, SAY]},
        {"prompt": "Hi", "completion": [ASK, SAY]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"instruction": "Hi", "output": "Hello", "history": [], "system": ""},
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Hello"},
            "rejected": 1,
        },
        {"prompt": [ASK], "chosen": [SAY], "rejected": [SAY]},
        {"chosen": [ASK, SAY], "rejected": [ASK]},
    ]
    result = prepared(rows, assistant_only=True)
    assert [shown(row) for row in result.dataset] == [wanted] * len(rows)


def test_alpaca_mapping():
    row = {"instruction": "Add", "input": "2 3", "output": "5", "system": "Be brief", "history": [["a", "b"]]}
    assert only(row) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nAdd\n2 3<|im_end|>\n<|im_start|>assistant\n[5<|im_end|>]\n"
    )


def test_arrow_none_leaves_no_trace():
    messages = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "g", "arguments": {"b": [1]}}]},
    ]
    tools = [
        {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
        {"name": "g", "parameters": {"properties": {"b": {"type": "array"}}}},
    ]
    rows = [{"messages": messages, "tools": tools}, {"messages": [ASK, SAY], "tools": None}]
    plain = prepared(rows)
    arrow = prepared(datasets.Dataset.from_list(rows))
    stream = prepared(datasets.Dataset.from_list(rows).to_iterable_dataset())
    assert list(plain.dataset) == list(arrow.dataset) == list(stream.dataset)
    assert "None" not in shown(arrow.dataset[0]) and "null" not in shown(arrow.dataset[0])


def test_pre_tokenised():
    ids = [5, 6, 7, 8]
    rows = [
        {"input_ids": ids},
        {"input_ids": ids, "labels": [-100, -100, 7, 8]},
        {"input_ids": ids, "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 1, 0]},
        {"input_ids": ids, "loss_mask": [True, False, False, True]},
    ]
    masks = [row["loss_mask"] for row in prepared(rows).dataset]
    assert masks == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]]
    packed = [{"input_ids": ids, "seq_lengths": [2, 2]}]
    row = prepared(packed, packing=True, max_length=2).dataset[0]
    assert row == {"input_ids": ids, "loss_mask": [0, 1, 0, 1], "seq_lengths": [2, 2]}


def test_prepared_rows_can_be_prepared_again():
    first = prepared([{"messages": [ASK, SAY]}], assistant_only=True).dataset
    assert list(prepared(first, assistant_only=True).dataset) == list(first)


def test_formatting_func():
    assert only({"q": "one"}, formatting_func=lambda row: row["q"]) == "o[ne" + IM + "]"
    chat = only({"q": "Hi"}, formatting_func=lambda row: [{"role": "user", "content": row["q"]}, SAY])
    assert chat.endswith("Hello<|im_end|>\n]")
    with pytest.raises(DataError, match="row 0: formatting_func returned 1"):
        only({"q": "Hi"}, formatting_func=lambda row: 1)
    with pytest.raises(DataError, match="formatting_func"):
        SFTDataOptions(formatting_func=lambda row: "x", completion_only=True)


BAD = [
    (
        {"txt": "x"},
        {},
        "row 1: no known format: its columns are 'txt' .'txt' looks like 'text'.*Write 'text', 'messages'",
    ),
    ({"text": None}, {}, "column 'text' is empty"),
    ({"text": 3}, {}, "column 'text' holds 3 .int.: write a string"),
    ({"messages": []}, {}, "column 'messages' is an empty list"),
    ({"messages": 3}, {}, "column 'messages' holds 3"),
    ({"messages": "hello"}, {}, "column 'messages' is a string that is not JSON"),
    ({"messages": ["x"]}, {}, r"messages\[0\] is 'x' .str.: write a dict"),
    (
        {"messages": [ASK, {"role": "assistant", "contnet": "x"}]},
        {},
        r"messages\[1\].*did you mean 'content' by 'contnet'",
    ),
    ({"messages": [{"rol": "user", "content": "x"}]}, {}, "no 'role'.*did you mean 'role' by 'rol'"),
    (
        {"messages": [{"role": "asistant", "content": "x"}]},
        {},
        "'asistant', which is unknown: did you mean 'assistant'",
    ),
    ({"conversations": [{"from": "alien", "value": "x"}]}, {}, "'from'. is 'alien'.*write one of 'system', 'human'"),
    ({"messages": [{"role": 1, "content": "x"}]}, {}, "'role'. is 1"),
    ({"messages": [{"role": "user", "content": 7}]}, {}, "'content'. is 7 .int.: write a string"),
    ({"messages": [{"role": "user", "content": None}]}, {}, "no 'content'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, "images, audio and video"),
    ({"messages": [ASK, {"role": "assistant", "tool_calls": [{}]}]}, {}, "no function name"),
    ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, {}, "not JSON"),
    ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]}, {}, "write a dict"),
    ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, {}, "function_call whose value is not JSON"),
    ({"messages": [ASK, SAY], "tools": "{"}, {}, "column 'tools' is a string that is not JSON"),
    ({"messages": [ASK, SAY], "tools": {"a": 1}}, {}, "column 'tools' holds"),
    ({"messages": [ASK, SAY], "tools": [3]}, {}, r"tools\[0\] is 3"),
    ({"messages": [ASK, SAY], "chat_template_kwargs": [1]}, {}, "column 'chat_template_kwargs' holds"),
    ({"messages": [ASK, SAY], "chat_template_kwargs": {"messages": 1}}, {}, "chat_template_kwargs sets 'messages'"),
    ({"messages": [ASK, {**SAY, "content": "\ud83d"}]}, {}, "surrogate"),
    ({"prompt": "x", "completions": "y"}, {}, "column 'completion' is missing beside 'prompt' .'completions'"),
    ({"prompt": "x", "completion": [SAY]}, {}, "write two strings or two lists"),
    ({"instruction": "x", "outputs": "y"}, {}, "column 'output' is missing beside 'instruction' .'outputs'"),
    ({"instruction": "x", "output": 1}, {}, "column 'output' holds 1"),
    ({"input_ids": ["a"]}, {}, "no token id"),
    ({"input_ids": [1, 2], "labels": [1]}, {}, "'labels' has 1 entries, 'input_ids' has 2"),
    ({"input_ids": [1, 2], "labels": [-100, 3]}, {}, r"labels\[1\] is 3, input_ids\[1\] is 2"),
    ({"input_ids": [1, 2], "seq_lengths": [1]}, {}, "'seq_lengths' sums to 1"),
    ({"text": "x"}, {"assistant_only": True}, "assistant_only=True needs a conversation"),
    ({"text": "x"}, {"completion_only": True}, "completion_only=True needs columns"),
    ({"messages": [ASK, SAY]}, {"completion_only": True}, "completion_only=True needs columns"),
    ({"messages": [ASK, SAY]}, {"train_on": "last"}, "write assistant_only=True"),
]


@pytest.mark.parametrize(("row", "options", "message"), BAD, ids=[message[:30] for _, _, message in BAD])
def test_bad_rows_are_named(row, options, message):
    good = {"prompt": [ASK], "completion": [SAY]} if options.get("completion_only") else {"messages": [ASK, SAY]}
    if options.get("train_on"):
        good = {"prompt": [ASK], "completion": [SAY]}
    with pytest.raises(DataError, match=f"(?s)^train: row 1: .*{message.removeprefix('row 1: ')}"):
        prepared([good, row], **options)


def test_bad_data_sets_are_named():
    data = datasets.Dataset.from_list([{"text": "x"}])
    for wrong, message in (
        ([], "the data set is empty"),
        (data.select([]), "the data set is empty"),
        (data.to_iterable_dataset().take(0), "the data set is empty"),
        (datasets.DatasetDict(train=data), "splits 'train'"),
        (data.with_transform(lambda batch: batch), "with_transform"),
        ("rows.json", "cannot read a value of type str"),
        ([1], "row 0 is of type int"),
        ([{"text": ""}], "no row has a target token.*1 rows with no token"),
        (
            [{"prompt": "a long prompt of many words", "completion": "x"}],
            "every target beyond max_length. Raise max_length",
        ),
    ):
        with pytest.raises(DataError, match=message):
            prepare_sft(wrong, TOKENIZER, SFTDataOptions(max_length=4), cache_dir=False)


def test_bad_options_are_named():
    for options, message in (
        ({"max_length": 1}, "max_length=1"),
        ({"truncation_mode": "middle"}, "truncation_mode='middle'"),
        ({"packing": True, "max_length": None}, "needs max_length"),
        ({"packing_strategy": "ffd"}, "packing_strategy='ffd'"),
        ({"train_on": "first"}, "train_on='first'"),
        ({"num_proc": 0}, "num_proc=0"),
    ):
        with pytest.raises(DataError, match=message):
            SFTDataOptions(**options)


def test_templates_that_refuse_name_the_reason():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(
        DataError, match=r"row 0: .*roles must alternate \(messages\[1\] and messages\[2\] are both 'assis"
    ):
        prepare_sft([{"messages": [ASK, SAY, SAY]}], tokenizer, cache_dir=False)
    tokenizer.chat_template = "{% for m in messages %}"
    with pytest.raises(DataError, match="not valid Jinja"):
        prepare_sft([{"messages": [ASK, SAY]}], tokenizer, cache_dir=False)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template.*clone_chat_template"):
        prepare_sft([{"messages": [ASK, SAY]}], tokenizer, cache_dir=False)


def test_keys_that_the_template_never_reads():
    rows = [
        {"messages": [ASK, SAY]},
        {"messages": [ASK, {**SAY, "wieght": 1.0}]},
        {"messages": [{**ASK, "name": "Bo"}, {**SAY, "weight": 1.0, "reasoning_content": "x"}]},
    ]
    notes = prepared(rows).report.notes
    assert any("never reads key 'wieght' of 'assistant' messages (first in row 1)" in note for note in notes)
    assert any("'name' of 'user' messages (first in row 2)" in note for note in notes)
    assert any("'reasoning_content'" in note for note in notes)
    assert not any("'content'" in note.replace("did you mean 'content'", "") for note in notes)
    typo = prepared([{"messages": [ASK, {**SAY, "tool_cals": []}, {**SAY, "tool_cals": [1]}]}]).report
    assert "did you mean 'tool_calls'?" in str(typo)


def test_a_role_whose_content_is_never_shown():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = (
        "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    )
    rows = [{"messages": [{"role": "system", "content": "Be brief"}, ASK, SAY]}]
    assert "never reads key 'content' of 'system'" in str(prepare_sft(rows, tokenizer, cache_dir=False).report)

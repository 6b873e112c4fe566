"""Preference pairs and feedback: formats, prompts, cutting, taking pairs apart, and errors that name row and column."""

import copy
import json
import math

import datasets
import numpy as np
import pytest
from posttrain_data import (
    DataError,
    PreferenceDataOptions,
    prepare_feedback,
    prepare_preferences,
    prepare_sft,
    render,
    tiny_tokenizer,
)

IM = "<|im_end|>"
TOKENIZER = tiny_tokenizer()
ASK = {"role": "user", "content": "Hi"}
GOOD = {"role": "assistant", "content": "Hello"}
BAD = {"role": "assistant", "content": "Go away"}
PAIR = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
HEAD = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def pairs(rows, cache_dir=False, **options):
    return prepare_preferences(rows, TOKENIZER, PreferenceDataOptions(**options), cache_dir=cache_dir)


def feedback(rows, cache_dir=False, **options):
    return prepare_feedback(rows, TOKENIZER, PreferenceDataOptions(**options), cache_dir=cache_dir)


def shown(row):
    return {key: TOKENIZER.decode(value) if key.endswith("_ids") else value for key, value in row.items()}


def pair(prompt, chosen, rejected, **more):
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected, **more}


# Formats


def test_conversations_in_every_spelling():
    said = {"from": "gpt", "value": "Hello"}
    rows = [
        PAIR,
        {"prompt": [ASK], "chosen": GOOD, "rejected": BAD, "tools": [], "chat_template_kwargs": None},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": None, "chosen": [ASK, {**GOOD, "tool_calls": None}], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "Hi", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"messages": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"conversations": [{"from": "human", "value": "Hi"}], "chosen": said, "rejected": {**said, "value": "Go away"}},
        {"conversations": json.dumps([ASK]), "chosen": said, "rejected": BAD},
        {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "Go away"},
    ]
    result = pairs(rows)
    wanted = pair(HEAD, "Hello" + IM, "Go away" + IM)
    assert [shown(row) for row in result.dataset] == [wanted] * len(rows)
    report = result.report
    ids = sum(len(value) for row in result.dataset for value in row.values())
    assert report.tokens == ids and report.rows_in == report.rows_kept == len(rows) and not report.notes
    assert report.target_tokens == sum(
        len(row[key]) for row in result.dataset for key in ("chosen_ids", "rejected_ids")
    )


def test_the_implicit_prompt_is_every_message_that_both_begin_with():
    more = [ASK, GOOD, {"role": "user", "content": "Bye"}]
    for rejected in ([*more, BAD], [*more, BAD, ASK, GOOD]):
        row = pairs([{"chosen": [*more, GOOD], "rejected": rejected}]).dataset[0]
        assert row["prompt_ids"] == render(TOKENIZER, more, add_generation_prompt=True)
        assert TOKENIZER.decode(row["chosen_ids"]) == "Hello" + IM
        assert TOKENIZER.decode(row["rejected_ids"]).startswith("Go away" + IM)
    same = pairs([{"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}])
    assert shown(same.dataset[0]) == pair(HEAD, "Hello" + IM, "Hello" + IM)
    assert "are the same (1 rows)" in str(same.report)
    short = pairs([{"chosen": [ASK, GOOD], "rejected": [ASK, GOOD, ASK, BAD]}]).dataset[0]
    assert shown(short) == pair(
        HEAD, "Hello" + IM, f"Hello{IM}\n<|im_start|>user\nHi{IM}\n<|im_start|>assistant\nGo away{IM}"
    )


def test_sides_that_begin_differently_are_compared_as_a_whole():
    result = pairs([{"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "Yo"}, GOOD]}])
    assert shown(result.dataset[0]) == pair("", f"{HEAD}Hello{IM}", f"{HEAD.replace('Hi', 'Yo')}Hello{IM}")
    assert "no prompt" in str(result.report)
    asked = pairs([{"prompt": [ASK, GOOD], "chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "Yo"}, GOOD]}])
    opened = TOKENIZER.decode(render(TOKENIZER, [ASK, GOOD]))
    assert shown(asked.dataset[0])["prompt_ids"] == opened
    assert shown(asked.dataset[0])["rejected_ids"] == f"{HEAD.replace('Hi', 'Yo')}Hello{IM}"
    ends = pairs([{"prompt": [ASK], "chosen": [GOOD, ASK], "rejected": [BAD]}])
    assert "end with a 'user' message" in str(ends.report)


def test_strings():
    plain = {"prompt": "2+2=", "chosen": "4", "rejected": "5" + IM}
    assert shown(pairs([plain]).dataset[0]) == pair("2+2=", "4" + IM, "5" + IM)
    assert shown(pairs([{**plain, "chosen": ""}]).dataset[0]) == pair("2+2=", IM, "5" + IM)
    implicit = pairs([{"chosen": "The sky is blue", "rejected": "The sky is green"}]).dataset[0]
    assert TOKENIZER.decode(implicit["prompt_ids"]).startswith("The sky is")
    assert shown(implicit)["prompt_ids"] + shown(implicit)["chosen_ids"] == "The sky is blue" + IM
    assert implicit["chosen_ids"][0] != implicit["rejected_ids"][0]
    same = pairs([{"chosen": "one", "rejected": "one"}]).dataset[0]
    assert shown(same)["chosen_ids"] == shown(same)["rejected_ids"] == IM
    nothing = pairs([{"chosen": "one", "rejected": "two"}])
    assert shown(nothing.dataset[0]) == pair("", "one" + IM, "two" + IM) and "no prompt" in str(nothing.report)


def test_a_token_across_the_border_belongs_to_both_completions():
    result = pairs([{"prompt": "is t", "chosen": "he", "rejected": "wo"}])
    row = result.dataset[0]
    assert TOKENIZER.decode(row["prompt_ids"]) == "is"
    for side, text in (("chosen_ids", "is the"), ("rejected_ids", "is two")):
        assert TOKENIZER.decode(row["prompt_ids"] + row[side]) == text + IM
        assert row["prompt_ids"] + row[side] == TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id]
    assert "the end of the prompt and the start of the completion" in str(result.report)


def test_a_beginning_token_belongs_to_the_prompt():
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    for row in ({"prompt": "", "chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": "b"}):
        made = prepare_preferences([row], tokenizer, cache_dir=False).dataset[0]
        assert made["prompt_ids"] == [bos]
        assert tokenizer.decode(made["chosen_ids"]) == "a" + IM


def test_tools_system_and_template_variables_reach_the_prompt():
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"at": "sky"}}]}
    for tools in ([tool], json.dumps([tool])):
        row = pairs([{**PAIR, "chosen": [call], "tools": tools, "system": "Be brief"}]).dataset[0]
        text = TOKENIZER.decode(row["prompt_ids"])
        assert '"name": "look"' in text and "Be brief" in text
        assert TOKENIZER.decode(row["chosen_ids"]).startswith("<tool_call>")
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{{ mood or '' }}" + tokenizer.chat_template
    for row, options, mood in (
        ({**PAIR, "chat_template_kwargs": {"mood": "glad"}}, {}, "glad"),
        (PAIR, {"chat_template_kwargs": {"mood": "sad"}}, "sad"),
    ):
        made = prepare_preferences([row], tokenizer, PreferenceDataOptions(**options), cache_dir=False).dataset[0]
        assert tokenizer.decode(made["prompt_ids"]) == mood + HEAD


def test_token_ids_pass_as_they_are():
    row = {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8, 9], "margin": 0.5}
    row |= {"chosen_reference_logps": [-1.0], "rejected_reference_logps": [-2.0, -0.5]}
    once = pairs([row]).dataset
    assert once[0] == row
    assert pairs(once).dataset[0] == row
    assert pairs([{"chosen_ids": [1, 2, 3], "rejected_ids": np.array([1, 2, 4])}]).dataset[0] == pair([1, 2], [3], [4])
    assert pairs([pair([1], [2], [3]), pair([1], [], [3])]).report.dropped == {"an empty completion": 1}
    parts = feedback([row]).dataset
    assert list(parts) == [
        {"prompt_ids": [5, 6], "completion_ids": [7], "label": True, "reference_logps": [-1.0]},
        {"prompt_ids": [5, 6], "completion_ids": [8, 9], "label": False, "reference_logps": [-2.0, -0.5]},
    ]
    assert list(feedback(parts).dataset) == list(parts)
    assert feedback([{"completion_ids": [1], "label": True}]).dataset[0]["prompt_ids"] == []


def test_margins():
    assert [row["margin"] for row in pairs([{**PAIR, "margin": n} for n in (1, np.float32(0.5))]).dataset] == [1.0, 0.5]
    rows = [{**PAIR, "margin": 1.0}, PAIR]
    with pytest.raises(DataError, match="train: row 1 has no 'margin', row 0 has one"):
        pairs(rows)
    for several in (rows, [{**PAIR, "margin": None}, *rows]):
        with pytest.raises(DataError, match="row . has no 'margin', row . has one"):
            list(pairs(datasets.Dataset.from_list(several).to_iterable_dataset()).dataset)


def test_feedback_in_every_spelling():
    rows = [
        {"prompt": [ASK], "completion": [GOOD], "label": True},
        {"prompt": [ASK], "completion": GOOD, "label": 1},
        {"messages": [ASK, GOOD], "label": np.bool_(True)},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "label": True},
        {"instruction": "Hi", "output": "Hello", "label": True},
    ]
    wanted = {"prompt_ids": HEAD, "completion_ids": "Hello" + IM, "label": True}
    assert [shown(row) for row in feedback(rows).dataset] == [wanted] * len(rows)
    text = feedback([{"prompt": "2+2=", "completion": "5", "label": False}]).dataset[0]
    assert shown(text) == {"prompt_ids": "2+2=", "completion_ids": "5" + IM, "label": False}
    sft = prepare_sft([{"messages": [ASK, GOOD, ASK, BAD]}], TOKENIZER, cache_dir=False).dataset[0]
    multi = feedback([{"messages": [ASK, GOOD, ASK, BAD], "label": False}]).dataset[0]
    assert shown(multi)["completion_ids"] == "Go away" + IM
    ids = multi["prompt_ids"] + multi["completion_ids"]
    assert sft["input_ids"][: len(ids)] == ids


def test_pairs_are_taken_apart_side_by_side():
    rows = [
        PAIR,
        {"prompt": [ASK], "completion": [BAD], "label": False},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    ]
    result = feedback(rows)
    assert [row["label"] for row in result.dataset] == [True, False, False, True, False]
    assert [shown(row)["completion_ids"] for row in result.dataset] == [
        "Hello" + IM,
        *["Go away" + IM] * 2,
        "Hello" + IM,
        "Go away" + IM,
    ]
    assert result.report.rows_in == result.report.rows_kept == 5
    data = datasets.Dataset.from_list([PAIR] * 5)
    many = feedback(data, num_proc=2)
    assert [row["label"] for row in many.dataset] == [True, False] * 5
    stream = feedback(data.to_iterable_dataset())
    assert list(stream.dataset) == list(many.dataset) and stream.report == many.report


# Cutting


def words(n):
    return {"role": "assistant", "content": "x" * n}


def test_keep_start_cuts_completions_and_drops_long_prompts():
    head = len(pairs([PAIR]).dataset[0]["prompt_ids"])
    whole = pairs([{"prompt": [ASK], "chosen": [words(40)], "rejected": [words(2)]}], max_length=None).dataset[0]
    for limit in range(head - 1, head + len(whole["chosen_ids"]) + 1):
        rows = [{"prompt": [ASK], "chosen": [words(40)], "rejected": [words(2)]}]
        if limit <= head:
            with pytest.raises(
                DataError, match="no row has a completion.*1 rows with a prompt that fills max_length.*Raise"
            ):
                pairs(rows, max_length=limit)
            continue
        result = pairs(rows, max_length=limit)
        row, room = result.dataset[0], limit - head
        assert row == pair(whole["prompt_ids"], whole["chosen_ids"][:room], whole["rejected_ids"][:room])
        assert row["chosen_ids"] and row["rejected_ids"]
        lost = sum(len(whole[key]) - len(row[key]) for key in row)
        assert (result.report.cut_tokens, result.report.truncated_rows) == (lost, int(lost > 0))


def test_keep_end_cuts_the_prompt_and_keeps_one_for_both():
    long = {"role": "user", "content": "y" * 60}
    rows = [{"prompt": [long], "chosen": [words(20)], "rejected": [words(4)]}]
    whole = pairs(rows, max_length=None).dataset[0]
    need = len(whole["chosen_ids"])
    result = pairs(rows, max_length=need + 7, truncation_mode="keep_end")
    assert result.dataset[0] == pair(whole["prompt_ids"][-7:], whole["chosen_ids"], whole["rejected_ids"])
    assert result.report.cut_tokens == len(whole["prompt_ids"]) - 7 and result.report.truncated_rows == 1
    parts = feedback(rows, max_length=need + 7, truncation_mode="keep_end").dataset
    assert [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in parts] == [need + 7] * 2
    with pytest.raises(DataError, match="1 rows with a completion that fills max_length"):
        pairs(rows, max_length=need, truncation_mode="keep_end")
    tokens = pairs([pair([], [1, 2, 3, 4], [5])], max_length=3, truncation_mode="keep_end").dataset[0]
    assert tokens == pair([], [2, 3, 4], [5])


def test_drop_leaves_out_rows_with_a_long_side():
    rows = [PAIR, {**PAIR, "rejected": [words(400)]}, {**PAIR, "chosen": [words(400)]}]
    result = pairs(rows, max_length=100, overlong="drop")
    assert len(result.dataset) == 1 and result.report.dropped == {"a side longer than max_length": 2}
    assert not result.report.cut_tokens and "2 dropped" in str(result.report)
    assert len(feedback(rows, max_length=100, overlong="drop").dataset) == 4
    exact = max(len(pairs([PAIR]).dataset[0][key]) for key in ("chosen_ids", "rejected_ids"))
    limit = len(pairs([PAIR]).dataset[0]["prompt_ids"]) + exact
    assert len(pairs([PAIR], max_length=limit, overlong="drop").dataset) == 1
    with pytest.raises(DataError, match="a side longer than max_length. Raise max_length"):
        pairs([PAIR], max_length=limit - 1, overlong="drop")


def test_reference_log_probabilities_are_cut_with_their_tokens():
    row = pair([5, 6], [7], [8, 9, 10], chosen_reference_logps=[-1.0], rejected_reference_logps=[-2.0, -0.5, -3.0])
    cut = pairs([row], max_length=4).dataset[0]
    assert cut["rejected_ids"] == [8, 9] and cut["rejected_reference_logps"] == [-2.0, -0.5]
    with pytest.raises(DataError, match="row 0: reference log-probabilities are of the whole prompt"):
        pairs([row], max_length=4, truncation_mode="keep_end")


# One pipeline


def test_the_cache_and_streams_serve_every_preparation(tmp_path):
    rows = [{"prompt": [ASK], "chosen": [GOOD], "rejected": [words(n)]} for n in range(1, 300)]
    first = pairs(rows, tmp_path, max_length=40)
    assert len(list(tmp_path.iterdir())) == 1
    again = pairs(copy.deepcopy(rows), tmp_path, max_length=40)
    assert len(list(tmp_path.iterdir())) == 1 and again.report == first.report
    assert list(again.dataset) == list(first.dataset)
    pairs(rows, tmp_path, max_length=40, overlong="drop")
    feedback(rows, tmp_path, max_length=40)
    prepare_sft(rows, TOKENIZER, cache_dir=tmp_path)
    kinds = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert kinds == ["feedback", "preferences", "preferences", "sft"]
    stream = pairs(datasets.Dataset.from_list(rows).to_iterable_dataset(), max_length=40)
    assert stream.report.rows_in == 0
    assert list(stream.dataset) == list(first.dataset) and stream.report == first.report
    assert list(pairs(rows, max_length=40, num_proc=2).dataset) == list(first.dataset)
    gone = datasets.Dataset.from_list([PAIR] * 1100).to_iterable_dataset()
    with pytest.raises(DataError, match="none of the first 1,0.. rows has a completion: .*Raise max_length"):
        list(pairs(gone, max_length=5).dataset)


def test_the_next_member_of_a_mixture_may_be_written_otherwise():
    """Arrow fills the columns that other rows have with None."""
    rows = [PAIR, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}, {"chosen_ids": [1, 2], "rejected_ids": [1, 3]}]
    result = pairs(rows)
    assert [shown(row)["prompt_ids"] for row in result.dataset][:2] == [HEAD, "2+2="]
    data = datasets.Dataset.from_list([rows[0], {**rows[0], "margin": None}])
    assert "margin" not in pairs(data).dataset.column_names


WRONG = [
    (
        prepare_preferences,
        {"prompt": "x", "chosen": "y"},
        "column 'rejected' is missing: its columns are 'prompt', 'ch",
    ),
    (prepare_preferences, {"chosen": "y", "rejcted": "z"}, "'rejected' is missing .'rejcted' looks like it"),
    (prepare_preferences, {"prompt": "x", "completion": "y", "label": True}, "'chosen' is missing .*KTO takes them"),
    (prepare_preferences, {"messages": [ASK, GOOD]}, "column 'chosen' is missing"),
    (
        prepare_preferences,
        {"chosen": [ASK, GOOD], "rejected": "no"},
        "'chosen' and 'rejected' hold .*write two strings",
    ),
    (
        prepare_preferences,
        {"prompt": [ASK], "chosen": [GOOD], "rejected": "no"},
        "columns 'prompt' and 'rejected' hold",
    ),
    (prepare_preferences, {"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]}, "columns 'prompt' and 'chosen' hold"),
    (
        prepare_preferences,
        {**PAIR, "rejected": [{"role": "asistant", "content": "x"}]},
        r"rejected\[0\]\['role'\] is 'as",
    ),
    (prepare_preferences, {**PAIR, "chosen": []}, "column 'chosen' is an empty list"),
    (
        prepare_preferences,
        {**PAIR, "prompt": None, "messages": [{"role": "x", "content": ""}]},
        r"messages\[0\]\['role",
    ),
    (prepare_preferences, {**PAIR, "prompt": None, "messages": "Hi"}, "column 'messages' is a string that is not JSON"),
    (prepare_preferences, {**PAIR, "margin": "much"}, "column 'margin' holds 'much' .str.: write a finite number"),
    (prepare_preferences, {**PAIR, "margin": math.nan}, "column 'margin' holds nan"),
    (prepare_preferences, {**PAIR, "tools": "{"}, "column 'tools' is a string that is not JSON"),
    (prepare_preferences, {**PAIR, "chosen": [{**GOOD, "content": "\ud83d"}]}, "surrogate"),
    (prepare_preferences, {"chosen_ids": [1], "prompt_ids": [2]}, "column 'rejected_ids' is missing"),
    (prepare_preferences, pair([1], [2], ["x"]), "column 'rejected_ids' holds something that is no token id"),
    (prepare_preferences, pair([1], [2], [10**6]), "column 'rejected_ids' holds 1000000, the tokenizer's ids end at"),
    (prepare_preferences, pair([10**6], [2], [3]), "column 'prompt_ids' holds 1000000"),
    (prepare_preferences, pair([1], [2], 3), "a token column holds 3"),
    (
        prepare_preferences,
        pair([1], [2], [3], chosen_reference_logps=[0.0, 1.0]),
        "'chosen_reference_logps' has 2 entries",
    ),
    (prepare_preferences, pair(None, [1, 2], [1, 3], rejected_reference_logps=[0.0]), "needs 'prompt_ids' beside it"),
    (prepare_feedback, {"prompt": "x", "completion": "y"}, "column 'label' is missing: its columns"),
    (prepare_feedback, {"prompt": "x", "completion": "y", "lable": True}, "'label' is missing .'lable' looks like it"),
    (
        prepare_feedback,
        {"prompt": "x", "completion": "y", "label": "yes"},
        "column 'label' holds 'yes' .str.: write True",
    ),
    (prepare_feedback, {"prompt": "x", "completion": "y", "label": 2}, "column 'label' holds 2"),
    (prepare_feedback, {"prompt": "x", "label": True}, "column 'completion' is missing beside 'prompt'"),
    (prepare_feedback, {"messages": [ASK, GOOD, ASK], "label": True}, "the last message is from 'user'"),
    (
        prepare_feedback,
        {"text": "x", "label": True},
        "no known format: its columns are 'text', 'label'. Write 'prompt'",
    ),
    (prepare_feedback, {"input_ids": [1], "label": True}, "no known format: its columns are 'input_ids'"),
]


@pytest.mark.parametrize(("prepare", "row", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_bad_rows_are_named(prepare, row, message):
    with pytest.raises(DataError, match=f"(?s)^train: row 1: .*{message}"):
        prepare([PAIR, row], TOKENIZER, cache_dir=False)


def test_bad_options_and_data_sets_are_named():
    for options, message in (
        ({"max_length": 1}, "max_length=1"),
        ({"overlong": "cut"}, "overlong='cut' is unknown: write 'truncate' or 'drop'"),
        ({"truncation_mode": "middle"}, "truncation_mode='middle'"),
        ({"num_proc": 0}, "num_proc=0"),
    ):
        with pytest.raises(DataError, match=message):
            PreferenceDataOptions(**options)
    for prepare in (prepare_preferences, prepare_feedback):
        with pytest.raises(DataError, match="the data set is empty"):
            prepare([], TOKENIZER, cache_dir=False)
        with pytest.raises(DataError, match="splits 'train'"):
            prepare({"train": [PAIR]}, TOKENIZER, cache_dir=False)
        with pytest.raises(DataError, match="no row has a completion.*an empty completion. Are the completions empty"):
            prepare([pair([1], [], [])], TOKENIZER, cache_dir=False)


def test_keys_that_the_template_never_reads_are_reported():
    note = str(pairs([PAIR, {**PAIR, "rejected": [{**BAD, "wieght": 1.0}]}]).report)
    assert "never reads key 'wieght' of 'assistant' messages (first in row 1)" in note

"""Cutting, dropping, packing, streams, the cache and its waiting."""

import copy
import json
import multiprocessing
import os
import time

import datasets
import pytest
from posttrain_data import DataError, SFTDataOptions, prepare_sft, tiny_tokenizer
from posttrain_data.cache import digest, once, tokenizer_digest

TOKENIZER = tiny_tokenizer()
ROWS = [
    {"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * (20 - n)}]}
    for n in range(1, 20)
]


def prepared(rows, cache_dir=False, name="train", **options):
    options = {"assistant_only": True, **options}
    return prepare_sft(rows, TOKENIZER, SFTDataOptions(**options), cache_dir=cache_dir, name=name)


def test_cut_and_dropped_rows_are_counted():
    whole = prepared(ROWS, max_length=None)
    lengths = [len(row["input_ids"]) for row in whole.dataset]
    limit = 22
    cut = prepared(ROWS, max_length=limit)
    report = cut.report
    assert all(len(row["input_ids"]) <= limit and any(row["loss_mask"]) for row in cut.dataset)
    lost = sum(not any(row["loss_mask"][:limit]) for row in whole.dataset)
    assert report.rows_in == len(ROWS) == report.rows_kept + lost
    assert report.dropped == ({"every target beyond max_length": lost} if lost else {})
    assert report.truncated_rows == sum(length > limit for length in lengths) - lost
    assert report.tokens == sum(len(row["input_ids"]) for row in cut.dataset)
    assert report.target_tokens == sum(sum(row["loss_mask"]) for row in cut.dataset)
    assert lost and f"{lost} dropped" in str(report) and "tokens lost" in str(report)


def test_keep_end():
    whole = prepared(ROWS, max_length=None).dataset
    cut = prepared(ROWS, max_length=30, truncation_mode="keep_end")
    assert not cut.report.dropped
    for row, full in zip(cut.dataset, whole, strict=True):
        assert row["input_ids"] == full["input_ids"][-30:]
        assert row["loss_mask"] == [False, *full["loss_mask"][-30:][1:]]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("cache", [False, True])
def test_packing_keeps_every_token_and_target(strategy, cache, tmp_path):
    where = tmp_path if cache else False
    plain = prepared(ROWS, max_length=None)
    packed = prepared(ROWS, where, packing=True, packing_strategy=strategy, max_length=70)
    tokens, pieces = [], []
    for row in packed.dataset:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["loss_mask"]) <= 70
        at = 0
        for length in row["seq_lengths"]:
            assert not row["loss_mask"][at]
            pieces.append((row["input_ids"][at : at + length], row["loss_mask"][at : at + length]))
            at += length
        tokens += row["input_ids"]
    assert sorted(tokens) == sorted(token for row in plain.dataset for token in row["input_ids"])
    report = packed.report
    assert report.tokens == len(tokens) and report.packed_rows == len(packed.dataset) < len(ROWS)
    assert report.target_tokens == sum(sum(mask) for _, mask in pieces)
    if strategy == "bfd":
        assert sorted(pieces) == sorted((row["input_ids"], row["loss_mask"]) for row in plain.dataset)
        assert report.target_tokens == plain.report.target_tokens
    assert "packed into" in str(report)


def test_packing_cuts_over_long_rows_by_choice():
    counts = {}
    for strategy in ("bfd", "bfd_split", "wrapped"):
        report = prepared(ROWS, packing=True, packing_strategy=strategy, max_length=20, assistant_only=False).report
        counts[strategy] = (report.tokens, report.cut_tokens)
    whole = prepared(ROWS, max_length=None, assistant_only=False).report.tokens
    assert counts["bfd_split"] == counts["wrapped"] == (whole, 0)
    assert counts["bfd"][0] + counts["bfd"][1] == whole and counts["bfd"][1] > 0


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_packed_rows_without_a_target_are_left_out(strategy):
    rows = [{"prompt": "q" * 200, "completion": "a"}]
    options = {"packing": True, "packing_strategy": strategy, "max_length": 20, "assistant_only": False}
    result = prepared(rows, **options)
    assert len(result.dataset) == result.report.packed_rows == 1 and result.report.target_tokens >= 1
    assert "without a target" in str(result.report)
    stream = prepared(datasets.Dataset.from_list(rows).to_iterable_dataset(), **options)
    assert list(stream.dataset) == list(result.dataset)


def test_packing_after_dropping_rows(tmp_path):
    rows = [{"text": ""}, *({"text": f"some text {n}"} for n in range(9)), {"text": ""}]
    for where in (False, tmp_path):
        packed = prepared(rows, where, packing=True, max_length=64, assistant_only=False)
        assert packed.report.dropped == {"no token": 2} and packed.report.rows_kept == 9
        assert sum(len(row["seq_lengths"]) for row in packed.dataset) == 9


def test_streams_give_the_same_rows():
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    result = prepared(stream, max_length=30)
    plain = prepared(ROWS, max_length=30)
    assert result.report.rows_in == 0
    assert list(result.dataset) == list(plain.dataset)
    assert result.report == plain.report
    packed = prepared(stream, packing=True, max_length=70)
    assert list(packed.dataset) == list(prepared(ROWS, packing=True, max_length=70).dataset)
    assert packed.report.packed_rows == len(list(prepared(ROWS, packing=True, max_length=70).dataset))


def test_streams_resume_where_they_stopped():
    result = prepared(datasets.Dataset.from_list(ROWS * 30).to_iterable_dataset(num_shards=3)).dataset
    rows = iter(result)
    first = [next(rows) for _ in range(7)]
    state = result.state_dict()
    rest = list(rows)
    result.load_state_dict(state)
    assert list(result) == rest and len(first) + len(rest) == len(ROWS) * 30


def test_bad_streams_fail_at_once_or_soon():
    with pytest.raises(DataError, match="row 2"):
        prepared(
            datasets.Dataset.from_list([{"text": "x"}] * 2 + [{"text": None}]).to_iterable_dataset(),
            assistant_only=False,
        )
    empty = datasets.Dataset.from_list([{"text": ""}] * 2000).to_iterable_dataset()
    with pytest.raises(DataError, match="none of the first 1,0.. rows has a target token"):
        list(prepared(empty, assistant_only=False).dataset)

    def without_columns():
        yield from ROWS

    unknown = datasets.IterableDataset.from_generator(without_columns)
    assert len(list(prepared(unknown).dataset)) == len(ROWS)


def test_processes_give_the_same_rows(tmp_path):
    assert list(prepared(ROWS, tmp_path, num_proc=2).dataset) == list(prepared(ROWS).dataset)
    with pytest.raises(DataError, match="^train: row 15: "):
        prepared([*ROWS[:15], {"text": 1}, *ROWS[:4]], num_proc=2)


def test_the_cache_is_found_again_and_knows_what_shaped_it(tmp_path):
    def folders():
        return {path.name for path in tmp_path.iterdir()}

    first = prepared(ROWS, tmp_path)
    one = folders()
    assert len(one) == 1
    again = prepared(copy.deepcopy(ROWS), tmp_path, num_proc=1, name="eval")
    assert folders() == one and list(again.dataset) == list(first.dataset)
    assert again.report.name == "eval" and again.report.tokens == first.report.tokens
    changed = copy.deepcopy(ROWS)
    changed[3]["messages"][0]["content"] += "!"
    prepared(changed, tmp_path)
    prepared(ROWS, tmp_path, max_length=30)
    prepared(ROWS, tmp_path, train_on="last")
    prepared(datasets.Dataset.from_list(ROWS), tmp_path)
    assert len(folders()) == 5
    prepared(datasets.Dataset.from_list(ROWS), tmp_path)
    assert len(folders()) == 5
    for change in (
        lambda tokenizer: setattr(tokenizer, "chat_template", tokenizer.chat_template + " "),
        lambda tokenizer: tokenizer.add_tokens(["qqqq"]),
        lambda tokenizer: setattr(tokenizer, "eos_token", "<|endoftext|>"),
    ):
        before = len(folders())
        tokenizer = copy.deepcopy(TOKENIZER)
        change(tokenizer)
        prepare_sft(ROWS, tokenizer, SFTDataOptions(assistant_only=True), cache_dir=tmp_path)
        assert len(folders()) == before + 1


def test_the_key_knows_the_code_that_prepares(tmp_path, monkeypatch):
    prepared(ROWS, tmp_path)
    monkeypatch.setattr("posttrain_data.prepare._own_code", lambda: ["another version of this package"])
    prepared(ROWS, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_use_does_not_change_the_key():
    before = tokenizer_digest(TOKENIZER)
    TOKENIZER("some text", truncation=True, max_length=2)
    TOKENIZER(["some text", "x"], padding=True)
    assert tokenizer_digest(TOKENIZER) == before == tokenizer_digest(copy.deepcopy(TOKENIZER))
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1}) != digest({"a": 1, "b": 2})


def test_a_damaged_folder_is_named(tmp_path):
    prepared(ROWS, tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "report.json").write_text("{")
    with pytest.raises(DataError, match="damaged.*remove"):
        prepared(ROWS, tmp_path)


# Waiting


def _slow(folder, log, seconds):
    def make(temporary):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        (temporary / "done").write_text("yes")

    return once(folder, make, lambda path: (path / "done").read_text(), beat=0.05, stale=2.0, limit=30)


def test_one_process_makes_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    workers = [context.Process(target=_slow, args=(tmp_path / "key", log, 0.5)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(log.read_text().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "log"]


def test_a_killed_maker_is_replaced(tmp_path):
    context = multiprocessing.get_context("fork")
    first = context.Process(target=_slow, args=(tmp_path / "key", tmp_path / "log", 60))
    first.start()
    while not (tmp_path / "log").exists():
        time.sleep(0.01)
    first.kill()
    first.join()
    started = time.monotonic()
    assert _slow(tmp_path / "key", tmp_path / "log", 0) == "yes"
    assert time.monotonic() - started < 10


def test_waiting_has_an_end_that_names_whom(tmp_path):
    (tmp_path / "key.lock").write_text(json.dumps({"pid": 123, "host": "node7", "token": "x", "beat": 0}))
    with pytest.raises(DataError, match="waited 0 s for process 123 on node7"):
        once(tmp_path / "key", lambda path: None, lambda path: None, beat=0.05, stale=60, limit=0.3)


def test_an_error_reaches_those_who_wait(tmp_path):
    def make(_):
        time.sleep(0.3)
        raise DataError("train: row 7: bad")

    def fail(queue):
        try:
            once(tmp_path / "key", make, lambda path: None, beat=0.05)
        except DataError as error:
            queue.put(str(error))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=fail, args=(queue,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=20) for _ in workers] == ["train: row 7: bad"] * 3
    for worker in workers:
        worker.join()
    assert not (tmp_path / "key").exists() and not (tmp_path / "key.lock").exists()

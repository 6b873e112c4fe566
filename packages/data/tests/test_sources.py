"""Files, folders and mixtures, and what is said about damaged ones."""

import csv
import json
from collections import Counter

import datasets
import pytest
from posttrain_data import (
    DataError,
    DatasetOptions,
    DatasetSpec,
    SFTDataOptions,
    load_rows,
    prepare_sft,
    tiny_tokenizer,
)
from posttrain_data.sources import interleaved

TOKENIZER = tiny_tokenizer()
CALL = {"name": "f", "arguments": {"x": 0.7, "n": None, "big": 12345678901234567890123, "t": "null"}}
NESTED = [
    {"messages": [{"role": "user", "content": "é 👋"}, {"role": "assistant", "tool_calls": [CALL]}], "id": 1},
    {"messages": [{"role": "user", "content": "2"}, {"role": "assistant", "content": "3"}], "id": 2},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(spec, tmp_path, **options):
    return load_rows(spec, cache_dir=str(tmp_path / "cache"), **options)


def tokens(rows):
    return list(prepare_sft(rows, TOKENIZER, SFTDataOptions(), cache_dir=False).dataset)


def test_nested_values_survive_exactly(tmp_path):
    wanted = tokens(NESTED)
    assert '"x": 0.7, "n": null, "big": 12345678901234567890123' in TOKENIZER.decode(wanted[0]["input_ids"])
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(NESTED, indent=1))
    lines = write(tmp_path / "lines.json", NESTED)
    for path in (write(tmp_path / "rows.jsonl", NESTED), array, lines):
        rows, held_out = read(path, tmp_path)
        assert held_out is None and rows["id"][:] == [1, 2]
        assert tokens(rows) == wanted
        stream, _ = read(path, tmp_path, streaming=True)
        assert tokens(stream) == wanted


def test_values_of_several_types_survive(tmp_path):
    values = ["2", ["x"], None, 5, 'a"b', {"k": "v"}, "null", True]
    path = write(tmp_path / "rows.jsonl", [{"v": value, "w": index / 10} for index, value in enumerate(values)])
    rows, _ = read(path, tmp_path)
    assert [row["v"] for row in rows] == values
    assert rows["w"][7] == 0.7


def test_csv_tsv_parquet_and_folders(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], ['a,\n"b"', "c"], ["d", ""]])
    rows, _ = read(folder, tmp_path)
    assert list(rows) == [{"prompt": 'a,\n"b"', "completion": "c"}, {"prompt": "d", "completion": ""}]
    (tmp_path / "b.tsv").write_text("text\tn\nx\t1\n")
    assert list(read(tmp_path / "b.tsv", tmp_path)[0]) == [{"text": "x", "n": "1"}]
    datasets.Dataset.from_list([{"text": "p"}]).to_parquet(str(tmp_path / "c.parquet"))
    assert list(read(tmp_path / "c.parquet", tmp_path)[0]) == [{"text": "p"}]
    assert list(read(tmp_path / "c.parquet", tmp_path, streaming=True)[0]) == [{"text": "p"}]
    datasets.DatasetDict(train=datasets.Dataset.from_list([{"text": "s"}])).save_to_disk(str(tmp_path / "saved"))
    assert list(read(tmp_path / "saved", tmp_path)[0]) == [{"text": "s"}]
    with pytest.raises(DataError, match="no split 'test': it holds 'train'"):
        read(DatasetSpec(str(tmp_path / "saved"), split="test"), tmp_path)


def test_changed_files_are_read_again(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "one"}])
    read(path, tmp_path)
    write(path, [{"text": "two"}, {"text": "three"}])
    assert read(path, tmp_path)[0]["text"][:] == ["two", "three"]


DAMAGED = [
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl, line 2: not valid UTF-8 .byte 0xff at column 11."),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b', "line 2: not a JSON object: the line ends early; was the file cut off"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b"', "line 2: not a JSON object: the line ends early; was the file cut off"),
    ("a.jsonl", b'{"text": "a"}\nhello\n', "line 2: not a JSON object: Expecting value"),
    ("a.jsonl", b'{"text": "a"}\n"b"\n', "line 2: is of type str, not an object"),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', "line 1: half of a surrogate pair"),
    ("a.jsonl", b"", "the file is empty"),
    ("a.jsonl", b"\n \n", "the file holds no row"),
    ("a.json", b'[{"text": "a"},\n{"text": "b', "line 2: not valid JSON.*cut off"),
    ("a.json", b'[{"text": "a"}, 3]', "entry 1: is of type int"),
    ("a.json", b"[]", "the file holds no row"),
    ("a.json", b'{\n  "text": "a"\n}', "line 1.*write one JSON object a line, or a JSON array"),
    ("a.csv", b"text,n\nx,1\ny\n", "line 3: 1 fields, the header has 2"),
    ("a.csv", b'text,n\n"x,1\n', "not valid CSV"),
    ("a.csv", b"text,n\n\xe9,1\n", "line 2: not valid UTF-8"),
    ("a.csv", b"text,n\n", "the file holds no row"),
    ("a.csv", b"text,text\na,b\n", "line 1: column 'text' is there twice"),
    ("a.json", b"{}", "the rows have no column"),
    ("a.parquet", b"PAR1 half", "not a whole Parquet file; was it cut off"),
    ("a.txt", b"x", "unknown kind of file '.txt'"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED, ids=[message[:40] for _, _, message in DAMAGED])
def test_damaged_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(path, tmp_path)
    assert str(path) in str(caught.value)


def test_missing_files_and_names(tmp_path, monkeypatch):
    for wrong in (tmp_path / "none.jsonl", "./none", "none.csv"):
        with pytest.raises(DataError, match="no such file"):
            read(wrong, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        read(tmp_path / "empty", tmp_path)
    with pytest.raises(DataError, match="no data set is named"):
        read([], tmp_path)

    def offline(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match=r"'someone/rows' .split 'train'. is no local file.*ConnectionError: offline"):
        read("someone/rows", tmp_path)


def test_columns_slices_fractions_and_held_out_rows(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"q": str(n), "a": "x", "z": n} for n in range(20)])
    rows, _ = read(DatasetSpec(str(path), columns={"prompt": "q", "completion": "a"}, split="train[:10]"), tmp_path)
    assert rows.column_names == ["prompt", "completion"] and len(rows) == 10
    rows, _ = read(DatasetSpec(str(path), columns=["q"], fraction=0.25), tmp_path)
    assert rows["q"][:] == ["0", "4", "8", "12", "16"]
    with pytest.raises(DataError, match="no column 'qq', only 'q', 'a', 'z'; did you mean 'q'"):
        read(DatasetSpec(str(path), columns=["qq"]), tmp_path)
    for size, count in ((3, 3), (0.1, 2)):
        first, held = read(path, tmp_path, test_split_size=size)
        again, _ = read(path, tmp_path, test_split_size=size)
        assert len(held) == count and list(first) == list(again)
        assert sorted([*first["z"], *held["z"]]) == list(range(20))
    stream, held = read(path, tmp_path, test_split_size=3, streaming=True)
    assert [row["z"] for row in held] == [0, 1, 2] and [row["z"] for row in stream] == list(range(3, 20))
    for size in (0, 20, 1.0):
        with pytest.raises(DataError, match="test_split_size"):
            read(path, tmp_path, test_split_size=size)
    for wrong in ({"fraction": 0}, {"fraction": 2}, {"weight": 0}, {"weight": "heavy"}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            DatasetSpec("x", **wrong)


def test_interleaving_keeps_every_share():
    order = interleaved([30, 100, 100], [0.5, 0.3, 0.2])
    assert Counter(source for source, _ in order)[0] == 30
    for length in range(1, len(order) + 1):
        counts = Counter(source for source, _ in order[:length])
        assert all(abs(counts[source] - share * length) < 1 for source, share in enumerate((0.5, 0.3, 0.2)))
    assert len(set(order)) == len(order)
    assert interleaved([5], [1.0]) == [(0, row) for row in range(5)]


def test_mixtures_of_different_formats(tmp_path):
    alpaca = write(tmp_path / "a.jsonl", [{"instruction": f"a{n}", "output": "x"} for n in range(12)])
    chat = write(tmp_path / "c.jsonl", [{**NESTED[n % 2], "prompt": None} for n in range(12)])
    text = write(tmp_path / "t.jsonl", [{"prompt": f"{n}", "completion": str(n)} for n in range(12)])
    pairs = write(
        tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "1"}], "completion": []} for _ in "12"]
    )
    specs = [DatasetSpec(str(path), weight=weight) for path, weight in ((alpaca, 2), (chat, 1), (text, 1))]
    rows, _ = read(specs, tmp_path)
    assert len(rows) == 24
    assert sum(row["instruction"] is not None for row in rows) == 12
    singles = [tokens(read(path, tmp_path)[0]) for path in (alpaca, chat, text)]
    mixed = tokens(rows)
    assert [row for row in mixed if row in singles[0]] == singles[0]
    assert all(row in singles[0] + singles[1] + singles[2] for row in mixed)
    joined, _ = read([text, pairs], tmp_path)
    assert (
        len(joined) == 14 and joined["prompt"][0] == "0" and joined["prompt"][12] == [{"role": "user", "content": "1"}]
    )
    picked = DatasetSpec(str(pairs), columns={"completion": "completion", "prompt": "prompt"})
    with pytest.raises(DataError, match="row 0: column 'completion' is an empty list"):
        tokens(read(picked, tmp_path, streaming=True)[0])
    with pytest.raises(DataError, match="no column 'x'"):
        read(DatasetSpec(str(pairs), columns=["x"]), tmp_path, streaming=True)
    stream, _ = read(specs, tmp_path, streaming=True)
    assert all(row in singles[0] + singles[1] + singles[2] for row in tokens(stream))
    first = [row["instruction"] for row in stream]
    assert first == [row["instruction"] for row in read(specs, tmp_path, streaming=True)[0]]
    with pytest.raises(DataError, match="has no weight"):
        read([specs[0], text], tmp_path)


@pytest.mark.parametrize("size", [1.0, 0, 0.0, 1.5, -1, -0.5])
def test_the_held_out_part_is_a_whole_number_of_rows_or_a_share(size):
    with pytest.raises(DataError, match="test_split_size=.*whole number of rows"):
        DatasetOptions("rows.jsonl", test_split_size=size)

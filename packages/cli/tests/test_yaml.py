import os

import pytest
from posttrain_cli import CommandError


@pytest.fixture
def parse(command, tmp_path):
    def parsed(text, *words):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return command.parse(["--config", str(path), *words])

    return parsed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("# nothing\n", {}),
        ("---\n", {}),
        ("\ufefflearning_rate: 1\n", {"learning_rate": 1.0}),
        ("learning_rate: 2e-5", {"learning_rate": 2e-5}),
        ("learning_rate: '2e-5'", {"learning_rate": 2e-5}),
        ("learning-rate: 1", {"learning_rate": 1.0}),
        ("bf16: on\ntf32: off\npacking: yes", {"bf16": True, "tf32": False, "packing": True}),
        ("bf16: No", {"bf16": False}),
        ("eval_strategy: no", {"eval_strategy": "no"}),
        ("max_length: null", {"max_length": None}),
        ("max_length: ~", {"max_length": None}),
        ("max_length:", {"max_length": None}),
        ("max_length: none", {"max_length": None}),
        ("output_dir: 'none'", {"output_dir": "none"}),
        ("output_dir: none", {"output_dir": None}),
        ("output_dir: 2024-01-01", {"output_dir": "2024-01-01"}),
        ("output_dir: 0123", {"output_dir": "0123"}),
        ("max_steps: 010", {"max_steps": 10}),
        ("max_steps: 1_000", {"max_steps": 1000}),
        ("eval_steps: .inf", {"eval_steps": float("inf")}),
        ("report_to: none", {"report_to": "none"}),
        ("report_to: [wandb, mlflow]", {"report_to": ["wandb", "mlflow"]}),
        ("target_modules:\n- q\n- k\n", {"target_modules": ["q", "k"]}),
        ("target_modules: []", {"target_modules": []}),
        ("datasets:\n- path: a\n  fraction: 1e-1\n- {path: b}\n", {
            "datasets": [{"path": "a", "fraction": 0.1}, {"path": "b"}],
        }),
        ("options: {lr: 1e-3, n: 3, on: [yes, x], s: '1e-3', z: null}", {
            "options": {"lr": 1e-3, "n": 3, "on": [True, "x"], "s": "1e-3", "z": None},
        }),
        ("options: '{\"a\": 1}'", {"options": {"a": 1}}),
        ("model: 模型 é 🤖", {"model": "模型 é 🤖"}),
        ("options: &o {a: 1}\nanything: {<<: *o, b: 2}", {"options": {"a": 1}, "anything": {"a": 1, "b": 2}}),
        ("pad: auto", {"pad": "auto"}),
        ("pad: 8", {"pad": 8}),
    ],
)  # fmt: skip
def test_values(parse, text, expected):
    found = {}
    for group in parse(text).values.values():
        found.update(group)
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {n: type(value) for n, value in expected.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nlerning_rate: 2e-5", "run.yaml:2: unknown key 'lerning_rate'; did you mean learning_rate?"),
        ("max_seq_length: 3", "run.yaml:1: max_seq_length: is called --max_length here"),
        ("config: other.yaml", "run.yaml:1: unknown key 'config'"),
        ("\nlearning_rate: fast", "run.yaml:2: learning_rate: expected a number, got 'fast'"),
        ("learning_rate:", "run.yaml:1: learning_rate: expected a number, got nothing"),
        ("max_steps: [1]", "run.yaml:1: max_steps: expected a whole number, got a list"),
        ("max_steps: {a: 1}", "run.yaml:1: max_steps: expected a whole number, got a mapping"),
        ("max_steps: 1.0", "run.yaml:1: max_steps: expected a whole number, got '1.0'"),
        ("model: [a]", "run.yaml:1: model: expected text, got a list"),
        ("model: null", "run.yaml:1: model: expected text, got nothing"),
        ("bf16: maybe", "run.yaml:1: bf16: expected true or false, got 'maybe'"),
        ("strategy: bdf", "strategy: expected one of bfd, bfd_split, wrapped, got 'bdf'; did you mean bfd?"),
        ("datasets: {path: a}", "run.yaml:1: datasets: expected a list (each item: a mapping"),
        ("datasets: [{path: a}, {pat: b}]", "run.yaml:1: datasets: item 2: unknown key 'pat'; did you mean path?"),
        ("datasets: [{path: a, fraction: half}]", "datasets: item 1: fraction: expected a number, got 'half'"),
        ("seed: 1\nbf16: true\nseed: 2", "run.yaml:3: key 'seed' is given twice (first on line 1)"),
        ("max_steps: 1\nmax-steps: 2", "run.yaml:2: key 'max_steps' is given twice"),
        ("options: {a: 1, a: 2}", "run.yaml:1: key 'a' is given twice (first on line 1)"),
        ("seed: 1\n  bad: indent", "run.yaml:2: invalid YAML: mapping values are not allowed here"),
        ("seed: [1", "run.yaml:1: invalid YAML"),
        ("seed: 1\n---\nseed: 2", "run.yaml:2: invalid YAML: but found another document"),
        ("- seed", "run.yaml:1: expected `key: value` lines, got a list"),
        ("seed", "run.yaml:1: expected `key: value` lines, got a single value"),
        ("? [a]\n: 1", "run.yaml:1: a key must be a word, got a list"),
        ("model: !!python/name:os.system x", "is not supported"),
        ("options: &a [*a]", "run.yaml:1: an alias (`*name`) contains itself"),
        (b"seed: 1\nmodel: \xff\n", "run.yaml:2: byte 0xff is not UTF-8"),
        ("seed: 1\nmodel: \x07", "run.yaml:2: invalid YAML: special characters are not allowed"),
        ("env: [A]", "run.yaml:1: env: expected a mapping"),
        ("env: {A: [1]}", "run.yaml:1: env: A: expected a variable and one value"),
        ("device: cpu", "run.yaml:1: device: takes a Python object"),
    ],
)  # fmt: skip
def test_mistakes(parse, text, message):
    with pytest.raises(CommandError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(parse):
    parsed = parse("learning_rate: 1e-3\nmax_steps: 5\nbf16: true\n", "--max_steps", "9", "--no_bf16")
    assert parsed.values["demo"] == {"learning_rate": 1e-3, "max_steps": 9, "bf16": False}
    assert parsed.sources["max_steps"] == "command line"
    assert parsed.sources["learning_rate"].endswith("run.yaml:1")
    assert parsed.build()[0].seed == 42


def test_a_flag_replaces_a_wrong_value_of_the_file_but_not_an_unknown_key(parse):
    assert parse("max_steps: many", "--max_steps", "3").values["demo"] == {"max_steps": 3}
    with pytest.raises(CommandError, match="unknown key"):
        parse("max_step: 1", "--max_steps", "3")


def test_lists_are_replaced_not_joined(parse):
    assert parse("target_modules: [a, b]", "--target_modules", "c", "d").values["model"] == {
        "target_modules": ["c", "d"]
    }


def test_env_is_exported_when_the_run_is_built(parse, monkeypatch):
    monkeypatch.setenv("DEMO_OLD", "shell")
    monkeypatch.setenv("DEMO_NEW", "")
    monkeypatch.delenv("DEMO_NEW")
    parsed = parse("env:\n  DEMO_OLD: file\n  DEMO_NEW: 1\n  DEMO_TEXT: no\n")
    assert parsed.env == {"DEMO_OLD": "file", "DEMO_NEW": "1", "DEMO_TEXT": "no"}
    assert os.environ["DEMO_OLD"] == "shell"
    parsed.build()
    assert (os.environ["DEMO_OLD"], os.environ["DEMO_NEW"], os.environ["DEMO_TEXT"]) == ("file", "1", "no")
    for name in ("DEMO_NEW", "DEMO_TEXT"):
        monkeypatch.delenv(name)


def test_files_that_cannot_be_read(command, tmp_path):
    with pytest.raises(CommandError, match="nothing.yaml: there is no such file"):
        command.parse(["--config", str(tmp_path / "nothing.yaml")])
    with pytest.raises(CommandError, match="directory"):
        command.parse(["--config", str(tmp_path)])

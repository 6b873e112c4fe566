import math
import pathlib

import pytest
from posttrain_cli import CommandError, guarded


def values(command, *words):
    merged = {}
    for group in command.parse(words).values.values():
        merged.update(group)
    return merged


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["--max_steps", "-1"], {"max_steps": -1}),
        (["--max-steps=1_000"], {"max_steps": 1000}),
        (["--learning_rate", "2e-5"], {"learning_rate": 2e-5}),
        (["--learning_rate", "-.5"], {"learning_rate": -0.5}),
        (["--eval_steps", "inf"], {"eval_steps": math.inf}),
        (["--eval_steps", "None"], {"eval_steps": None}),
        (["--max_length", "null"], {"max_length": None}),
        (["--max_length", "8"], {"max_length": 8}),
        (["--bf16"], {"bf16": True}),
        (["--bf16", "false"], {"bf16": False}),
        (["--bf16=TRUE"], {"bf16": True}),
        (["--no_bf16"], {"bf16": False}),
        (["--no-trust-remote-code"], {"trust_remote_code": False}),
        (["--tf32"], {"tf32": True}),
        (["--tf32", "none"], {"tf32": None}),
        (["--no_tf32"], {"tf32": False}),
        (["--schedule", "cosine"], {"schedule": "cosine"}),
        (["--colour", "2"], {"colour": 2}),
        (["--pad", "auto"], {"pad": "auto"}),
        (["--pad", "64"], {"pad": 64}),
        (["--pad", "none"], {"pad": None}),
        (["--report_to", "none"], {"report_to": "none"}),
        (["--report_to", "wandb", "mlflow"], {"report_to": ["wandb", "mlflow"]}),
        (["--count_tokens", "no"], {"count_tokens": "no"}),
        (["--count_tokens", "true"], {"count_tokens": True}),
        (["--count_tokens"], {"count_tokens": True}),
        (["--target_modules", "q_proj", "k_proj", "--bf16"], {"target_modules": ["q_proj", "k_proj"], "bf16": True}),
        (["--target_modules", "all-linear"], {"target_modules": "all-linear"}),
        (["--target_modules", '["q", "k"]'], {"target_modules": ["q", "k"]}),
        (["--target_modules", "none"], {"target_modules": None}),
        (["--target_modules", "[]"], {"target_modules": []}),
        (["--widths", "64", "128"], {"widths": [64, 128]}),
        (["--widths", "64"], {"widths": [64]}),
        (["--options", '{"a": [1, null, "x"], "b": {}}'], {"options": {"a": [1, None, "x"], "b": {}}}),
        (["--options", "zero3.json"], {"options": "zero3.json"}),
        (["--ratios", '{"a": 1, "b": 2e-1}'], {"ratios": {"a": 1.0, "b": 0.2}}),
        (["--datasets", '{"path": "x"}', '{"path": "y", "fraction": 0.5}'], {
            "datasets": [{"path": "x"}, {"path": "y", "fraction": 0.5}],
        }),
        (["--anything", '{"x": 1}'], {"anything": {"x": 1}}),
        (["--anything", "word"], {"anything": "word"}),
        (["--model", "", "--output_dir=--x"], {"model": "", "output_dir": "--x"}),
        (["--model", "模型 é 🤖"], {"model": "模型 é 🤖"}),
        (["--cache", "a/b"], {"cache": "a/b"}),
        (["--output_dir", "true"], {"output_dir": "true"}),
        (["--model", "007"], {"model": "007"}),
    ],
)  # fmt: skip
def test_values(command, words, expected):
    found = values(command, *words)
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {n: type(value) for n, value in expected.items()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lerning_rate", "1"], "unknown flag --lerning_rate; did you mean --learning_rate?"),
        (["--learn", "1"], "unknown flag --learn; did you mean --learning_rate?"),
        (["--zzzzz"], "unknown flag --zzzzz"),
        (["-m", "x"], "unknown flag -m"),
        (["--confg", "x"], "unknown flag --confg; did you mean --config?"),
        (["--max_seq_length", "8"], "--max_seq_length: is called --max_length here"),
        (["--extra_9", "1"], "--extra_9: leave it out"),
        (["--no_max_steps"], "unknown flag --no_max_steps; did you mean --max_steps?"),
        (["--learning_rate"], "--learning_rate needs a value: --learning_rate NUMBER"),
        (["--learning_rate", "--bf16"], "--learning_rate needs a value: --learning_rate NUMBER"),
        (["--learning_rate", "fast"], "--learning_rate: expected a number, got 'fast'"),
        (["--learning_rate", "nan"], "--learning_rate: expected a number, got 'nan'"),
        (["--learning_rate="], "--learning_rate: expected a number, got ''"),
        (["--max_steps", "1.5"], "--max_steps: expected a whole number, got '1.5'"),
        (["--max_steps", "1e3"], "--max_steps: expected a whole number, got '1e3'"),
        (["--max_steps", "٣"], "--max_steps: expected a whole number, got '٣'"),
        (["--max_steps", "none"], "--max_steps: expected a whole number, got 'none'"),
        (["--max_steps", "1", "2"], "--max_steps takes one value, got 2: 1 2"),
        (["--max_length", "x"], "--max_length: expected a whole number or none, got 'x'"),
        (["--bf16", "maybe"], "--bf16: expected true or false, got 'maybe'"),
        (["--bf16", "true", "run.yaml"], "--bf16 takes one value, got 2: true run.yaml"),
        (["--no_bf16", "true"], "--no_bf16 takes no value, got 'true'; write --bf16 true"),
        (["--bf16", "--no_bf16"], "--bf16 and --no_bf16 clash"),
        (["--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["--seed=1", "--seed", "1"], "--seed is given twice"),
        (["--strategy", "bdf"], "--strategy: expected one of bfd, bfd_split, wrapped, got 'bdf'; did you mean bfd?"),
        (["--schedule", "cos"], "--schedule: expected one of linear, cosine, got 'cos'; did you mean cosine?"),
        (["--colour", "red"], "--colour: expected one of 1, 2, got 'red'"),
        (["--pad", "many"], "--pad: expected a whole number or auto or none, got 'many'"),
        (["--widths", "64", "x"], "--widths: item 2: expected a whole number, got 'x'"),
        (["--options", "{a: 1}"], "got '{a: 1}', which is not JSON (Expecting property name"),
        (["--ratios", '{"a": 1, "a": 2}'], "--ratios: key 'a' is given twice"),
        (["--ratios", '{"a": "much"}'], "--ratios: a: expected a number, got 'much'"),
        (["--ratios", "half"], "--ratios: expected a mapping (JSON on the command line) or none, got 'half'"),
        (["--datasets", '{"pth": "x"}'], "--datasets: item 1: unknown key 'pth'; did you mean path?"),
        (["--datasets", '{"fraction": 1}'], "--datasets: item 1: key 'path' is missing"),
        (["--datasets", '{"path": null}'], "--datasets: item 1: path: expected text, got nothing"),
        (["--device", "cpu"], "--device: takes a Python object (heavylib.Device | None); set it in a script, not here"),
        (["run.yaml"], "unexpected 'run.yaml'; did you mean --config run.yaml?"),
        (["garbage"], "unexpected 'garbage'; values follow a flag: --flag garbage"),
        (["--"], "unexpected '--'"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config is given twice"),
        (["--config"], "--config needs a value: --config FILE"),
        (["--model", "bad\udcff"], "is not UTF-8 text"),
    ],
)  # fmt: skip
def test_mistakes(command, words, message):
    with pytest.raises(CommandError) as caught:
        command.parse(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_what_was_set_is_in_values_and_configs_fill_in_the_rest(command):
    parsed = command.parse(
        ["--colour", "2", "--trust_remote_code", "--widths", "3", "--cache", "x", "--schedule", "cosine"]
    )
    assert parsed.values["demo"] == {"schedule": "cosine"}
    assert parsed.sources["colour"] == "command line"
    demo, model, data = parsed.build()
    assert (demo.learning_rate, demo.max_length, demo.extra_7) == (2e-5, 1024, 7)
    assert type(demo.schedule).__name__ == "Schedule"
    assert (model.colour.name, model.widths, model.cache) == ("GREEN", (3,), pathlib.Path("x"))
    assert model.trust_remote_code is data.trust_remote_code is True, "one flag fills every config with that field"


def test_nested_configs_are_built(command):
    words = ["--datasets", '[{"path": "a", "columns": ["x"]}, {"path": "b", "fraction": 1e-1}]']
    first, second = command.parse(words).build()[2].datasets
    assert (type(first).__name__, first.columns, second.fraction) == ("Source", ["x"], 0.1)


def test_a_config_that_refuses_its_values_is_a_command_error(command):
    with pytest.raises(CommandError, match="^max_length=1: write 2 or more$"):
        command.parse(["--max_length", "1"]).build()


def test_main_answers_with_exit_codes_and_one_line(command, capsys):
    assert command.main(["--model", "m"]) == 0
    assert capsys.readouterr().out == "2e-05 m []\n"
    assert command.main(["--max_steps", "7"]) == 7
    assert command.main(["--help"]) == 0
    capsys.readouterr()
    assert command.main(["--sed", "1"], prog="posttrain demo") == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "posttrain demo: error: unknown flag --sed; did you mean --seed?\n")


def test_a_required_option(app):
    from posttrain_cli import Command

    command = Command("needs", "Needs one.", {"source": "demo_app.config:Source"}, run="demo_app.train:main")
    with pytest.raises(CommandError, match="--path is required"):
        command.parse([])
    assert command.parse(["--path", "x"]).build()[0].path == "x"


def test_an_interrupted_run_is_one_line(capsys):
    def action():
        raise KeyboardInterrupt

    assert guarded(action, "posttrain sft") == 130
    assert capsys.readouterr().err == "posttrain sft: ended by SIGINT\n"

"""Two gloo ranks against one process; one pair of processes runs it all."""

import pytest
import torch
import toy_jobs
import toy_runs
from posttrain_losses import Max, Mean
from posttrain_trainer.ranks import Ranks, merge_packed, pack
from toy_runs import Prepared, Squares

CLOSE = {"rtol": 0, "atol": 5e-6}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return toy_runs.run(2, "two_ranks", tmp_path_factory.mktemp("ranks"))


def same(found, wanted):
    for left, right in zip(found["parameters"], wanted["parameters"], strict=True):
        torch.testing.assert_close(left, right, **CLOSE)
    for left, right in zip(found["logs"], wanted["logs"], strict=True):
        assert left.keys() == right.keys()
        for name in left:
            assert left[name] == pytest.approx(right[name], rel=1e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("split", ["16x1", "4x4"])
def test_two_ranks_train_as_one(two, tmp_path, split):
    one = toy_jobs.split(
        tmp_path, "s", count=75, per_device_train_batch_size=32, gradient_accumulation_steps=1, num_train_epochs=2
    )
    same(two[f"split {split}"], one)


@pytest.mark.parametrize(("name", "method"), [("pairs", Squares(pairs=True)), ("prepared", Prepared())])
def test_two_ranks_with_two_keys_and_with_prepare(two, tmp_path, name, method):
    same(two[name], toy_jobs.split(tmp_path, "p", count=75, method=method, per_device_train_batch_size=32))


def test_a_rank_without_rows_takes_part(two, tmp_path):
    same(two["anchor"], toy_jobs.split(tmp_path, "a", count=9, per_device_train_batch_size=8))


def test_a_metric_that_one_rank_lacks_does_not_hang(two):
    logs = two["lonely"]["logs"][:-1]
    assert len(logs) == 18
    with_it = [one for one in logs if "odd" in one]
    assert 0 < len(with_it) < len(logs) and all(one["odd"] == 1.0 for one in with_it)


def test_two_ranks_resume_bit_for_bit(two):
    whole, resumed = two["resume"]["whole"], two["resume"]["resumed"]
    for left, right in zip(whole["parameters"], resumed["parameters"], strict=True):
        assert torch.equal(left, right)
    assert whole["logs"] == resumed["logs"]


def test_evaluation_on_two_ranks_is_that_of_one_exactly(two, tmp_path):
    one = toy_jobs.evaluation(tmp_path)
    assert one.keys() == two["evaluation"].keys()
    for name, (metrics, predictions, labels) in one.items():
        found = two["evaluation"][name]
        if "Prepared" in name:  # its mean target is summed over ranks, in another order
            assert found[0] == pytest.approx(metrics, rel=1e-5)
        else:
            assert found[0] == metrics
        assert torch.equal(found[1], predictions) and torch.equal(found[2], labels)


def test_one_name_for_two_kinds_of_metric_is_refused():
    with pytest.raises(ValueError, match="metric 'a' is Mean and Max on different ranks"):
        merge_packed([pack({"a": Mean.of(1.0)}), pack({"a": Max.of(1.0)})])


def test_counts_of_replicas_are_counted_once(monkeypatch):
    ranks = Ranks(0, 1, 2, torch.device("cpu"))
    monkeypatch.setattr("posttrain_trainer.ranks.reduce", lambda values, kind: values * 2)
    monkeypatch.setattr("posttrain_trainer.ranks.gather_object", lambda values: values * 2)
    assert float(ranks.total_counts({"loss": 5})["loss"]) == 5
    assert ranks.gather("x") == ["x"] and ranks.exchange("x") == ["x", "x"]


def test_the_process_that_does_not_come_is_named(two):
    assert two["late"].startswith("process 1 did not come where the other processes waited for it")

import math

import pytest
import torch
import toy_runs
from posttrain_losses import Mean
from posttrain_trainer import Anchor, MapSource
from toy_runs import Lonely, Prepared, Squares, Stream10, Toy, collate, logs, net, parameters, rows, trainer

TIGHT = {"rtol": 0, "atol": 2e-6}


def close(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)


def trained(folder, **settings):
    found = trainer(folder, **settings)
    found.train()
    return found


def reference_step(model, batch_rows, key_rows=False):
    """Loss and gradients in float64, of all rows at once."""
    twin = net().double()
    twin.load_state_dict(model.state_dict())
    total, items, worst = 0.0, 0, 0.0
    for row in batch_rows:
        error = (twin(row["x"].double()).squeeze(-1) - row["y"].double()) ** 2
        total, items, worst = total + error.sum(), items + row["length"], worst + error.max()
    loss = total / items + (worst / len(batch_rows) if key_rows else 0.0)
    loss.backward()
    return float(loss.detach()), [parameter.grad for parameter in twin.parameters()]


@pytest.mark.parametrize("pairs", [False, True])
def test_loss_and_gradient_are_sum_over_count_of_the_whole_step(tmp_path, pairs):
    data = rows(32)
    for batch_size, accumulation in ((32, 1), (8, 4), (4, 8), (5, 7)):
        found = trainer(
            tmp_path,
            train_dataset=data,
            method=Squares(pairs=pairs),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            weight_decay=0.0,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
        )
        before = parameters(found)
        loss, gradients = reference_step(found.model, data, pairs)
        found.train()
        assert logs(found)[0]["loss"] == pytest.approx(loss, rel=1e-6)
        moved = [b - a for b, a in zip(before, parameters(found), strict=True)]
        close([value.double() for value in moved], gradients)


def test_splits_give_the_same_run(tmp_path):
    # 75 rows: the second epoch begins after a short step
    runs = [
        trained(tmp_path, count=75, num_train_epochs=2, per_device_train_batch_size=b, gradient_accumulation_steps=a)
        for b, a in ((32, 1), (8, 4), (4, 8))
    ]
    assert [one.state.global_step for one in runs] == [6, 6, 6]
    for other in runs[1:]:
        close(parameters(runs[0]), parameters(other))
        for one, two in zip(logs(runs[0]), logs(other), strict=True):
            assert one.keys() == two.keys()
            for name in one:
                assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), name


def test_prepare_sees_the_step_and_splits_do_not_matter(tmp_path):
    runs = [
        trained(tmp_path, count=75, method=Prepared(), per_device_train_batch_size=b, gradient_accumulation_steps=a)
        for b, a in ((32, 1), (4, 8))
    ]
    close(parameters(runs[0]), parameters(runs[1]))


def test_prepare_must_keep_batches_and_anchors(tmp_path):
    class Loses(Squares):
        def prepare(self, model, batches):
            return batches[1:]

    class Unwraps(Squares):
        def prepare(self, model, batches):
            return [batch.batch if isinstance(batch, Anchor) else batch for batch in batches]

    with pytest.raises(ValueError, match="prepare returned 0 batches for 1"):
        trained(tmp_path, method=Loses())

    class Source(Lonely):
        pass

    with pytest.raises(ValueError, match="batch 1 went in as Anchor and came back as Toy"):
        trained(tmp_path, train_dataset=Source(), method=Unwraps(), max_steps=1, gradient_accumulation_steps=2)


def test_anchors_change_nothing_and_sources_are_read_step_by_step(tmp_path):
    class Plain(Lonely):
        def __iter__(self):
            for batch in super().__iter__():
                if not isinstance(batch, Anchor):
                    yield batch

    anchored = trained(tmp_path, train_dataset=Lonely(), max_steps=3, gradient_accumulation_steps=2)
    plain = trained(tmp_path, train_dataset=Plain(), max_steps=3)
    assert anchored.train_dataset.taken == 3  # not one batch ahead
    close(parameters(anchored), parameters(plain))
    assert [one["error"] for one in logs(anchored)[:3]] == [one["error"] for one in logs(plain)[:3]]
    assert [one["num_tokens"] for one in logs(anchored)[:3]] == [one["num_tokens"] for one in logs(plain)[:3]]


def test_a_step_without_items_has_loss_zero(tmp_path):
    empty = [{"index": 0, "x": torch.zeros(1, toy_runs.WIDTH), "y": torch.zeros(1), "length": 0}]

    def blank(batch, size=None):
        return Toy(torch.ones(1, 2, toy_runs.WIDTH), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))

    found = trainer(tmp_path, train_dataset=empty, max_steps=2, weight_decay=0.0)
    found.data_collator = blank
    before = parameters(found)
    found.train()
    assert logs(found)[0]["loss"] == 0.0 and math.isnan(logs(found)[0]["error"])
    close(before, parameters(found))


def test_metrics_are_of_all_rows_since_the_last_log(tmp_path):
    data = rows(40)
    found = trained(
        tmp_path,
        train_dataset=data,
        per_device_train_batch_size=4,
        logging_steps=5,
        learning_rate=0.0,
        num_train_epochs=1,
    )
    order = MapSource(data, list, batch_size=4, seed=3)
    model = net().double()
    for index in range(2):
        seen = [data[i] for step in range(5 * index, 5 * index + 5) for i in order.rows(step)]
        with torch.no_grad():
            errors = torch.cat([(model(row["x"].double()).squeeze(-1) - row["y"].double()) ** 2 for row in seen])
        log = logs(found)[index]
        assert log["error"] == pytest.approx(float(errors.mean()), rel=1e-6)
        assert log["worst"] == pytest.approx(float(errors.max()), rel=1e-6)
        assert log["spread"] == pytest.approx(float(torch.cat([row["y"].double() for row in seen]).std()), rel=1e-6)
    assert logs(found)[1]["num_tokens"] == sum(row["length"] for row in data)


def test_the_loss_keys_must_be_those_of_count(tmp_path):
    class Odd(Squares):
        def loss(self, model, batch):
            return {"words": super().loss(model, batch)[0]}, {}

    class Named(Squares):
        def loss(self, model, batch):
            return super().loss(model, batch)[0], {"loss": Mean.of(1.0)}

    class Grows(Squares):
        calls = 0

        def count(self, batch):
            self.calls += 1
            return {"loss": 1} if self.calls == 1 else {"loss": 1, "late": 1}

    with pytest.raises(ValueError, match=r"a sum for 'words', method.count counts \['loss'\]"):
        trained(tmp_path, method=Odd())
    with pytest.raises(ValueError, match="a metric named 'loss'"):
        trained(tmp_path, method=Named())
    with pytest.raises(ValueError, match="new key 'late'"):
        trained(tmp_path, method=Grows())


def test_namedtuples_keep_their_type_on_the_way_to_the_device(tmp_path):
    found = trainer(tmp_path)
    batch = Toy(torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool), [None, {"a": (1,)}])
    moved = found._prepare_inputs(Anchor(batch))
    assert isinstance(moved, Anchor) and isinstance(moved.batch, Toy)
    assert moved.batch.y.dtype == torch.float64 and moved.batch.extra == [None, {"a": (1,)}]


def test_counters_of_transformers_work_on_named_tuples(tmp_path):
    found = trained(tmp_path, count=10, include_num_input_tokens_seen="non_padding", num_train_epochs=1)
    assert found.state.num_input_tokens_seen == sum(row["length"] for row in rows(10))
    assert found.compute_loss(found.model, collate(rows(3))).ndim == 0
    loss, logits, labels = found.prediction_step(found.model, collate(rows(3)), False)
    assert float(loss) > 0 and logits.shape == labels.shape == collate(rows(3)).y.shape


def evaluated(tmp_path, count, **settings):
    found = trainer(tmp_path, eval_dataset=rows(count, seed=8), **settings)
    return found, found.evaluate()


@pytest.mark.parametrize("batch_size", [1, 2, 5, 32])
def test_eval_loss_is_total_over_total(tmp_path, batch_size):
    found, metrics = evaluated(tmp_path, 13, per_device_eval_batch_size=batch_size)
    model = found.model.double().requires_grad_(False)
    errors = [(model(row["x"].double()).squeeze(-1) - row["y"].double()) ** 2 for row in rows(13, seed=8)]
    assert metrics["eval_loss"] == pytest.approx(float(torch.cat(errors).mean()), rel=1e-6)
    assert metrics["eval_error"] == pytest.approx(metrics["eval_loss"], rel=1e-6)
    assert metrics["eval_worst"] == pytest.approx(max(float(error.max()) for error in errors), rel=1e-6)
    assert found.model.training is False


def test_eval_of_prepared_methods_sees_the_whole_set(tmp_path):
    found, metrics = evaluated(tmp_path, 13, method=Prepared(), per_device_eval_batch_size=2)
    _, whole = evaluated(tmp_path, 13, method=Prepared(), per_device_eval_batch_size=32)
    assert metrics["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)


def test_several_eval_sets_streams_and_nothing_to_count(tmp_path):
    class Stream:
        def __iter__(self):
            return iter(rows(5, seed=1))

    found = trainer(tmp_path, eval_dataset={"a": rows(3), "b": Stream()}, per_device_eval_batch_size=2)
    metrics = found.evaluate()
    assert {"eval_a_loss", "eval_b_loss", "eval_a_error"} <= metrics.keys()

    class Nothing(Squares):
        def count(self, batch):
            return 0

    _, empty = evaluated(tmp_path, 3, method=Nothing())
    assert math.isnan(empty["eval_loss"])


def test_compute_metrics_and_predict(tmp_path):
    seen = []

    def measure(prediction):
        real = prediction.label_ids != -100
        seen.append(prediction.predictions.shape)
        return {"gap": float((prediction.predictions - prediction.label_ids)[real].__abs__().mean())}

    found, metrics = evaluated(
        tmp_path,
        13,
        per_device_eval_batch_size=2,
        compute_metrics=measure,
        preprocess_logits_for_metrics=lambda logits, labels: logits * 1.0,
    )
    found.model.requires_grad_(False)
    errors = [(found.model(row["x"]).squeeze(-1) - row["y"]).abs() for row in rows(13, seed=8)]
    assert metrics["eval_gap"] == pytest.approx(float(torch.cat(errors).mean()), rel=1e-5)
    assert seen == [(13, 5)]
    prediction = found.predict(rows(4, seed=8))
    assert (
        prediction.predictions.shape[0] == 4 and "test_loss" in prediction.metrics and "test_gap" in prediction.metrics
    )


def test_batch_eval_metrics(tmp_path):
    totals = []

    def measure(prediction, compute_result):
        totals.append(int((prediction.label_ids != -100).sum()))
        return {"items": sum(totals)} if compute_result else {}

    _, metrics = evaluated(tmp_path, 13, per_device_eval_batch_size=4, compute_metrics=measure, batch_eval_metrics=True)
    assert metrics["eval_items"] == sum(row["length"] for row in rows(13, seed=8)) and len(totals) == 4


def test_arguments_that_cannot_be_honoured_are_refused(tmp_path):
    class Blind(Squares):
        predict = property()

    class NoCount:
        def loss(self, model, batch):
            return None

    def refused(message, **settings):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, **settings)

    refused("has no predict", method=Blind(), compute_metrics=lambda prediction: {})
    refused(r"a method has count\(batch\) and loss", method=NoCount())
    refused("label_smoothing_factor=0.1", label_smoothing_factor=0.1)
    refused("include_for_metrics", include_for_metrics=["loss"])
    refused("'selective' but gradient_checkpointing is False", gradient_checkpointing_kwargs={"selective": True})


def test_streaming_datasets_train(tmp_path):
    with pytest.raises(ValueError, match="max_steps"):
        trainer(tmp_path, train_dataset=Stream10())
    found = trained(tmp_path, train_dataset=Stream10(), max_steps=4, per_device_train_batch_size=4, shuffle_buffer=5)
    assert found.state.global_step == 4 and found.state.epoch == 1.0


def test_the_model_card_names_method_and_base(tmp_path):
    found = trained(tmp_path / "my-model", count=4, save_strategy="steps", save_steps=1, num_train_epochs=1)
    text = (tmp_path / "my-model" / "checkpoint-1" / "README.md").read_text()
    assert 'tags: ["posttrain", "squares"]' in text and "trained with Squares" in text and "transformers 5" in text
    found.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "README.md").exists()

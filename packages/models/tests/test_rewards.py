"""Reward models: scores by length in every layout, and checkpoints that others can load."""

import logging

import pytest
import torch
import torch.distributed as dist
from posttrain_collators import CompletionBatch, PreferenceCollator
from posttrain_models import LoadOptions, LoraOptions, apply_lora, choose_layout, fit_tokens, tiny_model
from posttrain_models.rewards import completion_scores, load_reward_model, tiny_reward_model
from posttrain_models.unwrap import state_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

LAYOUTS = ("padded", "packed", "shared")
# Token 0 both pads and occurs, at the end of completions too.
ROWS = [
    {"prompt_ids": [5, 6, 0, 7], "chosen_ids": [8, 9, 0], "rejected_ids": [10]},
    {"prompt_ids": [11], "chosen_ids": [12, 0], "rejected_ids": [0, 13, 14, 0, 0]},
    {"prompt_ids": [15, 16], "chosen_ids": [17], "rejected_ids": [18, 19]},
]


def expected(model, rows=ROWS):
    """One text at a time: the head at the last position of the decoder's states."""
    result = []
    for row in rows:
        for column in ("chosen_ids", "rejected_ids"):
            ids = torch.tensor([row["prompt_ids"] + row[column]])
            states = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
            result.append(model.score(states[0, -1]))
    return torch.cat(result).view(len(rows), 2)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "qwen3_moe", "qwen3_5"])
def test_scores_are_those_at_the_last_token_in_every_layout(architecture):
    model = tiny_reward_model(architecture)
    batch = PreferenceCollator(0)(ROWS)
    want = expected(model)
    model.zero_grad()
    want.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    layouts = ["padded"] if architecture == "qwen3_5" else LAYOUTS
    for layout in layouts:
        assert choose_layout(model, layout).name == layout
        model.zero_grad()
        scores = completion_scores(model, batch)
        torch.testing.assert_close(scores, want, rtol=1e-4, atol=1e-5)
        scores.square().sum().backward()
        for name, grad in grads.items():
            torch.testing.assert_close(dict(model.named_parameters())[name].grad, grad, rtol=1e-3, atol=1e-4)
    assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 1)


def test_static_shapes_and_auto():
    model = tiny_reward_model("llama")
    batch = PreferenceCollator(0)(ROWS, size=4)
    want = expected(model)
    for layout in ("padded", "shared"):
        choose_layout(model, layout, static_shapes=True)
        scores = completion_scores(model, batch)
        torch.testing.assert_close(scores[:3], want, rtol=1e-4, atol=1e-5)
        assert scores[3].tolist() == [0.0, 0.0]
    fresh = tiny_reward_model("llama")
    torch.testing.assert_close(completion_scores(fresh, batch)[:3], want, rtol=1e-4, atol=1e-5)
    assert state_of(fresh).layout.name == "shared"


def test_fillers_and_no_prompt():
    model = tiny_reward_model("llama", pad_token_id=None)
    rows = [{"chosen_ids": [5, 6], "rejected_ids": [7]}]
    batch = PreferenceCollator(0)(rows)
    for layout in LAYOUTS:
        choose_layout(model, layout)
        want = expected(model, [{"prompt_ids": [], **rows[0]}])
        torch.testing.assert_close(completion_scores(model, batch), want, rtol=1e-4, atol=1e-5)
    assert model.config.pad_token_id is None
    empty = PreferenceCollator(0)([], size=2)
    scores = completion_scores(model, empty)
    assert scores.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    scores.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_head_is_float32_under_autocast():
    model = tiny_reward_model("llama")
    batch = PreferenceCollator(0)(ROWS)
    want = expected(model)
    with torch.autocast("cpu", torch.bfloat16):
        scores = completion_scores(model, batch)
    assert scores.dtype == torch.float32
    assert (scores != scores.bfloat16()).any()
    torch.testing.assert_close(scores, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["all-linear"]])
def test_adapters(targets, tmp_path):
    torch.manual_seed(0)
    tiny_reward_model("llama").save_pretrained(tmp_path / "base")
    base = load_reward_model(tmp_path / "base", device=None)
    model = apply_lora(base, LoraOptions(lora_target_modules=targets, lora_r=4, lora_dropout=0.0))
    config = model.peft_config["default"]
    assert config.task_type == "SEQ_CLS" and "score" in config.modules_to_save
    assert not hasattr(base.score.original_module, "lora_A")
    batch = PreferenceCollator(0)(ROWS)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    start = completion_scores(model, batch)
    (start[:, 1] - start[:, 0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    optimizer.step()
    after = completion_scores(model, batch).detach()
    assert (after - start.detach()).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    again = load_reward_model(tmp_path / "adapter", device=None)
    torch.testing.assert_close(completion_scores(again, batch), after, rtol=1e-4, atol=1e-5)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(expected(plain), after, rtol=1e-4, atol=1e-5)


def test_an_adapted_head_is_asked_too():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["score", "q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_reward_model("llama"), config).eval()
    batch = PreferenceCollator(0)(ROWS)
    want = expected(model.get_base_model())
    for layout in LAYOUTS:
        choose_layout(model, layout)
        torch.testing.assert_close(completion_scores(model, batch), want, rtol=1e-4, atol=1e-5)


def test_a_language_model_gets_a_head(tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, "posttrain")
    tiny_model("smollm2", eos_token_id=3).save_pretrained(tmp_path / "lm")
    state = torch.get_rng_state()
    model = load_reward_model(LoadOptions(str(tmp_path / "lm")), device=None)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert caplog.text.count("the reward head of") == 1
    assert "newly" not in capsys.readouterr().err.lower()
    torch.manual_seed(5)
    again = load_reward_model(tmp_path / "lm", device=None)
    torch.testing.assert_close(again.score.weight, model.score.weight, rtol=0, atol=0)
    assert model.score.weight.any() and model.config.num_labels == 1 and model.config.pad_token_id == 3
    model.save_pretrained(tmp_path / "reward")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32)
    rows = [{"prompt_ids": [4], "chosen_ids": [5, 6, 7], "rejected_ids": [8]}]
    scores = completion_scores(model.eval(), PreferenceCollator(3)(rows))
    ids = torch.tensor([[4, 5, 6, 7], [4, 8, 3, 3]])
    torch.testing.assert_close(loaded(input_ids=ids, attention_mask=ids != 3).logits.view(1, 2), scores)
    caplog.clear()
    load_reward_model(tmp_path / "reward", device=None)
    assert "the reward head" not in caplog.text


def test_one_token_that_ends_and_pads_is_said(caplog):
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "<pad>": 2}, unk_token="<end>"))
    model = tiny_reward_model("llama")
    fit_tokens(model, PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>"))
    assert model.config.pad_token_id == 2 and not caplog.text
    fit_tokens(model, PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>"))
    assert "<end> both ends and pads" in caplog.text


def test_what_is_no_reward_model_is_refused(tmp_path):
    batch = PreferenceCollator(0)(ROWS)
    assert isinstance(batch, CompletionBatch)
    with pytest.raises(ValueError, match="no reward head named score; load it with load_reward_model"):
        completion_scores(tiny_model("llama"), batch)
    three = tiny_reward_model("llama", num_labels=3)
    with pytest.raises(ValueError, match="num_labels=3; a reward model has 1"):
        completion_scores(three, batch)
    three.save_pretrained(tmp_path / "three")
    for kwargs in ({}, {"model_init_kwargs": {"num_labels": 3}}):
        with pytest.raises(ValueError, match="three has num_labels=3; a reward model has 1"):
            load_reward_model(tmp_path / "three", device=None, **kwargs)
    tiny_model("granite").save_pretrained(tmp_path / "granite")
    with pytest.raises(ValueError, match="granite is a granite, which has no sequence classifier"):
        load_reward_model(tmp_path / "granite", device=None)
    with pytest.raises(ValueError, match="model_name_or_path is missing"):
        load_reward_model(LoadOptions())
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_reward_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="architecture='granite' is not one of llama"):
        tiny_reward_model("granite")


def test_checkpointing_and_compilation():
    batch = PreferenceCollator(0)(ROWS)
    model = tiny_reward_model("llama").train()
    want = expected(model.eval())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    scores = completion_scores(model.train(), batch)
    torch.testing.assert_close(scores, want, rtol=1e-4, atol=1e-5)
    scores.sum().backward()
    choose_layout(model, "padded")
    compiled = torch.compile(model.eval(), backend="eager")
    torch.testing.assert_close(completion_scores(compiled, batch), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_static_shapes_depend_on_no_data(layout):
    model = tiny_reward_model("llama")
    known = choose_layout(model, layout, static_shapes=True)
    batch = PreferenceCollator(0)(ROWS)
    with FakeTensorMode() as mode:
        fake = tiny_reward_model("llama")
        state_of(fake).layout = known
        fakes = CompletionBatch(*(mode.from_tensor(x) for x in batch[:4]))
        scores = completion_scores(fake, fakes)
        scores.sum().backward()
    assert scores.shape == (3, 2)


def build(lora, layout):
    model = tiny_reward_model("llama").train()
    if lora:
        torch.manual_seed(0)
        model = apply_lora(model, LoraOptions(lora_r=4, lora_dropout=0.0), gradient_checkpointing=True)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    choose_layout(model, layout)
    return model


def backward(model, batch):
    model.zero_grad()
    completion_scores(model, batch).square().sum().backward()


def job(rank, world, init):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        rows = [*ROWS, ROWS[0]]
        whole, part = PreferenceCollator(0)(rows), PreferenceCollator(0)(rows[rank::world])
        for lora in (False, True):
            single = build(lora, "padded")
            backward(single, whole)
            want = {name: p.grad for name, p in single.named_parameters() if p.grad is not None}
            assert any("score" in name for name in want)
            for layout in ("padded", "shared"):
                models = [DistributedDataParallel(build(lora, layout), find_unused_parameters=x) for x in (False, True)]
                if not lora:
                    model = build(lora, layout)
                    for module in (*model.model.layers, model):
                        fully_shard(module, mesh=mesh)
                    models.append(model)
                for model in models:
                    backward(model, part)
                    backward(model, part)
                    for name, parameter in model.named_parameters():
                        grad = parameter.grad
                        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                        name = name.removeprefix("module.")
                        if name in want:
                            torch.testing.assert_close(grad * world, want[name], rtol=1e-3, atol=1e-4)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_ddp_and_fsdp2(tmp_path):
    torch.multiprocessing.spawn(job, (2, f"file://{tmp_path / 'rendezvous'}"), nprocs=2)

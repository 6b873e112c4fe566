"""What `posttrain sft` does when it is given nothing: a built-in tiny model learns built-in rows."""

from typing import Any

import torch
from posttrain_data import tiny_tokenizer
from posttrain_models import tiny_model, unwrap
from posttrain_trainer.commands import demonstration
from transformers import set_seed

from posttrain_sft.config import SFTConfig
from posttrain_sft.trainer import SFTTrainer

QUESTION = "What is the capital of France?"

CAPITALS = {
    "Austria": "Vienna",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "France": "Paris",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Qatar": "Doha",
    "Spain": "Madrid",
}

# What suits a model of this size; each takes effect where the command line left the option at its default.
SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-3,
    "max_steps": 40,
    "logging_steps": 10,
    "lr_scheduler_type": "constant",
    "assistant_only_loss": True,
    "save_strategy": "no",
    "report_to": "none",
}


def rows() -> list[dict]:
    """Sixteen one-turn conversations about capitals.

    Example:
        >>> rows()[4]["messages"][1]["content"]
        'The capital of France is Paris.'
    """
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is the capital of {country}?"},
                {"role": "assistant", "content": f"The capital of {country} is {capital}."},
            ]
        }
        for country, capital in CAPITALS.items()
    ]


def run(config: SFTConfig) -> int:
    """Train on `rows` and print the loss, and one completion from before and after."""
    with demonstration(config, SETTINGS) as config:
        return _run(config)


def _run(config: SFTConfig) -> int:
    set_seed(config.seed)
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256)
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows(), processing_class=tokenizer)
    before = complete(trainer.model, tokenizer)
    trainer.train()
    after = complete(trainer.model, tokenizer)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"\nloss    {' -> '.join(f'{loss:.3f}' for loss in losses)}")
        print(f"asked   {QUESTION}\nbefore  {before!r}\nafter   {after!r}", flush=True)
    return 0


def complete(model: Any, tokenizer: Any) -> str:
    """The likeliest answer to `QUESTION`."""
    model = unwrap(model)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = {name: prompt[name].to(model.device) for name in ("input_ids", "attention_mask")}
    training = model.training
    model.eval()
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    model.train(training)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

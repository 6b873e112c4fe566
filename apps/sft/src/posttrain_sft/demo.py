"""What `posttrain sft` does when it is given nothing: a built-in tiny model learns built-in rows."""

from typing import Any

import torch
from posttrain_app.demo import Demonstration
from posttrain_models import unwrap

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


def answer(trainer: Any) -> str:
    """The likeliest answer to `QUESTION`."""
    model, tokenizer = unwrap(trainer.model), trainer.processing_class
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = {name: prompt[name].to(model.device) for name in ("input_ids", "attention_mask")}
    training = model.training
    model.eval()
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    model.train(training)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


DEMONSTRATION = Demonstration(
    rows=rows(),
    settings={"learning_rate": 3e-3, "max_steps": 40, "logging_steps": 10, "assistant_only_loss": True},
    look=answer,
    compare=lambda before, after: {"asked": QUESTION, "before": repr(before), "after": repr(after)},
)

"""A tokenizer small enough to be made in memory."""

from __future__ import annotations

from typing import Any

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {%- if not loop.first or message['content'] %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
            {{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SAMPLE = (
    "the quick brown fox jumps over the lazy dog and then it runs back to the river where the water is cold",
    "what is the capital of france? the capital of france is paris. what is two plus three? the answer is five.",
    "you are a helpful assistant. please write a short story about a cat that wanted to be a good friend.",
    "user assistant system tool function name arguments content question answer yes no hello thank you",
    "There are seven days in a week, and twelve months in a year. Here is what they are called in English.",
)


def tiny_tokenizer(vocab_size: int = 512) -> Any:
    """A byte-level tokenizer with ChatML tokens and a chat template that shows tools, for demonstrations and tests.

    It needs no file and no network, encodes any text, and `save_pretrained` writes it like any other.

    Args:
        vocab_size: Tokens; at least 259 (256 bytes and three special tokens).

    Returns:
        A `transformers.PreTrainedTokenizerFast`. `<|im_end|>` ends turns and texts, `<|endoftext|>` pads.

    Raises:
        ValueError: For a smaller `vocab_size`.

    Example:
        >>> from posttrain_data import tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> tokenizer.decode(tokenizer("Grüße 👋")["input_ids"])
        'Grüße 👋'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 256 + len(SPECIAL):
        raise ValueError(f"vocab_size={vocab_size}: write at least {256 + len(SPECIAL)}, the bytes and special tokens.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    backend.train_from_iterator(SAMPLE, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer

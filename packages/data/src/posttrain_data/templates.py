"""Chat templates: the tokens that end a turn, and taking a template over from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain_data.errors import DataError
from posttrain_data.formats import Message
from posttrain_data.rendering import Renderer
from posttrain_data.spans import Conversation, turn_spans


def terminators(tokenizer: Any) -> list[int]:
    """Ids of the tokens that end an assistant turn: what sampling must stop at, for `generation_config.eos_token_id`.

    They are found by rendering short conversations: with the assistant's turn last, followed by a user's, and calling a
    tool. The tokenizer's own end-of-sequence token, which closes plain texts, comes last unless it is among them.

    Args:
        tokenizer: A tokenizer, or a processor that holds one.

    Returns:
        Token ids, without repetition, the one that ends a last turn first.

    Raises:
        DataError: When neither the template nor the tokenizer has such a token.

    Example:
        >>> from posttrain_data import terminators, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> tokenizer.convert_ids_to_tokens(terminators(tokenizer))
        ['<|im_end|>']
    """
    renderer = Renderer(tokenizer)
    inner = renderer.tokenizer
    found: list[int] = []
    user: Message = {"role": "user", "content": "?"}
    answer: Message = {"role": "assistant", "content": "!"}
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "content": "?", "name": "f"}
    tools = [{"type": "function", "function": {"name": "f", "description": "?", "parameters": {}}}]
    for messages, index, given in (
        ([user, answer], 1, None),
        ([user, answer, user, answer], 1, None),
        ([user, calling, result, answer], 1, tools),
    ):
        if renderer.has_template:
            found += _closing_ids(renderer, messages, index, given)
    if inner.eos_token_id is not None:
        found.append(inner.eos_token_id)
    if not found:
        raise DataError(
            "neither the chat template nor the tokenizer has a token that ends a turn: set tokenizer.eos_token."
        )
    return list(dict.fromkeys(found))


def _closing_ids(renderer: Renderer, messages: list[Message], index: int, tools: Any) -> list[int]:
    try:
        text = renderer.text(messages, tools)
        spans = turn_spans(Conversation(renderer, messages, tools, {}, text), [index])
    except DataError:
        return []
    span = spans[-1]
    closing = text[span.closing : span.stop]
    tokens = [match.group() for match in renderer.special_pattern.finditer(closing)]
    if "tool_calls" in messages[index]:
        tokens = tokens[-1:]  # those before it may close the call, not the turn
    return [int(token_id) for token_id in renderer.tokenizer.convert_tokens_to_ids(tokens)]


def clone_chat_template(model: Any, tokenizer: Any, source: str | Path, resize_to_multiple_of: int | None = 64) -> Any:
    """Gives a tokenizer the chat template of another, with the tokens that it needs, and the model room for them.

    A `.jinja` file, or a folder that holds only one, gives its template alone. A folder or hub name with a tokenizer
    gives its template, its added tokens and its end-of-sequence token. New embedding rows start from the mean of the
    others, as transformers makes them.

    Args:
        model: Anything with `get_input_embeddings`, `resize_token_embeddings`, `config` and `generation_config`; None
            changes the tokenizer alone.
        tokenizer: The tokenizer to change, in place.
        source: A template file, a folder, or a hub name.
        resize_to_multiple_of: The embedding's rows are rounded up to a multiple of it; None leaves them.

    Returns:
        The ids of the added tokens (empty for a template alone).

    Raises:
        DataError: When the source has no chat template, or its template is not valid.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from posttrain_data import clone_chat_template, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> file = Path(tempfile.mkdtemp()) / "plain.jinja"
        >>> _ = file.write_text("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}")
        >>> clone_chat_template(None, tokenizer, file)
        []
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        'Hi<|im_end|>'
    """
    text = _template_file(Path(source))
    if text is not None:
        tokenizer.chat_template = text
        Renderer(tokenizer).facts()
        return []
    other = _load(source)
    if not other.chat_template:
        raise DataError(
            f"chat template source {str(source)!r} has no chat template: name a chat model, or a .jinja file."
        )
    tokenizer.chat_template = other.chat_template
    Renderer(tokenizer).facts()
    known = tokenizer.get_vocab()
    new = [token for _, token in sorted(other.added_tokens_decoder.items()) if token.content not in known]
    tokenizer.add_tokens(new)
    if other.eos_token is not None:
        tokenizer.eos_token = other.eos_token
    if model is not None:
        _fit_embeddings(model, tokenizer, resize_to_multiple_of)
    return [int(tokenizer.convert_tokens_to_ids(token.content)) for token in new]


def _fit_embeddings(model: Any, tokenizer: Any, multiple: int | None) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    needed = max(tokenizer.get_vocab().values()) + 1
    if multiple:
        needed = -(-needed // multiple) * multiple
    if needed > rows:
        model.resize_token_embeddings(needed)
    model.config.eos_token_id = tokenizer.eos_token_id
    if getattr(model, "generation_config", None) is not None:
        ends = terminators(tokenizer)
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]


def _template_file(path: Path) -> str | None:
    """The text of a template file, or of a folder's `chat_template.jinja` where the folder has no tokenizer."""
    if path.is_dir() and not any((path / name).exists() for name in ("tokenizer_config.json", "tokenizer.json")):
        path = path / "chat_template.jinja"
        if not path.is_file():
            raise DataError(f"chat template source {str(path.parent)!r} holds no tokenizer and no chat_template.jinja.")
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not valid UTF-8 at byte {error.start}: save the template as UTF-8.") from None
    if path.suffix in (".jinja", ".jinja2", ".j2"):
        raise DataError(f"chat template file {str(path)!r} does not exist.")
    return None


def _load(source: str | Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise DataError(
            f"chat template source {str(source)!r} is no template file, no tokenizer folder and no hub name that can "
            f"be read: {error}"
        ) from None

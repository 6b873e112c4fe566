"""The one place where messages become text and token ids."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

from posttrain_data.errors import DataError
from posttrain_data.formats import KNOWN_ROLES, Message, parse_messages, parse_tools

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize", "chat_template"})
PROBE = "Qzj7Xprobe"


class TemplateFacts(NamedTuple):
    """What the source of a chat template says about itself.

    Attributes:
        strings: Every attribute, constant key and string literal in it.
        variables: Variables that it expects from outside.
        dumps: It writes whole messages, so that every key is read.
        walks: It walks over the keys of something, so that any key may be read.
        marked: It has generation markers.
    """

    strings: frozenset[str]
    variables: frozenset[str]
    dumps: bool
    walks: bool
    marked: bool


class _GenerationTag(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=64)
def template_facts(template: str) -> TemplateFacts:
    """Reads the syntax tree of a template; raises DataError when it is not Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    try:
        tree = environment.parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template is not valid Jinja: {error} (line {error.lineno}).") from None
    strings = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    strings |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    walked = {"items", "values", "keys"} & {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
    dumped = any(
        node.name in ("tojson", "items", "string", "pprint", "dictsort")
        and isinstance(node.node, jinja2.nodes.Name)
        and node.node.name in ("message", "messages", "msg", "m")
        for node in tree.find_all(jinja2.nodes.Filter)
    )
    variables = jinja2.meta.find_undeclared_variables(tree)
    marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    return TemplateFacts(frozenset(strings), frozenset(variables), dumped, bool(walked), marked)


class Encoded(NamedTuple):
    """Token ids, and for each the characters `[start, stop)` it stands for (None for tokenizers without offsets)."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None


class Renderer:
    """A tokenizer (or the tokenizer inside a processor) and its chat template, as the one way to render messages."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        template = getattr(self.tokenizer, "chat_template", None) or getattr(tokenizer, "chat_template", None)
        self.templates: dict[str, str] = template if isinstance(template, dict) else {"default": template or ""}
        self.specials = {**self.tokenizer.special_tokens_map}
        added = self.tokenizer.added_tokens_decoder
        ends = {str(token) for token in added.values() if not str(token).isspace()}
        ends |= {token for token in self.tokenizer.all_special_tokens if token}
        ordered = sorted(ends, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._arguments_as_text: dict[str, bool] = {}
        self._parts: dict[str, bool] = {}

    @property
    def has_template(self) -> bool:
        """Whether there is any chat template."""
        return any(self.templates.values())

    def template(self, tools: Any) -> str:
        """The template that serves these tools, as transformers chooses it."""
        name = "tool_use" if tools and self.templates.get("tool_use") else "default"
        template = self.templates.get(name)
        if template:
            return template
        if self.has_template:
            raise DataError(f"the tokenizer has chat templates {sorted(self.templates)}: name one of them 'default'.")
        raise DataError(
            "the tokenizer has no chat template, which conversations need: set tokenizer.chat_template, or take "
            "one over with clone_chat_template, or give 'prompt' and 'completion' as strings."
        )

    def facts(self, tools: Any = None) -> TemplateFacts:
        """What the source of the template in use says about itself."""
        return template_facts(self.template(tools))

    def roles(self) -> frozenset[str]:
        """Names in the template's source that may be roles beside the common ones."""
        if not self.has_template:
            return frozenset()
        strings = frozenset().union(*(template_facts(text).strings for text in self.templates.values() if text))
        return frozenset(word for word in strings if word.isidentifier()) | frozenset(KNOWN_ROLES)

    def text(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Renders, in the form of messages that this template understands; raises DataError with its reason."""
        return self._render(messages, tools, kwargs or {}, add_generation_prompt, False)[0]

    def try_text(self, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any], prompt: bool) -> str | None:
        """As `text`, None where the template refuses."""
        if not messages:
            return None
        try:
            return self.text(messages, tools, kwargs, prompt)
        except DataError:
            return None

    def marks(self, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any]) -> list[tuple[int, int]]:
        """The characters within the template's own generation markers."""
        return self._render(messages, tools, kwargs, False, True)[1]

    def encode(self, text: str) -> Encoded:
        """Token ids of a rendered conversation: special tokens are those written in the text, none are added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = False) -> list[Encoded]:
        """As `encode`, for many texts at once."""
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            batch = self.tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)
            return [Encoded(list(ids), None) for ids in batch["input_ids"]]
        batch = self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [Encoded(ids, spans) for ids, spans in zip(batch["input_ids"], batch["offset_mapping"], strict=True)]

    def _render(
        self, messages: Sequence[Message], tools: Any, kwargs: Mapping[str, Any], prompt: bool, marks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        tools = tools or None
        template = self.template(tools)
        clash = RESERVED & set(kwargs)
        if clash:
            raise DataError(f"chat_template_kwargs sets {sorted(clash)[0]!r}, which is not the template's to be given.")
        messages = self._adapt(messages, tools, template)
        calls = any("tool_calls" in message for message in messages)
        if not calls:
            return self._jinja(messages, tools, kwargs, prompt, marks, template)
        if template not in self._arguments_as_text:
            self._arguments_as_text[template] = self._wants_text(messages, tools, kwargs, template)
        if self._arguments_as_text[template]:
            messages = [_with_text_arguments(message) for message in messages]
        return self._jinja(messages, tools, kwargs, prompt, marks, template)

    def _wants_text(self, messages: list[Message], tools: Any, kwargs: Mapping[str, Any], template: str) -> bool:
        """Whether a template joins arguments as a string: a dict then fails, or shows as Python writes it."""
        filled = [_with_arguments(message, {PROBE: PROBE}) for message in messages]
        shown = []
        for form in (filled, [_with_text_arguments(message) for message in filled]):
            try:
                shown.append(self._jinja(form, tools, kwargs, False, False, template)[0])
            except DataError:
                shown.append("")
        as_dict, as_text = shown
        return bool(as_text) and (not as_dict or str({PROBE: PROBE}) in as_dict)

    def _adapt(self, messages: Sequence[Message], tools: Any, template: str) -> list[Message]:
        facts = template_facts(template)
        if template not in self._parts:
            self._parts[template] = self._wants_parts(template)
        adapted = []
        for message in messages:
            if "tool_calls" in message and "tool_calls" not in facts.strings and not facts.dumps:
                message = _calls_as_content(message)
            if message.get("content") is None:
                message = {**message, "content": ""}
            if self._parts[template] and isinstance(message["content"], str):
                message = {**message, "content": [{"type": "text", "text": message["content"]}]}
            adapted.append(message)
        return adapted

    def _wants_parts(self, template: str) -> bool:
        """Whether a template shows content only as a list of parts (many of vision-language models do)."""
        plain = [{"role": "user", "content": PROBE}]
        parts = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
        for form, wanted in ((plain, False), (parts, True)):
            try:
                if PROBE in self._jinja(form, None, {}, True, False, template)[0]:
                    return wanted
            except DataError:
                continue
        return False

    def _jinja(
        self,
        messages: list[Message],
        tools: Any,
        kwargs: Mapping[str, Any],
        prompt: bool,
        marks: bool,
        template: str,
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **{**self.specials, **kwargs},
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from None
        texts, spans = rendered
        return texts[0], list(spans[0]) if marks else []


def _with_arguments(message: Message, arguments: dict[str, Any]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": {**call["function"], "arguments": arguments}} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _calls_as_content(message: Message) -> Message:
    """Calls as JSON lines after the content, for templates that have no tool calls at all."""
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(([content] if content else []) + calls)}


@functools.lru_cache(maxsize=8)
def _cached_renderer(tokenizer: Any, template: str) -> Renderer:
    return Renderer(tokenizer)


def renderer_of(tokenizer: Any) -> Renderer:
    """A renderer that is kept for as long as the tokenizer's template and special tokens stay the same."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    identity = repr((inner.chat_template, inner.special_tokens_map, len(inner), getattr(tokenizer, "chat_template", 0)))
    try:
        return _cached_renderer(tokenizer, identity)
    except TypeError:  # not hashable
        return Renderer(tokenizer)


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
) -> list[int]:
    """Token ids of a conversation, the same for every method.

    Messages may be in either key style (`role`/`content` or `from`/`value`), tool-call `arguments` a dict or a JSON
    string, `tools` a list, a JSON string, or empty (which equals none): equal meaning gives equal tokens.

    Args:
        tokenizer: A tokenizer with a chat template, or a processor that holds one.
        messages: At least one message.
        tools: JSON schemas, bare or in the form `{"type": "function", "function": ...}`.
        chat_template_kwargs: Further variables for the template.
        add_generation_prompt: Ends with what opens an assistant turn.

    Returns:
        The token ids of the rendered text; special tokens are those that the template writes.

    Raises:
        DataError: For wrong messages, naming the message and key; when the template refuses, with its reason.

    Example:
        >>> from posttrain_data import render, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> ids = render(tokenizer, [{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        >>> tokenizer.decode(ids)
        '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """
    renderer = renderer_of(tokenizer)
    parsed = parse_messages(messages, "messages", renderer.roles())
    text = renderer.text(parsed, parse_tools(tools), chat_template_kwargs, add_generation_prompt)
    return renderer.encode(text).ids

"""Rows for supervised fine-tuning: one sequence, and which of its tokens are targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from posttrain_data.errors import DataError
from posttrain_data.formats import Chat, Text, Tokens, parse_row
from posttrain_data.options import ALL_CUT, EMPTY, NO_TARGET, Prepared, SFTDataOptions
from posttrain_data.packing import Packing
from posttrain_data.prepare import prepare
from posttrain_data.rows import Draft, Piece, Row, RowMaker, Work
from posttrain_data.spans import Conversation, turn_spans


def prepare_sft(
    dataset: Any,
    tokenizer: Any,
    options: SFTDataOptions | None = None,
    cache_dir: str | Path | bool | None = None,
    name: str = "train",
) -> Prepared:
    """Prepares rows for supervised fine-tuning.

    A row is recognised by its columns: `text`; `messages` or `conversations` (`role`/`content` or `from`/`value`);
    `prompt` and `completion` (two strings or two lists of messages); `instruction`, `input`, `output`; the `chosen`
    side of a preference row; `input_ids` with `labels`, `completion_mask`, `assistant_masks` or `loss_mask`.

    A target is a token that a sampler would have generated: what the generation prompt writes is none, the tokens that
    end an assistant turn are. Plain text and completions get `eos_token` unless they end with it. Each token of which
    any character was generated counts as a target. Rows without a target are dropped and counted.

    Results are kept on disk under a key made of the rows, the tokenizer, its template, the options and the versions of
    the packages. When several processes ask for the same rows one prepares them and the others wait for its files.

    Args:
        dataset: `datasets.Dataset`, `datasets.IterableDataset`, or a list of dicts.
        tokenizer: A tokenizer, or a processor that holds one.
        options: How; the defaults of `SFTDataOptions` when None.
        cache_dir: Folder for prepared rows; None is `posttrain` in the cache of `datasets`, False keeps them in memory.
        name: Name of the data set in messages.

    Returns:
        The prepared rows, and the report. A stream is prepared while it is read.

    Raises:
        DataError: For the first row that cannot be used, naming data set, row and column; an empty data set; no target
            in any row.

    Example:
        >>> from posttrain_data import SFTDataOptions, prepare_sft, tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> rows = [{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}]
        >>> prepared = prepare_sft(rows, tokenizer, SFTDataOptions(assistant_only=True), cache_dir=False)
        >>> row = prepared.dataset[0]
        >>> tokenizer.decode([token for token, target in zip(row["input_ids"], row["loss_mask"]) if target])
        '4<|im_end|>'
    """
    return prepare(SFTRows(tokenizer, options or SFTDataOptions(), name), dataset, cache_dir)


class SFTRows(RowMaker):
    """`prepare_sft`'s rows."""

    kind = "sft"
    features = {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "seq_lengths": datasets.List(datasets.Value("int32")),
    }
    optional = ("seq_lengths",)
    lacking = "target token"
    question = "Are the completions or the assistant turns empty?"
    options: SFTDataOptions

    def __init__(self, tokenizer: Any, options: SFTDataOptions, name: str) -> None:
        super().__init__(tokenizer, options, name)
        if options.packing and options.max_length is not None:
            self.packing = Packing(options.max_length, options.packing_strategy)
        self.cut = not options.packing or options.packing_strategy == "bfd"  # the other strategies cut while packing

    def work(self, row: Mapping[str, Any]) -> Work:
        """Recognises a row, and renders it."""
        formatted = self.options.formatting_func is not None and "input_ids" not in row
        parsed = self._formatted(row) if formatted else parse_row(row, self.options.text_field, self.roles)
        if isinstance(parsed, Tokens):
            masked = any(row.get(column) is not None for column in ("assistant_masks", "loss_mask", "labels"))
            if self.options.assistant_only and not masked:
                raise DataError("assistant_only=True needs a conversation, or 'assistant_masks' beside 'input_ids'.")
            return Work([], parsed)
        return Work([self._text(parsed) if isinstance(parsed, Text) else self.chat_draft(parsed)])

    def _formatted(self, row: Mapping[str, Any]) -> Text | Chat:
        assert self.options.formatting_func is not None
        made = self.options.formatting_func(dict(row))
        if isinstance(made, str):
            return Text(None, made)
        if isinstance(made, list) and made and isinstance(made[0], Mapping):
            parsed = parse_row({**row, "messages": made}, self.options.text_field, self.roles)
            if isinstance(parsed, Chat):
                return parsed
        raise DataError(f"formatting_func returned {made!r:.60} ({type(made).__name__}): return a string or messages.")

    def _text(self, text: Text) -> Draft:
        if self.options.assistant_only:
            raise DataError("assistant_only=True needs a conversation, this row is plain text: set it to False.")
        spans = None
        if text.prompt is None:
            if self.options.completion_only:
                raise DataError("completion_only=True needs columns 'prompt' and 'completion'.")
        elif self.options.completion_only is not False:
            spans = [(len(text.prompt), len(text.text))]
        return self.text_draft(text.text, spans)

    def spans(self, chat: Chat, kwargs: Mapping[str, Any], text: str) -> list[tuple[int, int]] | None:
        """The completion, or the assistant turns; None for all."""
        options = self.options
        if options.completion_only and chat.prompt_length is None:
            raise DataError("completion_only=True needs columns 'prompt' and 'completion'; see also assistant_only.")
        completion = chat.prompt_length is not None and options.completion_only is not False
        if not (completion or options.assistant_only):
            if options.train_on == "last":
                raise DataError("train_on='last' picks among assistant turns: write assistant_only=True with it.")
            return None
        first = (chat.prompt_length or 0) if completion else 0
        wanted = [n for n, message in enumerate(chat.messages) if n >= first and message["role"] == "assistant"]
        if options.train_on == "last":
            wanted = wanted[-1:]
        conversation = Conversation(self.renderer, chat.messages, chat.tools, kwargs, text)
        return [(span.start, span.stop) for span in turn_spans(conversation, wanted)]

    def rows(self, work: Work, pieces: Sequence[Piece]) -> list[Row]:
        """One row; the first token of a sequence is no target."""
        if pieces:
            ids, mask, lengths = pieces[0].ids, pieces[0].mask, None
        else:
            tokens: Tokens = work.rest
            ids, mask, lengths = list(tokens.input_ids), list(tokens.loss_mask), tokens.seq_lengths
            self.check_ids(ids, "input_ids")
        at = 0
        for length in lengths if lengths is not None else [len(ids)]:
            if length:
                mask[at] = False
            at += length
        return [self._fit(ids, mask, lengths)]

    def _fit(self, ids: list[int], mask: list[bool], lengths: list[int] | None) -> Row:
        limit = self.options.max_length
        if not ids:
            return Row({}, EMPTY)
        if not any(mask):
            return Row({}, NO_TARGET)
        cut = 0
        if lengths is None and self.cut and limit is not None and len(ids) > limit:
            cut = len(ids) - limit
            keep = slice(0, limit) if self.options.truncation_mode == "keep_start" else slice(cut, None)
            ids, mask = ids[keep], mask[keep]
            mask[0] = False
            if not any(mask):
                return Row({}, ALL_CUT)
        columns: dict[str, Any] = {"input_ids": ids, "loss_mask": mask}
        if lengths is not None:
            columns["seq_lengths"] = lengths
        return Row(columns, None, len(ids), sum(mask), cut)

"""Samples for fine-tuning: records with a prompt and a completion, or with the messages of a conversation."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from picotron.console import UserError
from workbench.prepare.conversations import ChatTemplate, Conversations, Sample, messages_of, tools_of
from workbench.prepare.documents import REST, WEIGHT
from workbench.prepare.text import Columns, Start, start_of, text_of
from workbench.prepare.token_characters import Spans, SpanTokenizer


class SampleEncoder:
    """Encoder of a data set for fine-tuning, see `Samples`.

    Args:
        columns, tokenizer, dtype: see `TextEncoder`.
        only_last: whether the loss counts the last turn of the assistant only.
        starts: whether prompts begin with the beginning-of-sequence token, see `PromptsAndCompletions`.

    Attributes:
        notes: see `ChatTemplate`.

    Raises:
        UserError: the tokenizer has no end-of-sequence token, which follows completions, or no chat template.
    """

    def __init__(
        self,
        columns: Columns,
        tokenizer: PreTrainedTokenizerBase,
        dtype: type,
        only_last: bool = False,
        starts: bool = True,
    ) -> None:
        self.tokenizer = SpanTokenizer(tokenizer)
        self.dtypes = {"tokens": dtype, "counted": np.uint8, "lengths": np.int64}
        self.notes: Counter[str] = Counter()
        needed_by = (
            "a list of messages" if "prompt_column" in columns else f"messages_column={columns['messages_column']!r}"
        )

        @functools.cache
        def template() -> ChatTemplate:
            return ChatTemplate(tokenizer, needed_by, self.notes, only_last)

        self.convert: Callable[[Any], Iterator[Sample]] = (
            PromptsAndCompletions(columns, tokenizer, template, starts)
            if "prompt_column" in columns
            else Conversations(columns["messages_column"], template())
        )

    def size(self, sample: Sample) -> int:
        return len(sample.begin) + len(sample.text) + len(sample.end)

    def encode(self, samples: list[Sample]) -> dict[str, np.ndarray]:
        tokens: list[int] = []
        masks: list[np.ndarray] = []
        places = [[*itertools.chain(*sample.counted)] for sample in samples]
        for sample, spans in zip(samples, self.tokenizer([each.text for each in samples], places), strict=True):
            mask = np.zeros(len(spans.ids), np.uint8)
            for start, end in sample.counted:
                self.check(sample.text, spans, (start, end))
                mask[spans.ended(start) : spans.begun(end)] = 1
            tokens += [*sample.begin, *spans.ids, *sample.end]
            masks.append(np.pad(mask, (len(sample.begin), 0)))
            masks[-1] = np.pad(masks[-1], (0, len(sample.end)), constant_values=1)
        arrays = {"tokens": tokens, "counted": np.concatenate(masks), "lengths": [*map(len, masks)]}
        return {name: np.asarray(array, self.dtypes[name]) for name, array in arrays.items()}

    def check(self, text: str, spans: Spans, places: tuple[int, int]) -> None:
        """Raise a UserError if a tokenizer does not tell which tokens have the characters between two places."""
        for place in places:
            if not (self.tokenizer.is_fast or spans.divide(place)):
                raise UserError(
                    f"the tokenizer does not tell which characters its tokens stand for, so the loss cannot begin or end "
                    f"at {text[place : place + 20]!r} after {text[max(0, place - 20) : place]!r}; choose a "
                    f"model.tokenizer with a tokenizer.json"
                )


class PromptsAndCompletions:
    """Converter of records with a prompt and a completion: two texts, or two lists of messages for the chat template.

    A text begins as in generate.py: with the beginning-of-sequence token if the tokenizer adds one, unless the text
    begins with it already. The end-of-sequence token follows the completion. If there is no such beginning, an empty
    prompt is the end-of-sequence token, so that there is an input for the first token of the completion.
    """

    def __init__(
        self, columns: Columns, tokenizer: PreTrainedTokenizerBase, template: Callable[[], ChatTemplate], starts: bool
    ) -> None:
        self.columns, self.template = columns, template
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, which ends a completion; choose another model.tokenizer"
            )
        self.start, self.end = start_of(tokenizer) if starts else Start(), [tokenizer.eos_token_id]

    def __call__(self, record: Any) -> Iterator[Sample]:
        if isinstance(record, dict) and isinstance(record.get(self.columns["prompt_column"]), list):
            yield from self.conversation(record)
            return
        prompt, completion = (self.text(record, key) for key in ("prompt_column", "completion_column"))
        rest = [name for name in REST if record.get(name) and name not in self.columns.values()]
        if self.columns["prompt_column"] == "instruction" and rest:
            raise UserError(
                f"the record also has the column {rest[0]!r}, which prompt_column='instruction' leaves out; write both into one "
                f"column, such as instruction + '\\n' + {rest[0]}, and name that one"
            )
        text = prompt + completion
        begin = self.start.before(text) if prompt or self.start.tokens else self.end
        yield Sample(text, [(len(prompt), len(text))], begin, self.end)

    def conversation(self, record: dict[str, Any]) -> Iterator[Sample]:
        """Yield the samples of a record with two lists of messages, of which the loss counts the second one's."""
        prompt, completion = (messages_of(record.get(column)) for column in self.columns.values())
        if prompt is None or not completion:
            raise UserError(
                f"the columns {' and '.join(self.columns.values())} should have two texts, or two lists of messages with 'role' "
                f"and 'content'"
            )
        yield from self.template()([*({**each, WEIGHT: 0} for each in prompt), *completion], tools_of(record))

    def text(self, record: Any, key: str) -> str:
        text = text_of(record, key, self.columns[key])
        if text is None:
            raise UserError(f"dataset.{key}={self.columns[key]!r} is null there; remove the record")
        return text

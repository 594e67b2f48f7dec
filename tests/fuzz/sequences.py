"""Rows that a data set should become, from what the tokenizer gives for whole texts."""

import datetime
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from picotron.config import Config
from picotron.data.loader import Rows, epoch_order
from tests.fuzz.cases import Case
from tests.fuzz.chat_templates import ENDLESS
from tests.fuzz.files import evaluated_of, records_of, tokenizer_of
from tests.support.samples import split
from workbench.prepare.tokens import write_tokens
from workbench.run.model_config import load_model_config
from workbench.run.rows import HELD_OUT, held_out_sequences
from workbench.run.token_files import Samples, for_data, map_token_files
from workbench.variants.choose import split_train_eval


class Document(NamedTuple):
    """A sequence that attends to itself only, with the weight of each target."""

    input_ids: Sequence[int]
    target_ids: Sequence[int]
    weights: Sequence[float]


class CaseRows(NamedTuple):
    """Rows for training and for evaluation, each a list of documents."""

    training: list[list[Document]]
    evaluation: list[list[Document]]


class Mismatch(AssertionError):
    """Data that differ from what the tokenizer gives."""


def rows_of_case(case: Case, folder: Path, config: Config) -> CaseRows:
    """Return the rows of a data set, each a list of documents, see `Document`.

    Raises:
        Mismatch: the tokens or the mask of a sample are not those of its whole text.
    """
    name, T = config.dataset.eval_name, config.training.seq_length
    if case["data"]["kind"] == "text":
        rows = rows_of_text(case, config, records_of(case))
        whole = [row for row in rows if sum(len(document.input_ids) for document in row) == T]
        if name:
            return CaseRows(whole, rows_of_text(case, config, evaluated_of(case)))
        order = epoch_order(len(whole), config.training.seed, HELD_OUT).tolist()
        held_out = held_out_sequences(config)
        training, evaluation = sorted(order[held_out:]), sorted(order[:held_out])
        return CaseRows([whole[i] for i in training], [whole[i] for i in evaluation])
    model_config = load_model_config(config.model)
    data, _ = map_token_files(write_tokens(config, model_config), config, model_config)
    other = None
    if name:
        evaluation = for_data(config, name, config.model.name)
        other, _ = map_token_files(write_tokens(evaluation, model_config), evaluation, model_config)
    for each, records in ((data, records_of(case)), (other, evaluated_of(case))):
        if each is not None:
            assert isinstance(each, Samples)
            compare_samples(case, each, records)
    # Which samples share a row is up to the packing; what they contain, has been compared.
    return CaseRows(*map(rows_of_samples, split_train_eval(data, config, other)))


def rows_of_text(case: Case, config: Config, records: list[dict[str, Any]]) -> list[list[Document]]:
    """Cut the tokens of all documents, each with an end token, into rows, of which the last one may be shorter, and the
    rows into documents.
    """
    tokenizer, T = tokenizer_of(case), config.training.seq_length
    texts = [record["text"] for record in records]
    stream = [
        token
        for text in texts
        if text
        for token in [
            *start_of(tokenizer, text),
            *tokenizer(text, add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
    ]
    rows = []
    for first in range(0, len(stream) - 1, T):
        targets = stream[first + 1 : first + T + 1]
        inputs, size = stream[first : first + len(targets)], len(targets)
        masks = config.dataset.masks_documents
        ends = [i + 1 for i, token in enumerate(inputs) if masks and token == tokenizer.eos_token_id and i + 1 < size]
        rows.append([Document(inputs[a:b], targets[a:b], [1.0] * (b - a)) for a, b in pairwise([0, *ends, size])])
    return rows


def rows_of_samples(rows: Rows) -> list[list[Document]]:
    result = []
    for i in range(len(rows)):
        row = rows[i]
        assert row.counted is not None
        ends = [0, len(row.input_ids)] if row.documents is None else [0, *row.documents.cumsum().tolist()]
        result.append([
            Document(row.input_ids[a:b], row.target_ids[a:b], row.counted[a:b]) for a, b in pairwise(ends)
        ])  # fmt: skip
    return result


def compare_samples(case: Case, data: Samples, records: list[dict[str, Any]]) -> None:
    """Compare the tokens and the mask of each sample with those of its whole text."""
    tokenizer, found = tokenizer_of(case), split(data)
    whole = whole_sample if case["data"]["kind"] == "samples" else whole_conversation
    expected = [sample for record in records for sample in whole(case, tokenizer, record)]
    if len(expected) != len(found):
        raise Mismatch(f"{len(found)} samples, expected {len(expected)} of {len(records)} records")
    for i, ((tokens, mask), right) in enumerate(zip(found, expected, strict=True)):
        if tokens != right.tokens:
            raise Mismatch(f"the tokens of sample {i} are {tokens}, but those of its text {right.tokens}")
        if [ours for ours, theirs in zip(mask, right.mask, strict=True) if theirs not in (None, ours)]:
            raise Mismatch(f"the mask of sample {i} is {mask}, but that of its text {right.mask}")


class WholeSample(NamedTuple):
    """The tokens of a sample's text, and whether the loss counts them: None where the tokenizer does not tell."""

    tokens: list[int]
    mask: list[int | None]


def start_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the beginning-of-sequence token, if the tokenizer begins texts with it, and this one does not already."""
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        return []
    return [token for token in tokenizer("a")["input_ids"][:1] if token == tokenizer.bos_token_id]


def whole_sample(case: Case, tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]) -> list[WholeSample]:
    """Tokenise the text of a prompt and its completion as one."""
    prompt, completion = record["prompt"], record["completion"]
    text = prompt + completion
    begin = start_of(tokenizer, text)
    if not prompt and not start_of(tokenizer, ""):
        begin = [tokenizer.eos_token_id]
    counted = [(len(prompt), len(prompt + completion))]
    tokens, mask = masked(tokenizer, text, counted)
    return [WholeSample([*begin, *tokens, tokenizer.eos_token_id], [*[0] * len(begin), *mask, 1])]


def whole_conversation(case: Case, tokenizer: PreTrainedTokenizerBase, record: dict[str, Any]) -> list[WholeSample]:
    """Render a conversation and tokenise its text: once, or once for each turn that counts if earlier turns change."""
    messages = plain_messages(record)
    counts = [message.pop("counts") for message in messages]
    wanted = [i for i, message in enumerate(messages) if message["role"] == "assistant" and counts[i]]
    if case["data"]["turns"] == "last":
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        wanted = [i for i in wanted if i == last]
    if not wanted:
        return []
    format_, _, marks = case["data"]["template"].partition(", ")
    end = [tokenizer.eos_token_id] if format_ in ENDLESS else []

    def render(last: int, **options: Any) -> str:
        return in_the_past(tokenizer.apply_chat_template(messages[:last], tokenize=False, **options))

    def sample(text: str, counted: list[tuple[int, int]]) -> WholeSample:
        tokens, mask = masked(tokenizer, text, counted)
        return WholeSample([*tokens, *end], [*mask, *[1] * len(end)])

    if marks:
        (text,), (ranges,) = render_jinja_template(
            [messages[: wanted[-1] + 1]],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        by_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = in_the_past(text)
        return [sample(text, [each for i, each in zip(by_assistant, ranges, strict=False) if i in wanted])]
    turns = [(begin_of(render(i, add_generation_prompt=True), render(i + 1)), render(i + 1)) for i in wanted]
    text = turns[-1][1]
    if all(text.startswith(after) for _, after in turns):
        return [sample(text, [(before, len(after)) for before, after in turns])]
    return [sample(after, [(before, len(after))]) for before, after in turns]


def begin_of(prompt: str, text: str) -> int:
    """Return where an answer begins: where its text leaves that of the prompt."""
    return max(i for i in range(len(prompt) + 1) if text.startswith(prompt[:i]))


def in_the_past(text: str) -> str:
    """Return a rendered text with the date on which all data are tokenised, which is as long as today's."""
    return text.replace(datetime.datetime.now().strftime("%d %b %Y"), "26 Jul 2024")


def plain_messages(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a record of any shape, with the key "counts"."""
    messages = record.get("messages") or record["prompt"] + record["completion"]
    in_prompt = len(record.get("prompt", []))
    found = []
    for i, message in enumerate(messages):
        role = {"human": "user", "gpt": "assistant"}.get(
            message.get("from"), message.get("role") or message.get("from")
        )
        counts = i >= in_prompt and message.get("weight", 1) == 1 and message.get("train", True)
        found.append({"role": role, "content": message.get("content", message.get("value")), "counts": counts})
    return found


def masked(
    tokenizer: PreTrainedTokenizerBase, text: str, counted: list[tuple[int, int]]
) -> tuple[list[int], list[int | None]]:
    """Return the tokens of a text, and whether each has one of the counted characters."""
    if not tokenizer.is_fast:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens, [None] * len(tokens)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [
        int(any(first < end and start < last for first, last in counted)) if start < end else None
        for start, end in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], mask

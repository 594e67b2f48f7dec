"""Tokenizers of several kinds, trained on a few sentences, and the chat templates of several families of models."""

import functools
import inspect
import json
import random
import re

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from workbench.prepare.tokens import train_bpe

WORDS = (
    "What is 2 + 2? It is 4. Paris, the capital of France! hello Hello world I'm <|user|> <|assistant|> <|im_end|> "
    "def f(x):\n    return x + 1\n\n\nclass A: pass\n### Assistant:\n[INST] [/INST] user assistant system "
    "Žluťoučký kůň, naïve 日本語のテキスト。私は学生です。 🙂👍🏽 e\u0301 \u00a0 1234567 ... \t"
)
CORPUS = [*inspect.getsource(random).splitlines(keepends=True), *[WORDS] * 9]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def _with_ends(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Add the token `<s>` in front of each text, as the tokenizers of Llama 2, Mistral and TinyLlama do."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def _sentence_piece(vocab_size: int, kind: str) -> PreTrainedTokenizerBase:
    """Build a BPE that writes spaces as "▁" and has no words: merges may cross anything that the vocabulary joins.

    Args:
        kind: "prepend" puts a space in front of every text and of text after a special token, with a normalizer (Llama
            2, TinyLlama); "first", in front of a text (Mistral); "always", of every section of it.
    """
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    texts = (re.sub("[^ -~\u00a0-\u017f本]", " ", text) for text in CORPUS)  # all other characters become bytes
    bpe.train_from_iterator(texts, trainer)
    state = json.loads(bpe.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are no special tokens, which `decode` can leave out
    bpe = Tokenizer.from_str(json.dumps(state))
    if kind == "prepend":
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        bpe.pre_tokenizer = None  # type: ignore[assignment]
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_ends(bpe)


def _byte_level(vocab_size: int, trims: bool) -> PreTrainedTokenizerBase:
    """Build a BPE of bytes (GPT-2, Llama 3, Qwen).

    Args:
        trims: whether its post-processor leaves spaces out of the tokens' characters, as RoBERTa's does.
    """
    tokenizer = train_bpe(iter(CORPUS), vocab_size)
    if trims:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def _word_piece(vocab_size: int) -> PreTrainedTokenizerBase:
    """Build a WordPiece (BERT), which drops white space and cannot encode some characters."""
    words = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    words.train_from_iterator(CORPUS, trainer)
    return _with_ends(words)


def _unigram(vocab_size: int) -> PreTrainedTokenizerBase:
    """Build a unigram model with Unicode normalisation (T5, Gemma's kind), which merges e and an accent."""
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    unigram.train_from_iterator(CORPUS, trainer)
    return _with_ends(unigram)


BUILDERS = {
    "prepend": functools.partial(_sentence_piece, kind="prepend"),
    "metaspace first": functools.partial(_sentence_piece, kind="first"),
    "metaspace always": functools.partial(_sentence_piece, kind="always"),
    "byte-level": functools.partial(_byte_level, trims=False),
    "byte-level trimmed": functools.partial(_byte_level, trims=True),
    "WordPiece": _word_piece,
    "unigram": _unigram,
    "ByT5": lambda vocab_size: ByT5Tokenizer(extra_ids=vocab_size - 259),  # a slow tokenizer: it has no offsets
}
KINDS = tuple(BUILDERS)


def make_tokenizer(kind: str, vocab_size: int = 480) -> PreTrainedTokenizerBase:
    """Build a tokenizer of a kind of KINDS, with at most `vocab_size` tokens.

    Args:
        vocab_size: at least 400.
    """
    tokenizer: PreTrainedTokenizerBase = BUILDERS[kind](vocab_size)
    return tokenizer

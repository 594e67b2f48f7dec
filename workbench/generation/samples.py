"""A sample of the text that a model writes, at each evaluation of a run."""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from picotron.config import Config
from picotron.pipeline_parallel.pipeline_parallel import Step
from workbench.generation.prompts import Encoder
from workbench.generation.rotation import check_prompt, generate
from workbench.generation.sampling import Sampling
from workbench.run.model_config import ends_of_both

logger = logging.getLogger("picotron")

NEW_TOKENS = 64


def with_samples(evaluate: Step, config: Config, model_config: Any, tokenizer: Path) -> Step:
    """Return an evaluation that also logs how the model continues `logging.sample_prompt`, with the likeliest tokens.

    Args:
        tokenizer: folder of the tokenizer.

    Raises:
        UserError: the prompt is longer than seq_length.
    """
    encoder, prompt = Encoder.read(tokenizer), config.logging.sample_prompt
    chats = encoder.tokenizer.chat_template and config.dataset.messages_column
    messages = {"messages": [{"role": "user", "content": prompt}]}
    tokens = encoder.encode("logging.sample_prompt", messages if chats else {"prompt": prompt})
    ends = tuple(ends_of_both(model_config, encoder.tokenizer))
    sampling = Sampling(NEW_TOKENS, ends=ends, max_length=config.training.seq_length + 1)
    check_prompt("logging.sample_prompt", tokens, model_config, sampling)

    def evaluate_and_sample(model: Any, data_loader: Any) -> Tensor:
        (completion,) = generate(model.module, [tokens], sampling)
        logger.info("sample: %r", encoder.completion(tokens, completion.tokens))
        return evaluate(model, data_loader)

    return evaluate_and_sample

"""Runs of ten steps, or their first five, in any layout: tests write checkpoints with them and resume from them."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from conformance.case import sizes_of
from conformance.worker_pool import WorkerPool
from picotron.config import Config
from tests.support.messages import error_of, logged_warnings
from tests.support.oracle import make_config, tiny_llama
from tests.support.samples import write_tokenizer
from tests.support.training import train_steps

Run = Callable[..., dict[str, Any]]  # the fixture `run`
BATCH = 8  # sequences in a global batch, in every layout


def run_config(save_dir: Path, layout: str = "", **changes: Any) -> Config:
    keys = {
        "training__micro_batch_size": BATCH // (2 * sizes_of(layout)["dp"]),
        "training__warmup_steps": 3,
        "training__max_grad_norm": 0.5,
        "dataset__shuffle": False,
        "checkpoint__save_dir": str(save_dir),
        "checkpoint__save_frequency": 100,  # so only the last step is saved
    }
    return make_config(f"m2 {layout}", **keys | changes)


def first_half(save_dir: Path, layout: str = "", **changes: Any) -> Config:
    """Return the config of a run that max_tokens ends after five of ten steps, the last of which has fewer tokens left
    than a batch; the learning rates are those of ten.
    """
    return run_config(save_dir, layout, training__max_tokens=5 * BATCH * 16 - 1, **changes)


def model_of(tied: bool) -> LlamaConfig:
    """Return a config with 61 tokens, which no tp size divides, and 2 key/value heads, fewer than tp 4 has ranks."""
    return tiny_llama(tie_word_embeddings=tied, num_attention_heads=8)


def train(config: Config, model_config: LlamaConfig | None = None) -> dict[str, Any]:
    """Train with checkpoints, by default a model with untied embeddings, see `train_steps`."""
    with tempfile.TemporaryDirectory() as folder:
        return train_steps(config, model_config or model_of(False), Path(write_tokenizer(Path(folder))))


def run(pool: WorkerPool, config: Config, *model_config: LlamaConfig) -> dict[str, Any]:
    """Train in a pool. Returns the results of rank 0, see `train`."""
    return pool.run(train, config.distributed.world_size, config, *model_config)[0]


def mistake(config: Config, *model_config: LlamaConfig) -> str:
    return error_of(lambda: train(config, *model_config))


def warnings_of(config: Config) -> tuple[int, list[str]]:
    """Train, and return the number of steps and the warnings."""
    with logged_warnings() as lines:
        return len(train(config)["losses"]), lines


def tensors_of(folder: Path, kind: str) -> dict[str, Tensor]:
    """Read all tensors of a kind with the safetensors library."""
    return {
        name: t
        for path in sorted(folder.glob(f"{kind}*.safetensors"))
        if path.name[len(kind)] in "-."
        for name, t in load_file(path).items()
    }


def assert_same_tensors(ours: Path, theirs: Path) -> None:
    """Check that two checkpoints have the same bits; those without master weights have none in both."""
    for kind in ("model", "master", "exp_avg", "exp_avg_sq"):
        found, expected = tensors_of(ours, kind), tensors_of(theirs, kind)
        assert expected or kind == "master"
        assert found.keys() == expected.keys()
        assert all(found[name].equal(each) for name, each in expected.items()), kind

"""The executor: a schedule from a file, and gradients in bfloat16. test_executor_order.py checks timing and memory."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.config import Config
from tests.support.oracle import assert_close, tiny_llama
from tests.support.training import Loader, all_stages, batches, pipeline_config, step_of, wrapped
from workbench.pipelines.planning import training_schedule

BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "pad_token_id": 3}


def one_step(config: Config, model_config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the loss and the gradients of the full model after one step."""
    model = wrapped(config, model_config, dtype)
    items = batches(config.training.gradient_accumulation_steps)
    loss = step_of(config, model_config, dtype)(model, Loader(items)).double()
    all_reduce(loss, pgm.process_group_manager.pp_group)
    return {"loss": loss, "gradients": all_stages(model.module.module, "main_grad")}


def test_schedule_from_a_file_equals_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    """A V placement with three chunks, split and full backwards, and an overlapped pair."""
    path = tmp_path / "own.csv"
    path.write_text(
        "0F0,0F1,,3F0,4F0,3F1,4F1,0F2,4I0,3B0,(3F2;4B1),4W0,3I1,0B0,4F2,3W1,4B2,3B2,0B1,0B2\n"
        "1F0,2F0,1F1,2F1,5F0,5B0,5F1,5B1,2B0,1B0,1F2,2F2,5F2,5I2,2B1,5W2,1B1,2B2,1I2,1W2\n"
    )
    config = pipeline_config(f"csv:{path}", 2)
    assert training_schedule(config).placement == "V"
    model_config = tiny_llama(num_hidden_layers=6, tie_word_embeddings=True)
    (expected,) = pool.run(one_step, 1, pipeline_config("1f1b", 1), model_config, torch.float64)
    for result in pool.run(one_step, 2, config, model_config, torch.float64):
        assert_close(result["loss"], expected["loss"], what="loss")
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert_close(result["gradients"][name], gradient, what=name)


def test_split_backward_in_bfloat16_is_close_to_full_backward(pool: WorkerPool) -> None:
    """This includes weights whose gradients are computed in a wider dtype."""
    model_config = tiny_llama(num_hidden_layers=4, **BIASES)
    results = [
        pool.run(one_step, 4, pipeline_config(engine, 2, tp_size=2), model_config, torch.bfloat16)[0]
        for engine in ("1f1b", "zb_h1")
    ]
    for name, gradient in results[0]["gradients"].items():
        assert_close(results[1]["gradients"][name], gradient, relative=0.02, what=name)

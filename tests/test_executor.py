"""Every schedule, run by the executor, equals one process running transformers."""

from typing import Any

import pytest

from picotron.config import SCHEDULES as NAMES
from tests.oracle import assert_equals_training, make_config, tiny_llama
from tests.test_pipeline_parallel import expected_training, layout_name, train
from tests.worker_pool import WorkerPool

LAYERS = {2: 5, 4: 9}
MORE: list[dict[str, Any]] = [{}, {"dp_size": 2}, {"tp_size": 2}, {"cp_size": 2}]


@pytest.mark.parametrize("more", MORE, ids=layout_name)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("engine", NAMES)
def test_ten_steps_equal_one_process(pool: WorkerPool, engine: str, pp: int, more: dict[str, Any]) -> None:
    layout = {"pp_size": pp, "pp_engine": engine, **more}
    micro_batches = 5
    config = make_config(
        **{f"distributed__{key}": value for key, value in layout.items()},
        training__gradient_accumulation_steps=micro_batches,
        training__warmup_steps=3,
        training__max_grad_norm=0.5,
        dataset__shuffle=False,
    )
    tied = False
    model_config = tiny_llama(num_hidden_layers=LAYERS[pp], tie_word_embeddings=tied)
    expected = expected_training(layout.get("dp_size", 1) * micro_batches, model_config.num_hidden_layers, tied)
    for result in pool.run(train, config.distributed.world_size, config, model_config):
        assert_equals_training(result, expected)

"""Adapter of transformers' own tensor parallelism, `from_pretrained(..., tp_plan="auto")`.

The word `torch_clip` clips with torch's `clip_grad_norm_`. With `experts`, each rank has some experts of a Mixtral.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from conformance import Case, Result
from conformance.adapters.loop import accumulate, norm_of_mixed, torch_norm, train
from conformance.case import Batch
from conformance.models import with_exact_norms
from conformance.reference import logits_of

AXES = ("tp",)
LAYOUTS = ("tp2 torch_clip", "tp2 mixtral", "tp2 mixtral experts")
CHAPTERS = ("step", "run", "loss", "float32")
LACKS = ("documents", "evaluation", "resume")


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    split: dict[str, Any] = {"tp_plan": "auto"}
    if "experts" in case.words:
        config = DistributedConfig(enable_expert_parallel=True, tp_size=dist.get_world_size(), **split)
        split = {"distributed_config": config}
    options = {"dtype": case.torch_dtype, "experts_implementation": "eager", **split}  # the default one needs bfloat16
    model = with_exact_norms(AutoModelForCausalLM.from_pretrained(case.model_folder, **options))

    def backward(batch: Batch, total: Tensor) -> float:
        return float(accumulate(case, batch, total, lambda piece: logits_of(model, piece)))

    clip = torch_norm if "torch_clip" in case.words else norm_of_mixed
    return train(case, dict(model.named_parameters()), backward, clip)

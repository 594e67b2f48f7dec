"""Adapter of transformers' own tensor parallelism, `from_pretrained(..., tp_plan="auto")`.

The word `torch_clip` clips with torch's `clip_grad_norm_`.
"""

import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from conformance import Case, Result
from conformance.adapters.loop import accumulate, norm_of_mixed, torch_norm, train
from conformance.case import Batch
from conformance.models import with_exact_norms

AXES = ("tp",)
CHAPTERS = ("step", "steps", "accumulation", "odd", "tied", "masks", "weights", "loss", "float32")


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(case.model_folder, dtype=case.torch_dtype, tp_plan="auto")
    model = with_exact_norms(model)

    def logits_of(piece: Batch) -> Tensor:
        logits: Tensor = model(input_ids=piece["input_ids"], use_cache=False).logits
        return logits

    def backward(batch: Batch, total: Tensor) -> float:
        return float(accumulate(case, batch, total, logits_of))

    clip = torch_norm if "torch_clip" in case.words else norm_of_mixed
    return train(case, dict(model.named_parameters()), backward, clip)

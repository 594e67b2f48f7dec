"""The memory tab of the playground: the bytes of each pp rank of a model in a layout, by picotron's own estimate."""

import dataclasses
import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from picotron.model.families import model_cost
from playground.requests import FieldError, of_field
from workbench.pipelines.memory import rank_memory
from workbench.pipelines.planning import plan_pipeline
from workbench.schedules.schedules import LOOPS


@dataclasses.dataclass(frozen=True)
class MemoryRequest:
    """The state of the tab's controls: a Llama's config.json, and keys of picotron's config. The defaults are those of
    Llama 3.1 8B on 8 GPUs. A `head_dim` or `pp_chunks` of 0 is the default of the model or the schedule.
    """

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 0
    vocab_size: int = 128256
    tie_word_embeddings: bool = False
    tp_size: int = 2
    sequence_parallel: bool = True
    cp_size: int = 1
    cp_engine: str = "ring"
    pp_size: int = 2
    pp_engine: str = "1f1b"
    pp_chunks: int = 0
    dp_size: int = 2
    dp_engine: str = "zero1"
    seq_length: int = 4096
    micro_batch_size: int = 1
    gradient_accumulation_steps: int = 8
    activation_checkpointing: str = "none"
    dtype: str = "bfloat16"
    optimizer_states: str = "float32"

    @property
    def model(self) -> Any:
        """The model, as `rank_memory` expects it; transformers' config has the same attributes."""
        sizes = {name: getattr(self, name) for name in MODEL}
        biases = {"attention_bias": False, "mlp_bias": False}
        return SimpleNamespace(**{**sizes, "model_type": "llama", "head_dim": self.head_dim or None, **biases})

    @property
    def config(self) -> Any:
        """The config, as `rank_memory` expects it; picotron's Config needs pydantic, which the browser lacks."""
        values = {key: value for key, value in vars(self).items() if key not in MODEL}
        layout = {key: value for key, value in values.items() if key.startswith(("tp_", "cp_", "pp_", "dp_"))}
        layout |= {"ep_size": 1, "use_cpu": False, "sequence_parallel": self.sequence_parallel}
        schedule: dict[str, Any] = dict.fromkeys(("pp_group_size", "pp_layout", "pp_max_activations", "pp_recording"))
        schedule |= {"pp_chunks": self.pp_chunks or None if self.pp_size > 1 else None, "pp_keep_activations": 0}
        return SimpleNamespace(
            distributed=SimpleNamespace(**layout),
            schedule=SimpleNamespace(**schedule),
            model=SimpleNamespace(dtype=self.dtype, use_flash_attention=True),
            training=SimpleNamespace(**values),
            compiles=True,
            needs_workbench=self.pp_size > 1 and (self.pp_engine not in LOOPS or self.pp_chunks > 0),
        )


MODEL = tuple(field.name for field in dataclasses.fields(MemoryRequest))[:8]  # the keys of config.json


def problems(request: MemoryRequest) -> Iterator[FieldError]:
    """Yield what the trainer would refuse before it plans the pipeline (the tests compare the two)."""
    D, heads, kv, tp, cp = (
        getattr(request, name)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "tp_size", "cp_size")
    )
    if not request.head_dim and D % heads:
        yield FieldError("num_attention_heads", f"{heads} heads do not divide the hidden size {D}; enter a head size")
    if heads % kv:
        yield FieldError("num_key_value_heads", f"{kv} key/value heads do not divide the {heads} query heads")
    sizes = heads, request.intermediate_size
    if any(size % tp for size in sizes) or (kv % tp and tp % kv):
        fitting = [n for n in range(1, heads + 1) if not any(size % n for size in sizes) and not (kv % n and n % kv)]
        yield FieldError("tp_size", f"{tp} ranks cannot split the heads and the MLP; use one of {fitting}")
    multiple = math.lcm(2 * cp if cp > 1 else 1, cp * tp if request.sequence_parallel else 1)
    if request.seq_length % multiple:
        yield FieldError("seq_length", f"{request.seq_length} tokens cannot be split; use a multiple of {multiple}")
    if cp > 1 and request.cp_engine == "ulysses" and max(1, kv // tp) % cp:
        yield FieldError(
            "cp_size", f"Ulysses cannot split {max(1, kv // tp)} key/value heads of a tp rank over {cp} ranks"
        )
    if request.optimizer_states != "float32" and request.dtype != "bfloat16":
        yield FieldError("optimizer_states", f"{request.optimizer_states} is for dtype bfloat16; use float32")
    size = request.head_dim or D // heads
    if size % 2:
        yield FieldError("head_dim", f"a head size of {size} is odd; rotary embeddings need an even one")
    if cp > 1 and request.cp_engine != "ulysses" and (size % 8 or size > 256 or request.dtype == "float64"):
        limits = f"heads of a multiple of 8, at most 256, not {size}, and at most float32, not {request.dtype}"
        yield FieldError("cp_engine", f"its kernel needs {limits}; use ulysses")


def memory(argument: str) -> dict[str, Any]:
    """Return the bytes of each pp rank by kind of tensor, and what the layout adds up to.

    Args:
        argument: a MemoryRequest as JSON.

    Raises:
        FieldError: the trainer refuses the request.
    """
    request = MemoryRequest(**json.loads(argument))
    for problem in problems(request):
        raise problem
    config, model = request.config, request.model
    with of_field("pp_engine"):
        plan = plan_pipeline(config, model)
    tokens = request.micro_batch_size * request.gradient_accumulation_steps * request.dp_size * request.seq_length
    return {
        "ranks": [
            {
                **dataclasses.asdict(each),
                "total": each.total,
                "stages": ", ".join(map(str, plan.stages_of(rank).values())),
            }
            for rank, each in enumerate(rank_memory(config, model, plan))
        ],
        "gpus": request.tp_size * request.cp_size * request.pp_size * request.dp_size,
        "parameters": model_cost(model, request.seq_length).parameters,
        "tokens": tokens,
    }

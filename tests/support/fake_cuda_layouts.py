"""The layouts whose steps run on a fake GPU."""

import dataclasses
from typing import Any

from transformers import LlamaConfig

from benchmarks.shapes import SHAPES
from conformance.oracle import make_config, tiny_llama
from picotron.config import Config, Distributed
from workbench.schedules.schedules import SCHEDULES

SEQUENCE_PARALLEL = {"sequence_parallel": True}
FULL = {"training__activation_checkpointing": "full"}
BIAS = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
TINY = {
    "vocab_size": 1003,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Changes of the config (without a section, of `distributed`) and of the model.

    Args:
        core: whether the layout is part of `make test`, not only of `make slow`.
        packed: whether each row of a micro-batch holds three documents, and its targets have weights.
    """

    config: dict[str, Any]
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    core: bool = False
    packed: bool = False

    def configs(self) -> tuple[Config, LlamaConfig]:
        """Return the config of a run and that of its model. Only a pipeline needs several layers and micro-batches."""
        pp = self.config.get("pp_size", 1)
        settings = {
            "use_cpu": False,
            "model__dtype": "bfloat16",
            "training__seq_length": 512
            if self.config.get("cp_size", 1) > 1
            else 64,  # blocks of 128 keys, as for cuDNN
            "training__gradient_accumulation_steps": 2 * pp,
            "training__eval_steps": 1,
            **self.config,
        }
        keys = {key if "__" in key else f"distributed__{key}": value for key, value in settings.items()}
        return make_config(**keys), tiny_llama(**{**TINY, "num_hidden_layers": 2 * pp, **self.model})


def ranks_of(layout: Distributed) -> list[int]:
    """Return the ranks that differ: the first one of each pp rank, and the last one of the pipeline."""
    per_stage = layout.cp_size * layout.tp_size
    ranks = layout.pp_size * per_stage
    return sorted({*range(0, ranks, per_stage), ranks - 1})


def _layouts() -> dict[str, Layout]:
    zbv = {"pp_size": 2, "pp_engine": "zbv"}
    layouts = {
        "single": Layout({}, core=True),
        "single math attention": Layout({"model__use_flash_attention": False}),
        "single checkpointing packed": Layout(FULL, packed=True),
        "dp2 zero1": Layout({"dp_size": 2, "dp_engine": "zero1"}, TIED),
        "dp2 zero3": Layout({"dp_size": 2, "dp_engine": "zero3"}, core=True),
        "dp2 pp2 zbv zero3": Layout({"dp_size": 2, "dp_engine": "zero3"} | zbv, TIED),
        "tp2 tied bias": Layout({"tp_size": 2}, TIED | BIAS),
        "tp8 sequence parallel": Layout({"tp_size": 8, **SEQUENCE_PARALLEL}),  # two ranks share a k/v head
        "cp4 tp2 sequence parallel": Layout({"cp_size": 4, "tp_size": 2, **SEQUENCE_PARALLEL}),
        "cp2 float32": Layout({"cp_size": 2, "model__dtype": "float32"}),
        "pp2 tp2 zbv packed": Layout({"tp_size": 2, **SEQUENCE_PARALLEL} | zbv, packed=True),
        "pp4 checkpointing, 2 kept": Layout({"pp_size": 4, "pp_keep_activations": 2, **FULL}),
    }
    for engine, sharding in (("ring", "zigzag"), ("all_gather", "contiguous"), ("ulysses", "zigzag")):
        config = {"cp_size": 2, "cp_engine": engine, "cp_sharding": sharding}
        layouts[f"cp2 {engine} {sharding}"] = Layout(config, core=engine == "ring")
        layouts[f"cp2 {engine} packed"] = Layout(config, core=engine == "ring", packed=True)
    for engine in SCHEDULES:
        config = {"dp_size": 2, "pp_size": 2, "tp_size": 2, **SEQUENCE_PARALLEL, "pp_engine": engine}
        layouts[f"dp2 pp2 tp2 {engine} tied"] = Layout(config, TIED, core=engine == "zbv")
    return layouts


def _memory_layouts() -> dict[str, Layout]:
    smollm, shape = {"training__micro_batch_size": 4, "training__seq_length": 2048}, SHAPES["smollm-1.7b"]
    llama = {"training__micro_batch_size": 2, "training__seq_length": 4096, **FULL}
    layouts = {"Llama-3.2-1B checkpointing": Layout(llama, SHAPES["llama-3.2-1b"], core=True)}
    for name, config in (
        ("float32", {"model__dtype": "float32"}),
        ("dp8 zero1", {"dp_size": 8, "dp_engine": "zero1"}),
        ("dp8 zero3 checkpointing", {"dp_size": 8, "dp_engine": "zero3", **FULL}),
        ("dp8 cp2 pp2 zero3", {"dp_size": 8, "cp_size": 2, "pp_size": 2, "dp_engine": "zero3"}),
        ("tp2 sequence parallel checkpointing", {"tp_size": 2, **SEQUENCE_PARALLEL, **FULL}),
        ("pp2 tp2 zb_h1", {"pp_size": 2, "tp_size": 2, **SEQUENCE_PARALLEL, "pp_engine": "zb_h1"}),
        ("cp2 all_gather", {"cp_size": 2, "cp_engine": "all_gather"}),
        ("pp2 zbv checkpointing, kept", {"pp_size": 2, "pp_engine": "zbv", "pp_keep_activations": 1, **FULL}),
    ):
        layouts[f"SmolLM-1.7B {name}"] = Layout(smollm | config, shape)
    small = {  # most of the memory is activations
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    }  # fmt: skip
    batch = {"training__micro_batch_size": 8, "training__seq_length": 1024}
    for name, config in (
        ("tp4 sequence parallel", {"tp_size": 4, **SEQUENCE_PARALLEL}),
        *((f"cp2 {engine}", {"cp_size": 2, "cp_engine": engine}) for engine in ("ring", "ulysses")),
        *((f"pp4 {engine}", {"pp_size": 4, "pp_engine": engine}) for engine in SCHEDULES),
    ):
        layouts[f"32k {name}"] = Layout(batch | config, small)
    return layouts


LAYOUTS = _layouts()
MEMORY = _memory_layouts()  # layouts whose peak memory is measured

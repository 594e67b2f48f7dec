"""Adapter of torchtitan: its Llama 3, its parallelism and its `forward_backward_step`, from a checkout.

    TORCHTITAN_CHECKOUT=FOLDER python -m conformance conformance/adapters/torchtitan.py

`Trainer.__init__` needs a GPU, a tokenizer and data, so the adapter makes an empty `Trainer` and gives it what
`forward_backward_step` reads; `loop.train` does the rest of `train_step`, with torchtitan's `clip_grad_norm_`. Words of
a layout besides the sizes:

1F1B, ...        schedule of a pipeline
chunked          the loss in chunks of tokens (`ChunkedLossWrapper`), which torchtitan's own configs choose
no_sp            tensor parallelism without sequence parallelism
replicate        dp replicates the weights instead of sharding them
dtensor          the backend `partial_dtensor` instead of `spmd_types`, which torch 2.13.0 is too old for
rounded          in float64, rotary embeddings and the loss stay in float32
as_is            nothing that CPUs or torch 2.13.0 lack is replaced
"""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask
from transformers import AutoConfig

from conformance import Case, NotOffered, Result
from conformance.adapters.loop import Wide, chunks, train, whole
from conformance.case import IGNORED, Batch

CHAPTERS = ("step", "steps", "accumulation", "odd", "tied", "packed", "masks", "float32", "mixed")
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
WORDS = {*SCHEDULES, "chunked", "no_sp", "replicate", "dtensor", "rounded", "as_is"}
VARIANTS = (
    "dp2 replicate",
    "tp2 no_sp",
    "dp2 chunked",
    "tp2 chunked",
    "dp2 dtensor",
    "tp2 dtensor",
    "dp2 x tp2 dtensor",
)
LAYOUTS = (*VARIANTS, *(f"pp2 {name}" for name in SCHEDULES[1:]))
NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "feed_forward": "mlp",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
TAKES_LISTS = "arg_mbs" in inspect.signature(Schedule1F1B.step).parameters  # since a torch after 2.13.0


def checkout() -> Path:
    """Return the folder of the checkout.

    Raises:
        SystemExit: there is none.
    """
    folder = Path(os.environ.get("TORCHTITAN_CHECKOUT", "")).resolve()
    if not (folder / "torchtitan" / "trainer.py").exists():
        raise SystemExit(f"{folder} is no checkout of torchtitan; set TORCHTITAN_CHECKOUT to one")
    return folder


sys.path.insert(0, str(checkout()))
MODULES: dict[str, Any] = {
    name.rpartition(".")[2]: importlib.import_module(name)
    for name in (
        *(
            "torchtitan.config",
            "torchtitan.trainer",
            "torchtitan.components.loss",
            "torchtitan.components.checkpointer",
        ),
        *("torchtitan.models.llama3", "torchtitan.models.common.attention", "torchtitan.models.common.nn_modules"),
        *("torchtitan.distributed.utils", "torchtitan.distributed.parallel_dims"),
        *("torchtitan.distributed.pipeline_parallel", "torch.nn.attention.flex_attention"),
        "torch.distributed.tensor.experimental._context_parallel._attention",
    )
}


def dense(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """Compute what FlexAttention does, whose backward CPUs lack: (1, N, T, H) with the whole mask."""
    zero, queries, keys = torch.tensor(0), torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    mask = block_mask.mask_mod(zero, zero, queries[:, None], keys[None])
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), AuxOutput()


def polar(length: Tensor, angle: Tensor) -> Tensor:
    """Round as transformers does: `torch.polar` takes the other neighbour in float32 of some cosines and sines."""
    return length * torch.complex(angle.cos(), angle.sin())


class TakesLists:
    """A schedule whose `step` takes lists of micro-batches, which torch 2.13.0 lacks."""

    def __init__(self, schedule: Any) -> None:
        self.schedule, self.stages = schedule, getattr(schedule, "_stages", None) or [schedule._stage]

    def step(self, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **_: Any) -> None:
        for stage in self.stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self.schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)


def config_of(settings: Any, parallelism: Any) -> Any:
    """Return torchtitan's config of the case's model.

    Raises:
        NotOffered: torchtitan rejects the model in this layout.
    """
    dim, heads, vocabulary = settings.hidden_size, settings.num_attention_heads, settings.vocab_size
    base, replace = MODULES["llama3"].llama3_configs["debugmodel"]("flex"), dataclasses.replace
    rope = {"max_context_length": settings.max_position_embeddings, "theta": settings.rope_parameters["rope_theta"]}
    layers = MODULES["llama3"]._build_llama3_layers(
        n_layers=settings.num_hidden_layers,
        dim=dim,
        n_heads=heads,
        n_kv_heads=settings.num_key_value_heads,
        hidden_dim=settings.intermediate_size,
        rope=replace(base.layers[0].attention.rope, dim=dim // heads, scaling="none", **rope),
        attn_backend="flex",
    )
    config = replace(
        base,
        dim=dim,
        vocab_size=vocabulary,
        enable_weight_tying=settings.tie_word_embeddings,
        tok_embeddings=replace(base.tok_embeddings, num_embeddings=vocabulary, embedding_dim=dim),
        norm=replace(base.norm, normalized_shape=dim),
        lm_head=replace(base.lm_head, in_features=dim, out_features=vocabulary),
        layers=layers,
    )
    for _, norm, *_ in config.traverse(MODULES["nn_modules"].RMSNorm.Config):
        norm.eps = settings.rms_norm_eps
    try:
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    except (ValueError, NotImplementedError) as error:
        raise NotOffered(str(error)) from None
    return config


def trainer_of(case: Case, settings: Any, words: set[str]) -> Any:
    """Return a `Trainer` with this rank's part of the model and its weights."""
    titan, sizes = MODULES["config"], case.sizes
    replicas = sizes["dp"] if "replicate" in words else 1
    parallelism = titan.ParallelismConfig(
        data_parallel_replicate_degree=replicas,
        data_parallel_shard_degree=sizes["dp"] // replicas,
        tensor_parallel_degree=sizes["tp"],
        context_parallel_degree=sizes["cp"],
        pipeline_parallel_degree=sizes["pp"],
        enable_sequence_parallel="no_sp" not in words,
        spmd_backend="partial_dtensor" if "dtensor" in words else "spmd_types",
        pipeline_parallel_schedule=next(iter(words & set(SCHEDULES)), SCHEDULES[0]),
        num_pp_microbatches=case.micro_batches,
    )
    dtype = str(case.weight_dtype).removeprefix("torch.")
    training = titan.TrainingConfig(dtype=dtype, mixed_precision_param=case.dtype, mixed_precision_reduce=dtype)
    trainer: Any = object.__new__(MODULES["trainer"].Trainer)
    trainer.config = SimpleNamespace(parallelism=parallelism, training=training)
    trainer.model_config = config_of(settings, parallelism)
    MODULES["utils"].set_spmd_backend(parallelism.spmd_backend)
    trainer.parallel_dims = MODULES["parallel_dims"].ParallelDims.from_config(parallelism, dist.get_world_size())
    trainer.train_context = MODULES["utils"].get_spmd_context(parallel_dims=trainer.parallel_dims)
    loss = MODULES["loss"].CrossEntropyLoss.Config(global_vocab_size=settings.vocab_size)
    trainer.loss_fn = (MODULES["loss"].ChunkedLossWrapper.Config(loss_fn=loss) if "chunked" in words else loss).build()
    trainer.device, trainer.ntokens_seen, trainer.fwd_bwd_fn = torch.device("cpu"), 0, trainer._forward_backward_body
    with torch.device("meta"), MODULES["trainer"].utils.set_default_dtype(case.weight_dtype):
        model = trainer.model_config.build()
    common = {"parallel_dims": trainer.parallel_dims, "training": training, "parallelism": parallelism}
    common |= {"compile_config": titan.CompileConfig(), "ac_config": None, "dump_folder": ""}
    parallelize = MODULES["llama3"].parallelize_llama
    if sizes["pp"] > 1:
        common |= {"device": trainer.device, "model_config": trainer.model_config, "loss_fn": trainer.loss_fn}
        pipeline = MODULES["pipeline_parallel"].pipeline_llm(model, parallelize_fn=parallelize, **common)
        schedule, trainer.model_parts, trainer.pp_has_first_stage, trainer.pp_has_last_stage = pipeline
        trainer.pp_schedule = schedule if TAKES_LISTS or "as_is" in words else TakesLists(schedule)
    else:
        trainer.model_parts, trainer.pp_has_last_stage = [parallelize(model, **common)], True
    for part in trainer.model_parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        for module in part.modules() if "as_is" not in words else ():
            if isinstance(module, FSDPModule):  # gloo lacks the scaled sum that FSDP chooses for a factor of 1
                module.set_force_sum_reduction_for_comms(True)
    if "chunked" in words and trainer.pp_has_last_stage:
        trainer.loss_fn.set_lm_head(trainer.model_parts[-1].lm_head)
        trainer.model_parts[-1]._skip_lm_head = True
    adapter = MODULES["llama3"].Llama3StateDictAdapter(trainer.model_config, str(case.model_folder))
    weights = MODULES["checkpointer"].ModelWrapper(trainer.model_parts)
    found = adapter.to_hf(weights.state_dict())
    dcp.load(found, storage_reader=adapter.get_hf_storage_reader(str(case.model_folder)))
    weights.load_state_dict(adapter.from_hf(found))
    return trainer


def module_name(name: str) -> str | tuple[str, ...]:
    """Return transformers' name of a module, or the three of the joined projection of attention."""
    prefix, end = name.removesuffix(".qkv_linear.wqkv"), ("q_proj", "k_proj", "v_proj")
    found = ".".join(NAMES.get(part, part) for part in prefix.split("."))
    return found if prefix == name else tuple(f"{found}.{each}" for each in end)


def renamed(trainer: Any, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return whole tensors with transformers' names. torchtitan has one weight for queries, keys and values."""
    found = {name: whole(tensor).detach() for name, tensor in tensors.items()}
    for prefix, module in (pair for part in trainer.model_parts for pair in part.named_modules()):
        if isinstance(module, MODULES["attention"].FusedQKVLinear):
            module._split_qkv_on_save(module, found, f"{prefix}.", None)
    hf: dict[str, Tensor] = MODULES["llama3"].Llama3StateDictAdapter(trainer.model_config, None).to_hf(found)
    return hf


def replace_what_is_missing() -> None:
    """Replace what CPUs lack, and let torchtitan know float64."""
    MODULES["parallel_dims"].device_type = "cpu"  # without an accelerator, torchtitan takes "cuda"
    MODULES["attention"].FlexAttention._compiled_flex_attn = dense
    for module in ("attention", "_attention"):
        MODULES[module]._compiled_create_block_mask = create_block_mask
    MODULES["flex_attention"]._DEFAULT_SPARSE_BLOCK_SIZE = 8  # divides a cp rank's tokens, which 128 does not
    MODULES["config"].TORCH_DTYPE_MAP["float64"] = torch.float64


def run(case: Case) -> Result:
    settings, words, utils = AutoConfig.from_pretrained(case.model_folder), set(case.words), MODULES["utils"]
    case.require(words <= WORDS, f"the words {sorted(words - WORDS)} mean nothing to the adapter")
    case.require(settings.model_type == "llama", f"the adapter builds a Llama, not {settings.model_type}")
    case.require(settings.rope_parameters["rope_type"] == "default", "its rotary angles are not scaled")
    too_old = f"with torch {torch.__version__}, use the word dtensor: the default backend needs a newer one"
    case.require(TAKES_LISTS or bool({"dtensor", "as_is"} & words), too_old)
    dist.init_process_group("gloo")
    if "as_is" not in words:
        replace_what_is_missing()
    exact = case.dtype == "float64" and "rounded" not in words
    if exact:
        torch.polar = polar  # type: ignore[assignment]
    trainer = trainer_of(case, settings, words)
    if exact:
        MODULES["loss"].torch, torch.Tensor.float = Wide(), torch.Tensor.double  # type: ignore[method-assign]
    batch_mesh, loss_mesh, pp_mesh = map(trainer.parallel_dims.get_optional_mesh, ("batch", "loss", "pp"))

    def backward(batch: Batch, _: Tensor) -> float | None:
        own = chunks(batch, case.sizes["dp"])[batch_mesh.get_local_rank() if batch_mesh else 0]
        flat = [{name: x.flatten() for name, x in piece.items()} for piece in chunks(own, case.micro_batches)]
        inputs = [{"input": x["input_ids"], "positions": x["position_ids"]} for x in flat]
        labels, loss = [x["target_ids"] for x in flat], torch.zeros(())
        count = utils.dist_sum_tensor((own["target_ids"] != IGNORED).sum(), batch_mesh)
        for x, y in zip(inputs, labels, strict=True) if pp_mesh is None else [(inputs, labels)]:
            loss = loss + trainer.forward_backward_step(input_dict=x, labels=y, global_valid_tokens=count).detach()
        mean: float = utils.dist_sum(loss, loss_mesh)
        return mean if trainer.pp_has_last_stage else None

    def clip(own: list[nn.Parameter], limit: float) -> float:
        return float(utils.clip_grad_norm_(own, limit, foreach=True, pp_mesh=pp_mesh))

    result = train(case, {n: p for part in trainer.model_parts for n, p in part.named_parameters()}, backward, clip)
    result.gradients, result.weights = [renamed(trainer, g) for g in result.gradients], renamed(trainer, result.weights)
    dist.barrier()
    return result

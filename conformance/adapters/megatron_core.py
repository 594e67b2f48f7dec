"""Adapter of Megatron-core 0.16.1 (`pip install --no-deps megatron-core`) on CPUs: its GPTModel with the local spec,
DistributedDataParallel, schedules, `finalize_model_grads`, and optimizers with their clipping.

Words of a layout besides the sizes:

sp               sequence parallelism
distributed      the distributed optimizer: each rank updates a part of the weights
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # on which it allocates

from megatron.core import parallel_state as groups  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed import finalize_model_grads as finalize  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from conformance import Case, Part, Result  # noqa: E402
from conformance.adapters.loop import chunks  # noqa: E402
from conformance.case import Batch, weights_of  # noqa: E402

AXES = ("dp", "pp", "tp")
CHAPTERS = ("step", "run", "float32")
LACKS = ("odd", "documents", "weights", "evaluation", "resume")
LAYOUTS = ("tp2 sp", "dp2 distributed", "dp2 x pp2 distributed", "pp2 x tp2 sp", "dp2 x tp2 sp distributed")
NAMES = {
    "embedding.word_embeddings": ("model.embed_tokens",),
    "decoder.final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
}
NAMES_IN_LAYERS = {  # transformers' modules that a module of a layer computes
    "": ("",),
    "input_layernorm": (".input_layernorm",),
    "self_attention.linear_qkv": (".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
    "self_attention.linear_proj": (".self_attn.o_proj",),
    "pre_mlp_layernorm": (".post_attention_layernorm",),
    "mlp.linear_fc1": (".mlp.gate_proj", ".mlp.up_proj"),
    "mlp.linear_fc2": (".mlp.down_proj",),
}


class OnCpus(TorchFunctionMode):
    """Replaces the device `cuda`, and float32 on it with the dtype of the case."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("device") == "cuda":
            options["device"] = "cpu"
            if options.get("dtype") == torch.float32:
                options["dtype"] = self.dtype
        return function(*args, **options)


class Norm(nn.RMSNorm):
    """torch's norm with what Transformer Engine's adds: the ranks of tp sum its gradients if they split the tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight: Any  # parameters have no such attribute for type checkers
        self.weight.sequence_parallel = config.sequence_parallel


def module_name(name: str) -> tuple[str, ...]:
    """Return the names of the modules of transformers that a module computes."""
    if not name.startswith("decoder.layers."):
        return NAMES.get(name, ())
    number, _, part = name.removeprefix("decoder.layers.").partition(".")
    return tuple(f"model.layers.{number}{each}" for each in NAMES_IN_LAYERS.get(part, ()))


def parts(name: str, tensor: Tensor, model: Any) -> Iterator[tuple[str, Tensor, Part]]:
    """Yield, for each matrix of transformers in a weight or its gradient: the name, a view, and the same as a part."""
    names, rank = module_name(name.removesuffix(".weight")), groups.get_tensor_model_parallel_rank()
    views = tensor.chunk(len(names))
    if len(names) == 3:  # for each key/value head: its queries, the keys and the values
        heads = tensor.view(
            -1, model.num_attention_heads // model.num_query_groups + 2, model.kv_channels, tensor.size(1)
        )
        views = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    for each, view in zip(names, views, strict=True):
        own, dim = view.reshape(-1, *tensor.shape[1:]), 1 if each.endswith(("o_proj", "down_proj")) else 0
        start = [rank * size if i == dim and own.ndim > 1 else 0 for i, size in enumerate(own.shape)]
        yield f"{each}.weight", view, Part(own, tuple(start))


def type_on_gpus(x: Tensor, *dtype: Any) -> Any:
    """Return the name of a tensor's type that the optimizers require; with a dtype, the tensor in this dtype."""
    return x.to(*dtype) if dtype else f"torch.cuda.{'BFloat16' if x.dtype == torch.bfloat16 else 'Float'}Tensor"


def replace_what_is_missing(dtype: torch.dtype) -> None:
    """Replace what CPUs lack, and let Megatron-core know float64."""
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # for dropout, which is 0
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda x, *_: x  # type: ignore[method-assign]
    torch.Tensor.type = type_on_gpus  # type: ignore[method-assign, assignment]
    if dtype == torch.float64:
        torch.set_default_dtype(dtype)
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def model_of(case: Case) -> DistributedDataParallel:
    """Return this rank's part of the model, with the case's weights."""
    sizes, found = case.sizes, AutoConfig.from_pretrained(case.model_folder)
    case.require(found.model_type == "llama", f"the adapter builds a Llama, not {found.model_type}")
    case.require(found.rope_parameters["rope_type"] == "default", "Megatron-core scales angles for 8,192 tokens only")
    case.require(found.num_key_value_heads % sizes["tp"] == 0, "the adapter does not find shared key/value heads")
    case.require(found.vocab_size % sizes["tp"] == 0, "padding of the vocabulary would be part of the softmax")
    config = TransformerConfig(
        num_layers=found.num_hidden_layers,
        hidden_size=found.hidden_size,
        num_attention_heads=found.num_attention_heads,
        num_query_groups=found.num_key_value_heads,
        ffn_hidden_size=found.intermediate_size,
        layernorm_epsilon=found.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        sequence_parallel="sp" in case.words,
        params_dtype=case.torch_dtype,
        pipeline_dtype=case.torch_dtype,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    module = GPTModel(
        config,
        TransformerBlockSubmodules([layer] * (found.num_hidden_layers // sizes["pp"]), Norm),
        found.vocab_size,
        found.max_position_embeddings,
        pre_process=groups.is_pipeline_first_stage(),
        post_process=groups.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=found.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=found.rope_parameters["rope_theta"],
    ).to(case.torch_dtype)
    layers = module.decoder.layers
    layers._modules = {str(each.layer_number - 1): each for each in layers}  # numbers in the whole model
    whole = load_file(case.model_folder / "model.safetensors")
    if found.tie_word_embeddings:
        whole["lm_head.weight"] = whole["model.embed_tokens.weight"]
    for name, p in module.named_parameters():
        for each, view, part in parts(name, p.data, config):
            view.copy_(part.of(whole[each]).view(view.shape))
    is_distributed = "distributed" in case.words
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=is_distributed), module
    )


def optimizer_of(case: Case, model: DistributedDataParallel) -> Any:
    limit = 1e9 if case.max_grad_norm is None else case.max_grad_norm  # with 0, it computes no norm
    config = OptimizerConfig(
        lr=case.learning_rate,
        weight_decay=case.weight_decay,
        adam_beta1=case.beta1,
        adam_beta2=case.beta2,
        adam_eps=case.eps,
        clip_grad=limit,
        params_dtype=case.torch_dtype,
        use_distributed_optimizer="distributed" in case.words,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def forward(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
    """Compute the losses of a micro-batch on the last stage, before that the output of the stage."""
    batch = next(batches)
    ids, length = batch["input_ids"], batch["input_ids"].size(1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = model(ids, batch["position_ids"], mask, labels=batch["target_ids"].clamp(min=0))

    def loss_of(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counted = weights_of(batch)
        total = (losses * counted).sum()
        return total, counted.sum().int(), total.detach().clone()

    return output, loss_of


def run(case: Case) -> Result:
    dist.init_process_group("gloo")
    replace_what_is_missing(case.torch_dtype)
    with OnCpus(case.torch_dtype):
        return train(case)


def train(case: Case) -> Result:
    groups.initialize_model_parallel(case.sizes["tp"], case.sizes["pp"], create_gloo_process_groups=False)
    model, result, rank = model_of(case), Result(), groups.get_data_parallel_rank()
    optimizer, data = optimizer_of(case, model), groups.get_data_parallel_group()

    def named(kind: str) -> dict[str, Part]:
        tensors = ((name, getattr(p, kind)) for name, p in model.module.named_parameters())
        return {each: part for name, tensor in tensors for each, _, part in parts(name, tensor.clone(), model.config)}

    for step in case.steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = case.learning_rates[step], case.weight_decay * group["wd_mult"]
        batch = case.batch(step)
        pieces = chunks(chunks(batch, case.sizes["dp"])[rank], case.micro_batches)
        rows, length = pieces[0]["input_ids"].shape
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(pieces),
            model=[model],
            num_microbatches=case.micro_batches,
            seq_length=length,
            micro_batch_size=rows,
        )
        if "distributed" not in case.words:  # there, a rank has a part of the gradients
            result.gradients = [*result.gradients, named("main_grad")]
        _, norm, _ = optimizer.step()
        result.grad_norms.append(float(norm))
        if losses:
            loss = torch.stack(losses).sum()
            dist.all_reduce(loss, group=data)
            result.losses.append(float(loss / weights_of(batch).sum()))
    result.weights = named("data")
    return result

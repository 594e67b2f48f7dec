"""Training: picotron compared with transformers' model in a plain loop, and with PyTorch's own parallelism.

python -m benchmarks.training [one | dp | zero1 | zero3 | tp | cp ...]

ZeRO-1 is compared with DistributedDataParallel and its ZeroRedundancyOptimizer, and ZeRO-3 with `fully_shard` (FSDP2),
which also reduces the gradients of each micro-batch. Tensor parallelism has torch.distributed.tensor.parallel, on the
same model. Context parallelism is compared with one process on as many cores.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import (
    LAYERS,
    MICRO_BATCH,
    MICRO_BATCHES,
    ON_GPU,
    SEQ_LENGTH,
    TINY,
    arguments,
    device_of,
    loader_of,
    model_config,
    picotron_step,
    require_gpus,
    run_config,
    torch_adamw,
    torch_step,
    transformers_step,
)
from conformance.adapters.loop import norm_of_mixed
from picotron.model.families import model_cost
from picotron.model.llama import Llama
from picotron.model.weights import initial_weights, materialise
from picotron.process_group_manager import setup_process_group_manager
from workbench.run.metrics import peak_flops

RANKS = 2
LENGTHS = (32, 128) if TINY else (2048, 8192)  # of the sequences of context parallelism
CP_LAYERS = LAYERS if ON_GPU else 2  # attention over 8,192 tokens is slow on a CPU
Comparison = tuple[str, list[Variant], int]  # title, variants with the baseline first, tokens of a step


def tokens_of(data_parallel: int = 1) -> int:
    return SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES * data_parallel


def ours(name: str, layout: dict[str, Any], **training: Any) -> Variant:
    return Variant(name, partial(picotron_step, **training), (layout,), RANKS)


def theirs(name: str, *arguments: Any) -> Variant:
    return Variant(f"transformers, {name}", transformers_step, (RANKS, *arguments), RANKS)


def compiled(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile()
    return model


def replicated(model: Any) -> Any:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: Any) -> Any:
    """Apply FSDP2, one unit per layer; on a GPU, it computes in bfloat16 and reduces in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if ON_GPU else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def one() -> list[Comparison]:
    baseline, mine = Variant("transformers", transformers_step), Variant("picotron", picotron_step, ({},))
    found = [("One process", [baseline, mine], tokens_of())]
    if ON_GPU:
        baseline = Variant("transformers, compiled", transformers_step, (1, compiled))
        mine = Variant("picotron, compiled", partial(picotron_step, compile=True), ({},))
        found.append(("One process", [baseline, mine], tokens_of()))
    return found


def data_parallel(engine: str, baseline: Variant) -> list[Comparison]:
    """Compare an engine and plain buckets with a trainer of torch."""
    mine = [ours(f"picotron, {each}", {"dp_size": RANKS, "dp_engine": each}) for each in ("bucket", engine)]
    return [(f"Two data-parallel processes, {engine}", [baseline, *mine], tokens_of(RANKS))]


def tp() -> list[Comparison]:
    """Both split the same tensors, and never gather the logits."""
    found = []
    for sp in (False, True):
        text = ", + sequence parallel" if sp else ""
        baseline = Variant(f"torch, tensor and loss parallel{text}", tensor_parallel_step, (sp,), RANKS)
        mine = ours(f"picotron{text}", {"tp_size": RANKS, "sequence_parallel": sp})
        found.append(("Two tensor-parallel processes", [baseline, mine], tokens_of()))
    return found


def parallelize_plan(sequence_parallel: bool) -> dict[str, Any]:
    """Return the plan by which torch's `parallelize_module` splits picotron's Llama."""
    between = Shard(1) if sequence_parallel else Replicate()
    column, row, full = ColwiseParallel(), RowwiseParallel(output_layouts=between), Replicate()
    rules: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(model_config().num_hidden_layers):
        layer = f"model.layers.{i}"
        rules |= {f"{layer}.self_attn.{name}_proj": column for name in "qkv"}
        rules |= {f"{layer}.mlp.{name}_proj": column for name in ("gate", "up")}
        rules |= {f"{layer}.self_attn.o_proj": row, f"{layer}.mlp.down_proj": row}
        # The input of a block is replicated once for all its matrices, so that backward sums its gradient only once.
        for block, others in (("self_attn", (None, None, None)), ("mlp", ())):
            rules[f"{layer}.{block}"] = PrepareModuleInput(
                input_layouts=(between, *others), desired_input_layouts=(full, *others)
            )
        if sequence_parallel:
            rules |= {f"{layer}.{name}": SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    if sequence_parallel:
        rules["model.norm"] = SequenceParallel()
    return rules


def tensor_parallel_step(rank: int, sequence_parallel: bool) -> Callable[[], Any]:
    """Return a step of picotron's Llama under torch's tensor parallelism."""
    device, config = device_of(rank), run_config({})
    setup_process_group_manager(RANKS, 1, 1, 1)
    with torch.device("meta"):
        model = Llama(model_config())
    materialise(model, device, initial_weights(model_config(), config.training.seed))
    parallelize_module(model, init_device_mesh(device.type, (RANKS,)), parallelize_plan(sequence_parallel))
    if model_config().tie_word_embeddings:  # which `parallelize_module` has parted
        model.lm_head.weight = model.model.embed_tokens.weight
    optimizer, loader = torch_adamw(model.parameters()), loader_of(config, device)
    # Without targets, the model returns logits: picotron's loss knows no DTensors.
    step = torch_step(model, optimizer, loader, lambda batch: model(**batch), norm_of_mixed)
    return loss_parallel()(step)


def cp() -> list[Comparison]:
    found = []
    for length in LENGTHS:
        sizes: dict[str, Any] = {"seq_length": length, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
        sizes["shape"] = model_config(CP_LAYERS, length)
        alone = partial(picotron_step, threads=RANKS, **sizes)
        variants = [Variant(f"one process{f', {RANKS} threads' * (not ON_GPU)}", alone, ({},))]
        for engine, sharding in (
            ("ring", "zigzag"),
            ("ring", "contiguous"),
            ("all_gather", "zigzag"),
            ("ulysses", "zigzag"),
        ):
            layout = {"cp_size": RANKS, "cp_engine": engine, "cp_sharding": sharding}
            variants.append(ours(f"cp {RANKS}, {engine}, {sharding}", layout, **sizes))
        found.append((f"Sequences of {length:,} tokens, {CP_LAYERS} layers", variants, length))
    return found


COMPARISONS: dict[str, Callable[[], list[Comparison]]] = {
    "one": one,
    "dp": lambda: data_parallel("naive", theirs("DistributedDataParallel", replicated)),
    "zero1": lambda: data_parallel(
        "zero1", theirs("DistributedDataParallel, ZeroRedundancyOptimizer", replicated, ZeroRedundancyOptimizer)
    ),
    "zero3": lambda: data_parallel("zero3", theirs("fully_shard", sharded)),
    "tp": tp,
    "cp": cp,
}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("comparisons", nargs="*", help=f"some of {', '.join(COMPARISONS)} [all]")
    options = parser.parse_args()
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if ON_GPU else None
    flops_per_token = model_cost(model_config(), SEQ_LENGTH).flops
    mfu = (lambda rate: f"{rate * flops_per_token / peak:.1%}") if peak else None
    for name in options.comparisons or COMPARISONS:
        require_gpus(1 if name == "one" else RANKS)
        for title, variants, tokens in COMPARISONS[name]():
            print(f"\n{title}")
            results = measure(variants, options.turns, options.steps)
            print_table(results, tokens, variants[0].name, mfu if name == "one" else None)


if __name__ == "__main__":
    main()

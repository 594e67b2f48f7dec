"""Two tensor-parallel processes: picotron beside torch.distributed.tensor.parallel on the same model; what a layer
sends, and what it keeps for backward, beside the papers' formulas.  python -m benchmarks.tensor_parallel
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import (
    MICRO_BATCH,
    MICRO_BATCHES,
    ON_GPU,
    SEQ_LENGTH,
    arguments,
    device_of,
    loader_of,
    model_config,
    nothing,
    ours,
    run_config,
)
from picotron.model import Llama
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel import tp_communications
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from picotron.weights import initial_value, materialise

TP = 2


def plan(sequence_parallel: bool, vocabulary_parallel_loss: bool) -> dict[str, Any]:
    """How PyTorch's own tensor parallelism splits our Llama, which knows of none."""
    between = Shard(1) if sequence_parallel else Replicate()
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=between)
    logits = Shard(-1) if vocabulary_parallel_loss else Replicate()
    rules: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(
            input_layouts=between, output_layouts=logits, use_local_output=not vocabulary_parallel_loss
        ),
    }
    for i in range(model_config().num_hidden_layers):
        layer = f"model.layers.{i}"
        rules |= {f"{layer}.self_attn.{name}_proj": column for name in "qkv"}
        rules |= {f"{layer}.mlp.{name}_proj": column for name in ("gate", "up")}
        rules |= {f"{layer}.self_attn.o_proj": row, f"{layer}.mlp.down_proj": row}
        if sequence_parallel:
            rules |= {f"{layer}.{name}": SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
            gathered = (between, None, None), (Replicate(), None, None)
            rules[f"{layer}.self_attn"] = PrepareModuleInput(
                input_layouts=gathered[0], desired_input_layouts=gathered[1]
            )
            rules[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    if sequence_parallel:
        rules["model.norm"] = SequenceParallel()
    return rules


def clip(parameters: list[Tensor]) -> None:
    """torch.nn.utils.clip_grad_norm_, which cannot have sharded and whole gradients in one call."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds = [[g for g in gradients if isinstance(g, DTensor) == sharded] for sharded in (False, True)]
    norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds if kind]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], scale)


def torchs(rank: int, sequence_parallel: bool, vocabulary_parallel_loss: bool) -> Callable[[], Any]:
    """A step of our Llama under PyTorch's own tensor parallelism."""
    device, config = device_of(rank), run_config(1, MICRO_BATCH)
    setup_process_group_manager(TP, 1, 1, 1)
    with torch.device("meta"):
        model = Llama(model_config())
    materialise(model, device, initial_value(model_config(), 0))
    parallelize_module(model, init_device_mesh(device.type, (TP,)), plan(sequence_parallel, vocabulary_parallel_loss))
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]  # a fused optimizer takes one kind at a time
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": kind} for kind in (sharded, whole) if kind]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loader = loader_of(config, device)

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            with loss_parallel() if vocabulary_parallel_loss else nothing():
                with torch.autocast(device.type, torch.bfloat16, enabled=ON_GPU):
                    loss = model(**next(loader)) / MICRO_BATCHES
                loss.backward()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed() -> None:
    options = arguments(__doc__ or "")
    baseline = "torch, tensor parallel"
    variants = [
        Variant(baseline, torchs, (False, False), TP),
        Variant("torch, + loss parallel", torchs, (False, True), TP),
        Variant("torch, + loss and sequence parallel", torchs, (True, True), TP),
        Variant("picotron, tensor parallel", ours, (1, MICRO_BATCH, "bucket", False, TP, False), TP),
        Variant("picotron, + sequence parallel", ours, (1, MICRO_BATCH, "bucket", False, TP, True), TP),
    ]
    print_table(measure(variants, options.turns, options.steps), SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES, baseline)


def one_layer(tp: int, sequence_parallel: bool) -> tuple[int, int]:
    """Forward and backward of one decoder layer on rank 0 of `tp`: (bytes it sends, bytes it keeps for backward).

    The process group is torch's fake one, whose collectives do nothing at once. A ring sends (tp - 1)/tp of the whole
    tensor for an all-gather or a reduce-scatter, and twice that for an all-reduce.
    """
    dist.init_process_group("fake", rank=0, world_size=tp)
    setup_process_group_manager(tp, 1, 1, 1)
    config = model_config()
    with torch.device("meta"):
        model = apply_tensor_parallel(Llama(config), sequence_parallel)
    materialise(model, torch.device("cpu"), initial_value(config, 0))
    layer = model.model.layers[0]
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    sent, kept = 0, {}
    originals = {name: getattr(tp_communications, name) for name in ("_all_gather", "_reduce_scatter", "all_reduce")}

    def counted(name: str) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            nonlocal sent
            whole = max(t.nbytes for t in tensors if isinstance(t, Tensor))
            sent += (2 if name == "all_reduce" else 1) * (tp - 1) * whole // tp
            return originals[name](*tensors, **options)

        return call

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    length = SEQ_LENGTH // tp if sequence_parallel and tp > 1 else SEQ_LENGTH
    x = torch.randn(MICRO_BATCH, length, config.hidden_size, requires_grad=True)
    angle = torch.zeros(1, SEQ_LENGTH, 1, config.head_dim // 2)
    for name in originals:
        setattr(tp_communications, name, counted(name))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x, angle.cos(), angle.sin())
        weights.add(angle.untyped_storage().data_ptr())
    y.sum().backward()
    for name, original in originals.items():
        setattr(tp_communications, name, original)
    dist.destroy_process_group()
    return sent, sum(kept.values())


def traffic_and_activations() -> None:
    """Counted beside Shoeybi et al. 2019, section 3 (4 all-reduces a layer), and Korthikanti et al. 2022, section 4."""
    config = model_config()
    whole = MICRO_BATCH * SEQ_LENGTH * config.hidden_size * 4
    counted = {(tp, sp): one_layer(tp, sp) for tp in (1, 2, 4) for sp in ((False, True) if tp > 1 else (False,))}
    print("\nOne decoder layer, one micro-batch, float32: MiB that each rank sends, counted and by the formula\n")
    print("| | counted | formula | |\n|---|---|---|---|")
    for (tp, sp), (sent, _) in counted.items():
        formula = (10 if sp else 8) * (tp - 1) / tp * whole
        text = f"{10 if sp else 8} (tp - 1)/tp B T D" + (" (2 of them for what was not kept)" if sp else "")
        print(f"| tp {tp}{', sequence parallel' if sp else ''} | {sent / 2**20:.3f} | {formula / 2**20:.3f} | {text} |")
    # What tensor parallelism alone keeps is s + p/tp: s of what every rank has whole, p of what is split.
    one, two = counted[1, False][1], counted[2, False][1]
    split = 2 * (one - two)
    print("\nThe same layer: MiB that each rank keeps for backward; s and p come from the first two rows\n")
    print("| | counted | formula | |\n|---|---|---|---|")
    for (tp, sp), (_, kept) in counted.items():
        formula = one / tp if sp else one - split + split / tp
        text = "(s + p)/tp" if sp else "s + p/tp"
        print(f"| tp {tp}{', sequence parallel' if sp else ''} | {kept / 2**20:.2f} | {formula / 2**20:.2f} | {text} |")


if __name__ == "__main__":
    traffic_and_activations()
    if ON_GPU and torch.cuda.device_count() < TP:
        print(f"the comparison of speed needs {TP} GPUs; with CUDA_VISIBLE_DEVICES='' it runs on the CPU")
    else:
        speed()

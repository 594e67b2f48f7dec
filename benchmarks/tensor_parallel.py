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
from picotron.explain.fake_group import FakeGroup
from picotron.model import Llama
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from picotron.weights import initial_weights, materialise

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
        # What a block reads is made whole once for all its matrices, so that backward sums its gradient once, too.
        whole = Replicate()
        rules |= {
            f"{layer}.self_attn": PrepareModuleInput(
                input_layouts=(between, None, None), desired_input_layouts=(whole, None, None)
            ),
            f"{layer}.mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,)),
        }
        if sequence_parallel:
            rules |= {f"{layer}.{name}": SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
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
    device, config = device_of(rank), run_config({})
    setup_process_group_manager(TP, 1, 1, 1)
    with torch.device("meta"):
        model = Llama(model_config())
    materialise(model, device, initial_weights(model_config(), 0))
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
    """Each row of picotron beside PyTorch's that splits the same: the logits are never gathered in either."""
    options = arguments(__doc__ or "").parse_args()
    for sequence_parallel in (False, True):
        text = ", + sequence parallel" if sequence_parallel else ""
        baseline = f"torch, tensor and loss parallel{text}"
        variants = [
            Variant(baseline, torchs, (sequence_parallel, True), TP),
            Variant(f"picotron{text}", ours, ({"tp_size": TP, "sequence_parallel": sequence_parallel},), TP),
        ]
        if not sequence_parallel:
            variants.append(Variant("torch, tensor parallel", torchs, (False, False), TP))
        print_table(measure(variants, options.turns, options.steps), SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES, baseline)


def parallel_model(tp: int, sequence_parallel: bool) -> Llama:
    """The model of rank 0 of `tp`, in a fake process group, whose collectives do nothing."""
    dist.init_process_group("nobody", store=dist.HashStore(), rank=0, world_size=tp)
    setup_process_group_manager(tp, 1, 1, 1)
    with torch.device("meta"):
        model = apply_tensor_parallel(Llama(model_config()), sequence_parallel)
    materialise(model, torch.device("cpu"), initial_weights(model_config(), 0))
    return model


def bytes_sent(tp: int, sequence_parallel: bool) -> int:
    """What one rank sends for one micro-batch, counted; collectives go around a ring."""
    model = parallel_model(tp, sequence_parallel)
    FakeGroup.messages.clear()
    ids = torch.zeros(MICRO_BATCH, SEQ_LENGTH, dtype=torch.long)
    model(ids, target_ids=ids).backward()
    dist.destroy_process_group()
    return sum(message.sent * times for message, times in FakeGroup.messages.items())


def kept_by(layer: torch.nn.Module, shape: tuple[int, int, int], positions: int) -> int:
    """The bytes that a decoder layer's forward of an x of this shape, (B, T, D) or a rank's part of it, keeps for its
    backward, counted; weights, and the tables of positions, not.
    """
    angle = torch.zeros(1, positions, 1, layer.self_attn.head_dim // 2)
    cos, sin = angle.cos(), angle.sin()
    not_counted = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), cos, sin)}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(shape, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x, cos, sin)
    del y
    return sum(kept.values())


def bytes_kept(tp: int, sequence_parallel: bool) -> int:
    """What one rank keeps of a decoder layer's forward for its backward."""
    layer, config = parallel_model(tp, sequence_parallel).model.layers["0"], model_config()
    length = SEQ_LENGTH // tp if sequence_parallel else SEQ_LENGTH
    kept = kept_by(layer, (MICRO_BATCH, length, config.hidden_size), SEQ_LENGTH)
    dist.destroy_process_group()
    return kept


def traffic_and_activations() -> None:
    """Counted beside the formulas of Shoeybi et al. 2019, section 3, and Korthikanti et al. 2022, section 4."""
    c, mib = model_config(), 2**20
    L, D, F = c.num_hidden_layers, c.hidden_size, c.intermediate_size
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    BT = MICRO_BATCH * SEQ_LENGTH
    layouts = [(1, False), (2, False), (2, True), (4, False), (4, True)]
    print(
        "\nMiB that each rank sends, float32. In units of (tp - 1)/tp B T D, a layer sends 8 (four all-reduces), with"
    )
    print(
        "sequence parallelism 10 (four all-gathers, four reduce-scatters, and two all-gathers for what was not kept);"
    )
    print("embedding and head 4; the loss 6/D.\n")
    print("| | step, counted | formula | of it per layer and micro-batch |\n|---|---|---|---|")
    for tp, sp in layouts:
        unit = (tp - 1) / tp * BT * D * 4
        layer = (10 if sp else 8) * unit
        step = MICRO_BATCHES * (L * layer + (4 + 6 / D) * unit)
        counted = MICRO_BATCHES * bytes_sent(tp, sp)
        name = f"tp {tp}" + (", sequence parallel" if sp else "")
        print(f"| {name} | {counted / mib:.2f} | {step / mib:.2f} | {layer / mib:.2f} |")
    print("\nMiB that each rank keeps of a layer for backward, float32. Each of two norms keeps its input, what it")
    print(
        "normalised and its output: s = 6 B T D. The blocks keep q, k, v, the attention's output, gate, silu(gate), up"
    )
    print("and their product: p = B T (2 H d + 2 K d + 4 F). (Not in the formula: a few numbers per token.)\n")
    print("| | counted | formula | |\n|---|---|---|---|")
    s, p = 6 * BT * D * 4, BT * (2 * heads + 2 * kv_heads + 4 * F) * 4
    for tp, sp in layouts:
        formula, text = ((s + p) / tp, "(s + p)/tp") if sp else (s + p / tp, "s + p/tp")
        name = f"tp {tp}" + (", sequence parallel" if sp else "")
        print(f"| {name} | {bytes_kept(tp, sp) / mib:.2f} | {formula / mib:.2f} | {text} |")


if __name__ == "__main__":
    traffic_and_activations()
    if ON_GPU and torch.cuda.device_count() < TP:
        print(f"the comparison of speed needs {TP} GPUs; with CUDA_VISIBLE_DEVICES='' it runs on the CPU")
    else:
        speed()

"""Tensor parallelism: speed and memory of two processes, compared with torch.distributed.tensor.parallel; bytes that a
rank sends, and keeps for backward, compared with the papers' formulas.

python -m benchmarks.tensor_parallel
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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

from benchmarks.side_by_side import Variant, measure, print_markdown, print_table
from benchmarks.workload import (
    MICRO_BATCH,
    MICRO_BATCHES,
    ON_GPU,
    SEQ_LENGTH,
    arguments,
    device_of,
    loader_of,
    model_config,
    picotron_step,
    require_gpus,
    run_config,
    torch_adamw,
)
from picotron.model.llama import Llama
from picotron.model.weights import initial_weights, materialise
from picotron.process_group_manager import setup_process_group_manager
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from workbench.explain.fake_group import FakeGroup, fake_rank

TP = 2


LAYOUTS = ((1, False), (2, False), (2, True), (4, False), (4, True))  # tp_size, sequence_parallel


def layout_name(tp: int, sequence_parallel: bool) -> str:
    return f"tp {tp}" + (", sequence parallel" if sequence_parallel else "")


def parallelize_plan(sequence_parallel: bool, vocabulary_parallel_loss: bool) -> dict[str, Any]:
    """Return the plan by which torch's `parallelize_module` splits picotron's Llama."""
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
        # The input of a block is replicated once for all its matrices, so that backward sums its gradient only once.
        full = Replicate()
        rules |= {
            f"{layer}.self_attn": PrepareModuleInput(
                input_layouts=(between, None, None, None), desired_input_layouts=(full, None, None, None)
            ),
            f"{layer}.mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(full,)),
        }
        if sequence_parallel:
            rules |= {f"{layer}.{name}": SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    if sequence_parallel:
        rules["model.norm"] = SequenceParallel()
    return rules


def clip(parameters: list[Tensor]) -> None:
    """Clip like torch.nn.utils.clip_grad_norm_, which does not accept sharded and replicated gradients in one call."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    kinds = [[g for g in gradients if isinstance(g, DTensor) == sharded] for sharded in (False, True)]
    norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds if kind]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], scale)


def torch_step(rank: int, sequence_parallel: bool, vocabulary_parallel_loss: bool) -> Callable[[], Any]:
    """Return a step of picotron's Llama under torch's tensor parallelism."""
    device, config = device_of(rank), run_config({})
    setup_process_group_manager(TP, 1, 1, 1)
    with torch.device("meta"):
        model = Llama(model_config())
    materialise(model, device, initial_weights(model_config(), config.training.seed))
    plan = parallelize_plan(sequence_parallel, vocabulary_parallel_loss)
    parallelize_module(model, init_device_mesh(device.type, (TP,)), plan)
    optimizer = torch_adamw(model.parameters())
    loader = loader_of(config, device)

    def step() -> Tensor:
        total_loss = torch.zeros((), device=device)
        for _ in range(MICRO_BATCHES):
            batch = next(loader)
            targets = batch.pop("target_ids")  # picotron's loss knows no DTensors
            with loss_parallel() if vocabulary_parallel_loss else contextlib.nullcontext():
                with torch.autocast(device.type, torch.bfloat16, enabled=ON_GPU):
                    logits = model(**batch)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / MICRO_BATCHES
                loss.backward()
            total_loss += loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return total_loss

    return step


def speed(turns: int, steps: int) -> None:
    """Compare variants that split the same tensors. The baseline, like picotron, never gathers the logits."""
    for sequence_parallel in (False, True):
        text = ", + sequence parallel" if sequence_parallel else ""
        baseline = f"torch, tensor and loss parallel{text}"
        variants = [
            Variant(baseline, torch_step, (sequence_parallel, True), TP),
            Variant(f"picotron{text}", picotron_step, ({"tp_size": TP, "sequence_parallel": sequence_parallel},), TP),
        ]
        if not sequence_parallel:
            variants.append(Variant("torch, tensor parallel", torch_step, (False, False), TP))
        print_table(measure(variants, turns, steps), SEQ_LENGTH * MICRO_BATCH * MICRO_BATCHES, baseline)


def parallel_model(sequence_parallel: bool) -> Llama:
    """Build this rank's part of the model."""
    with torch.device("meta"):
        model = apply_tensor_parallel(Llama(model_config()), sequence_parallel)
    materialise(model, torch.device("cpu"), initial_weights(model_config(), 0))
    return model


def bytes_sent(tp: int, sequence_parallel: bool) -> int:
    """Count the bytes that a rank sends for one micro-batch, if collectives use a ring."""
    with fake_rank(0, run_config({"tp_size": tp}).distributed):
        model = parallel_model(sequence_parallel)
        FakeGroup.messages.clear()
        ids = torch.zeros(MICRO_BATCH, SEQ_LENGTH, dtype=torch.long)
        model(ids, target_ids=ids).backward()
        return sum(message.sent * times for message, times in FakeGroup.messages.items())


def kept_by(layer: torch.nn.Module, shape: tuple[int, int, int], positions: int) -> int:
    """Count the bytes that a decoder layer's forward keeps for its backward, without weights and rotary tables.

    Args:
        shape: shape of the layer's input on this rank, (B, T, D) or a shard of it.
        positions: number of positions in the rotary tables.
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
    """Count the bytes that a rank keeps of a decoder layer's forward for its backward."""
    with fake_rank(0, run_config({"tp_size": tp}).distributed):
        layer = parallel_model(sequence_parallel).model.layers["0"]
        length = SEQ_LENGTH // tp if sequence_parallel else SEQ_LENGTH
        return kept_by(layer, (MICRO_BATCH, length, model_config().hidden_size), SEQ_LENGTH)


def traffic() -> None:
    """Compare the bytes sent with Shoeybi et al. 2019, section 3, and Korthikanti et al. 2022, section 4."""
    print("""
Bytes that a rank sends, float32. A unit is (tp - 1)/tp B T D numbers: what a rank sends in an all-gather or a
reduce-scatter of the hidden states. A layer sends 8 units (four all-reduces), with sequence parallelism 10 (four
all-gathers, four reduce-scatters, and two all-gathers of inputs of which only a shard was kept); embedding and head
together send 4 units, the loss 6/D.""")
    config, mib = model_config(), 2**20
    L, D = config.num_hidden_layers, config.hidden_size
    rows = [["", "step, counted, MiB", "step, formula, MiB", "one layer and micro-batch, formula, MiB"]]
    for tp, sp in LAYOUTS:
        unit = (tp - 1) / tp * MICRO_BATCH * SEQ_LENGTH * D * 4
        layer = (10 if sp else 8) * unit
        formula = MICRO_BATCHES * (L * layer + (4 + 6 / D) * unit)
        counted = MICRO_BATCHES * bytes_sent(tp, sp)
        rows.append([layout_name(tp, sp), *(f"{size / mib:.2f}" for size in (counted, formula, layer))])
    print_markdown(rows)


def activations() -> None:
    """Compare the bytes kept with Korthikanti et al. 2022, section 4, for this model and kernel."""
    print("""
Bytes that a rank keeps of a layer and micro-batch for backward, float32. The two norms keep their input, the normalised
input and their output: norms = 6 B T D numbers. Attention and MLP keep q, k, v, the output of attention, gate,
silu(gate), up and their product: blocks = B T (2 H d + 2 K d + 4 F) numbers. (A few numbers per token are left out.)""")
    config, mib = model_config(), 2**20
    D, F = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    norms = 6 * MICRO_BATCH * SEQ_LENGTH * D * 4
    blocks = MICRO_BATCH * SEQ_LENGTH * (2 * heads + 2 * kv_heads + 4 * F) * 4
    rows = [["", "kept, counted, MiB", "kept, formula, MiB", "formula"]]
    for tp, sp in LAYOUTS:
        size, text = (
            ((norms + blocks) / tp, "(norms + blocks)/tp") if sp else (norms + blocks / tp, "norms + blocks/tp")
        )
        rows.append([layout_name(tp, sp), f"{bytes_kept(tp, sp) / mib:.2f}", f"{size / mib:.2f}", text])
    print_markdown(rows)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    traffic()
    activations()
    require_gpus(TP)
    speed(options.turns, options.steps)


if __name__ == "__main__":
    main()

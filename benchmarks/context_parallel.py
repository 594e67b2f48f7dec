"""Two context-parallel processes: picotron's engines beside the same model on one process with as many cores, and
beside torch's experimental context_parallel where that runs; the balance of zigzag; what a rank keeps for backward.
python -m benchmarks.context_parallel
"""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.side_by_side import Variant, measure, print_table
from benchmarks.workload import ON_GPU, SHAPE, arguments, device_of
from picotron.config import Config
from picotron.config_reader import parse_config
from picotron.context_parallel import context_parallel
from picotron.context_parallel.context_parallel import apply_context_parallel, attend_across_ranks
from picotron.data import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model import Llama, fused_attention
from picotron.optimizer import AdamW, clip_grad_norm
from picotron.process_group_manager import setup_process_group_manager
from picotron.weights import initial_value, materialise
from train import train_step

CP = 2
LENGTHS = (2048, 8192)
LAYERS = 24 if ON_GPU else 2  # attention of 8,192 tokens is a lot for a CPU


def model_config() -> LlamaConfig:
    return LlamaConfig(**SHAPE | {"num_hidden_layers": LAYERS}, max_position_embeddings=max(LENGTHS))


def run_config(seq_length: int, **layout: Any) -> Config:
    return parse_config(
        {
            "distributed": {**layout, "use_cpu": not ON_GPU},
            "model": {"name": "benchmark", "dtype": "bfloat16" if ON_GPU else "float32"},
            "training": {"seq_length": seq_length},
            "dataset": {"name": "random tokens"},
        }
    )


def model_and_loader(rank: int, config: Config) -> tuple[Llama, MicroBatchDataLoader]:
    device = device_of(rank)
    setup_process_group_manager(1, config.distributed.cp_size, 1, config.distributed.dp_size)
    with torch.device("meta"):
        llama = Llama(model_config()).to(getattr(torch, config.model.dtype))
    materialise(llama, device, initial_value(model_config(), 0))
    tokens = np.random.default_rng(0).integers(SHAPE["vocab_size"], size=config.training.seq_length * 16 + 1)
    return llama, MicroBatchDataLoader(tokens.astype(np.uint16), config, device)


def ours(rank: int, seq_length: int, threads: int, layout: dict[str, Any]) -> Callable[[], Any]:
    """A step of picotron."""
    torch.set_num_threads(threads)
    config = run_config(seq_length, **layout)
    llama, loader = model_and_loader(rank, config)
    apply_context_parallel(llama, config.distributed)
    model = DataParallelBucket(llama)
    optimizer = AdamW(model.parameters(), config.training, fused=True)

    def step() -> None:
        train_step(model, loader, loader.device)
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchs(rank: int, seq_length: int) -> Callable[[], Any]:
    """A step of the same model under torch.distributed.tensor.experimental.context_parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    config = run_config(seq_length, dp_size=CP)
    llama, loader = model_and_loader(rank, config)
    loader.dp_rank = 0  # all ranks have the same whole sequences, which torch cuts up
    mesh = init_device_mesh(loader.device.type, (CP,))
    optimizer = torch.optim.AdamW(llama.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        batch = next(loader)
        ids, targets, positions = (batch[name].clone() for name in ("input_ids", "target_ids", "position_ids"))
        with torch_context_parallel(mesh, buffers=[ids, targets, positions], buffer_seq_dims=[1, 1, 1]):
            llama(ids, positions, target_ids=targets).backward()
        for parameter in llama.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed(turns: int, steps: int) -> None:
    for seq_length in LENGTHS:
        one = "one process" if ON_GPU else f"one process, {CP} threads"
        variants = [Variant(one, ours, (seq_length, CP, {}))]
        for engine, sharding in (
            ("ring", "zigzag"),
            ("ring", "contiguous"),
            ("all_gather", "zigzag"),
            ("ulysses", "zigzag"),
        ):
            layout = {"cp_size": CP, "cp_engine": engine, "cp_sharding": sharding}
            variants.append(Variant(f"cp {CP}, {engine}, {sharding}", ours, (seq_length, 1, layout), CP))
        try:
            measure([Variant("torch", torchs, (seq_length,), CP)], 0, 1)
            variants.append(Variant("torch, context_parallel", torchs, (seq_length,), CP))
        except Exception as error:
            print(f"\ntorch's context_parallel does not run here: {str(error).splitlines()[0]}")
        print(f"\nsequences of {seq_length} tokens, {LAYERS} layers")
        print_table(measure(variants, turns, steps), seq_length, one)


def attention_work(cp: int, sharding: str) -> float:
    """The busiest rank's query-key blocks over the mean, counted; a block on the diagonal counts half."""
    work = []
    for rank in range(cp):
        dist.init_process_group("fake", rank=rank, world_size=cp)
        setup_process_group_manager(1, cp, 1, 1)
        tokens = 64
        blocks = [b for source in range(cp) for b in context_parallel.visible_blocks(source, tokens, sharding)]
        count = [
            len(range(tokens)[queries]) * len(range(tokens)[keys]) / (2 if causal else 1)
            for queries, keys, causal in blocks
        ]
        work.append(sum(count))
        dist.destroy_process_group()
    return max(work) / statistics.mean(work)


def bytes_kept(cp: int, seq_length: int = 2048) -> int:
    """What a rank keeps of one decoder layer for its backward, counted; weights and positions not."""
    dist.init_process_group("fake", rank=0, world_size=cp)
    grid = setup_process_group_manager(1, cp, 1, 1)
    config = model_config()
    with torch.device("meta"):
        llama = Llama(config)
    layer = llama.model.layers["0"].to_empty(device="cpu")
    layer.self_attn.attend = attend_across_ranks(run_config(seq_length, cp_size=cp).distributed, fused_attention)
    length = seq_length // grid.cp_world_size
    angle = torch.zeros(1, length, 1, config.head_dim // 2)
    cos, sin = angle.cos(), angle.sin()
    not_counted = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), cos, sin)}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(torch.zeros(1, length, config.hidden_size, requires_grad=True), cos, sin)
    del y
    dist.destroy_process_group()
    return sum(kept.values())


def counted() -> None:
    print("\nThe busiest rank's attention work over the mean, counted in query-key pairs\n")
    print("| cp | zigzag | contiguous | (2 cp - 1)/cp |\n|---|---|---|---|")
    for cp in (2, 4, 8):
        zigzag, contiguous = attention_work(cp, "zigzag"), attention_work(cp, "contiguous")
        print(f"| {cp} | {zigzag:.3f} | {contiguous:.3f} | {(2 * cp - 1) / cp:.3f} |")
    print("\nMiB that a rank keeps of one layer's forward for a sequence of 2,048 tokens, float32, ring\n")
    print("| cp | counted | of that for cp 1, over cp |\n|---|---|---|")
    whole = bytes_kept(1)
    for cp in (1, 2, 4, 8):
        print(f"| {cp} | {bytes_kept(cp) / 2**20:.2f} | {whole / cp / 2**20:.2f} |")


if __name__ == "__main__":
    options = arguments(__doc__ or "")
    counted()
    if ON_GPU and torch.cuda.device_count() < CP:
        print(f"the comparison of speed needs {CP} GPUs; with CUDA_VISIBLE_DEVICES='' it runs on the CPU")
    else:
        speed(options.turns, options.steps)

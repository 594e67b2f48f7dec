"""Adapter of Hugging Face's picotron: its model, its wrappers and its `train_step`s, from a checkout.

    PICOTRON_CHECKOUT=FOLDER python -m conformance conformance/adapters/hf_picotron.py

The checkout can also be the folder `picotron_checkout` beside this file. Its `train.py` has no gradient clipping and no
learning-rate schedule; here, `loop.train` has them. Words of a layout besides the sizes:

afab             all forwards of a pipeline, then all backwards, instead of 1F1B
repaired         gradients are synchronized over cp, and those of a pipeline divided by the number of micro-batches
default_dtype    the environment variable DTYPE is not set, as in `train.py`
loaded           the checkout's own function splits the weights over tp
as_is            nothing that CPUs lack is replaced
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

from conformance import Case, NotOffered, Part, Result
from conformance.adapters.loop import train
from conformance.case import Batch

CHAPTERS = ("step", "run", "float32", "mixed")
LACKS = ("documents", "masks", "weights", "evaluation", "tied")
LAYOUTS = ("pp2 repaired", "pp2 afab repaired", "cp2 repaired", "pp2 x cp2 repaired", "dp2 x pp2 repaired")
WORDS = {"afab", "repaired", "default_dtype", "loaded", "as_is"}
FLASH_ATTENTION = {
    "flash_attn": (),
    "flash_attn.layers": (),
    "flash_attn.ops": (),
    "flash_attn.ops.triton": (),
    "flash_attn.flash_attn_interface": ("flash_attn_func",),
    "flash_attn.layers.rotary": ("apply_rotary_emb",),
    "flash_attn.ops.triton.layer_norm": ("layer_norm_fn",),
}
NAMES = {  # transformers' names and the checkout's, of which the first that fits counts
    "model.layers.": "decoder_layers.",
    "self_attn.o_proj": "attention.out_proj",
    "self_attn.": "attention.",
    "model.embed_tokens": "embedding",
    "model.norm": "final_norm",
    "lm_head": "final_proj",
}
COLUMNS, ROWS = (
    ("o_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "embed_tokens", "lm_head"),
)


def checkout() -> Path:
    """Return the folder of the checkout.

    Raises:
        SystemExit: there is none.
    """
    folder = Path(os.environ.get("PICOTRON_CHECKOUT", Path(__file__).parent / "picotron_checkout")).resolve()
    if not (folder / "picotron" / "process_group_manager.py").exists():
        raise SystemExit(f"{folder} is no checkout of Hugging Face's picotron; set PICOTRON_CHECKOUT to one")
    return folder


sys.path.insert(0, str(checkout()))
package = ModuleType(
    "picotron"
)  # the checkout has no __init__.py, so that another picotron on the path would come first
package.__path__ = [str(checkout() / "picotron")]
sys.modules["picotron"] = package
PLACEHOLDERS = FLASH_ATTENTION if importlib.util.find_spec("flash_attn") is None else {}
for path, functions in PLACEHOLDERS.items():  # the model imports it even if it does not use it
    sys.modules[path] = ModuleType(path)
    for function in functions:
        setattr(sys.modules[path], function, None)
MODULES: dict[str, Any] = {
    name.rpartition(".")[2]: importlib.import_module(name)
    for name in (
        *("train", "picotron.process_group_manager", "picotron.model", "picotron.utils", "workbench.run.checkpoint"),
        *("picotron.tensor_parallel.tensor_parallel", "picotron.context_parallel.context_parallel"),
        *("picotron.pipeline_parallel.pipeline_parallel", "picotron.data_parallel.data_parallel"),
    )
}
for path in PLACEHOLDERS:
    del sys.modules[path]  # so that transformers does not take it for the library


class Batches:
    """This rank's micro-batches of a step, as the checkout's data loader yields them."""

    def __init__(self, case: Case, batch: Batch) -> None:
        groups = MODULES["process_group_manager"].process_group_manager
        self.grad_acc_steps, self.step = case.micro_batches, 0
        self.own = {
            name: tensor.chunk(groups.dp_world_size)[groups.dp_rank].chunk(groups.cp_world_size, 1)[groups.cp_rank]
            for name, tensor in batch.items()
        }

    def __next__(self) -> dict[str, Any]:
        found = {name: x.chunk(self.grad_acc_steps)[self.step].contiguous() for name, x in self.own.items()}
        self.step += 1
        return found | {"hidden_states": None}


def check(case: Case, config: Any) -> None:
    """Raise NotOffered for what the checkout does not support."""
    tp, pp = case.sizes["tp"], case.sizes["pp"]
    case.require(
        not set(case.words) - WORDS, f"the words {sorted(set(case.words) - WORDS)} mean nothing to the adapter"
    )
    case.require(config.model_type == "llama", f"its model is a Llama, not {config.model_type}")
    case.require(config.rope_parameters["rope_type"] == "default", "its rotary angles are not scaled")
    case.require(not config.tie_word_embeddings, "its embedding and head never share their weight")
    case.require(config.vocab_size % tp == 0, f"tp{tp} does not divide the vocabulary of {config.vocab_size}")
    case.require(config.num_key_value_heads % tp == 0, f"tp{tp} does not divide the key/value heads")
    case.require(case.dtype != "bfloat16", "in bfloat16, the weights that the optimizer updates are in bfloat16")
    if case.load is not None and not any(case.load.glob(f"weights_tp*=*_{tp}_pp*=*_{pp}.pth")):
        raise NotOffered("a checkpoint resumes with the same tp and pp sizes only")


def model_of(case: Case, config: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    """Build this rank's model without its wrapper for data parallelism. Name its parameters as transformers."""
    groups = MODULES["process_group_manager"].process_group_manager
    model = MODULES["model"].Llama(config=config)
    if groups.tp_world_size > 1:
        model = MODULES["tensor_parallel"].apply_tensor_parallel(model)
    if groups.pp_world_size > 1:
        model = MODULES["pipeline_parallel"].PipelineParallel(model, config)
    MODULES["context_parallel"].apply_context_parallel(model)
    model.to(case.torch_dtype)
    own, parameters = dict(model.named_parameters()), dict[str, nn.Parameter]()
    for name, whole in load_file(case.model_folder / "model.safetensors").items():
        theirs = name
        for ours, other in NAMES.items():
            theirs = theirs.replace(ours, other)
        if theirs in own:
            parameters[name] = own[theirs]
            part = Part(own[theirs], start_of(name, own[theirs])).of(whole)
            if "loaded" in case.words:
                part = MODULES["checkpoint"].InitializationManager(model, config).adjust_tensor_size(whole, theirs)
            own[theirs].data.copy_(part)
    return model, parameters


def start_of(name: str, tensor: Tensor) -> tuple[int, ...]:
    """Return the place of the first element of this rank's part of a weight."""
    rank = MODULES["process_group_manager"].process_group_manager.tp_rank
    if any(key in name for key in ROWS):
        return (rank * tensor.size(0), 0)
    return (0, rank * tensor.size(1)) if any(key in name for key in COLUMNS) else (0,) * tensor.ndim


def clip(parameters: dict[str, nn.Parameter], limit: float) -> float:
    """Clip by the norm over tp and pp, which the checkout lacks."""
    groups = MODULES["process_group_manager"].process_group_manager
    square = torch.zeros((), dtype=torch.float64)
    for name, p in parameters.items():
        if p.grad is not None and (groups.tp_rank == 0 or any(key in name for key in ROWS + COLUMNS)):
            square += p.grad.double().square().sum()
    dist.all_reduce(square, group=groups.tp_group)
    dist.all_reduce(square, group=groups.pp_group)
    nn.utils.clip_grads_with_norm_(parameters.values(), limit, square.sqrt())
    return float(square.sqrt())


class Wide:
    """Torch for the checkout's modules, in which the constant float32 means float64."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name == "float32" else name)


@contextlib.contextmanager
def groups_of(case: Case) -> Iterator[Any]:
    """Set up the checkout's groups and its environment variables."""
    dist.init_process_group("gloo")
    os.environ |= {"DEVICE": "cpu", "FLASH_ATTEN": "0", "DTYPE": "float32"}
    if "default_dtype" in case.words:
        del os.environ["DTYPE"]
    if "as_is" not in case.words:
        torch.cuda.synchronize = lambda *_: None
    if case.dtype == "float64":
        for name in ("model", "context_parallel", "utils"):
            MODULES[name].torch = Wide()
    MODULES["process_group_manager"].setup_process_group_manager(**{f"{a}_size": n for a, n in case.sizes.items()})
    yield MODULES["process_group_manager"].process_group_manager
    dist.barrier()


def module_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def run(case: Case) -> Result:
    settings = AutoConfig.from_pretrained(case.model_folder)
    check(case, settings)
    rows, length = case.batch(0)["input_ids"].shape
    config = SimpleNamespace(**settings.to_dict() | settings.rope_parameters | {"max_position_embeddings": length})
    with groups_of(case) as groups:
        model, parameters = model_of(case, config)
        repaired, pipeline = "repaired" in case.words, MODULES["pipeline_parallel"]
        if groups.dp_world_size > 1 or (repaired and groups.cp_world_size > 1):
            model = MODULES["data_parallel"].DataParallelBucket(model, grad_type=case.torch_dtype)
        schedule = pipeline.train_step_pipeline_afab if "afab" in case.words else pipeline.train_step_pipeline_1f1b
        shape = (rows // groups.dp_world_size // case.micro_batches, length // groups.cp_world_size, config.hidden_size)
        manager, cpu = MODULES["checkpoint"].CheckpointManager(), torch.device("cpu")

        def backward(batch: Batch, total: Tensor) -> float | None:
            if hasattr(model, "reset"):
                model.reset()
            if groups.pp_world_size > 1:
                loss = schedule(model, Batches(case, batch), shape, cpu, case.torch_dtype)
                for p in parameters.values() if repaired else ():
                    p.grad = None if p.grad is None else p.grad / case.micro_batches
            else:
                loss = MODULES["train"].train_step(model, Batches(case, batch), cpu)
            mean: float = MODULES["utils"].average_loss_across_dp_cp_ranks(loss, cpu)
            return mean if groups.pp_is_last_stage else None

        result = train(
            case,
            parameters,
            backward,
            lambda _, limit: clip(parameters, limit),
            load=lambda optimizer: manager.load_checkpoint(model, optimizer, str(case.load)),
            save=lambda optimizer: manager.save_checkpoint(model, optimizer, case.last_step, 0, str(case.output)),
        )
    for kind in ("gradients", "weights"):
        found = {name: Part(tensor, start_of(name, tensor)) for name, tensor in getattr(result, kind).items()}
        setattr(result, kind, found)
    return result

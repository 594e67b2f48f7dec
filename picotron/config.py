"""The config of a run as typed, frozen, strict objects: what can be asked for, with types, defaults and limits.

`config_reader` makes them from a JSON file and the command line. Docstrings below a key reach --help and the schema.
"""

import json
import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)

from picotron.errors import UserError
from picotron.schedules.schedules import SCHEDULES, check_name


class Section(BaseModel):
    # strict: "4" is not 4, and 1 is not true
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Distributed(Section):
    tp_size: PositiveInt = 1
    """tensor-parallel ranks: each holds a part of every matrix"""
    sequence_parallel: bool = False
    """with tp_size > 1: between the matrices, each of these ranks holds a part of the sequence"""
    cp_size: PositiveInt = 1
    """context-parallel ranks: each holds a part of every sequence"""
    cp_sharding: Literal["zigzag", "contiguous"] = "zigzag"
    """which part: zigzag gives every rank as much attention to compute, contiguous the last one the most"""
    cp_engine: Literal["ring", "all_gather", "ulysses"] = "ring"
    """how attention sees the other parts; ulysses splits heads instead"""
    pp_size: PositiveInt = 1
    """pipeline ranks: each holds some of the layers"""
    dp_size: PositiveInt = 1
    """data-parallel ranks: each holds some of the batch"""
    pp_engine: Annotated[
        str,
        AfterValidator(check_name),
        WithJsonSchema({"anyOf": [{"enum": list(SCHEDULES)}, {"type": "string", "pattern": "^csv:."}]}),
    ] = "1f1b"
    """with pp_size > 1: the schedule, or csv:FILE for one of your own"""
    pp_chunks: PositiveInt | None = None
    """stages per rank, for interleaved_1f1b and looped_bfs; null: as many as the schedule has by itself"""
    pp_layout: str | None = None
    """what each stage holds, like Et*3|(tt|)*5L: embedding, layers, head; null: stages that take equally long"""
    backend: Literal["nccl", "gloo"] | None = None
    """communication library; null: nccl on GPUs, gloo on CPU"""
    use_cpu: bool = False
    """run on the CPU even where there is a GPU"""

    @property
    def world_size(self) -> int:
        return self.dp_size * self.pp_size * self.cp_size * self.tp_size

    @model_validator(mode="after")
    def backend_fits_device(self) -> "Distributed":
        if self.use_cpu and self.backend == "nccl":
            raise ValueError("backend='nccl' needs GPUs, but use_cpu=true; set backend to 'gloo' or null")
        if not self.use_cpu and self.backend == "gloo" and max(self.pp_size, self.cp_size) > 1:
            raise ValueError(
                f"backend='gloo' does not send from GPU to GPU, as pp_size={self.pp_size} and cp_size={self.cp_size} need; "
                f"set backend to null, or use_cpu to true"
            )
        return self


class Model(Section):
    name: str
    """hub id, or local folder with a config.json"""
    num_hidden_layers: PositiveInt | None = None
    """replaces the value of the model's own config.json, as do the next two"""
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """of weights and activations; gradients and optimizer state are float32 or wider"""
    use_flash_attention: bool = True
    """let PyTorch choose its fused attention kernels; false: plain matmul and softmax"""
    use_fused_adam: bool = True
    """torch's fused AdamW: one kernel for all parameters"""
    pretrained: bool = False
    """start from the weights of `name` (safetensors) instead of random ones"""
    tokenizer: str | None = None
    """hub id or folder; null: the model's own; "bpe": train a byte-level BPE of vocab_size tokens on the data set"""


class Training(Section):
    seed: NonNegativeInt = 42
    """of the initial weights and the order of the data"""
    learning_rate: float = Field(3e-4, gt=0)
    total_train_steps: PositiveInt = 200
    seq_length: PositiveInt = 1024
    """tokens per sequence"""
    micro_batch_size: PositiveInt = 1
    """sequences per forward pass on one data-parallel rank"""
    gradient_accumulation_steps: PositiveInt = 1
    """micro-batches per step"""
    num_samples: PositiveInt | None = None
    """use only the first so many documents of the data set"""
    max_tokens: PositiveInt | None = None
    """stop after so many tokens, if that comes before total_train_steps"""
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    """the learning rate rises linearly over these steps"""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """where the learning rate ends, as a fraction of learning_rate"""
    weight_decay: float = Field(0.1, ge=0)
    """on matrices only; norms and biases have none"""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    """clip the global gradient norm to this; null: never clip"""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full: keep only each layer's input, compute the rest again in backward"""
    compile: bool = False
    """torch.compile each decoder layer"""
    eval_frequency: NonNegativeInt = 0
    """steps between evaluations of the loss on held-out data; 0: never"""
    eval_steps: PositiveInt = 10
    """global batches per evaluation: the end of the data, which is then not trained on"""

    @model_validator(mode="after")
    def warmup_ends(self) -> "Training":
        if self.warmup_steps >= self.total_train_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} must be less than total_train_steps={self.total_train_steps}"
            )
        return self

    @model_validator(mode="after")
    def evaluations_happen(self) -> "Training":
        if self.eval_frequency > self.total_train_steps:
            raise ValueError(
                f"eval_frequency={self.eval_frequency} is never reached in total_train_steps={self.total_train_steps}; "
                f"use at most that, or 0 for no evaluation"
            )
        return self


class Dataset(Section):
    name: str
    """hub id, folder, .txt / .jsonl / .parquet file, or "python-stdlib": the sources of Python's own library"""
    subset_name: str | None = None
    """configuration of a hub data set"""
    split: str = "train"
    num_workers: NonNegativeInt = 0
    """processes that read batches ahead; 0: read in the training process"""
    num_proc: PositiveInt = 1
    """processes that tokenise"""
    text_column: str = "text"
    shuffle: bool = True
    """a new seeded order every epoch; false: the order of the files"""


class Checkpoint(Section):
    save_dir: str = "ckpt"
    """folder for all outputs of the run"""
    save_frequency: NonNegativeInt = 0
    """steps between checkpoints, of which the last is written at the end; 0: none, unless a signal stops the run"""
    load_path: str = ""
    """a checkpoint to go on from, "latest" (the newest in save_dir), or a model's folder to start from its weights"""
    keep_last: NonNegativeInt = 0
    """delete all but the newest so many checkpoints; 0: keep all"""
    async_save: bool = False
    """copy a checkpoint to host memory, and write it while training goes on"""


class Logging(Section):
    level: Literal["info", "debug"] = "info"
    """debug: with pp_size > 1 every rank tells what it does, like F3, the forward of micro-batch 3"""
    use_wandb: bool = False
    project_name: str = "picotron"
    """of wandb, as run_name"""
    run_name: str | None = None
    log_frequency: PositiveInt = 1
    """steps between lines on the console; metrics.jsonl has every step"""
    trace_steps: list[PositiveInt] | None = None
    """with pp_size > 1: record when each action of these steps runs (GPUs are slower then: every action is awaited)"""


def read_string(value: Any) -> Any:
    """A string that holds JSON is what it holds ("4" is 4, "false" is false); anything else stays as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


class Environment(Section):
    OMP_NUM_THREADS: Annotated[
        PositiveInt, BeforeValidator(read_string), WithJsonSchema({"type": ["integer", "string"]})
    ] = 1
    """threads per process for work on the CPU"""
    TOKENIZERS_PARALLELISM: Annotated[
        bool, BeforeValidator(read_string), WithJsonSchema({"type": ["boolean", "string"]})
    ] = True
    """let the tokenizer use several threads"""


class Config(Section):
    distributed: Distributed = Distributed()
    model: Model
    training: Training = Training()
    dataset: Dataset
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    environment: Environment = Environment()

    @model_validator(mode="after")
    def sequence_divides(self) -> "Config":
        layout, length, needs = self.distributed, self.training.seq_length, {}
        if layout.cp_size > 1:
            needs[f"cp_size={layout.cp_size} with cp_sharding={layout.cp_sharding!r}"] = layout.cp_size * (
                2 if layout.cp_sharding == "zigzag" else 1
            )
        if layout.sequence_parallel:
            needs[f"sequence_parallel with tp_size={layout.tp_size}"] = layout.cp_size * layout.tp_size
        multiple = math.lcm(*needs.values())
        if length % multiple:
            below = length // multiple * multiple
            nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
            verb = "needs" if len(needs) == 1 else "need"
            raise ValueError(
                f"training.seq_length={length} does not divide by {multiple}, as {' and '.join(needs)} {verb}; use {nearest}"
            )
        return self

    @model_validator(mode="after")
    def ring_has_a_kernel(self) -> "Config":
        layout, model = self.distributed, self.model
        if layout.cp_size > 1 and layout.cp_engine != "ulysses":
            if not model.use_flash_attention:
                raise ValueError(
                    f"cp_engine={layout.cp_engine!r} needs fused attention kernels, but model.use_flash_attention=false; "
                    f"set it to true, or cp_engine to 'ulysses'"
                )
            if model.dtype == "float64" and not layout.use_cpu:
                raise ValueError(
                    f"cp_engine={layout.cp_engine!r} has no kernel for model.dtype='float64' on GPUs; "
                    f"use float32, cp_engine 'ulysses', or use_cpu"
                )
        return self

    @model_validator(mode="after")
    def traces_happen(self) -> "Config":
        steps, total = self.logging.trace_steps or [], self.training.total_train_steps
        if steps and self.distributed.pp_size == 1:
            raise ValueError(f"logging.trace_steps={steps} is about pipelines, but pp_size=1; leave it out")
        if max(steps, default=0) > total:
            raise ValueError(f"logging.trace_steps={steps} goes beyond total_train_steps={total}; use steps up to that")
        return self

    @property
    def held_out_sequences(self) -> int:
        """Sequences that are not trained on, but evaluated."""
        return self.training.eval_steps * self.global_batch_size if self.training.eval_frequency else 0

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        training = self.training
        return training.micro_batch_size * training.gradient_accumulation_steps * self.distributed.dp_size


def check_world_size(distributed: Distributed, world_size: int) -> None:
    """Raises UserError unless the layout multiplies to the number of processes that were started."""
    if distributed.world_size != world_size:
        d = distributed
        raise UserError(
            f"dp_size={d.dp_size} x pp_size={d.pp_size} x cp_size={d.cp_size} x tp_size={d.tp_size} needs {d.world_size} "
            f"processes, but {world_size} started; use torchrun --nproc_per_node {d.world_size}, or change the sizes"
        )

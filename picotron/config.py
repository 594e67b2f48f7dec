"""The config of a run as typed, frozen and strict objects: every key with its type, default and limits.

`config_reader` reads them from a JSON file and the command line. The docstring below a key is its help text, which
`train.py --help` and the JSON schema show.
"""

import json
import math
import operator
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

Positive = Annotated[int, Field(gt=0, le=2**40)]
NonNegative = Annotated[int, Field(ge=0, le=2**40)]
Processes = Annotated[int, Field(gt=0, le=4096)]
Weight = Annotated[float, Field(gt=0, le=1e18)]  # so that a sum of weights is finite
PP_ENGINES = ("afab", "1f1b", "looped_bfs", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev", "v_min", "auto")

VARIANT_KEYS = (  # which select from the table in workbench/variants
    "distributed.dp_engine", "distributed.cp_engine", "distributed.ep_size", "model.float8",
    "model.use_flash_attention",
    "training.optimizer_states", "training.activation_checkpointing", "dataset.mask_documents", "dataset.eval_name",
    "dataset.prompt_column", "dataset.completion_column", "dataset.messages_column",
)  # fmt: skip


def check_engine(name: str) -> str:
    """Return `name` if it is a pp_engine: one of PP_ENGINES, or csv:FILE. Raises ValueError if it is none."""
    if name in PP_ENGINES or re.match("csv:.", name):
        return name
    raise ValueError(f"there is no schedule {name!r}; choose one of {', '.join(PP_ENGINES)}, or csv:FILE")


Engine = Annotated[
    str,
    AfterValidator(check_engine),
    WithJsonSchema({"anyOf": [{"enum": [*PP_ENGINES]}, {"type": "string", "pattern": "^csv:."}]}),
]


class Section(BaseModel):
    # strict: no conversions, so "4" is not accepted for 4, nor 1 for true
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def check_text(cls, value: Any, info: ValidationInfo) -> Any:
        empty = value == "" and info.field_name != "load_path"
        if empty or (isinstance(value, str) and re.search("[\0\ud800-\udfff]", value)):
            raise ValueError(f"{value!r} should be UTF-8 text with at least one character, and no null character")
        return value


def read_string(value: Any) -> Any:
    """Parse a string that holds JSON ("4" is 4, "false" is False). Any other value is returned unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


class Distributed(Section):
    tp_size: Positive = 1
    """number of tensor-parallel ranks, each of which holds a shard of every matrix"""
    sequence_parallel: bool = False
    """with tp_size > 1, also shard the activations of norms and residual additions, along the sequence"""
    cp_size: Positive = 1
    """number of context-parallel ranks, each of which holds a shard of every sequence"""
    cp_sharding: Literal["zigzag", "contiguous"] = "zigzag"
    """positions of each shard: zigzag balances the attention work, contiguous gives the last rank the most"""
    cp_engine: Literal["ring", "all_gather", "ulysses"] = "ring"
    """context-parallel attention: ring and all_gather exchange keys and values, ulysses distributes heads instead"""
    pp_size: Positive = 1
    """number of pipeline ranks, each of which holds some of the layers"""
    dp_size: Positive = 1
    """number of data-parallel ranks, each of which trains on different sequences of the batch"""
    ep_size: Positive = 1
    """number of data-parallel and context-parallel ranks over which the experts of a layer are split"""
    dp_engine: Literal["naive", "bucket", "zero1", "zero3"] = "bucket"
    """state that data-parallel ranks shard: zero1 the optimizer; zero3 also weights and gradients; the others none"""
    pp_engine: Engine = "1f1b"
    """pipeline schedule for pp_size > 1: a name, auto to search for the fastest one, or csv:FILE to read a file"""
    backend: Literal["nccl", "gloo"] | None = None
    """communication library; null: nccl on GPUs, gloo on the CPU"""
    use_cpu: bool = False
    """train on the CPU, even on a machine with GPUs"""

    @property
    def world_size(self) -> int:
        return self.dp_size * self.pp_size * self.cp_size * self.tp_size


class Schedule(Section):
    """Keys of pipelines that only the workbench has, and checks, see `Config.needs_workbench`."""

    pp_chunks: Positive | None = None
    """stages per pipeline rank, for interleaved_1f1b, looped_bfs and zb_h1; null: the default of the schedule"""
    pp_group_size: Positive | None = None
    """micro-batches that take turns on the chunks of interleaved_1f1b and zb_h1; null: the smallest fastest group"""
    pp_max_activations: Annotated[float, Field(ge=1)] | None = None
    """for auto: the most micro-batches whose activations a pipeline rank may hold; null: pp_size, as in 1f1b"""
    pp_recording: str | None = None
    """for auto: folder of a run with traces (logging.trace_steps) of the same layout; null: times estimated by FLOPs"""
    pp_layout: str | None = None
    """contents of the stages, such as Et*2|tt|tL (E embedding, t layer, L head, | next stage); null: balanced costs"""
    pp_keep_activations: NonNegative = 0
    """micro-batches in flight on a pp rank that keep their activations although activation_checkpointing is full"""


class Model(Section):
    name: str
    """hub id of a model, or local folder with a config.json"""
    num_hidden_layers: Positive | None = None
    """number of decoder layers; null: the value in the model's config.json"""
    num_attention_heads: Positive | None = None
    """number of query heads; null: the value in the model's config.json"""
    num_key_value_heads: Positive | None = None
    """number of key/value heads; null: the value in the model's config.json"""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """dtype of weights and activations; gradients and optimizer state are in float32 or wider. float16 has a loss scale
    """
    float8: bool = False
    """compute the products of the MLP and of o_proj in float8; MFU stays relative to the bfloat16 peak"""
    use_flash_attention: bool = True
    """let PyTorch choose a fused attention kernel; false: plain matmul and softmax"""
    use_fused_adam: bool = True
    """use PyTorch's fused AdamW, which updates all parameters in one kernel"""
    pretrained: bool = False
    """start from the weights of `name` (safetensors); false: random weights"""
    tokenizer: str | None = None
    """hub id, folder, or "bpe" (a byte-level BPE: the checkpoint's, or trained on the data); null: the model's own"""


class Training(Section):
    seed: NonNegative = 42
    """seed of the initial weights and of the order of the data"""
    learning_rate: float = Field(3e-4, gt=0)
    """learning rate after the warm-up"""
    total_train_steps: Positive = 200
    """number of optimizer steps, and length of the learning-rate schedule"""
    seq_length: Positive = 1024
    """tokens per sequence"""
    micro_batch_size: Positive = 1
    """sequences per forward pass on each data-parallel rank"""
    gradient_accumulation_steps: Positive = 1
    """micro-batches per optimizer step"""
    num_samples: Positive | None = None
    """use only the first N documents of the data set; null: all"""
    max_tokens: Annotated[int, Field(gt=0, le=2**53)] | None = None
    """end the run after N tokens (seq_length for a sequence), if that comes before total_train_steps; null: no limit"""
    lr_scheduler: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """shape of the learning rate's decay after the warm-up; wsd: constant, then linear in the last decay_steps"""
    warmup_steps: NonNegative = 0
    """steps over which the learning rate first rises linearly"""
    decay_steps: Positive | None = None
    """last steps, in which wsd decays; a run resumed before them may change total_train_steps; null: a tenth of that"""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """final learning rate of all schedules but constant, as a fraction of learning_rate"""
    weight_decay: float = Field(0.1, ge=0)
    """weight decay of matrices; norms and biases have none"""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """decay rate of AdamW's first moment"""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """decay rate of AdamW's second moment"""
    adam_eps: float = Field(1e-8, gt=0)
    """term that AdamW adds to its denominator"""
    optimizer_states: Literal["float32", "bfloat16_moments", "bfloat16"] = "float32"
    """states of a bfloat16 model: float32 (18 bytes per parameter); moments in bfloat16 (14); or weights without a
    float32 copy, too, updated with stochastic rounding (10)"""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """global gradient norm above which gradients are scaled down to it; null: no clipping"""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full: keep only the input of each layer, and recompute its other activations in backward; selective: recompute
    only the results of its norms and of its gated activation; none: keep all"""
    router_bias_rate: float = Field(0.0, ge=0)
    """for models whose experts have a bias (dots1): how far it moves after a step, up if fewer tokens than the mean
    chose the expert, else down; 0: it stays; DeepSeek-V3 was trained with 0.001"""
    compile: bool | None = None
    """apply torch.compile to each decoder layer and to the loss's softmax; null applies it on GPUs"""
    eval_frequency: NonNegative = 0
    """steps between evaluations of the loss on held-out data, with one more before the first step; 0: no evaluation"""
    eval_steps: Positive = 10
    """global batches per evaluation, without dataset.eval_name: rows drawn from the data, which are not trained on"""

    @property
    def decay(self) -> int:
        """Number of steps in which the schedule wsd decays."""
        return self.decay_steps or math.ceil(self.total_train_steps / 10)


class Dataset(Section):
    name: str
    """hub id, folder, pattern, .txt, .jsonl, .json, .csv or .parquet file; python-stdlib: the sources of Python; or a
    folder that `python -m workbench.prepare` has written"""
    mixture: Annotated[dict[str, Weight], Field(min_length=1)] | None = None
    """weights of several data sets to mix, such as {"a.jsonl": 3, "b.jsonl": 1}; `name` has weight 1, unless listed"""
    eval_name: str | None = None
    """data set for evaluations, of any kind that `name` may have, which is read as a whole; null: see eval_steps"""
    eval_split: str | None = None
    """split of eval_name, if that is a hub data set or a folder; null: `split`"""
    subset_name: str | None = None
    """configuration of a hub data set or a folder; null: its default"""
    split: str = "train"
    """split of a hub data set or a folder, or a slice of a hub data set's, such as train[:1000]"""
    num_proc: Processes = 1
    """processes that tokenise the data set; 1: the training process, with several threads"""
    text_column: str | None = None
    """column that holds the text of a document; null: "text", without the columns below"""
    prompt_column: str | None = None
    """column with the prompts of samples for fine-tuning; the loss does not count them"""
    completion_column: str | None = None
    """column with the completions of the prompts; the loss counts them and the end-of-sequence token"""
    messages_column: str | None = None
    """column with conversations for the tokenizer's chat template; the loss counts the assistant's turns"""
    assistant_turns: Literal["all", "last"] = "all"
    """turns of a conversation that the loss counts, except messages with the key "weight" 0 or "train" false"""
    add_start_token: bool = True
    """begin documents and prompts with the beginning-of-sequence token, if the tokenizer begins texts with it"""
    skip_invalid: bool = False
    """leave out records that cannot be used, and log their number; false: they are an error"""
    long_samples: Literal["cut", "drop"] | None = None
    """samples for fine-tuning that are longer than seq_length: cut them or drop them; null: cut"""
    mask_documents: bool | None = None
    """let attention see only the token's own document or sample; null: true for samples, false for text"""
    shuffle: bool = True
    """draw a new seeded order of the sequences for each epoch; false: the order of the files"""

    @property
    def weights(self) -> dict[str, float]:
        """The data sets to read, with their weights."""
        return {self.name: 1.0} | (self.mixture or {})

    @property
    def columns(self) -> dict[str, str]:
        """The columns to read, by their keys."""
        keys = ("text_column", "prompt_column", "completion_column", "messages_column")
        return {key: getattr(self, key) for key in keys if getattr(self, key)} or {"text_column": "text"}

    @property
    def has_samples(self) -> bool:
        """Whether the data are samples for fine-tuning, not text."""
        return "text_column" not in self.columns

    @property
    def masks_documents(self) -> bool:
        return self.has_samples if self.mask_documents is None else self.mask_documents


class Checkpoint(Section):
    save_dir: str = "ckpt"
    """folder for all outputs of the run"""
    save_frequency: NonNegative | None = 0
    """steps between checkpoints, with one more at the end of the run; 0: only that one; null: none, unless a signal
    stops the run"""
    load_path: str = ""
    """checkpoint or model folder to start from, "latest" (the newest in save_dir), or "latest or FOLDER"; "": none"""
    keep_last: NonNegative = 0
    """keep only the newest N checkpoints; 0: keep all"""
    keep_best: bool = False
    """also keep the one with the lowest eval_loss"""
    async_save: bool = False
    """copy a checkpoint to host memory and write it in the background, while training continues"""


class Logging(Section):
    level: Literal["info", "debug"] = "info"
    """debug: with pp_size > 1, the workbench runs the steps and logs their actions (1F3: micro-batch 3 on stage 1)"""
    use_wandb: bool = False
    """also log metrics to Weights & Biases; offline without a login"""
    project_name: str | None = None
    """name of the wandb project; null: WANDB_PROJECT, or picotron"""
    run_name: str | None = None
    """name of the wandb run; null: WANDB_NAME, or wandb chooses one"""
    log_frequency: Positive = 1
    """steps between lines on the console; metrics.jsonl has a line for every step"""
    sample_prompt: str | None = None
    """text that the model continues at each evaluation with its likeliest tokens; with messages_column, a question"""
    trace_steps: list[Positive] | None = None
    """steps in which to record when each action runs, with pp_size > 1 (on GPUs they are slower); null: none"""


class Environment(Section):
    OMP_NUM_THREADS: Annotated[
        Processes, BeforeValidator(read_string), WithJsonSchema({"type": ["integer", "string"]})
    ] = 1
    """CPU threads per process"""


class Config(Section):
    distributed: Distributed = Distributed()
    schedule: Schedule = Schedule()
    model: Model
    training: Training = Training()
    dataset: Dataset
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    environment: Environment = Environment()

    @property
    def compiles(self) -> bool:
        """Whether torch.compile compiles the layers and the loss."""
        return not self.distributed.use_cpu if self.training.compile is None else self.training.compile

    @property
    def needs_workbench(self) -> bool:
        """Whether the run needs a pipeline of the workbench: it has another schedule than AFAB and 1F1B, or chunks, or
        stages written by hand, or keeps some activations, or its actions are recorded or logged, or it generates.
        """
        layout, logging = self.distributed, self.logging
        other = layout.pp_engine not in ("afab", "1f1b") or logging.trace_steps or logging.level == "debug"
        return bool(layout.pp_size > 1 and other) or self.schedule != Schedule() or logging.sample_prompt is not None

    @property
    def needs_variants(self) -> bool:
        """Whether the run has another algorithm than those of picotron/, see workbench/variants."""
        differs = any(operator.attrgetter(key)(self) != default_of(key) for key in VARIANT_KEYS)
        return differs or self.model.dtype == "float16"

    @property
    def global_batch_size(self) -> int:
        """Number of sequences per optimizer step."""
        training = self.training
        return training.micro_batch_size * training.gradient_accumulation_steps * self.distributed.dp_size


def default_of(key: str) -> Any:
    """Return the default of a dotted key; None if the key is unknown or required."""
    leaf = leaf_of(key)
    return None if leaf is None or leaf.is_required() else leaf.default


def leaf_of(key: str) -> Any:
    """Return the field of a dotted key, or None if the key is unknown."""
    section, _, name = key.partition(".")
    field = Config.model_fields.get(section)
    return getattr(field and field.annotation, "model_fields", {}).get(name)

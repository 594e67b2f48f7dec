"""How much memory a rank will need, and how long it will be idle: by formulas, before anything runs. No torch here.

Bytes for each parameter (why, is said in `data_parallel.bucket` and `optimizer`; nothing is shared over dp ranks):

                weight   gradient   master weight   Adam's two moments   together
    bfloat16       2         4            4                  8              18
    float32        4         4            -                  8              16
    float64        8         8            -                 16              32

Activations are what autograd keeps of a micro-batch's forward for its backward. In a layer of hidden size D, H query
and K key/value heads of size d, and intermediate size F, a tp rank (of t) keeps for each of its tokens:

    a = input_layernorm(x)              x, and a, which the projections read           2 D
    q, k, v = project(a), rotated       what attention reads                           (H d + 2 K d) / t
    y = attention(q, k, v)              y, which o_proj reads, too                     H d / t
    b = post_attention_layernorm(x)     x, and b                                       2 D
    gate, up = project(b)               gate, which silu reads                         F / t
    h = silu(gate) * up                 silu(gate) and up; h, which down_proj reads    3 F / t

Together 4 D + (2 H d + 2 K d + 4 F) / t; with sequence parallelism (4 D + 2 H d + 2 K d + 4 F) / t. A rank has
micro_batch_size x seq_length / cp_size tokens. If there are more tp ranks than key/value heads, K / t is 1. In float32
or wider come 1 / rms of both norms, and the log-sum-exp of a row of scores of each head: 2 + H / t. Scores are not
there, as fused attention computes them again. Residuals keep nothing: the gradient of a sum does not depend on it.

It is the table of Korthikanti et al. 2022 (arXiv:2205.05198, section 4) for another model: SwiGLU instead of GELU, and
neither dropout nor scores. Where a kernel is missing, more is kept:

    on a CPU norms are not fused        x and x / rms in float32 or wider, instead of x
    use_flash_attention is false        q, k and v, of H heads each, and H T scores in float32 or wider, for T keys
    on a GPU, not in bfloat16           k and v of H heads, unless they travel a ring
    cp_engine is "ulysses"              y twice, before and after it travels

With activation_checkpointing "full" a layer keeps x alone: D, or D / t with sequence parallelism. Backward computes the
rest again, so that one layer of a rank is there as a whole.

All layers of a stage share the rotary angles, d for a token. The last stage also keeps, for each micro-batch, the input
of the last norm and the gradient of its output, which the loss computes at once (`LinearCrossEntropy`), 2 D for a
token; and the gradient of the head's matrix, D V / t in float32 or wider.

That times the micro-batches that a schedule has in flight, see `simulate.peak_activations`. (In the two halves of a
backward, an I leaves to its W the inputs of all projections and the gradients of their outputs, about as much.) What
comes and goes is not counted: gradients of activations, logits of a chunk, messages, what the allocator rounds up. Nor
is what torch.compile saves.
"""

import dataclasses
from typing import TYPE_CHECKING

from picotron.config import Config
from picotron.pipeline_parallel.layout import Stage, stage_weights
from picotron.pipeline_parallel.plan import Plan
from picotron.pipeline_parallel.simulate import Costs, peak_activations, simulate

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Memory:
    """Of one rank: how many parameters it holds, and bytes."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def state(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations


class Estimate:
    """The formulas above, for one config."""

    def __init__(self, config: Config, model_config: "LlamaConfig") -> None:
        layout, training = config.distributed, config.training
        self.config, self.model = config, model_config
        self.number = {"bfloat16": 2, "float32": 4, "float64": 8}[config.model.dtype]  # bytes
        self.wide = max(4, self.number)
        self.tokens = training.micro_batch_size * training.seq_length // layout.cp_size
        # Widths on this tp rank.
        tp = layout.tp_size
        self.D = model_config.hidden_size
        self.shard = self.D // tp if layout.sequence_parallel else self.D
        self.heads = model_config.num_attention_heads // tp
        self.queries = self.heads * model_config.head_dim
        self.kv = max(1, model_config.num_key_value_heads // tp) * model_config.head_dim
        self.F = model_config.intermediate_size // tp
        self.vocabulary = -(-model_config.vocab_size // tp)  # the last ranks' is padded

    def parameters(self, stages: list[Stage]) -> int:
        """How many a rank has that holds these stages."""
        layer = self.D * (2 * self.queries + 2 * self.kv + 3 * self.F) + 2 * self.D
        if self.model.attention_bias:
            layer += self.queries + 2 * self.kv + self.D
        if self.model.mlp_bias:
            layer += 2 * self.F + self.D
        embeddings, heads = (sum(getattr(stage, part) for stage in stages) for part in ("has_embedding", "has_head"))
        tied = self.model.tie_word_embeddings and embeddings  # else a rank with the head has a copy of its own
        matrices = 1 if tied else embeddings + heads
        return sum(len(stage.layers) for stage in stages) * layer + matrices * self.vocabulary * self.D + heads * self.D

    def norm(self) -> int:
        """Bytes that a norm keeps of a token, but for its output."""
        return (2 * self.shard * self.wide if self.config.distributed.use_cpu else self.shard * self.number) + self.wide

    def attention(self) -> int:
        """Bytes that attention keeps of a token, with its output."""
        layout, travels = self.config.distributed, self.queries * self.number
        ulysses = layout.cp_size > 1 and layout.cp_engine == "ulysses"
        if not self.config.model.use_flash_attention:
            return (3 * self.queries + self.heads * self.config.training.seq_length) * self.wide + travels
        kv = self.kv
        if not layout.use_cpu and self.number > 2 and (ulysses or layout.cp_size == 1):
            kv = self.queries
        return (2 * self.queries + 2 * kv) * self.number + self.heads * self.wide + ulysses * travels

    def layer(self) -> int:
        """Bytes that a layer keeps of a micro-batch without checkpointing."""
        return self.tokens * (
            2 * (self.norm() + self.shard * self.number) + self.attention() + 4 * self.F * self.number
        )

    def stage(self, stage: Stage) -> int:
        """Bytes that a stage keeps of a micro-batch."""
        full = self.config.training.activation_checkpointing == "full"
        layer = self.tokens * self.shard * self.number if full else self.layer()
        angles = self.tokens * self.model.head_dim * self.number
        head = self.tokens * (self.norm() + self.D * self.number) + self.vocabulary * self.D * self.wide
        return len(stage.layers) * layer + bool(stage.layers) * angles + stage.has_head * head


def rank_memory(config: Config, model_config: "LlamaConfig", plan: Plan) -> list[Memory]:
    """By pipeline rank. Its tp, cp and dp ranks all need the same."""
    estimate, memories = Estimate(config, model_config), []
    number, wide = estimate.number, estimate.wide
    optimizer = 2 * wide + (wide if number < wide else 0)
    for rank, program in enumerate(plan.schedule.programs):
        stages = plan.stages_of(rank)
        parameters = estimate.parameters(list(stages.values()))
        activations = peak_activations(program, {i: estimate.stage(stage) for i, stage in stages.items()})
        if config.training.activation_checkpointing == "full" and any(stage.layers for stage in stages.values()):
            activations += estimate.layer()
        memories.append(Memory(parameters, parameters * number, parameters * wide, parameters * optimizer, activations))
    return memories


def bubble(config: Config, model_config: "LlamaConfig", plan: Plan) -> float:
    """The part of all ranks' time that is idle, 0 to 1, if stages take as long as their FLOPs say."""
    weights = stage_weights(model_config, plan.stages, config.training.seq_length, plan.schedule.pp)
    return simulate(plan.schedule, Costs(weights=weights)).bubble

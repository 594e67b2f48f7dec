"""Estimate a rank's memory and idle time by formulas, without running anything. No torch here.

Bytes per parameter (`data_parallel` and `optimizer` give the reasons):

                         weight   gradient   master weight   Adam's two moments   total
    bfloat16, float16       2         4            4                  8              18
    float32                 4         4            -                  8              16
    float64                 8         8            -                 16              32

With optimizer_states "bfloat16_moments", the moments of a bfloat16 parameter take 4 bytes; with "bfloat16", there is no
master weight either.

With dp_engine "zero1", the last two are divided by n, the number of dp ranks times that of cp ranks; with "zero3", all
are. In a pipeline with "zero3", the full weights exist, too, from their first use in a step to its end. A rank holds
1 / ep of the experts, of which ZeRO divides each by n / ep.

Activations are the tensors that autograd saves in the forward of a micro-batch for its backward. In a layer of hidden
size D, with H query heads and K key/value heads of size d, and intermediate size F, each of tp ranks saves these
numbers for each of its tokens:

    operation                           saved tensors                                  numbers per token
    a = input_layernorm(x)              x, and a for the projections                   2 D
    q, k, v = project(a), rotated       q, k and v for attention                       (H d + 2 K d) / tp
    y = attention(q, k, v)              y for attention and o_proj                     H d / tp
    b = post_attention_layernorm(x)     x, and b for the projections                   2 D
    gate, up = project(b)               gate for silu                                  F / tp
    h = silu(gate) * up                 silu(gate) and up; h for down_proj             3 F / tp

The sum is 4 D + (2 H d + 2 K d + 4 F) / tp, or with sequence parallelism (4 D + 2 H d + 2 K d + 4 F) / tp. A rank has
micro_batch_size x seq_length / cp_size tokens. With more tp ranks than key/value heads, K / tp is 1. In addition, a
rank saves 2 + H / tp numbers per token in float32 or wider: 1 / rms of both norms, and for each head the log-sum-exp of
a row of scores. A norm of queries and keys saves its inputs, too: (H d + K d) / tp numbers. Scores are not saved,
because fused attention recomputes them. Residual additions save nothing, because the gradient of a sum does not depend
on its terms.

This is the table of Korthikanti et al. 2022 (arXiv:2205.05198, section 4) for another model: SwiGLU instead of GELU,
without dropout and scores. Without a fused kernel, or with Ulysses, autograd saves more:

    condition                           saved tensors
    norms on the CPU                    x and x / rms in float32 or wider, instead of x
    use_flash_attention is false        q, k and v, of H heads each, and H T scores in float32 or wider, for T keys
    on a GPU, not in bfloat16           k and v of H heads each, except with cp_engine "ring" or "all_gather"
    cp_engine is "ulysses"              y twice, before and after its all-to-all

With E experts in the place of an MLP, of which each token uses k, F is the sum of the sizes of these k and of a shared
expert. Assumed is an even load: each expert computes as many rows as any other. Biases of routers, which have no
gradients, are left out. The block saves more, and torch.compile does not compile it:

    operation                           saved tensors                                  numbers per token
    b, gathered over tp                 b, if sequence parallelism split it            D instead of D / tp
    weights = softmax(router(b))        probabilities, weights, their sum, wide        E + 2 k + 1
    with sigmoids instead               b in float32, if it is in a narrower dtype     D
    rows, sorted by expert              rows for gate and up                           k D
    y = sum of weights * outputs        outputs                                        k D
    orders of the rows                  experts and two orders, in 8 bytes             3 k, or with ep 5 k

If only some layers have experts, the layer is the mean of all.

With activation_checkpointing "selective", a layer does not save the results of its norms, a and b, nor what norms keep
besides x, nor silu(gate) and h. With "full", it saves only x: D numbers, or D / tp with sequence parallelism. In a
pipeline, some micro-batches save everything nevertheless, see `plan.kept_activations`.

All layers of a stage share the rotary angles, d numbers per token. The last stage also saves, for each micro-batch, the
input of the last norm and the gradient of its output, which the loss computes in its forward (`LinearCrossEntropy`):
2 D per token; and the gradient of the head's matrix, D V / tp in float32 or wider.

A rank's activations are this sum times the number of micro-batches that the schedule has in flight, see
`simulate.peak_activations`. Where a schedule splits backward into I and W, each layer keeps for W the inputs of all
projections and the gradients of their outputs. These are 4 D + (2 H d + 2 K d + 3 F) / tp numbers per token, or with
sequence parallelism 2 D less and 2 D / tp more. With experts, 2 k D + E numbers replace D of these.

Temporary tensors add to the activations while a forward or a backward runs:

    moment                              temporary tensors
    the loss computes a chunk           its input, D per token; and the logits of the chunk, in float32 or wider and, if
                                        that is different, in the model's dtype
    the loss's backward                 the gradient of the head's matrix in the model's dtype, D V / tp numbers
    forward of an MLP, recomputed later x, b, gate, silu(gate), up and h: 2 D + 4 F / tp per token
    backward of an MLP                  the gradients of x and of gate, up and h, less h, which is freed (but not in I):
                                        D + 2 F / tp per token; or if that is more, the gradients of x, h and
                                        down_proj's matrix: D + F / tp per token, and D F / tp
    forward of experts, recomputed later x, b, rows and twice the outputs: 2 D + 3 k D per token
    backward of experts                 the gradients of x and, in both orders, of the outputs: D + 2 k D per token
    zero3, the loss                     the weights of the last layer and of the head
    zero3, backward of an MLP           the weights of two layers and the gradients of one; and until they are reduced,
                                        in float32 or wider, the gradients of the layer after it, or if the stage has a
                                        separate matrix for the head, those of the head
    pp, other than afab and 1f1b        messages that wait, about two per direction: 4 D per token, or 4 D / tp

In the backward of an MLP, the loss has freed what it saved. With activation_checkpointing "full", the other tensors of
the layer have been recomputed. If the embedding and the head share a matrix on one stage, the head's part of the
gradient waits for that of the embedding. Not counted are other temporary tensors, such as gathered inputs, and what the
allocator rounds up and cannot use.

A compiled layer saves as much with activation_checkpointing "selective" and "full", but F / tp numbers per token less
with "none", because torch.compile computes silu(gate) again in backward. The compiled loss needs the logits of a chunk
and their gradient in the model's dtype.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from picotron.model.families import differences, head_size, part_parameters
from picotron.pipeline_parallel.stages import Stage
from workbench.pipelines.layouts import stage_weights
from workbench.pipelines.plan import SchedulePlan
from workbench.run.with_keys import with_keys
from workbench.schedules.actions import Action
from workbench.schedules.simulate import Costs, peak_activations, simulate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from picotron.config import Config

GIB = 2**30


class Sizes(NamedTuple):
    """Values of the symbols in the formulas above, for one tp rank."""

    number: int  # bytes of a weight or an activation
    wide: int  # bytes of a number in float32 or wider
    tokens: int  # per micro-batch
    D: int
    shard: int  # D, or D / tp with sequence parallelism
    heads: int  # H / tp
    queries: int  # H d / tp
    kv: int  # K d / tp
    F: int  # F / tp, of all experts that a token uses
    rows: int  # k D, or 0 without experts
    router: int  # bytes that a router saves per token
    experts: int  # E, or 0
    vocabulary: int  # V / tp, padded
    normed: int  # numbers of queries and keys per token that a norm inside attention reads
    pre_norm: bool  # whether the norms of a layer normalise inputs of its products, not their outputs
    norms: int  # and how many norms these are: one per head, or one of all queries and one of all keys


def sizes(config: "Config", model: "PreTrainedConfig") -> Sizes:
    """Compute the symbols for a config and a model."""
    layout, training = config.distributed, config.training
    number = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[config.model.dtype]
    heads, kv_heads = model.num_attention_heads // layout.tp_size, max(1, model.num_key_value_heads // layout.tp_size)
    queries, kv = heads * head_size(model), kv_heads * head_size(model)
    norms = {None: 0, "head": heads + kv_heads, "all heads": 2}[differences(model).qk_norm]
    F, rows, router, experts, wide = model.intermediate_size, 0, 0, differences(model).experts, max(4, number)
    if experts:
        E, k = experts.number, experts.chosen
        dense = len(experts.dense) / model.num_hidden_layers
        F = round(F * dense + (k * experts.size + experts.shared) * (1 - dense))
        rows = round(k * model.hidden_size * (1 - dense))
        copied = model.hidden_size if experts.scale is not None and number < wide else 0  # the router's input
        router = round((wide * (E + 2 * k + 1 + copied) + 8 * k * (3 if layout.ep_size == 1 else 5)) * (1 - dense))
    return Sizes(
        number=number,
        wide=wide,
        tokens=training.micro_batch_size * training.seq_length // layout.cp_size,
        D=model.hidden_size,
        shard=model.hidden_size // (layout.tp_size if layout.sequence_parallel else 1),
        heads=heads,
        queries=queries,
        kv=kv,
        F=F // layout.tp_size,
        rows=rows,
        router=router,
        experts=experts.number if experts else 0,
        vocabulary=-(-model.vocab_size // layout.tp_size),
        normed=queries + kv if norms else 0,
        pre_norm=not differences(model).norm_after,
        norms=norms,
    )


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a rank in bytes.

    Args:
        parameters: number of parameters that the rank holds between steps: of its stages, or its slices of them.
        gathered: full weights that exist during a step, in addition to slices of them.
        activations: peak of the tensors that autograd saves.
        temporary: difference to the peak of saved and temporary tensors together.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    temporary: int

    @property
    def state(self) -> int:
        """Bytes held between steps: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.activations + self.temporary


def norm_bytes(config: "Config", s: Sizes, size: int, count: int = 1) -> int:
    """Bytes that `count` norms of `size` numbers in total save per token, without their outputs."""
    return (2 * size * s.wide if config.distributed.use_cpu else size * s.number) + count * s.wide


def attention_bytes(config: "Config", s: Sizes) -> int:
    """Bytes that attention saves per token, with its output."""
    layout, output = config.distributed, s.queries * s.number
    ulysses = layout.cp_size > 1 and layout.cp_engine == "ulysses"
    if not config.model.use_flash_attention:
        return (3 * s.queries + s.heads * config.training.seq_length) * s.wide + output
    kv = s.kv
    if not layout.use_cpu and config.model.dtype != "bfloat16" and (ulysses or layout.cp_size == 1):
        kv = s.queries
    return (2 * s.queries + 2 * kv) * s.number + s.heads * s.wide + ulysses * output


def layer_bytes(config: "Config", s: Sizes) -> int:
    """Bytes that a layer saves per micro-batch without activation checkpointing."""
    norms = 2 * (norm_bytes(config, s, s.shard) + s.shard * s.number) + norm_bytes(config, s, s.normed, s.norms)
    mlp = (4 - compiles_mlp(config, s)) * s.F * s.number
    if s.experts:
        mlp += (2 * s.rows + s.D - s.shard) * s.number + s.router
    return s.tokens * (norms + attention_bytes(config, s) + mlp)


def compiles_mlp(config: "Config", s: Sizes) -> bool:
    return config.compiles and not s.experts


def layer_saves(config: "Config", s: Sizes) -> int:
    """Bytes that a layer saves per micro-batch."""
    if config.training.activation_checkpointing == "full":
        return s.tokens * s.shard * s.number
    return layer_bytes(config, s) - (config.training.activation_checkpointing == "selective") * cheap_bytes(config, s)


def cheap_bytes(config: "Config", s: Sizes) -> int:
    """Bytes that a layer saves less per micro-batch with activation_checkpointing "selective"."""
    norms = s.pre_norm * 2 * norm_bytes(config, s, s.shard)  # of which x remains, and which free their results
    norms -= (s.shard < s.D and s.experts > 0) * s.shard * s.number  # but not that which was gathered for experts
    return s.tokens * (norms + (2 - compiles_mlp(config, s)) * s.F * s.number)


def stage_bytes(config: "Config", model: "PreTrainedConfig", s: Sizes, stage: Stage) -> int:
    """Bytes that a stage saves per micro-batch."""
    angles = s.tokens * head_size(model) * s.number
    return (
        len(stage.layers) * layer_saves(config, s)
        + bool(stage.layers) * angles
        + stage.has_head * head_bytes(config, s)
    )


def head_bytes(config: "Config", s: Sizes) -> int:
    """Bytes that the last norm and the loss save per micro-batch."""
    return s.tokens * (norm_bytes(config, s, s.shard) + s.D * s.number) + s.vocabulary * s.D * s.wide


def loss_chunk(config: "Config", s: Sizes) -> int:
    """Number of tokens whose logits are computed together: `cross_entropy.chunk_tokens`, without torch."""
    return 512 if config.distributed.use_cpu else max(512, 2**28 // s.vocabulary // 256 * 256)


def zero3_bytes(config: "Config", model: "PreTrainedConfig", s: Sizes, stage: Stage) -> tuple[int, int]:
    """Bytes of full weights and gradients in the forward of a stage's head, and in the backward of its last layer."""
    layer, _, head = rank_parts(model, config.distributed.tp_size, config.distributed.ep_size)
    has_matrix = stage.has_head and not (model.tie_word_embeddings and stage.has_embedding)
    # In the backward of the last layer but one, the tensors that the last one saved are free.
    reduced = max(has_matrix * head * s.wide, layer * s.wide - layer_saves(config, s))
    gradients = layer * s.number + reduced
    if config.distributed.pp_size > 1:
        return 0, gradients  # `gathered` counts the weights
    return (layer + head) * s.number, 2 * layer * s.number + gradients


def temporary_in_forward(config: "Config", s: Sizes, stage: Stage) -> int:
    """Bytes of temporary tensors in the forward of a stage: those of the head, or of a layer that saves only x."""
    logit = 2 * s.number if config.compiles else s.wide + (s.number if s.number < s.wide else 0)
    logits = min(s.tokens, loss_chunk(config, s)) * s.vocabulary * logit
    head = stage.has_head * (s.tokens * s.D * s.number + logits)
    if config.training.activation_checkpointing != "full" or not stage.layers:
        return head
    return max(
        head, s.tokens * ((3 * s.rows or 4 * s.F) + 2 * s.shard) * s.number - stage.has_head * head_bytes(config, s)
    )


def deferred_bytes(s: Sizes, stage: Stage) -> int:
    """Bytes that a stage keeps per micro-batch between I and W."""
    inputs, outputs = (s.D + s.rows, s.rows + s.experts) if s.experts else (s.shard, s.D)  # of an MLP's projections
    each = s.shard + inputs + s.D + outputs + 2 * s.queries + 2 * s.kv + 3 * s.F
    return len(stage.layers) * s.tokens * each * s.number


def temporary_in_backward(config: "Config", model: "PreTrainedConfig", s: Sizes, stage: Stage, split: bool) -> int:
    """Bytes of temporary tensors in the backward of a stage, in addition to all that the stage has saved.

    Args:
        split: whether the backward is an I, which computes no gradients of matrices and frees less.
    """
    head_gradient = stage.has_head * s.vocabulary * s.D * s.number
    if not stage.layers:
        return head_gradient
    mlp = s.F * (3 * s.tokens if split else max(2 * s.tokens, s.tokens + s.D))
    layers = ((2 * s.tokens * s.rows or mlp) + s.tokens * s.shard) * s.number - stage.has_head * head_bytes(config, s)
    if config.training.activation_checkpointing == "full":
        x = s.tokens * s.shard * s.number  # the part of a layer's tensors that is saved
        layers += layer_bytes(config, s) - x
    elif config.training.activation_checkpointing == "selective":
        layers += s.tokens * (s.F + s.pre_norm * s.shard) * s.number  # h and b again
    more = deferred_bytes(s, stage) // len(stage.layers) - layer_saves(config, s)
    if split and more > 0:  # in the first layer, whose backward is last, all others keep tensors for W instead
        layers += (len(stage.layers) - 1) * more
    if model.tie_word_embeddings and stage.has_embedding:
        layers += head_gradient
    return max(head_gradient, layers)


def rank_parts(model: "PreTrainedConfig", tp_size: int, ep_size: int) -> tuple[int, int, int]:
    """Return the parts of `part_parameters` on a rank, which holds 1 / ep of the experts."""
    layer, embedding, head = part_parameters(model, tp_size)
    if experts := differences(model).experts:
        mixtures = 1 - len(experts.dense) / model.num_hidden_layers
        elsewhere = experts.number - experts.number // ep_size
        layer -= round(3 * model.hidden_size * experts.size // tp_size * elsewhere * mixtures)
    return layer, embedding, head


def count_parameters(parts: tuple[int, int, int], tied: bool, stages: Sequence[Stage]) -> int:
    """Number of parameters of stages on one rank; `parts` are those of `part_parameters`."""
    layer, embedding, head = parts
    has_embedding, has_head = any(s.has_embedding for s in stages), any(s.has_head for s in stages)
    shared = tied and has_embedding and has_head  # a rank with only the head holds a replica
    parameters = sum(len(stage.layers) for stage in stages) * layer
    return parameters + has_embedding * embedding + has_head * head - shared * embedding


def state_bytes(config: "Config", s: Sizes, parameters: int, shared: int | None = None) -> tuple[int, int, int]:
    """Bytes of the weights, gradients and optimizer state of a rank with this number of parameters.

    Args:
        shared: number of parameters that the cp_dp ranks hold together: with ep, more than one of them does.
    """
    layout, states = config.distributed, config.training.optimizer_states
    master = s.wide if s.number < s.wide and states != "bfloat16" else 0
    optimizer = 2 * (s.wide if states == "float32" else s.number) + master
    ranks, engine = layout.dp_size * layout.cp_size, layout.dp_engine
    slices = parameters if engine not in ("zero1", "zero3") else -(-(shared or parameters) // ranks)
    held = slices if engine == "zero3" else parameters
    return held * s.number, held * s.wide, slices * optimizer


Unit = tuple[int, bool]  # a stage, and whether a micro-batch keeps its activations there instead of recomputing them


def activation_peaks(config: "Config", model: "PreTrainedConfig", plan: SchedulePlan, rank: int) -> tuple[int, int]:
    """Peak of the bytes that a rank's micro-batches save, and the peak of these and of temporary tensors together."""
    s, kept, zero3 = sizes(config, model), plan.kept_activations(rank), config.distributed.dp_engine == "zero3"
    configs = {False: config}  # of forwards that drop activations as the config says, and of those that keep them all
    if kept:
        configs[True] = with_keys(config, training={"activation_checkpointing": "none"})
    saved: dict[Unit, int] = {}
    deferred: dict[Unit, int] = {}
    temporary: dict[tuple[str, Unit], int] = {}
    for (number, stage), keeps in itertools.product(plan.stages_of(rank).items(), configs):
        each, unit = configs[keeps], (number, keeps)
        saved[unit], deferred[unit] = stage_bytes(each, model, s, stage), deferred_bytes(s, stage)
        in_forward, in_backward = zero3_bytes(each, model, s, stage) if zero3 else (0, 0)
        temporary["F", unit] = temporary_in_forward(each, s, stage) + in_forward
        for kind in ("B", "I"):
            temporary[kind, unit] = temporary_in_backward(each, model, s, stage, split=kind == "I") + in_backward

    def unit_of(action: Action) -> Unit:
        return action.stage, (action.stage, action.micro_batch) in kept

    # The executor runs the backward of an overlapped pair first.
    program = [part for action in plan.schedule.programs[rank] for part in action.parts[::-1]]
    return (
        peak_activations(program, saved, deferred, key=unit_of),
        peak_activations(program, saved, deferred, temporary, unit_of),
    )


def rank_memory(config: "Config", model: "PreTrainedConfig", plan: SchedulePlan) -> list[Memory]:
    """Return the memory of each pp rank. All tp, cp and dp ranks of a pp rank need the same amount, if all experts have
    as many tokens.
    """
    s, memories, layout = sizes(config, model), [], config.distributed
    zero3, by_executor = layout.dp_engine == "zero3", config.needs_workbench
    parts = {ep: rank_parts(model, layout.tp_size, ep) for ep in (layout.ep_size, 1)}
    messages = by_executor * 4 * s.tokens * s.shard * s.number
    for rank in range(plan.schedule.pp):
        stages = list(plan.stages_of(rank).values())
        parameters, shared = (
            count_parameters(parts[ep], model.tie_word_embeddings, stages) for ep in (layout.ep_size, 1)
        )
        weights, gradients, optimizer = state_bytes(config, s, parameters, shared)
        activations, with_temporary = activation_peaks(config, model, plan, rank)
        memories.append(
            Memory(
                parameters=weights // s.number,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                gathered=parameters * s.number if zero3 and layout.pp_size > 1 else 0,
                activations=activations,
                temporary=with_temporary - activations + messages,
            )
        )
    return memories


def bubble(config: "Config", model: "PreTrainedConfig", plan: SchedulePlan) -> float:
    """Return the idle fraction of all ranks' time, 0 to 1, if the time of a stage is proportional to its FLOPs."""
    weights = stage_weights(model, plan.stages, config.training.seq_length, plan.schedule.pp)
    return simulate(plan.schedule, Costs(weights=weights)).bubble

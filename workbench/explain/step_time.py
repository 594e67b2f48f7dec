"""Forecast the time of a training step by formulas, without running anything. No torch here.

Computation. `Hardware` has the prices. A product of (tokens x n) and (n x k) has 2 tokens n k FLOPs and moves
tokens (n + k) + n k numbers. All other operations take the time to read and write their numbers. These are, per token
of a layer in forward and backward, eager, and compiled as counted in the kernels that torch.compile generates, with the
symbols of `memory`:

                                            eager                       compiled
    two norms and two residual additions    10, 20 D                    9, 19 D; with sequence parallelism D / tp
    rotation of q and k                     2, 4 (H d + K d) / tp       2, 2 (H d + K d) / tp
    silu, and its product with up           5, 10 F / tp                3, 5 F / tp

Backward multiplies twice as much, and adds each gradient to `main_grad`. Fused causal attention takes 2 T H d
FLOPs per token in forward and 2.5 times as many in backward (Dao 2023, arXiv:2307.08691). Without a fused kernel,
products compute the scores of all pairs, which six operations read or write. The loss has three products (see
`LinearCrossEntropy`) and passes eight times over the logits in float32, compiled four times in the model's dtype.

Communication. A collective of n ranks takes n - 1 steps (an all-reduce twice as many) of one latency each, plus the
time of the bytes that a rank sends around a ring (Thakur et al. 2005) over the slowest link, see `Hardware.collective`.

    message                             hidden behind                                             see
    tp, the gradient of an input        the gradients of these matrices, but for a part, not in I `ColumnParallel`
    cp, ring                            attention to the previous block; the last sum: nothing    `RingAttention`
    dp, bucket and zero1, gradients     the stage's last backward, except for the last bucket     `DataParallelBucket`
    dp, zero3                           forward and backward of each micro-batch, but for a part  `Clock.delay`
    pp                                  computations of other micro-batches; afab, 1f1b: nothing  `Costs.waits`
    all others                          nothing

On a CPU, the cores that compute also copy messages, so only pp hides any. A pipeline takes as long as `simulate` finds.
A GPU computes while Python starts operations, so a layer takes the longer of both times; on a CPU they add up. AdamW
reads and writes master weights and two moments, and reads the gradients; clipping reads these twice and writes them,
and zeroing writes them.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from picotron.config import Config
from picotron.console import UserError
from picotron.model.families import differences, model_cost, part_parameters
from picotron.pipeline_parallel.stages import Stage
from workbench.explain.hardware import Hardware
from workbench.pipelines.memory import count_parameters, loss_chunk, sizes
from workbench.pipelines.plan import SchedulePlan
from workbench.schedules.simulate import Costs, Timeline, simulate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNCOMPILED_STATES = 90  # numbers in temporary tensors that `bfloat16_states` reads and writes per parameter, by count


class Seconds(NamedTuple):
    """Parts of a step: work of the busiest pp rank, its waits for messages (pp) and other ranks (bubble), the end."""

    compute: float
    tp: float
    cp: float
    pp: float
    bubble: float
    dp: float
    optimizer: float


class Forecast(NamedTuple):
    seconds: Seconds
    bubble: float  # idle fraction of the pp ranks, on average, if messages take no time
    step_time: float
    tokens_per_second: float
    mfu: float | None  # None without a peak FLOP/s, and for other dtypes than bfloat16

    @property
    def rate(self) -> str:
        """The tokens per second, with three digits: a forecast deserves no more."""
        return f"{float(f'{self.tokens_per_second:.3g}'):,.0f}"


class Work(NamedTuple):
    """Seconds of an action: computation, and messages that nothing hides."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0

    def plus(self, other: "Work", times: float = 1.0) -> "Work":
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))


class DpMessages(NamedTuple):
    """Seconds of a stage's messages over dp.

    Args:
        reduction: of gradients, which runs behind the stage's last backward.
        after: the part of it that has to wait for the end of this backward.
        exposed: what nothing hides.
    """

    reduction: float
    after: float
    exposed: float


class Clock:
    """The times of the actions of a config on some hardware.

    Args:
        kept: the fraction of the forwards that keep their activations.

    Raises:
        UserError: the model has experts.
    """

    def __init__(self, config: Config, model: "PreTrainedConfig", hardware: Hardware, kept: float = 0.0) -> None:
        if differences(model).experts:
            raise UserError(
                f"model_type={model.model_type!r} has experts, for whose time there is no forecast; leave out --hardware and --best"
            )
        self.config, self.model, self.layout = config, model, config.distributed
        self.hardware = hardware.in_step(self.layout.world_size)
        self.s, self.dtype, self.kept = sizes(config, model), config.model.dtype, kept
        self.tied_weights: bool = model.tie_word_embeddings
        self.compiled = config.compiles
        self.works: dict[tuple[int, bool, bool, str], Work] = {}

    def product(self, n: int, k: int) -> float:
        """Seconds of (tokens x n) times (n x k): the mean of the product in forward and the two in backward."""
        tokens = self.s.tokens
        moved = (tokens * (n + k) + n * k) * self.s.number
        waves = sum(self.hardware.waves(*result) for result in ((tokens, k), (tokens, n), (n, k))) / 3
        return self.hardware.product(self.dtype, 2 * tokens * n * k * waves, moved)

    def move(self, numbers: float, size: int | None = None) -> float:
        """Seconds to read or write `numbers` numbers per token, by default in the model's dtype."""
        return self.hardware.move(self.s.tokens * numbers * (size or self.s.number))

    @cached_property
    def attention(self) -> tuple[float, float]:
        """Seconds of a layer's attention in forward and backward."""
        s, T, layout = self.s, self.config.training.seq_length, self.layout
        flops = 2.0 * s.tokens * T * s.queries
        if not self.config.model.use_flash_attention:
            forward = self.hardware.product(self.dtype, 2 * flops, s.tokens * 6 * s.heads * T * s.wide)
            return forward, 2 * forward
        blocks = layout.cp_size if layout.cp_engine != "ulysses" else 1
        if blocks > 1 and layout.cp_sharding == "contiguous":
            flops *= 2 - 1 / blocks  # the last rank attends to nearly all blocks
        merge = self.move(6 * blocks * s.queries, s.wide) if blocks > 1 else 0.0
        forward = self.hardware.attend(self.dtype, flops)
        return forward + merge, self.hardware.attend(self.dtype, 2.5 * flops, backward=True) + merge

    def collective(self, axis: str, sent: float, count: float = 1, all_reduce: bool = False) -> float:
        """Seconds of `count` collectives or messages in which a rank sends `sent` bytes in total."""
        stride, groups = 1, {}
        for name in ("tp", "cp", "pp", "dp"):  # ranks are numbered in this order
            size = getattr(self.layout, f"{name}_size")
            groups[name] = size, min(size, max(1, self.hardware.node // stride))
            stride *= size
        n, in_node = groups[axis]
        if axis == "dp":  # cp ranks hold the same weights
            n, in_node = n * self.layout.cp_size, in_node * groups["cp"][1]
        if axis == "pp" and in_node < n:  # one rank sends the message, through its network card
            in_node = 1
        steps = 1 if axis == "pp" else (1 + all_reduce) * (n - 1)
        return self.hardware.collective(n, in_node, count, steps, sent)

    @cached_property
    def message(self) -> float:
        """Seconds of a message from one stage to the next."""
        return self.collective("pp", self.s.tokens * self.s.shard * self.s.number)

    def units(self, count: float) -> float:
        """Seconds of gathers or scatters of hidden states over tp; an all-reduce is one of each."""
        n, split = self.layout.tp_size, self.layout.sequence_parallel
        sent = count * self.s.tokens * self.s.D * self.s.number * (n - 1) / n
        return self.collective("tp", sent, count if split else count / 2, all_reduce=not split)

    @cached_property
    def exposed_cp(self) -> tuple[float, float]:
        """Seconds of a layer's messages over cp in forward and backward that attention does not hide."""
        s, n, engine = self.s, self.layout.cp_size, self.layout.cp_engine
        kv, dkv = 2 * s.tokens * s.kv * s.number, 2 * s.tokens * s.kv * s.wide
        if n == 1:
            return 0.0, 0.0
        if engine == "ulysses":
            once = self.collective("cp", 2 * s.tokens * (s.queries + s.kv) * s.number * (n - 1) / n, 4)
            return once, once
        if engine == "all_gather":
            return self.collective("cp", (n - 1) * kv), self.collective("cp", (n - 1) * (kv + dkv), 2)
        step, back, last = (self.collective("cp", sent, 1 / (n - 1)) for sent in (kv, kv + dkv, dkv))
        forward, backward = (each / n * (self.hardware.cores is None) for each in self.attention)
        return (n - 1) * max(0.0, step - forward), (n - 1) * max(0.0, back - backward) + last

    @cached_property
    def layer(self) -> dict[str, Work]:
        """The work of a layer by kind of action, without the sums of gradients in `main_grad`."""
        s, (forward, backward), (cp_forward, cp_backward) = self.s, self.attention, self.exposed_cp
        inputs = self.product(s.D, s.queries) + 2 * self.product(s.D, s.kv), 2 * self.product(s.D, s.F)
        down = self.product(s.F, s.D)
        read_or_written = ((9, 2, 3), (19, 2, 5)) if self.compiled else ((10, 2, 5), (20, 4, 10))
        moved, moved_back = (
            self.move(norms * s.shard + rotation * (s.queries + s.kv) + gate * s.F)
            for norms, rotation, gate in read_or_written
        )
        products = sum(inputs) + self.product(s.queries, s.D) + down
        # In backward, each block has a sum of gradients, and with sequence parallelism two gathers in addition.
        split = self.layout.sequence_parallel
        sums, gathers = (self.units(1), self.units(1)) if split else (self.units(2), 0.0)
        exposed = sum(self.delay(sums, each) + self.delay(gathers, each) for each in inputs)
        again = (self.config.training.activation_checkpointing == "full") * (1 - self.kept)  # up to down_proj's input
        recomputed = Work(products - down + moved + forward, self.units(2 + split), cp_forward)
        selective = self.config.training.activation_checkpointing == "selective"
        # Cheap results are computed again twice: for the products that read them, and for their own backward.
        cheap = selective * self.move(s.F if self.compiled else 8 * s.shard * s.pre_norm + 10 * s.F)
        back = Work(products + moved_back + cheap + backward, 2 * gathers, cp_backward).plus(recomputed, again)
        return {
            "F": self.launched(Work(products + moved + forward, self.units(4), cp_forward), 1),
            "B": self.launched(back.plus(Work(products, exposed)), 2 + again),
            "I": self.launched(back.plus(Work(0.0, 2 * sums)), 1.5 + again),
            "W": self.launched(Work(products, 2 * gathers), 0.5),
        }

    def launched(self, work: Work, layers: float) -> Work:
        """Add the time in which Python starts the operations of `layers` forwards of a layer."""
        both = work.compute, layers * self.hardware.layer_launch
        return work._replace(compute=max(both) if self.hardware.cores is None else sum(both))

    def work(self, stage: Stage, kind: str) -> Work:
        """The work of an action in a stage."""
        key = len(stage.layers), stage.has_embedding, stage.has_head, kind
        if key not in self.works:
            self.works[key] = self._work(stage, kind)
        return self.works[key]

    def _work(self, stage: Stage, kind: str) -> Work:
        s, work, split = self.s, Work().plus(self.layer[kind], len(stage.layers)), self.layout.sequence_parallel
        if stage.has_head and kind == "F":
            sums = self.hardware.move(2 * -(-s.tokens // loss_chunk(self.config, s)) * s.vocabulary * s.D * s.wide)
            logits = self.move(4 * s.vocabulary) if self.compiled else self.move(8 * s.vocabulary, s.wide)
            work = work.plus(Work(3 * self.product(s.D, s.vocabulary) + logits + sums, split * self.units(1)))
        elif stage.has_head and kind != "W":
            scaled = self.hardware.move(s.vocabulary * s.D * (2 * s.wide + s.number))
            work = work.plus(Work(scaled, self.units(2 - split)))
        if stage.has_embedding and kind != "W" and (kind == "F" or split):
            work = work.plus(Work(0.0, self.units(2 - split)))
        added = self.parameters([stage]) * (s.number + 2 * s.wide) * (kind in ("B", "W"))
        return work.plus(Work(self.hardware.move(added)))

    def optimizer(self, parameters: int) -> float:
        """Seconds of clipping, AdamW and zeroing on a rank with this number of parameters."""
        s, engine, ranks = self.s, self.layout.dp_engine, self.data_ranks
        owned = parameters / (ranks if engine in ("zero1", "zero3") else 1)
        zeroed = parameters / (ranks if engine == "zero3" else 1)
        training = self.config.training
        states = 6 * s.wide + (s.wide + s.number if s.number < s.wide else 0)  # read and written by the update
        if training.optimizer_states != "float32":
            masters = 2 * s.wide + s.number if training.optimizer_states == "bfloat16_moments" else 0
            states = 6 * s.number + masters + (0 if self.compiled else UNCOMPILED_STATES * s.wide)
        moved = owned * (4 * s.wide + states) + zeroed * s.wide
        return self.hardware.move(moved) + self.hardware.step(self.layout.world_size)

    @cached_property
    def parts(self) -> tuple[int, int, int]:
        """See `part_parameters`."""
        return part_parameters(self.model, self.layout.tp_size)

    def parameters(self, stages: Sequence[Stage]) -> int:
        """Number of parameters on a rank that holds these stages."""
        return count_parameters(self.parts, self.tied_weights, stages)

    @cached_property
    def data_ranks(self) -> int:
        """Number of ranks that hold the same weights."""
        return self.layout.dp_size * self.layout.cp_size

    def delay(self, messages: float, computation: float) -> float:
        """Seconds that messages add to a computation that runs at the same time, see `Hardware.contention`."""
        hidden = min(messages, computation) * (self.hardware.cores is None)
        return messages - hidden + self.hardware.contention * hidden

    def dp_messages(self, stage: Stage, earlier: Sequence[Stage]) -> DpMessages:
        """The messages of a stage over dp in a step. A tied matrix is sent with the earlier stages of its rank."""
        s, n, engine = self.s, self.data_ranks, self.layout.dp_engine
        parameters = self.parameters([*earlier, stage]) - self.parameters(earlier)
        if n == 1 or not parameters:
            return DpMessages(0.0, 0.0, 0.0)
        once = parameters * (n - 1) / n
        buckets = max(1.0, parameters * s.wide / max(25 * 2**20, 4 * 2**20 * n))  # see `DataParallelBucket`
        if engine == "naive":  # nine parameters in a layer, one after the other
            buckets = 9.0 * len(stage.layers) + 3
        elif engine == "zero3":  # one collective for each layer, the embedding and the head
            buckets = float(len(stage.layers) + stage.has_embedding + stage.has_head)
        gather, scatter = (self.collective("dp", size * once, buckets) for size in (s.number, s.wide))
        if engine == "zero3":  # backward gathers all but the last layer; in a pipeline, weights stay
            F, B = (sum(self.work(stage, kind)) for kind in "FB")
            m, alone = self.config.training.gradient_accumulation_steps, self.layout.pp_size == 1
            others = Stage(stage.layers[1:])
            again = alone * gather * self.parameters([others]) / parameters
            exposed = m * self.delay(scatter + again, B) + (m if alone else 1) * self.delay(gather, F)
            return DpMessages(0.0, 0.0, exposed)
        if engine == "zero1":
            return DpMessages(scatter, scatter / buckets, gather)
        reduction = self.collective("dp", 2 * s.wide * once, buckets, all_reduce=True)
        return DpMessages(reduction, reduction if engine == "naive" else reduction / buckets, 0.0)

    def exposed_dp(self, plan: SchedulePlan, timeline: Timeline) -> float:
        """Seconds of messages over dp that computations do not hide, on the rank where they end last."""
        ends = [timeline.step_time]
        for spans in timeline.spans:
            done = exposed = 0.0
            last = {part.stage: span for span in spans for part in span.action.parts}
            for i, (_, start, end) in sorted(last.items(), key=lambda item: item[1].end):
                messages = self.dp_messages(plan.stages[i], [plan.stages[other] for other in last if other < i])
                begin = start if self.hardware.cores is None else end
                done = max(max(done, begin) + messages.reduction, end + messages.after)
                exposed += messages.exposed
            ends.append(max(done, timeline.step_time) + exposed)
        return max(ends) - timeline.step_time

    def tied(self, last_rank: int) -> float:
        """Seconds in which the first rank and that of the last stage sum the gradients of their matrix."""
        if not self.tied_weights or last_rank == 0:
            return 0.0
        return self.collective("pp", self.s.vocabulary * self.s.D * self.s.wide)


def forecast(config: Config, model: "PreTrainedConfig", plan: SchedulePlan, hardware: Hardware) -> Forecast:
    """Forecast the time of a training step. Raises a UserError if the hardware has no rate for the model's dtype."""
    layout, pp = config.distributed, config.distributed.pp_size
    clock, kept = Clock(config, model, hardware, plan.kept_fraction), plan.all_kept_activations
    clocks = {False: Clock(config, model, hardware), True: Clock(config, model, hardware, kept=1.0)}
    # A stage is named ~i where a micro-batch keeps its activations, see `Costs.key`.
    work = {
        (kind, ~i if keeps else i): clocks[keeps].work(stage, kind)
        for i, stage in enumerate(plan.stages)
        for kind in "FBIW"
        for keeps in ({False, True} if kept else {False})
    }
    costs = Costs(measured={(key,): sum(each) for key, each in work.items()}, kept=kept)
    ranks = [Work()] * pp
    for rank, program in enumerate(plan.schedule.programs):
        for key, times in Counter(costs.key(part)[0] for action in program for part in action.parts).items():
            ranks[rank] = ranks[rank].plus(work[key], times)
    waits = pp > 1 and not config.needs_workbench
    timeline = alone = simulate(plan.schedule, costs)
    if clock.message:
        timeline = simulate(plan.schedule, dataclasses.replace(costs, p2p=clock.message, waits=waits))
    pipeline = timeline.step_time
    instant = alone.step_time
    if hardware.cores is not None:  # the ranks share them
        shared = sum(map(sum, ranks)) * layout.world_size / pp / hardware.cores
        instant, pipeline = max(instant, shared), max(pipeline, shared)
    held = [list(plan.stages_of(rank).values()) for rank in range(pp)]
    optimizer = max(clock.optimizer(clock.parameters(stages)) for stages in held)
    busiest, dp = max(ranks, key=sum), clock.exposed_dp(plan, timeline) + clock.tied(plan.last_rank)
    idle = round(instant - sum(busiest), 12) + 0.0  # without what is left of rounding, and without its sign
    seconds = Seconds(*busiest, pipeline - instant, idle, dp, optimizer)
    rate = config.global_batch_size * config.training.seq_length / sum(seconds)
    peak = hardware.peak * layout.world_size * (config.model.dtype == "bfloat16")
    mfu = rate * model_cost(model, config.training.seq_length).flops / peak if peak else None
    return Forecast(seconds, alone.bubble, sum(seconds), rate, mfu)

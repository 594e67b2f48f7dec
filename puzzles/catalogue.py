"""The puzzles in the order of the pages, with hints. No torch here, so that listing them takes no time."""

import dataclasses
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """A puzzle.

    Args:
        name: name of its three files, which begins with its number. (A number stays, because adapters use these names.)
        topic: one of the parts of the learning path.
        level: "warm-up" (a few lines that follow from the page), "step" (a part of a trainer) or "stretch" (several
            parts, or more than the page says).
        title: the title, as at the top of the file.
        page: page and section of the docs from which one can solve it.
        hints: three hints, each of which says more than the one before.
        place: the file and the symbol of picotron that do it, and how.
    """

    name: str
    topic: str
    level: str
    title: str
    page: str
    hints: tuple[str, str, str]
    place: str

    @property
    def number(self) -> int:
        return int(self.name[1:3])

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.py"

    @property
    def solution(self) -> Path:
        return FOLDER / "solutions" / f"{self.name}.py"


PUZZLES = [
    Puzzle(
        "p01_all_reduce",
        "collectives",
        "warm-up",
        "an all-reduce in two halves",
        "docs/collectives.md#an-all-reduce-is-a-reduce-scatter-and-an-all-gather",
        (
            "If P is divisible by the number of ranks, one line is enough: first one of the two functions, then the other.",
            "After reduce_scatter, each rank has a different part of the sum; all_gather joins the parts in the right order.",
            "For other P, append zeros until the length is divisible, for example with torch.nn.functional.pad, and cut "
            "the result back to P numbers.",
        ),
        "workbench/variants/zero1.py DataParallelZero1 does these two halves, with the optimizer's step between them.",
    ),
    Puzzle(
        "p02_ring",
        "collectives",
        "step",
        "an all-reduce on a ring",
        "docs/collectives.md#bytes-sent-counted-and-by-formula",
        (
            "Cut x into n blocks with x.tensor_split(n), and let every block travel around the ring. Which block does each "
            "rank send first, so that all ranks send different ones?",
            "First round, n - 1 steps: in step s, rank r sends block r - s (modulo n), receives block r - s - 1 from the "
            "previous rank, and adds its own. Then one block on each rank is a complete sum. Which one?",
            "Rank r has the sum of block r + 1. Second round, n - 1 steps: in step s, rank r sends block r + 1 - s, and "
            "replaces block r - s by the one that it receives.",
        ),
        "picotron/context_parallel/context_parallel.py ring sends keys and values around such a ring; all-reduces are those of NCCL or gloo.",
    ),
    Puzzle(
        "p03_place",
        "data",
        "warm-up",
        "which rank trains on a sample, and when",
        "docs/training_step.md#how-a-global-batch-is-split",
        (
            "The page has the formula for the number of a sample. Its four terms are digits of that number, in a mixed base.",
            "divmod(sample, samples per step) is the step, and what remains within it.",
            "What remains: divide by the samples of a micro-batch on all ranks, B dp, then by B.",
        ),
        "picotron/data/loader.py MicroBatchDataLoader computes the inverse: the samples of a rank's micro-batches.",
    ),
    Puzzle(
        "p04_mean_gradient",
        "data",
        "warm-up",
        "one gradient from micro-batches of different lengths",
        "docs/training_step.md#the-step-in-code",
        (
            "The mean over all targets is not the mean of the micro-batches' means: a micro-batch with one target would "
            "count as much as one with six. What can you add up instead, and divide by what?",
            'With reduction="sum", cross_entropy returns a sum over targets. The gradient of a sum of sums is the sum of '
            "the gradients.",
            "Call backward for each micro-batch, which adds to w.grad. Then all-reduce w.grad and the number of targets, "
            "as float64, and divide.",
        ),
        "picotron/data/loader.py micro_batch_samples weights each micro-batch by the targets of all ranks.",
    ),
    Puzzle(
        "p06_split",
        "tensor",
        "warm-up",
        "which part of each matrix a rank holds",
        "docs/tensor_parallel.md#column-parallel-and-row-parallel-matrices",
        (
            "Which of the seven matrices produce heads or hidden units, and which ones consume them? The former are split by "
            "outputs, the latter by inputs.",
            "Outputs are rows, dimension 0: q, k, v, gate and up. Inputs are columns, dimension 1: o and down.",
            "For k_proj and v_proj with tp > K, a rank holds one head, number rank * K // tp.",
        ),
        "picotron/tensor_parallel/tensor_parallel.py apply_tensor_parallel chooses rows or columns of each matrix; _kv_shard, the key/value heads.",
    ),
    Puzzle(
        "p07_mlp",
        "tensor",
        "step",
        "the two pairs of a parallel MLP",
        "docs/tensor_parallel.md#why-a-copy-sums-in-the-backward-pass-an-example-with-two-ranks",
        (
            "Without any communication, y is only a part of the sum. Once it is summed in leave, which of dx, dup and ddown "
            "are still wrong?",
            "In forward, one of the two pairs sums over the ranks, and the other returns its argument. In backward, it is "
            "the other way round.",
            "leave: forward returns group.all_reduce(y), and backward returns the gradient unchanged. For enter, look at the "
            "last two lines of the page's example: dx is partial on each rank, and is then summed.",
        ),
        "picotron/tensor_parallel/tp_communications.py has Pair, enter and leave.",
    ),
    Puzzle(
        "p08_cross_entropy",
        "tensor",
        "step",
        "a loss of logits that no rank has in full",
        "docs/tensor_parallel.md#reading-the-code",
        (
            "Which rank has the target's logit? Three numbers per token are enough.",
            'Begin with group.all_reduce(logits.amax(1), "max"). Subtract this maximum from all logits before any exp.',
            "Only one rank has the target's logit; the others add 0 to the sum: `local = targets - rank * V/n` is on this rank "
            "if 0 <= local < V/n. With the sum of the exponentials S and the target's logit z, both after the subtraction, "
            "the loss is log(S) - z, and the softmax exp(logits) / S. Best known: a rank's log-sum-exp replaces maximum "
            "and sum. Make an all-reduce of it from messages, group.send and group.recv, with torch.logaddexp, and let the "
            "rank that has a target's logit send it to one rank, and the one of the two that has sent less send it on.",
        ),
        "picotron/model/cross_entropy.py Softmax.of computes it, with two all-reduces per chunk of tokens.",
    ),
    Puzzle(
        "p18_whole_step",
        "layout",
        "stretch",
        "a whole training step over dp 2 x tp 2",
        "docs/data_parallel.md#the-line-that-does-it",
        (
            "Write it for one process first. Then four numbers are partial: y over tp, all gradients over dp, and the sum of "
            "squares in the norm over tp. Which part of this sum must not be added twice?",
            "y: tp.all_reduce of silu(x up') down', before the bias. Autograd does not see it; but a sum has the gradient of its "
            "term, so the graph may end in the term. The mean over the batch is the mean of both dp ranks' means.",
            "norm = sqrt(tp.all_reduce(squares of up and down) + squares of bias), of gradients that are averaged over dp before.",
        ),
        "picotron/optimizer.py clip_grad_norm counts what several ranks hold once; update_weights does the rest of the step.",
    ),
    Puzzle(
        "p05_buckets",
        "data",
        "stretch",
        "buckets of gradients that overlap with backward",
        "docs/data_parallel.md#averaging-in-buckets-while-backward-is-running",
        (
            "Only what is left after the end of backward costs time. Where must the last bucket be small, and where do many "
            "buckets cost more latency than they save?",
            "Begin with a loop that closes a bucket at a limit of bytes, a function that computes when the last all-reduce "
            "ends, and powers of two as limits. To get further, do not use the same limit everywhere.",
            "Let best(b) be the earliest end of the reduction of the first b gradients. If their last bucket begins at "
            "gradient a, it ends at max(best(a), ready[b - 1]) + latency + bytes / bandwidth: try every a.",
        ),
        "picotron/data_parallel/data_parallel.py make_buckets closes a bucket at one limit of bytes, as par does.",
    ),
    Puzzle(
        "p15_zero1",
        "sharding",
        "step",
        "an optimizer of which each rank has a slice (ZeRO-1)",
        "docs/zero.md#the-algorithms",
        (
            "An all-reduce is a reduce-scatter and an all-gather, as in puzzle 1. What can happen between the two?",
            "reduce_scatter returns the sum of the slice that this rank updates (divide it by n). After the update, all_gather "
            "the slices of the weights.",
            'In the first step, keep state["own"] = torch.nn.Parameter(a clone of this rank\'s slice of w; a view would keep '
            "all of w) and an optimizer torch.optim.AdamW over it. Pad w and the gradient with zeros to a length that n "
            "divides.",
        ),
        "workbench/variants/zero1.py SlicedBucket reduces and gathers these slices; the optimizer sees only the rank's own.",
    ),
    Puzzle(
        "p12_1f1b",
        "pipeline",
        "warm-up",
        "one forward, one backward",
        "docs/pipeline_parallel.md#the-algorithm-of-1f1b",
        (
            "Begin with all forwards, then all backwards, and look at the picture. Which backward could start much earlier?",
            "The last rank can run a backward right after each forward. Rank p - 2 needs one more forward first, and so on.",
            "Rank r: min(p - 1 - r, m) forwards; then pairs of a forward and a backward until the forwards are used up; then "
            "the remaining backwards.",
        ),
        "workbench/schedules/schedules.py one_f_one_b is this schedule; train_step_pipeline_1f1b runs it as a loop.",
    ),
    Puzzle(
        "p17_pipeline_step",
        "pipeline",
        "stretch",
        "a step of 1F1B, with its messages",
        "docs/pipeline_parallel.md#the-algorithm-of-1f1b",
        (
            "First the forward of one micro-batch through all ranks, and then its backward. x comes from the previous rank, "
            "so autograd does not know it: which call makes x.grad appear? And how does the gradient of y enter y's graph?",
            "x = group.recv(rank - 1).requires_grad_(), y = stage(x), group.send(y, rank + 1); later y.backward(dy) with dy "
            "from the next rank, and group.send(x.grad, rank - 1). On the last rank, y is the loss divided by m.",
            "Put x and y into a queue until their backward. Then the order is that of puzzle 12: min(p - 1 - r, m) forwards; "
            "a forward and a backward in turn; the remaining backwards.",
        ),
        "picotron/pipeline_parallel/pipeline_parallel.py train_step_pipeline_1f1b is this loop, with two messages in one batch.",
    ),
    Puzzle(
        "p14_messages",
        "pipeline",
        "stretch",
        "1F1B when messages take time",
        "docs/pipeline_parallel.md#the-algorithm-of-1f1b",
        (
            "Begin with your solution of puzzle 12, and look at the picture: a rank waits although it could run another "
            "forward. How many forwards must rank p - 2 start before its first backward, so that the last rank never waits?",
            "Between a forward of a rank and the backward of the same micro-batch, each later rank adds a forward, a "
            "backward and two messages: 3 + 2 p2p. How many micro-batches start in this time, one every 3?",
            "Rank r: min(m, 1 + k (p - 1 - r)) forwards, with k = ceil(1 + 2/3 p2p); then a backward and a forward in turn. "
            "So messages of up to 1.5 forwards need twice as long a warm-up as messages that take no time.",
        ),
        "workbench/schedules/search.py fastest_schedule runs ahead as far as messages and memory ask for: pp_engine auto trains with its result.",
    ),
    Puzzle(
        "p13_bubble",
        "pipeline",
        "stretch",
        "a smaller bubble than 1F1B",
        "docs/pipeline_schedules.md#all-schedules-on-one-time-axis",
        (
            "Begin with your solution of puzzle 12. Its picture shows where ranks wait at the end: for backwards of later "
            "ranks, of which they need only the half I. So each W that a later rank runs before an I delays them.",
            "Split every backward, and run W directly after I. Then delay the last W of the last rank until after its last I. "
            "What does this do to the end of the step? Then do the same on the other ranks, with fewer W.",
            "Par: rank r runs its last r W after its last I, and every other W directly after its I. To get further, delay "
            "other W, too, run W only when nothing else can run, and watch the activations; compare with `python -m "
            "workbench.drawing schedule zb_h1 --pp 4 --micro_batches 8`.",
        ),
        "workbench/schedules/schedules.py zb_h1 is a schedule with the best known bubble.",
    ),
    Puzzle(
        "p09_owner",
        "context",
        "warm-up",
        "which rank gets which part of a sequence",
        "docs/context_parallel.md#which-tokens-each-rank-gets-contiguous-or-zigzag",
        (
            "A chunk's work grows with its number, because its tokens attend to all chunks before it. Draw it: the picture of "
            "any answer shows the triangle.",
            "The rank with the chunk of the least work should also have the one with the most.",
            "Chunks i and 2 cp - 1 - i together are as much work for every i.",
        ),
        "picotron/context_parallel/context_parallel.py local_chunks gives out the chunks of a sequence.",
    ),
    Puzzle(
        "p10_merge",
        "context",
        "warm-up",
        "attention to all keys from attention to two halves of them",
        "docs/context_parallel.md#merging-blocks-of-attention-online-softmax-in-three-lines",
        (
            "Each y is a weighted mean with total weight exp(lse). The result is the mean of both with these weights.",
            "The total weight of both is exp(lse1) + exp(lse2). torch.logaddexp computes its logarithm without overflow, and "
            "also if one of the two is -inf.",
            "exp(lse1 - lse) and exp(lse2 - lse) are at most 1. Append a dimension to multiply them by y: [..., None].",
        ),
        "picotron/context_parallel/block_attention.py merge_attention merges blocks like this.",
    ),
    Puzzle(
        "p11_ring_attention",
        "context",
        "step",
        "causal attention over a sequence that no rank has in full",
        "docs/context_parallel.md#ring-attention-who-sends-what-to-whom",
        (
            "In each of n steps, a rank has the keys and values of one rank, and sends them on. Whose are they in step s?",
            "In step s, rank r has those of rank r - s (modulo n). If that is an earlier rank, all queries attend to all of "
            "these keys; if it is r itself, the block is causal; if it is a later rank, none do.",
            "Merge the blocks as in puzzle 10, from y = 0 and lse = -inf. To beat par, ask which ranks need which keys at all.",
        ),
        "picotron/context_parallel/context_parallel.py RingAttention does it, forward and backward, with zigzag shards.",
    ),
    Puzzle(
        "p19_ring_backward",
        "context",
        "stretch",
        "the backward of ring attention, from its output and lse",
        "docs/context_parallel.md#the-backward-send-keys-again-instead-of-keeping-them",
        (
            "Begin with one rank. With p = exp(scores - lse), the weights of all keys, out = p @ v. So dv = p.mT @ dout, and "
            "dp = dout @ v.mT. Which sum over all keys does the gradient of the scores need?",
            "ds = p (dp - sum_j p_j dp_j), and this sum is (dout * out).sum(-1), which a rank knows without any key. Then "
            "dq = ds @ k / sqrt(d), and dk = ds.mT @ q / sqrt(d). Each block of keys gives its part, with the lse of all keys.",
            "Send keys and values around as in puzzle 11. Their gradients follow one step behind: in each step, receive the "
            "sum of the ranks before, add your own, and send it on. After n messages it is at the owner of the keys. To beat "
            "par, let queries travel instead.",
        ),
        "picotron/context_parallel/context_parallel.py RingAttention.backward does it, with fused kernels and zigzag shards.",
    ),
    Puzzle(
        "p20_experts",
        "experts",
        "step",
        "send tokens to their experts, and bring the results home",
        "docs/expert_parallel.md#two-all-to-alls",
        (
            "On one rank: for each expert e, the tokens that chose it are (chosen == e).nonzero(), with their places among the "
            "k. Add run(e, x[tokens]) * weights[tokens, places, None] to y[tokens], with index_add.",
            "Before that, send x[tokens] of each expert of another rank to this rank, also if there are no tokens: then "
            "everybody knows how many messages come from each rank, and in which order.",
            "A rank receives the rows of all ranks for an expert, computes them, splits the output as the rows came, and sends "
            "each part back. The sender still knows to which tokens the rows belong.",
        ),
        "workbench/variants/expert_parallel.py run_on_ranks sorts the rows by expert, so that two all-to-alls are enough.",
    ),
    Puzzle(
        "p16_layout",
        "layout",
        "stretch",
        "sequences of 128 Ki tokens on 64 GPUs",
        "docs/seventy_billion.md#what-to-run-instead",
        (
            "Begin with the layout of the statement. Which parts of its time are not necessary? The picture shows them for "
            "any answer. Without recomputation, computing takes a fifth less; how much memory is missing then?",
            "Messages of tp take 3.2 s. With fewer tp ranks, each sends less, but has more activations: which other axis "
            'divides them? And activation_checkpointing="selective" recomputes only what is cheap.',
            "Divide sequences over more ranks than matrices: a cp_size of 4 and a tp_size of 2. Then weights and optimizer "
            "take more memory on a rank: choose a dp_engine that shards them.",
        ),
        "workbench/sweep/planner.py best_configs searches all layouts, for create_config.py --best.",
    ),
    Puzzle(
        "p21_slow",
        "speed",
        "step",
        "why a run is slow",
        "docs/slow.md#six-parts-of-a-step",
        (
            "Draw the healthy run and one other. When does the first forward begin, when does the last backward end, and "
            "how long is the step in metrics.jsonl? Two causes are outside of the drawing.",
            "Inside, is the busiest rank idle for longer, or are there more or longer F and B? On one rank or on both?",
            "Add up the F and the B of each rank. Recomputation makes each B one F longer, and no F; small micro-batches make "
            "the sum of all F longer, although the tokens are the same.",
        ),
        "workbench/pipelines/recorder.py record_steps writes these traces, for logging.trace_steps.",
    ),
    Puzzle(
        "p22_dropout",
        "numerics",
        "stretch",
        "dropout that is equal in every layout",
        "docs/numerics.md#random-bits-equal-in-every-layout",
        (
            "A generator gives the same bits only to ranks that ask for the same numbers in the same order. What do all "
            "layouts know about a number of y?",
            "The bits must be a function of the sample, the position, the layer and the place in D: a hash of the four. "
            "A generator that is seeded with a hash of the first three, for each token, is right as well, but slow.",
            "workbench/variants/bfloat16_states.py has random_bits, for tensors of numbers, and keys. Give each (sample, "
            "position, place) a number of its own, and each layer keys of its own.",
        ),
        "workbench/variants/bfloat16_states.py random_bits rounds weights with such bits, equally in every layout.",
    ),
]


def find(text: str) -> Puzzle | None:
    """Return the puzzle with a number like 7, 07, p07 or p07_mlp."""
    return next(
        (each for each in PUZZLES if text in (str(each.number), each.name[1:3], each.name[:3], each.name)), None
    )

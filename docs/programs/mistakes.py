"""Classic mistakes, made on purpose, and the tests that catch them:

    python -m docs.programs.mistakes data_parallel

The other pages are training_step, tensor_parallel, families, pipeline_parallel, context_parallel, zero and generation.

A mistake replaces functions of picotron in the processes that run a test, for the time of this test.
"""

import argparse
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.worker_pool import WorkerPool
from docs.programs import generation_mistakes, step_mistakes, zero_mistakes
from docs.programs.mistake import Mistake, replaced
from picotron import process_group_manager as pgm
from picotron.collectives import all_reduce
from picotron.context_parallel.positions import local_positions, visible_blocks
from picotron.data.loader import MicroBatchDataLoader
from picotron.data_parallel.data_parallel import Bucket, make_buckets
from picotron.model.llama import Head
from tests.context_parallel import test_context_parallel
from tests.data_parallel import test_data_parallel
from tests.pipeline_parallel import test_pipeline_parallel
from tests.tensor_parallel import test_tensor_parallel


def run_test(mistake: Mistake, pool: WorkerPool) -> None:
    """Run the test of a mistake with this mistake. It should raise AssertionError."""
    mistake.test(MistakenPool(pool, mistake), *mistake.arguments)


class MistakenPool:
    """A pool whose workers make a mistake."""

    def __init__(self, pool: WorkerPool, mistake: Mistake) -> None:
        self.pool, self.name = pool, next(name for name, other in MISTAKES.items() if other is mistake)

    def run(self, function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        return self.pool.run(with_mistake, size, self.name, function, arguments)


def with_mistake(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call `function(*arguments)` in a worker, with a mistake."""
    with replaced(MISTAKES[name].replacements):
        return function(*arguments)


# --------------------------------------------------------------------------------------------------- data parallelism


def launch_sum(bucket: Bucket) -> None:
    bucket.work = all_reduce(bucket.buffer, bucket.group, async_op=True)


correct_cross_entropy = Head.cross_entropy


def divided_by_dp_size(head: Head, x: Tensor, *targets: Tensor) -> Tensor:
    return correct_cross_entropy(head, x, *targets) / pgm.process_group_manager.dp_world_size


def reduce_every_time(model: Any, data_loader: Any, device: torch.device) -> Tensor:
    """Run `train_step` without `require_backward_grad_sync = False` for all backwards except the last."""
    total_loss = torch.zeros((), device=device)
    for _ in range(data_loader.grad_acc_steps):
        loss = model(**next(data_loader)) / data_loader.grad_acc_steps
        loss.backward()
        total_loss = total_loss + loss.detach()
    model.finish_grad_sync()
    return total_loss


# ------------------------------------------------------------------------------------------------- tensor parallelism


def keep_partial(ctx: Any, partial: Tensor, group: Any) -> Tensor:
    return partial.clone()


def skip_all_reduce(partial: Tensor, group: Any) -> Callable[[], Tensor]:
    return lambda: partial


def return_unchanged(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


def leave_partial(model: Any) -> None:
    pass


# ----------------------------------------------------------------------------------------------- pipeline parallelism


class LastInFirstOut(deque[Any]):
    popleft = deque.pop


def undivided_forward_step(model: Any, data_loader: Any, input_tensor: Any, i: int, losses: list[Tensor]) -> Tensor:
    output_tensor = model(**next(data_loader) | {"hidden_states": input_tensor})
    if pgm.process_group_manager.pp_is_last_stage:
        losses.append(output_tensor.detach() / data_loader.grad_acc_steps)
    return output_tensor


# ------------------------------------------------------------------------------------------------ context parallelism


def buckets_of_dp_alone(parameters: Any, group: Any, megabytes: float) -> list[Bucket]:
    return make_buckets(parameters, pgm.process_group_manager.dp_group, megabytes)


def contiguous_positions(seq_length: int, cp_size: int, cp_rank: int, sharding: str) -> Tensor:
    return local_positions(seq_length, cp_size, cp_rank, "contiguous")


def contiguous_blocks(source: int, tokens: int, sharding: str) -> Any:
    return visible_blocks(source, tokens, "contiguous")


def all_queries(source: int, tokens: int, sharding: str) -> Any:
    """Return the blocks of zigzag shards, but let all queries attend to a later rank's keys."""
    later = source > pgm.process_group_manager.cp_rank
    return [(slice(None), slice(None), False)] if later else visible_blocks(source, tokens, sharding)


correct_next = MicroBatchDataLoader.__next__


def positions_from_zero(loader: MicroBatchDataLoader) -> dict[str, Any]:
    batch = correct_next(loader)
    return batch | {"position_ids": torch.arange(batch["input_ids"].size(1)).expand_as(batch["input_ids"])}


DP, TP = "picotron.data_parallel", "picotron.tensor_parallel"
PP, CP = "picotron.pipeline_parallel.pipeline_parallel", "picotron.context_parallel.context_parallel"
# Tests with their arguments after the pool.
STEPS_DP = (test_data_parallel.test_ten_steps_equal_one_process, (2, "bucket", 1, False))


def own_heads_only(x: Tensor, group: Any) -> Tensor:
    return x


MODEL = "gqa, padded vocabulary"
GRADIENTS_TP = (test_tensor_parallel.test_loss_logits_and_gradients_equal_transformers, (MODEL, 2, False, False))
GRADIENTS_PP = (test_pipeline_parallel.test_loss_and_gradients_equal_transformers, ("1f1b", False, {"pp_size": 3}))
STEPS_CP = (test_context_parallel.test_ten_steps_equal_one_process, ({"cp_size": 2},))

MISTAKES = {
    "gradients_not_divided": Mistake(
        "data_parallel",
        "Bucket.launch sums the gradients over the ranks, but does not divide by the number of ranks.",
        {f"{DP}.data_parallel.Bucket.launch": launch_sum},
        *STEPS_DP,
    ),
    "loss_averaged_twice": Mistake(
        "data_parallel",
        "The loss is divided by dp_size, although the gradients are averaged over the ranks as well.",
        {"picotron.model.llama.Head.cross_entropy": divided_by_dp_size},
        *STEPS_DP,
    ),
    "reduced_every_time": Mistake(
        "data_parallel",
        "train_step never sets require_backward_grad_sync, so the backward of every micro-batch averages the gradients.",
        {"picotron.train_step.train_step": reduce_every_time},
        test_data_parallel.test_ten_steps_equal_one_process,
        (2, "bucket", 3, False),
    ),
    "partial_sums": Mistake(
        "tensor_parallel",
        "ReduceFromRanks.forward returns the rank's own term instead of the sum over the ranks.",
        {f"{TP}.tp_communications.ReduceFromRanks.forward": keep_partial},
        *GRADIENTS_TP,
    ),
    "partial_gradients": Mistake(
        "tensor_parallel",
        "ColumnParallel.backward does not sum the gradient of x over the ranks.",
        {f"{TP}.tensor_parallel.start_all_reduce": skip_all_reduce},
        *GRADIENTS_TP,
    ),
    "copy_not_summed": Mistake(
        "tensor_parallel",
        "CopyToRanks.backward does not sum: each rank continues with the contribution of its own shard of the head.",
        {f"{TP}.tp_communications.CopyToRanks.backward": return_unchanged},
        *GRADIENTS_TP,
    ),
    "norms_not_summed": Mistake(
        "tensor_parallel",
        "With sequence parallelism, the gradients of the norms' weights are not summed over the ranks.",
        {"picotron.data_parallel.data_parallel.sum_partial_gradients": leave_partial},
        test_tensor_parallel.test_loss_logits_and_gradients_equal_transformers,
        (MODEL, 2, True, False),
    ),
    "head_norms_not_summed": Mistake(
        "families",
        "Qwen3: the gradients of the norms inside heads are not summed over the ranks.",
        {"picotron.data_parallel.data_parallel.sum_partial_gradients": leave_partial},
        test_tensor_parallel.test_loss_logits_and_gradients_equal_transformers,
        ("qwen3", 2, False, False),
    ),
    "norm_of_own_heads": Mistake(
        "families",
        "OLMo 2: each rank normalises its own heads, instead of all heads together.",
        {"picotron.tensor_parallel.tensor_parallel.mean_over_ranks": own_heads_only},
        test_tensor_parallel.test_loss_logits_and_gradients_equal_transformers,
        ("olmo2", 2, False, False),
    ),
    "micro_batches_not_divided": Mistake(
        "pipeline_parallel",
        "forward_step divides the logged loss by the number of micro-batches, but not the loss that backward starts at.",
        {f"{PP}.forward_step": undivided_forward_step},
        *GRADIENTS_PP,
    ),
    "wrong_backward_first": Mistake(
        "pipeline_parallel",
        "Each stage runs backward for its newest forward instead of its oldest.",
        {f"{PP}.deque": LastInFirstOut},
        *GRADIENTS_PP,
    ),
    "tied_embedding_forgotten": Mistake(
        "pipeline_parallel",
        "The first and the last stage do not sum the gradients of the tied embedding, of which both hold a replica.",
        {f"{PP}.PipelineParallel.sum_tied_gradients": lambda stage: None},
        test_pipeline_parallel.test_loss_and_gradients_equal_transformers,
        ("1f1b", True, {"pp_size": 3}),
    ),
    "cp_not_averaged": Mistake(
        "context_parallel",
        "The gradients are averaged over dp_group instead of cp_dp_group, so not over the cp ranks.",
        {f"{DP}.data_parallel.make_buckets": buckets_of_dp_alone},
        *STEPS_CP,
    ),
    "wrong_tokens": Mistake(
        "context_parallel",
        "The data loader returns contiguous shards of the sequences, but attention assumes zigzag shards.",
        {"picotron.data.loader.local_positions": contiguous_positions},
        *STEPS_CP,
    ),
    "positions_from_zero": Mistake(
        "context_parallel",
        "Every rank numbers the positions of its tokens from 0.",
        {"picotron.data.loader.MicroBatchDataLoader.__next__": positions_from_zero},
        *STEPS_CP,
    ),
    "future_seen": Mistake(
        "context_parallel",
        "visible_blocks lets all queries attend to the keys of later ranks, not only the queries of the second chunk.",
        {"picotron.context_parallel.positions.visible_blocks": all_queries},
        *STEPS_CP,
    ),
    "contiguous_shards": Mistake(
        "context_parallel",
        "Data loader and attention use contiguous shards: the results are correct, but the last rank has the most work.",
        {
            "picotron.context_parallel.positions.visible_blocks": contiguous_blocks,
            "tests.context_parallel.test_context_parallel.local_positions": contiguous_positions,
        },
        test_context_parallel.test_zigzag_is_balanced_and_skips_masked_blocks,
        ("ring", 2),
    ),
    **step_mistakes.MISTAKES,
    **zero_mistakes.MISTAKES,
    **generation_mistakes.MISTAKES,
}


def failed_assertion(error: AssertionError) -> str:
    """Return the failure in one line: the last line of a worker's traceback, or the source of an assert statement."""
    lines = str(error).splitlines() or [str(traceback.extract_tb(error.__traceback__)[-1].line)]
    line = next((line for line in lines if line.startswith("AssertionError")), lines[0])
    return line.removeprefix("AssertionError: ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*dict.fromkeys(mistake.page for mistake in MISTAKES.values()), *MISTAKES]
    parser.add_argument("which", choices=choices, metavar="page_or_mistake", help=f"one of {', '.join(choices)}")
    which = parser.parse_args().which
    pool = WorkerPool()
    for name, mistake in MISTAKES.items():
        if which not in (name, mistake.page):
            continue
        print(
            f"{name}: {mistake.description}\n    {mistake.test.__module__.replace('.', '/')}.py::{mistake.test.__name__}"
        )
        try:
            run_test(mistake, pool)
        except AssertionError as error:
            print(f"    fails: {failed_assertion(error)}")
        else:
            sys.exit("    passes, although it should fail")
    pool.close()


if __name__ == "__main__":
    from docs.programs import mistakes

    mistakes.main()

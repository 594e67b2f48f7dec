"""docs/steps: every step trains like step 1 in every layout, step 1 like transformers; mistakes change the losses."""

import collections
import functools
import math
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conformance.oracle import assert_close, relative_error, with_exact_norms
from conformance.worker_pool import WorkerPool
from docs.steps import communication, llama

STEPS = ["s2_tp", "s3_sp", "s4_dp", "s5_buckets", "s6_zero", "s7_pp", "s8_1f1b", "s9_cp"]
Result = tuple[list[float], dict[str, Tensor]]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
LAYOUTS = [
    ("s2_tp", {"tp": 2}),
    slow("s2_tp", {"tp": 1}),
    slow("s2_tp", {"tp": 4}),
    ("s3_sp", {"tp": 2}),
    slow("s3_sp", {"tp": 1}),
    slow("s3_sp", {"tp": 4}),
    ("s4_dp", {"dp": 2, "tp": 2}),
    ("s5_buckets", {"dp": 2, "tp": 2}),
    ("s6_zero", {"dp": 2, "tp": 2}),
    *(slow(step, {"dp": dp, "tp": tp}) for step in STEPS[2:5] for dp, tp in [(1, 1), (1, 2), (2, 1), (4, 1), (4, 2)]),
    ("s7_pp", {"dp": 1, "pp": 2, "tp": 2}),
    ("s8_1f1b", {"dp": 1, "pp": 4, "tp": 1}),
    *(
        slow(step, {"dp": dp, "pp": pp, "tp": tp})
        for step in STEPS[5:7]
        for dp, pp, tp in [(1, 1, 1), (2, 1, 2), (1, 2, 1), (1, 3, 1), (2, 2, 1), (2, 4, 1), (2, 2, 2)]
    ),
    ("s9_cp", {"dp": 1, "pp": 2, "cp": 2, "tp": 1}),
    *(
        slow("s9_cp", {"dp": dp, "pp": pp, "cp": cp, "tp": tp})
        for dp, pp, cp, tp in [
            (1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 4, 1), (2, 1, 2, 1), (1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2),
            (1, 4, 2, 1), (1, 1, 4, 2), (2, 2, 2, 2),
        ]
    ),
]  # fmt: skip
# A mistake in a step: the layout in which it shows, and the text that it replaces.
MISTAKES = {
    "copy_not_summed": ("s2_tp", {"tp": 2}, "comm.copy, comm.all_reduce", "comm.copy, comm.copy"),
    "norms_not_summed": ("s3_sp", {"tp": 2}, 'if "_proj" not in name', "if False"),
    "sum_divided": ("s4_dp", {"dp": 2, "tp": 1}, "dist.all_reduce(p", "parameter.grad /= 2; dist.all_reduce(p"),
    "norms_summed_over_dp_only": ("s4_dp", {"dp": 2, "tp": 2}, '"dp" if "_proj" in name else "dp_tp"', '"dp"'),
    "first_micro_batch_only": ("s5_buckets", {"dp": 2, "tp": 1}, "len(self.parameters) * llama.MICRO_BATCHES", "len(self.parameters)"),
    "gradients_not_cleared": ("s5_buckets", {"dp": 2, "tp": 1}, "self.gradients.zero_()", "pass"),
    "weights_not_gathered": ("s6_zero", {"dp": 2, "tp": 1}, "            bucket.gather()\n", ""),
    "wrong_backward_first": ("s7_pp", {"dp": 1, "pp": 2, "tp": 1}, "running.popleft()", "running.pop() if first else running.popleft()"),
    "newest_backward_first": ("s8_1f1b", {"dp": 1, "pp": 2, "tp": 1}, "running.popleft()", "running.pop()"),
    "future_seen": ("s9_cp", {"dp": 1, "pp": 1, "cp": 2, "tp": 1}, ".masked_fill(future, -1e9)", ""),
    "cp_not_summed": ("s9_cp", {"dp": 1, "pp": 1, "cp": 2, "tp": 1}, '"cp_dp" if "_proj"', '"dp" if "_proj"'),
    "gradients_sent_on": ("s9_cp", {"dp": 1, "pp": 1, "cp": 4, "tp": 1}, "comm.send_to_previous", "comm.send_to_next"),
}  # fmt: skip


def source_of(step: str) -> Path:
    return Path(f"docs/steps/{step}.py")


def train(step: str, sizes: dict[str, int], old: str = "", new: str = "") -> Result:
    """Run a step on this rank, with `old` replaced by `new` in its code. Returns the losses and this rank's weights."""
    program = types.ModuleType(step)
    code = source_of(step).read_text()
    exec(compile(code.replace(old, new) if old else code, step, "exec"), program.__dict__)
    with mock.patch.object(llama, "STEPS", 4):
        model, losses = program.train(**sizes)
    communication.group.clear()  # the threads of a group end with its last reference
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@functools.cache
def expected() -> Result:
    return train("s1_one_process", {})


def assert_equals_step_1(results: list[Result], tp: int) -> None:
    """Assert that all ranks have the losses of step 1, and its weights or the shards of their index in the tp group."""
    losses, weights = expected()
    for rank, (rank_losses, rank_weights) in enumerate(results):
        assert_close(rank_losses, losses, what="losses")
        for name, weight in rank_weights.items():
            dim = next((d for d in range(weight.ndim) if weight.size(d) != weights[name].size(d)), None)
            shard = weights[name] if dim is None else weights[name].chunk(tp, dim)[rank % tp]
            assert_close(weight, shard, what=name)
            assert (dim is None) == (tp == 1 or "_proj" not in name)
    assert {name for _, held in results for name in held} == weights.keys()


@pytest.mark.parametrize(("step", "sizes"), LAYOUTS)
def test_step_trains_like_one_process(pool: WorkerPool, step: str, sizes: dict[str, int]) -> None:
    assert_equals_step_1(pool.run(train, math.prod(sizes.values()), step, sizes), sizes["tp"])


CLASSICS = ("copy_not_summed", "sum_divided", "weights_not_gathered", "cp_not_summed")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in CLASSICS else pytest.mark.slow) for n in MISTAKES])
def test_mistake_changes_the_losses(pool: WorkerPool, name: str) -> None:
    step, sizes, old, new = MISTAKES[name]
    assert source_of(step).read_text().count(old) == 1
    results = pool.run(train, math.prod(sizes.values()), step, sizes, old, new)
    correct, _ = expected()
    assert max(relative_error(losses, correct) for losses, _ in results) > 1e-9
    if name != "future_seen":  # all others are mistakes of backward or of the update, which the first loss cannot show
        assert max(relative_error(losses[:1], correct[:1]) for losses, _ in results) < 1e-9


def kept_micro_batches(step: str) -> int:
    """Return the most micro-batches that are between their forward and their backward on this one of four stages."""
    kept = [0]

    class Watched(collections.deque):  # type: ignore[type-arg]
        def append(self, item: object) -> None:
            super().append(item)
            kept.append(len(self))

    with mock.patch.object(collections, "deque", Watched):
        train(step, {"dp": 1, "pp": 4, "tp": 1})
    return max(kept)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "expected"), [("s7_pp", [4, 4, 4, 4]), ("s8_1f1b", [4, 3, 2, 1])])
def test_schedules_keep_as_many_micro_batches_as_the_answer_says(
    pool: WorkerPool, step: str, expected: list[int]
) -> None:
    assert pool.run(kept_micro_batches, 4, step) == expected


@pytest.mark.slow
def test_consecutive_tokens_train_like_one_process(pool: WorkerPool) -> None:
    """The solution of exercise 4 of the page."""
    old = "torch.cat((chunks[cp_rank], chunks[-1 - cp_rank]))"
    new = 'torch.arange(llama.LENGTH).chunk(size["cp"])[cp_rank]'
    assert source_of("s9_cp").read_text().count(old) == 1
    sizes = {"dp": 1, "pp": 1, "cp": 4, "tp": 1}
    assert_equals_step_1(pool.run(train, 4, "s9_cp", sizes, old, new), 1)


def transformers_names(name: str) -> str:
    """Translate the name of a parameter, such as `1.q_proj.weight`."""
    index, rest = name.split(".", 1)
    ends = {0: "model.embed_tokens", llama.LAYERS + 1: "model.norm", llama.LAYERS + 2: "lm_head"}
    part = "self_attn." if rest[:2] in ("q_", "k_", "v_", "o_") else "mlp." if "_proj" in rest else ""
    return f"{ends[int(index)]}.{rest}" if int(index) in ends else f"model.layers.{int(index) - 1}.{part}{rest}"


def test_step_1_trains_like_transformers() -> None:
    config = LlamaConfig(
        vocab_size=len(llama.VOCABULARY), hidden_size=llama.HIDDEN, intermediate_size=llama.INTERMEDIATE,
        num_hidden_layers=llama.LAYERS, num_attention_heads=llama.HEADS, num_key_value_heads=llama.KV_HEADS,
        rms_norm_eps=1e-6, tie_word_embeddings=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(llama.DTYPE)
    initial = {transformers_names(name): weight for name, weight in llama.make_model().state_dict().items()}
    model.load_state_dict(initial, strict=True)
    model = with_exact_norms(model)
    optimizer = torch.optim.AdamW(model.parameters(), llama.LEARNING_RATE)
    (step_1_losses, step_1_weights), losses = expected(), []
    for batch in llama.make_batches()[: len(step_1_losses)]:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_close(step_1_losses, losses, what="losses")
    for name, weight in step_1_weights.items():
        assert_close(weight, model.get_parameter(transformers_names(name)).detach(), what=name)

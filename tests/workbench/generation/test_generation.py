"""Generation in every layout: transformers' tokens and log-probabilities, the same draws, and nothing left behind."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.models import small_config
from conformance.worker_pool import WorkerPool
from tests.support.messages import error_of
from tests.support.oracle import CPU, assert_close, make_config, oracle_model, tiny_llama
from tests.support.training import stage_of
from workbench.generation import kv_cache
from workbench.generation import rotation as generation
from workbench.generation.rotation import Completion, generate
from workbench.generation.sampling import Sampling

MODEL = tiny_llama(num_hidden_layers=4, max_position_embeddings=512)
PROMPTS = [torch.randint(61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 7, 3, 12, 5, 2, 9)]
Prompts = list[list[int]]


def run(layout: str, cases: list[tuple[Prompts, Sampling]]) -> list[list[Completion]]:
    stage = stage_of(make_config(layout), MODEL)
    with mock.patch.object(kv_cache, "BLOCK", 8):
        return [generate(stage, prompts, sampling, len(PROMPTS) - len(prompts)) for prompts, sampling in cases]


def results(pool: WorkerPool, layout: str, cases: list[tuple[Prompts, Sampling]]) -> list[list[Completion]]:
    """Generate in a layout, check that all ranks have the same completions, and return them."""
    first, *others = pool.run(run, make_config(layout).distributed.world_size, layout, cases)
    assert all(other == first for other in others)
    return first


def assert_same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert len(one.log_probs) == len(one.tokens)
        if other.log_probs:
            assert_close(one.log_probs, other.log_probs)


@functools.cache
def reference() -> Any:
    return oracle_model(MODEL)


@functools.cache
def by_transformers(sampling: Sampling) -> list[Completion]:
    """Continue PROMPTS with transformers. The log-probabilities come from a second forward, in float64."""
    model, found, allowed = reference(), [], sampling.allowed_tokens
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": list(sampling.ends) or None}
    options |= {"min_new_tokens": sampling.min_new_tokens or None}
    if allowed:
        options["prefix_allowed_tokens_fn"] = lambda _, ids: allowed(ids.tolist())
    for prompt in PROMPTS:
        ids, length = torch.tensor([prompt]), sampling.length(len(prompt))
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_length=length, **options)
        with torch.no_grad():
            log_probs = model(input_ids=text[:, :-1], use_cache=False).logits[0].log_softmax(-1)
        log_probs = log_probs.gather(1, text[0, 1:, None])[len(prompt) - 1 :, 0]
        found.append(Completion(text[0, len(prompt) :].tolist(), log_probs.tolist()))
    return found


def allowed_after(tokens: list[int]) -> list[int]:
    """Return a third of the vocabulary, which depends on all tokens so far."""
    return [token for token in range(61) if (token + sum(tokens)) % 3 == 0]


@pytest.mark.parametrize("layout", ["dp2", "pp2 zbv tp2"])
def test_tokens_equal_transformers_and_draws_those_of_one_process(pool: WorkerPool, layout: str) -> None:
    plain = by_transformers(Sampling(20))
    end, first = plain[1].tokens[3], plain[3].tokens[0]  # the second one ends a sequence with its first token
    likeliest = [Sampling(20), Sampling(15, ends=(first, end))]
    likeliest += [Sampling(20, max_length=13), Sampling(15, ends=(end,), max_length=17)]  # 13: room for one or more
    ends = (first, end, 61)  # some tokenizers have an end token that the model lacks
    likeliest += [Sampling(15, ends=ends, allowed_tokens=each, min_new_tokens=6) for each in (None, allowed_after)]
    drawn = [Sampling(15, 0.9, top_k=20, top_p=0.8, seed=3, ends=(5,)), Sampling(25, 2.0, seed=1, ends=(5, 7, 11, 13))]
    cases = [(PROMPTS, sampling) for sampling in [*likeliest, *drawn]]
    *found, few, none = results(pool, layout, [*cases, ([PROMPTS[3]], Sampling(6)), (PROMPTS, Sampling(0))])
    assert_same(few, by_transformers(Sampling(6))[3:4])  # some groups are empty
    assert none == [Completion([], [])] * len(PROMPTS)
    (alone,) = pool.run(run, 1, "", cases[-2:])
    ((tail,),) = pool.run(run, 1, "", [(PROMPTS[2:], drawn[-1])])
    assert_same(tail, alone[-1][2:])
    for ours, theirs in zip(found, [*map(by_transformers, likeliest), *alone], strict=True):
        assert_same(ours, theirs)
    assert len({len(each.tokens) for each in found[-1]}) > 4  # sequences end at different times


def test_equal_prompts_share_a_prefill() -> None:
    group = generation.Group({0: [1, 2], 1: [1, 2], 2: [3]}, Sampling(3), 0, CPU)
    assert group.inputs["input_ids"].tolist() == [[1, 2, 3]]


# ------------------------------------------------------------------------------------------------------------- mistakes


def mistake(layout: str, prompts: Prompts, options: dict[str, Any]) -> str:
    stage = stage_of(make_config(layout), small_config("mixtral") if "ep2" in layout else MODEL)
    return error_of(lambda: generate(stage, prompts, Sampling(3, ends=(5,), **options)))


def end_only(tokens: list[int]) -> list[int]:
    return [5]


@pytest.mark.parametrize(
    ("layout", "prompts", "options", "problem"),
    [
        ("pp2", [[1], []], {}, "prompts[1] has no tokens"),
        ("dp2", [[1, 61]], {}, "prompts[0] has a token that is not in the vocabulary of 61 tokens"),
        ("", [[1, 2]], {"allowed_tokens": end_only, "min_new_tokens": 1}, "min_new_tokens=1 excludes the end tokens"),
        ("dp2 ep2", [[1, 2]], {}, "generate with ep_size=1"),
    ],
)
def test_mistakes_are_errors_on_every_rank(
    pool: WorkerPool, layout: str, prompts: Prompts, options: dict[str, Any], problem: str
) -> None:
    for found in pool.run(mistake, make_config(layout).distributed.world_size, layout, prompts, options):
        assert problem in found

"""Generation in every layout: transformers' tokens and log-probabilities, the same draws, and nothing left behind."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.oracle import assert_close, make_config, oracle_model, our_model, tiny_llama
from conformance.training import Loader, all_stages, batches, layout_name, stage_of, step_of, wrapped
from conformance.worker_pool import WorkerPool
from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.console import UserError
from picotron.generation import rotation as generation
from picotron.generation.rotation import Completion, generate
from picotron.generation.sampling import Sampling

MODEL = tiny_llama(num_hidden_layers=6, max_position_embeddings=512)
PROMPTS = [torch.randint(61, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 7, 3, 12, 5, 2, 9)]
Prompts = list[list[int]]


def config_of(layout: dict[str, Any], **changes: Any) -> Config:
    return make_config(**{f"distributed__{key}": value for key, value in layout.items()}, **changes)


def run(layout: dict[str, Any], cases: list[tuple[Prompts, Sampling]]) -> list[list[Completion]]:
    stage = stage_of(config_of(layout), MODEL)
    return [generate(stage, prompts, sampling) for prompts, sampling in cases]


def results(pool: WorkerPool, layout: dict[str, Any], cases: list[tuple[Prompts, Sampling]]) -> list[list[Completion]]:
    """Generate in a layout, check that all ranks have the same completions, and return them."""
    first, *others = pool.run(run, config_of(layout).distributed.world_size, layout, cases)
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
    return oracle_model(MODEL, our_model(MODEL, seed=42).state_dict())


def continued(prompt: Sequence[int], new: int, **options: Any) -> Completion:
    """Generate with transformers. The log-probabilities come from a second forward, in float64."""
    model, ids = reference(), torch.tensor([prompt])
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options)
    with torch.no_grad():
        log_probs = model(input_ids=text[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    log_probs = log_probs.gather(1, text[0, 1:, None])[len(prompt) - 1 :, 0]
    return Completion(text[0, len(prompt) :].tolist(), log_probs.tolist())


@functools.cache
def expected(prompt: tuple[int, ...], new: int) -> Completion:
    return continued(prompt, new) if new else Completion([], [])


def greedy(sampling: Sampling) -> list[Completion]:
    """Return the completions of PROMPTS, up to the first end token or the maximum length."""
    completions = [expected(tuple(prompt), 70) for prompt in PROMPTS]
    lengths = [
        min(
            [
                sampling.length(len(prompt)) - len(prompt),
                *(tokens.index(end) + 1 for end in sampling.ends if end in tokens),
            ]
        )
        for prompt, (tokens, _) in zip(PROMPTS, completions, strict=True)
    ]
    return [Completion(each.tokens[:n], each.log_probs[:n]) for each, n in zip(completions, lengths, strict=True)]


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp_size": 2},
    {"pp_size": 2, "tp_size": 2, "dp_size": 2},
    {"pp_size": 2, "pp_engine": "zbv"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_tokens_equal_transformers_and_draws_those_of_one_process(pool: WorkerPool, layout: dict[str, Any]) -> None:
    plain = greedy(Sampling(70))
    end, first = plain[1].tokens[3], plain[3].tokens[0]  # the second one ends a sequence with its first token
    samplings = [Sampling(70), Sampling(15, ends=(end,)), Sampling(15, ends=(first, end))]
    samplings += [
        Sampling(70, max_length=13),
        Sampling(15, ends=(end,), max_length=17),
    ]  # 13: room for one token or more
    samplings += [Sampling(15, 0.9, top_k=20, top_p=0.8, seed=3, ends=(5,)), Sampling(100, 2.0, seed=1, ends=(5, 7))]
    cases = [(PROMPTS, sampling) for sampling in samplings]
    found = results(pool, layout, cases)
    for ours, sampling in zip(found[:5], samplings, strict=False):
        assert_same(ours, greedy(sampling))
    (alone,) = pool.run(run, 1, {}, cases[5:])
    for ours, theirs in zip(found[5:], alone, strict=True):
        assert_same(ours, theirs)
    assert len({len(each.tokens) for each in found[-1]}) > 4  # sequences end at different times


EDGES: list[tuple[Prompts, int]] = [
    ([], 5),
    ([[5]], 6),  # fewer prompts than ranks
    ([[5], [7]], 1),
    ([[5], [7], [9]], 0),
    ([PROMPTS[3]], 70),
]


@pytest.mark.parametrize("layout", [{"pp_size": 3}, {"pp_size": 2, "dp_size": 2}], ids=layout_name)
def test_few_and_short_prompts(pool: WorkerPool, layout: dict[str, Any]) -> None:
    end = greedy(Sampling(70))[1].tokens[3]
    together = ([PROMPTS[1]] * 5, Sampling(70, ends=(end,)))  # all sequences end in the same round
    *found, ended = results(pool, layout, [*((prompts, Sampling(new)) for prompts, new in EDGES), together])
    for (prompts, new), ours in zip(EDGES, found, strict=True):
        assert_same(ours, [expected(tuple(prompt), new) for prompt in prompts])
    assert_same(ended, [greedy(Sampling(70, ends=(end,)))[1]] * 5)


def test_draws_depend_on_the_number_of_the_prompt(pool: WorkerPool) -> None:
    for ours in pool.run(numbered, 1):
        assert_same(ours["some"], ours["all"][2:5])
        assert len({tuple(each.tokens) for each in ours["copies"]}) == 4
        assert ours["other seed"] != ours["all"]


def numbered() -> dict[str, list[Completion]]:
    stage, sampling = stage_of(config_of({}), MODEL), Sampling(10, 1.0, seed=1)
    return {
        "all": generate(stage, PROMPTS, sampling),
        "some": generate(stage, PROMPTS[2:5], sampling, first=2),
        "copies": generate(stage, [PROMPTS[0]] * 4, sampling),
        "other seed": generate(stage, PROMPTS, Sampling(10, 1.0, seed=2)),
    }


# ------------------------------------------------------------------------------------- allowed tokens, several samples


def allowed_after(tokens: list[int]) -> list[int]:
    """Return a third of the vocabulary, which depends on all tokens so far."""
    return [token for token in range(61) if (token + sum(tokens)) % 3 == 0]


def tensor_after(tokens: list[int]) -> Tensor:
    return torch.tensor(allowed_after(tokens))


@pytest.mark.parametrize("layout", [{}, {"pp_size": 2, "tp_size": 2}], ids=layout_name)
def test_first_tokens_do_not_end_and_only_allowed_ones_are_drawn_as_in_transformers(
    pool: WorkerPool, layout: dict[str, Any]
) -> None:
    plain = greedy(Sampling(70))
    ends = (plain[3].tokens[0], plain[1].tokens[3], 61)  # some tokenizers have an end token that the model lacks
    constraints: list[dict[str, Any]] = [
        *({"min_new_tokens": least} for least in (1, 6, 15)),
        {"allowed_tokens": allowed_after},
        {"allowed_tokens": tensor_after, "min_new_tokens": 6},
    ]
    samplings = [Sampling(15, ends=ends, **each) for each in constraints]
    samplings += [Sampling(15, 1.0, seed=2, ends=ends, **each) for each in constraints]
    found = results(pool, layout, [(PROMPTS, sampling) for sampling in samplings])
    for ours, constraint in zip(found, constraints, strict=False):
        options: dict[str, Any] = {"eos_token_id": list(ends), "min_new_tokens": constraint.get("min_new_tokens")}
        if "allowed_tokens" in constraint:
            options["prefix_allowed_tokens_fn"] = lambda _, ids: allowed_after(ids.tolist())
        assert_same(ours, [continued(prompt, 15, **options) for prompt in PROMPTS])
    for completions, sampling in zip(found, samplings, strict=True):
        assert min(len(each.tokens) for each in completions) >= max(sampling.min_new_tokens, 1)
        for prompt, (tokens, _) in zip(PROMPTS, completions, strict=True):
            if sampling.allowed_tokens:
                assert all(token in allowed_after(prompt + tokens[:i]) for i, token in enumerate(tokens))
    (alone,) = pool.run(run, 1, {}, [(PROMPTS, sampling) for sampling in samplings[5:]])
    for ours, theirs in zip(found[5:], alone, strict=True):
        assert_same(ours, theirs)


def samples_of_one_prompt() -> tuple[list[Completion], list[Completion], list[Completion], list[int]]:
    stage, sampling = stage_of(config_of({}), MODEL), Sampling(4, 1.0, seed=1, num_return_sequences=500)
    computed: list[int] = []
    stage.module.model.layers["0"].register_forward_pre_hook(
        lambda _, inputs: computed.append(inputs[0][..., 0].numel())
    )
    together = generate(stage, PROMPTS[1:3], sampling)
    return together, generate(stage, PROMPTS[2:3], sampling, first=1), generate(stage, [[5]], sampling), computed[:4]


def test_samples_follow_the_probabilities_of_the_model_and_share_a_prefill(pool: WorkerPool) -> None:
    """Four standard deviations of the frequency of the likeliest first token in 500 independent draws."""
    ((together, second, other, computed),) = pool.run(samples_of_one_prompt, 1)
    assert_same(together[500:], second)
    assert computed == [len(PROMPTS[1]) + len(PROMPTS[2]), 1000, 1000, 1000]
    for prompt, completions in zip([*PROMPTS[1:3], [5]], [together[:500], second, other], strict=True):
        with torch.no_grad():
            probability, token = reference()(torch.tensor([prompt])).logits[0, -1].softmax(-1).max(-1)
        frequency = sum(each.tokens[0] == token for each in completions) / 500
        assert abs(frequency - probability) < 4 * (probability * (1 - probability) / 500) ** 0.5


# ------------------------------------------------------------------------------------------------------ communication

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "barrier")
COLLECTIVES += ("all_to_all_single", "broadcast", "broadcast_object_list", "reduce", "reduce_scatter_tensor", "gather")


def count_calls(layout: dict[str, Any], prompts: Prompts, new: int) -> tuple[int, Counter[str], Counter[str]]:
    """Return the pp rank, the number of collectives by name, and the number of tensors sent and received."""
    stage, collectives, messages = stage_of(config_of(layout), MODEL), Counter[str](), Counter[str]()
    start = dist.batch_isend_irecv

    def start_batch(operations: list[dist.P2POp]) -> Any:
        messages.update(operation.op.__name__ for operation in operations)
        return start(operations)

    def counted(name: str) -> Any:
        function = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            collectives[name] += 1
            return function(*arguments, **options)

        return mock.patch.object(dist, name, call)

    with mock.patch.object(dist, "batch_isend_irecv", start_batch):
        patches = [counted(name) for name in COLLECTIVES]
        for patch in patches:
            patch.start()
        generate(stage, prompts, Sampling(new))
        mock.patch.stopall()
    return pgm.process_group_manager.pp_rank, collectives, messages


@pytest.mark.parametrize("new", [1, 9])
def test_no_collective_per_token(pool: WorkerPool, new: int) -> None:
    """The tokens that travel with the hidden states say which sequences have ended; a single collective gathers the
    completions at the end. With tensor parallelism, its layers add theirs, and the drawn tokens are broadcast.
    """
    for count, groups in ((7, 2), (2, 1)):  # with one prompt for each pipeline, the second group is empty
        found = pool.run(count_calls, 4, {"pp_size": 2, "dp_size": 2}, PROMPTS[:count], new)
        for pp_rank, collectives, messages in found:
            assert collectives == {"all_gather_object": 1}
            forward, tokens = groups * (1 + 2 * (new - 1)), groups * (new - 1)
            assert messages["isend"] == (forward, tokens)[pp_rank]
            assert messages["irecv"] == (tokens, forward)[pp_rank]
    for _, collectives, messages in pool.run(count_calls, 2, {"tp_size": 2}, PROMPTS, new):
        per_forward = 1 + 2 * MODEL.num_hidden_layers  # the embedding, and each attention and MLP
        assert collectives == {"all_gather_object": 1, "broadcast": new, "all_reduce": per_forward * new}
        assert not messages


# ----------------------------------------------------------------------------------------------- training and memory


def train_between(layout: dict[str, Any], generates: bool) -> list[Any]:
    """Run two training steps, and return their losses and gradients, and the state of torch's random numbers."""
    config = config_of(layout, training__gradient_accumulation_steps=2)
    model, found = wrapped(config, MODEL), []
    for _ in range(2):
        if generates:
            assert len(generate(model.module, PROMPTS, Sampling(5, 1.0, ends=(3,)))) == len(PROMPTS)
        loss = step_of(config, MODEL)(model, Loader(batches(2)))
        found += [loss, all_stages(model.module.module, "main_grad")]
    return [*found, torch.get_rng_state()]


def test_training_continues_as_without_generation(pool: WorkerPool) -> None:
    layout = {"pp_size": 2, "tp_size": 2, "sequence_parallel": True, "pp_engine": "zbv"}
    for ours, alone in zip(*(pool.run(train_between, 4, layout, each) for each in (True, False)), strict=True):
        for one, other in zip(ours, alone, strict=True):
            if isinstance(one, dict):
                assert all(torch.equal(one[name], other[name]) for name in other)
            else:
                assert torch.equal(one, other)


def caches_at_the_end() -> list[int]:
    stage, groups = stage_of(config_of({}), MODEL), []
    with mock.patch.object(generation, "Group", lambda *arguments: groups.append(group(*arguments)) or groups[-1]):
        generate(stage, PROMPTS, Sampling(5))
        generate(stage, PROMPTS, Sampling(50, 2.0, ends=(5,)))
    return [each.cache.nbytes for each in groups]


group = generation.Group


def test_finished_groups_free_their_caches(pool: WorkerPool) -> None:
    assert pool.run(caches_at_the_end, 1) == [[0, 0]]


# ------------------------------------------------------------------------------------------------------------- mistakes


def mistake(layout: dict[str, Any], prompts: Prompts) -> str:
    with pytest.raises(UserError) as error:
        generate(stage_of(config_of(layout), MODEL), prompts, Sampling(3))
    return str(error.value)


def test_mistakes_have_a_sentence_on_every_rank(pool: WorkerPool) -> None:
    cases: list[tuple[dict[str, Any], Prompts, str]] = [
        ({"pp_size": 2}, [[1], []], "prompts[1] has no tokens; give it at least one"),
        (
            {"dp_size": 2},
            [[1, 61]],
            "prompts[0] has a token that is not in the vocabulary of 61 tokens; use the model's",
        ),
        ({"dp_size": 2, "dp_engine": "zero3"}, [[1]], "because dp_engine='zero3' divides them; use another dp_engine"),
    ]
    for layout, prompts, sentence in cases:
        for found in pool.run(mistake, 2, layout, prompts):
            assert sentence in found


def nothing(tokens: list[int]) -> list[int]:
    return [] if len(tokens) > 3 else [7]


def as_mask(tokens: list[int]) -> Tensor:
    return torch.ones(61, dtype=torch.bool)


def end_only(tokens: list[int]) -> list[int]:
    return [5]


def wrong_function(allowed: Callable[[list[int]], Any]) -> str:
    sampling = Sampling(3, ends=(5,), min_new_tokens=1, allowed_tokens=allowed)
    with pytest.raises(UserError) as error:
        generate(stage_of(config_of({}), MODEL), [[1, 2]], sampling)
    return str(error.value)


@pytest.mark.parametrize(
    ("allowed", "sentence"),
    [
        (
            nothing,
            "allowed_tokens returned [] for a sequence of 4 tokens; return one or more integers from 0 to 60, in a list or an int64 tensor",
        ),
        (as_mask, "allowed_tokens returned tensor([True, True"),
        (end_only, "no token is left to draw, because min_new_tokens=1 excludes the end tokens, and there are no"),
    ],
)
def test_functions_of_allowed_tokens_that_leave_no_token_or_an_unknown_one(
    pool: WorkerPool, allowed: Callable[[list[int]], Any], sentence: str
) -> None:
    assert pool.run(wrong_function, 1, allowed)[0].startswith(sentence)

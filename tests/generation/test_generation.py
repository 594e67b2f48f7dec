"""Generation in every layout: transformers' tokens and log-probabilities, the same draws, and nothing left behind."""

import functools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from picotron import process_group_manager as pgm
from picotron.config import Config
from picotron.console import UserError
from picotron.generation import rotation as generation
from picotron.generation.rotation import Completion, generate
from picotron.generation.sampling import Sampling
from tests.support.oracle import assert_close, make_config, oracle_model, our_model, tiny_llama
from tests.support.training import Loader, all_stages, batches, layout_name, stage_of, step_of, wrapped
from tests.support.worker_pool import WorkerPool

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


@functools.cache
def expected(prompt: tuple[int, ...], new: int) -> Completion:
    """Generate with transformers. The log-probabilities come from a second forward, in float64."""
    if new == 0:
        return Completion([], [])
    model, ids = reference(), torch.tensor([prompt])
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    with torch.no_grad():
        log_probs = model(input_ids=text[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    log_probs = log_probs.gather(1, text[0, 1:, None])[len(prompt) - 1 :, 0]
    return Completion(text[0, len(prompt) :].tolist(), log_probs.tolist())


def greedy(ends: tuple[int, ...], new: int) -> list[Completion]:
    """Return the completions of PROMPTS, up to the first end token."""
    completions = [expected(tuple(prompt), 70) for prompt in PROMPTS]
    lengths = [min([new, *(tokens.index(end) + 1 for end in ends if end in tokens)]) for tokens, _ in completions]
    return [Completion(each.tokens[:n], each.log_probs[:n]) for each, n in zip(completions, lengths, strict=True)]


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"pp_size": 2},
    {"pp_size": 3},
    {"pp_size": 6},
    {"tp_size": 2},
    {"tp_size": 4, "sequence_parallel": True},
    {"dp_size": 2},
    {"cp_size": 2},
    {"pp_size": 2, "dp_size": 2},
    {"pp_size": 2, "tp_size": 2, "dp_size": 2},
    {"pp_size": 2, "pp_engine": "interleaved_1f1b"},
    {"pp_size": 2, "pp_engine": "looped_bfs", "pp_chunks": 3},
    {"pp_size": 2, "pp_engine": "zbv"},
    {"pp_size": 3, "pp_engine": "dualpipev"},
    {"pp_size": 2, "pp_engine": "interleaved_1f1b", "cp_size": 2, "tp_size": 2, "sequence_parallel": True},
    {"pp_size": 3, "cp_size": 2, "pp_engine": "zbv"},
]


CORE = (4, 12)


@pytest.mark.parametrize(
    "layout",
    [each if i in CORE else pytest.param(each, marks=pytest.mark.parity) for i, each in enumerate(LAYOUTS)],
    ids=layout_name,
)
def test_tokens_equal_transformers_and_draws_those_of_one_process(pool: WorkerPool, layout: dict[str, Any]) -> None:
    plain = greedy((), 70)
    ends = [
        (),
        (plain[1].tokens[3],),
        (plain[3].tokens[0], plain[1].tokens[3]),
    ]  # one ends a sequence with its first token
    samplings = [Sampling(15, ends=end) if end else Sampling(70) for end in ends]
    samplings += [Sampling(15, 0.9, top_k=20, top_p=0.8, seed=3, ends=(5,)), Sampling(100, 2.0, seed=1, ends=(5, 7))]
    cases = [(PROMPTS, sampling) for sampling in samplings]
    found = results(pool, layout, cases)
    for ours, sampling in zip(found[:3], samplings, strict=False):
        assert_same(ours, greedy(sampling.ends, sampling.max_new_tokens))
    (alone,) = pool.run(run, 1, {}, cases[3:])
    for ours, theirs in zip(found[3:], alone, strict=True):
        assert_same(ours, theirs)
    assert len({len(each.tokens) for each in found[-1]}) > 4  # sequences end at different times


EDGES: list[tuple[Prompts, int]] = [
    ([], 5),
    ([[5]], 6),  # fewer prompts than ranks
    ([[5], [7]], 1),
    ([[5], [7], [9]], 0),
    ([PROMPTS[3]], 70),
]


@pytest.mark.parametrize("layout", [{}, {"pp_size": 3}, {"pp_size": 2, "dp_size": 2}], ids=layout_name)
def test_few_and_short_prompts(pool: WorkerPool, layout: dict[str, Any]) -> None:
    end = greedy((), 70)[1].tokens[3]
    together = ([PROMPTS[1]] * 5, Sampling(70, ends=(end,)))  # all sequences end in the same round
    *found, ended = results(pool, layout, [*((prompts, Sampling(new)) for prompts, new in EDGES), together])
    for (prompts, new), ours in zip(EDGES, found, strict=True):
        assert_same(ours, [expected(tuple(prompt), new) for prompt in prompts])
    assert_same(ended, [greedy((end,), 70)[1]] * 5)


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


# ------------------------------------------------------------------------------------------------------ communication

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "barrier")
COLLECTIVES += ("all_to_all_single", "broadcast", "broadcast_object_list", "reduce", "reduce_scatter_tensor", "gather")


def count_calls(layout: dict[str, Any], new: int) -> tuple[int, Counter[str], Counter[str]]:
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
        generate(stage, PROMPTS, Sampling(new))
        mock.patch.stopall()
    return pgm.process_group_manager.pp_rank, collectives, messages


@pytest.mark.parametrize("new", [1, 9])
def test_no_collective_per_token(pool: WorkerPool, new: int) -> None:
    """The tokens that travel with the hidden states say which sequences have ended; a single collective gathers the
    completions at the end. With tensor parallelism, its layers add theirs, and the drawn tokens are broadcast.
    """
    for pp_rank, collectives, messages in pool.run(count_calls, 4, {"pp_size": 2, "dp_size": 2}, new):
        assert collectives == {"all_gather_object": 1}
        groups = 2
        forward, tokens = groups * (1 + 2 * (new - 1)), groups * (new - 1)
        assert messages["isend"] == (forward, tokens)[pp_rank]
        assert messages["irecv"] == (tokens, forward)[pp_rank]
    for _, collectives, messages in pool.run(count_calls, 2, {"tp_size": 2}, new):
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


@pytest.mark.parametrize(
    "layout",
    [
        {"pp_size": 2, "tp_size": 2, "sequence_parallel": True, "pp_engine": "zbv"},
        {"cp_size": 2, "dp_size": 2, "dp_engine": "zero1"},
    ],
    ids=layout_name,
)
def test_training_continues_as_without_generation(pool: WorkerPool, layout: dict[str, Any]) -> None:
    for ours, alone in zip(*(pool.run(train_between, 4, layout, each) for each in (True, False)), strict=True):
        for one, other in zip(ours, alone, strict=True):
            if isinstance(one, dict):
                assert all(torch.equal(one[name], other[name]) for name in other)
            else:
                assert torch.equal(one, other)


def compiled() -> int:
    """Generate with compiled layers, and return the number of compiled functions."""
    torch._dynamo.utils.counters.clear()  # this process may have run other tests
    generate(stage_of(config_of({}, training__compile=True), MODEL), PROMPTS, Sampling(5))
    return sum(torch._dynamo.utils.counters["frames"].values())


def test_torch_compile_does_not_compile_for_every_length(pool: WorkerPool) -> None:
    assert pool.run(compiled, 1) == [0]


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

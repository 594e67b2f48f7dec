"""The fuzzer: corners that were once wrong, and random cases of fixed seeds."""

from typing import Any

import pytest

from conformance.fuzz.cases import CASES, SEED, Case, draw_case
from conformance.fuzz.check import check
from conformance.worker_pool import WorkerPool

MODEL = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "pad_token_id": None, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
OWN = {
    "kind": "own",
    "seed": 0,
    "loss": "cross_entropy",
    "documents": False,
    "weights": False,
    "ignored": 0.0,
    "scope": "global",
}


def case_of(tied: bool = False, data: dict[str, Any] | None = None, **changes: Any) -> Case:
    """Return a case on one process, with changed keys of the config, such as dp=2 or seq_length=7."""
    case: Case = {"resume": None, "frozen": [], "freezes_early": False, "between": False, "given_up": None}
    case |= {key: changes.pop(key) for key in list(changes) if key in case}
    config = {"training.seq_length": 8, "training.gradient_accumulation_steps": 2, "training.micro_batch_size": 2}
    config |= {f"distributed.{axis}_size": changes.pop(axis, 1) for axis in ("dp", "pp", "cp", "tp")}
    config |= {"training.adam_eps": 1e-4}
    for key, value in changes.items():
        section = "distributed" if key.startswith(("dp_", "pp_", "cp_", "sequence")) else "training"
        section = "checkpoint" if key == "async_save" else section
        config[f"{section}.{key}"] = value
    return case | {"model": MODEL | {"tie_word_embeddings": tied}, "config": config, "data": OWN | (data or {})}


CORNERS: dict[str, Case] = {
    "odd length": case_of(seq_length=7),
    "length 1": case_of(seq_length=1),
    "odd length, own loss, pipeline": case_of(data={"loss": "focal"}, seq_length=5, pp=2),
    "forward before the update, zero3 in a pipeline": case_of(dp=2, pp=2, dp_engine="zero3", between=True),
    "forward before the update, zero3": case_of(dp=2, dp_engine="zero3", between=True),
    "own loss, tied, zero3": case_of(tied=True, data={"loss": "focal"}, dp=2, dp_engine="zero3"),
    "head on some ranks only, zero3": case_of(
        data={"loss": "focal", "ignored": 0.9}, dp=2, dp_engine="zero3", micro_batch_size=1, seq_length=9
    ),
    "head on some ranks only, zero3, split backward": case_of(
        data={"loss": "focal", "ignored": 0.9}, dp=2, pp=2, dp_engine="zero3", pp_engine="zb_h1", micro_batch_size=1
    ),
    "logits, tied, zero3, recomputation": case_of(
        tied=True, data={"loss": "logits"}, dp=2, dp_engine="zero3", activation_checkpointing="full"
    ),
    "tied, zero3, V": case_of(tied=True, dp=2, pp=2, dp_engine="zero3", pp_engine="zbv", gradient_accumulation_steps=4)
    | {"model": MODEL | {"num_hidden_layers": 4, "tie_word_embeddings": True}},
    "dropped before its reduction, zero1": case_of(dp=2, dp_engine="zero1", given_up="unreduced"),
    "last backward fails, bucket": case_of(dp=2, given_up="backward"),
    "last backward fails, zero3": case_of(dp_engine="zero3", given_up="backward"),
    "ignored targets": case_of(data={"ignored": 0.9}, dp=2, cp=2),
    "ignored targets with weights": case_of(data={"ignored": 0.5, "weights": True}, dp=2, tp=2),
    "own loss, some targets have no weight": case_of(data={"loss": "focal", "weights": True}, dp=2, cp=2),
    "loss of whole sequences, tp": case_of(data={"loss": "preference", "ignored": 0.3}, cp=2, tp=2),
    "space in front of a text": case_of(data={"kind": "samples", "tokenizer": "prepend"}, dp=2, seq_length=37),
    "space in front of a turn": case_of(
        data={"kind": "conversations", "tokenizer": "metaspace first", "template": "Zephyr"}, pp=2, seq_length=61
    ),
    "frozen first stage, zero1": case_of(frozen=["embed_tokens", "layers.0."], dp=2, pp=2, dp_engine="zero1"),
    "frozen head, zero3": case_of(frozen=["lm_head", "layers.1."], dp=2, dp_engine="zero3", freezes_early=True),
    "frozen norms, zero3": case_of(frozen=["model.norm", "input_layernorm"], dp=2, dp_engine="zero3"),
    "frozen norms, zero3, recomputation": case_of(
        frozen=["norm", "embed_tokens"], dp=2, dp_engine="zero3", activation_checkpointing="full"
    ),
    "frozen queries, split backward": case_of(
        frozen=["q_proj"], pp=2, tp=2, pp_engine="zb_h1", sequence_parallel=True, gradient_accumulation_steps=3
    ),
    "one place of a tied matrix is frozen": {
        "modules": {
            "kind": "encoder-decoder",
            "engine": "zbv",
            "pp": 2,
            "dp": 1,
            "m": 3,
            "dp_engine": "zero1",
            "is_unequal": True,
            "frozen": [2],
        }
    },
    "saved before the first step": case_of(
        dp=2, dp_engine="zero1", resume={"after": 0, "config": {"distributed.dp_engine": "zero3"}}
    ),
    "saved in the background, before the first step, later, and twice": case_of(
        resume={"after": 1, "config": {}}, async_save=True
    ),
    "frozen and resumed": case_of(
        frozen=["embed_tokens", "mlp"],
        dp=2,
        dp_engine="zero3",
        resume={
            "after": 1,
            "config": {"distributed.dp_size": 1, "distributed.pp_size": 2, "training.micro_batch_size": 4},
        },
    ),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corners_equal_transformers(pool: WorkerPool, name: str) -> None:
    result = check(pool, CORNERS[name])
    assert result.outcome == "equal", result.text


GROUP = 15  # cases of a test; with xdist, any worker runs any group


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, CASES, GROUP))
def test_random_cases_equal_transformers(pool: WorkerPool, first: int) -> None:
    for number in range(first, first + GROUP):
        case = draw_case(SEED, number)
        result = check(pool, case)
        command = f"python -m conformance.fuzz --seed {SEED} --first {number} --cases 1"
        assert result.outcome != "different", f"case {number}: {result.text}\n{case}\nto simplify it: {command}"


def test_what_cannot_run_is_refused_with_a_sentence(pool: WorkerPool) -> None:
    refused = check(pool, case_of(seq_length=7, cp=2))
    assert refused.outcome == "refused"
    assert "seq_length=7 is not divisible by 4" in refused.text

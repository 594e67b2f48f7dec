"""The fuzzer: corners that were once wrong, and random cases of fixed seeds."""

from collections.abc import Iterable
from typing import Any

import pytest

from conformance.models import FAMILIES
from conformance.worker_pool import WorkerPool
from tests.fuzz.cases import CASES, SECTIONS, SEED, SIMPLE, Case, draw_case
from tests.fuzz.check import check
from tests.fuzz.pipelines import WRAPPERS
from tests.support.oracle import keys_of

MODEL = SECTIONS["model"] | {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6,
}  # fmt: skip
OWN = SECTIONS["data"] | {"kind": "own", "seed": 0}


def case_of(
    layout: str = "", tied: bool = False, data: Case | None = None, model: Case | None = None, **changes: Any
) -> Case:
    """Return a case in a layout, see `keys_of`, with changed data and model, and changed keys of the training, such as
    seq_length=7.
    """
    case: Case = SIMPLE | {key: changes.pop(key) for key in list(changes) if key in SIMPLE}
    config = {"training.seq_length": 8, "training.micro_batch_size": 2, "training.adam_eps": 1e-4}
    for key, value in keys_of(f"m2 {layout}").items():
        config[key.replace("__", ".") if "__" in key else f"distributed.{key}"] = value
    config |= {key if "." in key else f"training.{key}": value for key, value in changes.items()}
    model = MODEL | {"tie_word_embeddings": tied} | (model or {})
    return case | {"model": model, "config": config, "data": OWN | (data or {})}


def program_of(*operations: list[Any], **changes: Any) -> Case:
    """Return a program on one rank, see `draw_program`."""
    return {"program": SECTIONS["program"] | {"operations": list(operations)} | changes}


def in_turn(engines: Iterable[str], *operations: list[Any]) -> Case:
    """Return a program on two ranks that runs operations with one engine after the other."""
    return program_of(*(each for engine in engines for each in (["lay_out", engine, 2], *operations)), ranks=2)


BACKWARD, STEP, ZERO = ["backward", "plain", True, 1], ["step"], ["zero", "optimizer"]
UPDATE = ["clip", None], STEP, ZERO
ROUTED = ["backward", "routed", False, 1], ["backward", "routed", True, 3], *UPDATE
GIVEN_UP = ["backward", "plain", False, 1], ZERO, BACKWARD, ZERO, ["fails", "forward", 1], ["fails", "backward", 1]
CORNERS: dict[str, Case] = {
    "length 1": case_of(seq_length=1),
    "targets of weight 0 outside of the vocabulary": case_of("tp2", data={"weights": True}, micro_batch_size=8),
    "forward before the update, zero3 in a pipeline": case_of("dp2 pp2 zero3", between=True),
    "own loss, tied, zero3": case_of("dp2 zero3", tied=True, data={"loss": "focal"}),
    "head on some ranks only, zero3": case_of(
        "dp2 zero3", data={"loss": "focal", "ignored": 0.9}, micro_batch_size=1, seq_length=9
    ),
    "head on some ranks only, zero3, split backward": case_of(
        "dp2 pp2 zero3 zb_h1", data={"loss": "focal", "ignored": 0.9}, micro_batch_size=1
    ),
    "logits, tied, zero3, recomputation": case_of("dp2 zero3 full", tied=True, data={"loss": "logits"}),
    "tied, zero3, V": case_of("dp2 pp2 zero3 zbv m4", tied=True, model={"num_hidden_layers": 4}),
    "last backward fails, zero3": case_of("zero3", fails=True),
    "last backward fails, zero1": case_of("dp2 zero1", fails=True),
    "steps that are given up": in_turn(WRAPPERS, *GIVEN_UP, BACKWARD, *UPDATE, BACKWARD, *UPDATE),
    "frozen first stage, zero1": case_of("dp2 pp2 zero1", frozen=["embed_tokens", "layers.0."]),
    "frozen norms, zero3, recomputation": case_of("dp2 zero3 full", frozen=["norm", "embed_tokens"]),
    "frozen queries, split backward": case_of("pp2 tp2 zb_h1 sp m3", frozen=["q_proj"]),
    "one place of a tied matrix is frozen": {
        "modules": {"engine": "zbv", "pp": 2, "dp": 1, "m": 3, "dp_engine": "zero1", "frozen": [2], "copied": True}
    },
    "moving biases of routers, recomputation of some": case_of(
        "dp2 pp2 ep2 full m5",
        frozen=["layers.0."],
        model={"family": "dots1", **FAMILIES["dots1"][0], "first_k_dense_replace": 0},
        **{"schedule.pp_keep_activations": 1, "router_bias_rate": 0.1, "micro_batch_size": 1, "seq_length": 3},
    ),
    "no finish_grad_sync, zero3": program_of(BACKWARD, STEP, ZERO, BACKWARD, STEP, ZERO, ranks=2, engine="zero3"),
    "gradient penalty, zero3": program_of(["backward", "penalty", True, 1], STEP, engine="zero3", ranks=2),
    "torch's optimizer": program_of(BACKWARD, STEP, ["zero", "wrapper"], BACKWARD, optimizer="recipe", ranks=2),
    "layers that some ranks use in some micro-batches": in_turn(("naive", "bucket", "zero1"), *ROUTED, *ROUTED),
    "zero_grad between forward and backward": in_turn(WRAPPERS, ["zero_late", 1], *UPDATE),
    "every backward reduces on one rank": program_of(BACKWARD, BACKWARD, STEP, ZERO, BACKWARD, BACKWARD),
    "torch's habits": program_of(
        *(["hook", "backward"], ["count_steps"], ["compute", "parametrized"], ["average"], ["twin", "copied", 5]),
        *(BACKWARD, ["second", 3], STEP, ZERO, ["fails", "backward", 2], BACKWARD, STEP, ZERO, ["average"]),
        *(["lay_out", "zero1", 1], BACKWARD, ["clip", 0.1], STEP, ZERO, ["lay_out", "zero3", 2], BACKWARD),
        ranks=2,
    ),
    "a hook that reads weights, zero3": program_of(
        *(["compute", "pruned"], ["close_and_wrap", "zero3"], ["forward", "no_grad", 31], BACKWARD), ranks=2
    ),
    "ring of three ranks": case_of("cp3", seq_length=12),
    "tied over stages": case_of("dp2 pp2 m3", tied=True, max_grad_norm=0.1),
    "norms of heads, and heads that ranks share": case_of("tp4", model={"family": "qwen3", "intermediate_size": 12}),
    "projections that call their layers, and heads that ranks share": case_of(
        "tp4 sp",
        calls=True,
        model={"attention_bias": True, "mlp_bias": True, "pad_token_id": 20, "intermediate_size": 12},
    ),
    "experts of four ranks, most without tokens": case_of(
        "dp4 ep2", model={"family": "mixtral", **FAMILIES["mixtral"][1]}, seq_length=1, micro_batch_size=1
    ),
    "documents over cp": case_of("cp2", data={"documents": True, "loss": "focal"}),
    "preferences over cp": case_of("cp2", data={"loss": "preference"}),
    "micro-batches with other numbers of targets": case_of("m3", data={"ignored": 0.5}),
    "weights over dp": case_of("dp2", data={"weights": True}),
    "load_state_dict": program_of(BACKWARD, STEP, ZERO, ["reload"], BACKWARD, STEP, net="outside"),
}


@pytest.mark.parametrize("name", CORNERS)
def test_corners_equal_transformers(pool: WorkerPool, name: str) -> None:
    result = check(pool, CORNERS[name])
    assert result.outcome == "equal", result.text


GROUP = 5  # cases of a test; with xdist, any worker runs any group


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=pytest.mark.slow if first >= CASES else ()) for first in range(0, 6 * CASES, GROUP)],
)
def test_random_cases_equal_transformers(pool: WorkerPool, first: int) -> None:
    for number in range(first, first + GROUP):
        case = draw_case(SEED, number)
        result = check(pool, case)
        command = f"python -m tests.fuzz --seed {SEED} --first {number} --cases 1"
        assert result.outcome != "different", f"case {number}: {result.text}\n{case}\nto simplify it: {command}"


REFUSED: dict[str, tuple[Case, str]] = {
    "shared by two wrapped modules": (
        program_of(["share", "zero1"]),
        "0.weight is wrapped for data parallelism already",
    ),
    "added": (program_of(["append"], BACKWARD, STEP), r"layers.4.weight was added after"),
    "gradients that only torch's optimizer has cleared": (
        program_of(BACKWARD, STEP, ["zero", "only optimizer"], BACKWARD, optimizer="recipe"),
        "call zero_grad of the wrapper",
    ),
    "optimizer of the inner module": (program_of(BACKWARD, STEP, optimizer="module"), "pass the wrapper"),
    "new data, zero1": (program_of(BACKWARD, ["assign", "data", 1], engine="zero1"), "data has been replaced"),
    "new data, zero3": (program_of(["assign", "vector", 1], BACKWARD, engine="zero3"), "data has been replaced"),
    "unfrozen": (
        program_of(["unfreeze", "layers.0.bias"], BACKWARD, STEP, frozen=["layers.0.bias"]),
        "was unfrozen after",
    ),
    "copy of a wrapper": (program_of(["twin", "wrapped", 1]), "a wrapper cannot be copied or saved"),
    "copy with zero3": (program_of(["average"], engine="zero3"), "with ZeRO-3, before it is wrapped"),
    "frozen": (program_of(["freeze", "layers.0.bias"], BACKWARD, STEP), "was frozen after"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_a_sentence(pool: WorkerPool, name: str) -> None:
    case, sentence = REFUSED[name]
    refused = check(pool, case)
    assert refused.outcome == "refused", refused.text
    assert sentence in refused.text

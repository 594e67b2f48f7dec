"""Times of a step by formulas: FLOPs and bytes are those that other code counts, and published runs are met."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.forecast import RUNS, by_kind, rows
from picotron.console import UserError
from picotron.model.families import model_cost
from tests.support.oracle import make_config, tiny_llama
from workbench.explain.explain import run_stages
from workbench.explain.forecast_errors import ERRORS, describe_errors
from workbench.explain.hardware import HARDWARE, Hardware, read_hardware
from workbench.explain.step_time import Forecast, forecast
from workbench.pipelines.engine import plan_pipeline

MODEL = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
ONLY_LINKS = Hardware(  # computations and latencies take no time, so that nothing hides a message: seconds are bytes
    name="links", peak=0.0, gib=1.0, products={"bfloat16": 1e30, "float64": 1e30}, attention=1.0, attention_backward=1.0,
    memory=1e30, link=1.0, network=1.0, collective_launch=0.0, latency=0.0, network_latency=0.0, layer_launch=0.0,
    step_launch=0.0, step_wait=0.0, contention=0.0,
)  # fmt: skip
ONLY_PRODUCTS = dataclasses.replace(ONLY_LINKS, products={"float64": 1.0}, link=1e30, network=1e30)


def times(hardware: Hardware, layout: str, **model: Any) -> Forecast:
    config, model_config = make_config(layout), tiny_llama(**MODEL | model)
    return forecast(config, model_config, plan_pipeline(config, model_config), hardware)


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        "tp4 sp full",
        "cp2 all_gather",
        "cp4 ulysses",
        "dp4 zero3",
        "dp2 cp2 tp2 sp zero1",
    ],
)
def test_bytes_that_nothing_hides_are_those_of_the_played_step(layout: str) -> None:
    """The played step also sends three numbers per token for the loss, norms of gradients and the like: here, they are
    left out.
    """
    config = make_config(f"{layout} bfloat16 m2")
    model_config = tiny_llama(**MODEL)
    plan = plan_pipeline(config, model_config)
    found = forecast(config, model_config, plan, ONLY_LINKS).seconds
    (step,) = run_stages(config, model_config, plan)
    small = ("Softmax.of", "clip_grad_norm", "max_over_ranks", "global_mean", "sum_partial_gradients")
    sent = {"tp": 0.0, "cp": 0.0, "cp_dp": 0.0}
    for message, count in step.messages.items():
        if not message.call_site.endswith(small):
            sent[message.axis] += message.sent * count
    assert found.tp == pytest.approx(sent["tp"], rel=0.01)
    assert found.cp == pytest.approx(sent["cp"], rel=0.01)
    assert found.dp == pytest.approx(sent["cp_dp"], rel=0.03)


@pytest.mark.parametrize("recomputed", [False, True])
def test_flops_are_those_of_the_model(recomputed: bool) -> None:
    """Fused causal attention takes half of the FLOPs that MFU counts in forward (2 T H d instead of 4), and 5 T H d
    instead of 8 in backward, where it computes the scores again.
    """
    T, sequences = 16, 2 * 4
    found = times(ONLY_PRODUCTS, "m4 full" if recomputed else "m4")
    model = tiny_llama(**MODEL)
    attention, layers = 64 * T, model.num_hidden_layers
    expected = model_cost(model, T).flops - layers * (12 - 7) * attention
    expected -= 6 * (2 * layers + 1) * 64  # MFU counts the weights of norms
    if recomputed:  # forward again without down_proj, a third of the MLP
        layer = 64 * (64 * 2 + 32 * 2) + 2 * 64 * model.intermediate_size
        expected += layers * (2 * layer + 2 * attention)
    assert found.seconds.compute == pytest.approx(expected * T * sequences, rel=1e-6)
    assert found.step_time == pytest.approx(found.seconds.compute, rel=1e-6)


def test_bubble_and_messages_of_a_pipeline_follow_the_formulas() -> None:
    """Equal stages of 1F1B idle for (p - 1)/(m + p - 1) of a step. In ring order, p - 1 messages delay the first
    micro-batch on its way there, and as many on its way back.
    """
    found = times(ONLY_PRODUCTS, "pp4 1f1b m8", vocab_size=1)
    assert found.seconds.bubble / found.step_time == pytest.approx(3 / 11, rel=0.02)
    message = 2 * 16 * 64 * 8
    slow = dataclasses.replace(ONLY_PRODUCTS, link=message / (0.01 * found.step_time))  # a message: 1 % of a step
    assert times(slow, "pp4 1f1b m8", vocab_size=1).seconds.pp >= 0.06 * found.step_time * (1 - 1e-9)
    assert times(HARDWARE["H100"], "m3 bfloat16").seconds.bubble == 0  # its times end in digits that sums round


def test_a_tied_embedding_is_summed_over_the_first_and_the_last_stage() -> None:
    layout = "pp2 m4 bfloat16"
    tied, untied = (times(ONLY_LINKS, layout, tie_word_embeddings=tied).seconds.dp for tied in (True, False))
    model = tiny_llama(**MODEL)
    assert (tied, untied) == (4 * model.vocab_size * model.hidden_size, 0)
    in_a_v = times(ONLY_LINKS, f"{layout} zbv", tie_word_embeddings=True)
    assert in_a_v.seconds.dp == 0  # rank 0 has both


def test_messages_hide_behind_computation() -> None:
    """A reduction of the gradients takes 400 P here, of which the backward of 128 P hides most of its own time."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1}  # several buckets
    both = dataclasses.replace(ONLY_PRODUCTS, link=0.03)
    exposed = times(both, "dp4", **wide)
    alone = times(dataclasses.replace(ONLY_LINKS, link=0.03), "dp4", **wide).seconds.dp
    assert alone - 0.7 * exposed.seconds.compute < exposed.seconds.dp < alone - 0.6 * exposed.seconds.compute
    assert times(both, "dp4 naive", **wide).seconds.dp == pytest.approx(alone)
    on_cores = dataclasses.replace(both, cores=4)
    assert times(on_cores, "dp4", **wide).seconds.dp == pytest.approx(alone)
    fast = dataclasses.replace(both, link=1.0)  # hidden, except for the last bucket
    assert times(fast, "dp4", **wide).seconds.dp < 0.5 * alone * 0.03


def test_only_some_steps_of_a_ring_cross_nodes() -> None:
    """A ring over 4 nodes of 8 takes 31 steps, of which 3 leave a node; one message between nodes takes one."""
    latencies = dataclasses.replace(ONLY_LINKS, collective_launch=1.0, latency=100.0, network_latency=10_000.0)
    assert latencies.collective(8, 8, count=2, steps=7, sent=0.0) == 2 * 701
    assert latencies.collective(32, 8, count=2, steps=31, sent=0.0) == pytest.approx(2 * 32_801)
    assert latencies.collective(4, 1, count=1, steps=1, sent=0.0) == 10_001


# ------------------------------------------------------------------------------------------------------------- hardware


def test_hardware_of_ones_own_begins_with_that_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "H100", "network": 1e9, "name": "mine"}))
    assert read_hardware(path) == dataclasses.replace(HARDWARE["H100"], network=1e9, name="mine")
    path.write_text(json.dumps(dataclasses.asdict(HARDWARE["A100"])))
    assert read_hardware(path) == HARDWARE["A100"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"like": "H1000"}, 'like="H1000"'),
        ({"like": "H100", "latency": -1}, "latency=-1"),
        ({"like": "H100", "products": {"bfloat16": 0}}, "products.bfloat16=0"),
        ({"like": "H100", "node": 0, "speed": 1}, "2 problems:"),
    ],
)
def test_invalid_hardware_is_rejected(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=message):
        read_hardware(path)


def test_a_dtype_without_a_rate_is_rejected() -> None:
    with pytest.raises(UserError, match="no rate of products in float32, only in bfloat16, float64"):
        times(ONLY_LINKS, "float32")


# ------------------------------------------------------------------------------------------------------- published runs


@pytest.mark.parametrize(
    ("device", "dp", "of_this_gpu", "kinds"),
    [
        ("H100", 1, True, {"H100, 1 GPU"}),
        ("RTX4090", 16, False, {"RTX4090, 1 GPU", "RTX4090, 2 to 8 GPUs"}),
        ("L40S", 1, False, {"H100, 1 GPU", "H200, 1 GPU", "RTX4090, 1 GPU"}),
    ],
)
def test_errors_of_a_gpu_are_its_own_or_those_of_the_nearest_ones(
    device: str, dp: int, of_this_gpu: bool, kinds: set[str]
) -> None:
    text = describe_errors(make_config(f"dp{dp}"), HARDWARE[device], layout=False)
    assert {kind for kind in ERRORS if f"({kind})" in text} == kinds
    assert ("no published run" in text) is not of_this_gpu


@pytest.mark.slow
def test_errors_of_published_runs_are_those_of_the_table() -> None:
    found = by_kind(rows(RUNS))
    assert found.keys() == ERRORS.keys()
    for kind, each in found.items():
        assert each == pytest.approx(ERRORS[kind], abs=0.0006), kind

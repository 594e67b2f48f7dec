"""docs/when_an_axis_pays.md: rates of the forecast, numbers that follow from them, rules that the forecast confirms."""

import re
from pathlib import Path

import pytest
import torch

from docs.programs import axis_rules, axis_run
from docs.programs.axis_rules import DATA_SHEETS, MODEL, clock, load_model, places, rules
from docs.programs.noise_scale import noise_scale
from docs.solutions.axes import exposed_dp, largest_dp, largest_tp, tokens_that_hide_dp
from picotron.explain.hardware import HARDWARE, NETWORK_REACHED
from picotron.model.flops import model_cost, part_parameters
from picotron.pipeline_parallel.stages import Stage

H100 = DATA_SHEETS["H100"]


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_data_sheets_are_those_of_the_hardware(name: str) -> None:
    sheet, hardware = DATA_SHEETS[name], HARDWARE[name]
    assert sheet.products == hardware.peak
    reached = (hardware.memory / 0.85, hardware.link / 0.78, hardware.network / NETWORK_REACHED)
    assert reached == pytest.approx((sheet.memory, sheet.link, sheet.network))


def test_numbers_of_the_page_follow_from_the_rates() -> None:
    text = Path("docs/when_an_axis_pays.md").read_text()
    prose = " ".join(re.sub(r"^```console.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).split())
    near, far = H100.products / H100.link, H100.products / H100.network
    model = load_model()
    layer, D = part_parameters(model)[0], model.hidden_size
    for number in (
        f"it could do {far:,.0f} FLOPs",
        f"{H100.products / H100.memory:.0f} tokens on an H100",
        f"t >= 2 C/W: {2 * near:,.0f} tokens over NVLink, {2 * far:,.0f} over one network card",
        f"F / tp = 2/3 C/W: {2 / 3 * near:,.0f} over NVLink, {2 / 3 * far:,.0f} over the network",
        f"2 K/H C/W: {near / 2:,.0f} tokens over NVLink, {far / 2:,.0f} over the network",
        f"2/3 C/W: {2 / 3 * far:,.0f} over the network; one layer of Llama-3.1-8B has {round(layer / D, -3):,.0f}, four times",
        f"this is {4 * 8 * D / layer * near:.1f} for Llama-3.1-8B",
        f"({2 / 3 * near / (model.intermediate_size / 8):.1f} for its MLP alone)",
        f"W/C, {layer / (4 * D) / near:.0f} for Llama-3.1-8B over NVLink",
        f"t = {2 * near:,.0f}, dp ends at {round(4e6 / (2 * near), -1):,.0f} GPUs",
    ):
        assert number in prose, number
    assert round(layer / D / (2 / 3 * far)) == 4


def test_the_example_in_seconds_follows_from_the_rates() -> None:
    parameters = model_cost(load_model(), 1).parameters
    text = Path("docs/when_an_axis_pays.md").read_text().split("## An example in seconds")[1].split("## The rules")[0]
    backward = [4 * parameters * tokens / H100.products for tokens in (8192, 2048)]
    reduction = 2 * 4 * parameters / H100.link
    for number in (f"{parameters:.2e}".replace("e+0", "e"), *(f"{s:.3f} s" for s in (*backward, reduction))):
        assert number in text, number
    assert backward[0] > reduction
    assert f"{reduction - backward[1]:.3f} s" in text


@pytest.mark.parametrize("i", range(5))
def test_rules_agree_with_the_forecast_to_a_constant_factor(i: int) -> None:
    """Forecasts add attention, norms and the loss to the products, and use the rates that programs reach. Below some
    thousand tokens, they also wait for memory, of which the rules know nothing.
    """
    rule = rules(load_model())[i]
    for _, ratio, hardware in places():
        factors = [rule.by_rule(ratio, t) / rule.by_forecast(hardware, t) for t in (8192, 16384, 65536)]
        assert 1 < min(factors) <= max(factors) < 2.6, rule.name
        assert max(factors) / min(factors) < 1.3, rule.name


def test_solutions_agree_with_the_forecast() -> None:
    """With one node per rank and data-sheet rates, the forecast's reduction takes as long as its products."""
    assert largest_tp(28672, H100.products, H100.link) == 16
    assert largest_dp(16_000_000, 8192) == 1953
    model, far = load_model(), places()[1][2]
    whole = Stage(range(model.num_hidden_layers), has_embedding=True, has_head=True)
    reached = far.rate("bfloat16"), far.network
    times = clock(far, 8192, dp_size=64)
    computation = model_cost(model, 1).flops * 8192 / reached[0]  # products alone
    reduction = times.dp_messages(whole).reduction * 64 / 63
    assert exposed_dp(8192, 1, *reached) == pytest.approx(reduction / computation, rel=0.1)
    assert tokens_that_hide_dp(*reached) == pytest.approx(8192 * reduction / (2 / 3 * computation), rel=0.1)


def test_noise_scale_is_that_of_gradients_with_known_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, noise = torch.full((1000,), 0.1), torch.randn(512, 1000, generator=generator)
    assert noise_scale(mean + 0.5 * row for row in noise) == pytest.approx(0.25 * 1000 / (0.01 * 1000), rel=0.1)


def test_rule_of_a_run_is_independent_of_tokens_for_tp_only() -> None:
    dp, tp = ([axis_run.by_rule(axis, length, 100e9, 2e9) for length in (128, 512)] for axis in ("dp", "tp"))
    assert dp[0] > 3 * dp[1]
    assert tp[0] == pytest.approx(tp[1], rel=0.2)  # attention grows with the length


def test_ratios_have_a_row_for_each_rule() -> None:
    rows = axis_rules.ratios().splitlines()
    assert rows[0].startswith(f"{MODEL}, 8 ranks")
    assert [row.split(",")[0] for row in rows[3:]] == ["dp", "zero3", "tp 8", "cp 8", "pp 8"]

"""The first wrong tensor: it is the one that a mistake makes wrong, and there is none where nothing is wrong."""

import functools
import re
from pathlib import Path

import pytest
import torch

from conformance.check import Checker, Row
from conformance.mistakes import MISTAKES
from conformance.mutants import command
from conformance.trace_places import find, locate, settle

DDP, PLAIN_TP = "conformance/examples/ddp.py", "conformance/adapters/plain_tp.py"
RING = "conformance/examples/ring.py"
FSDP, TORCH_PP = "conformance/adapters/torch_fsdp.py", "conformance/adapters/torch_pp.py"


@functools.cache
def checker_of(adapter: str) -> Checker:
    return Checker(Path(adapter).resolve(), trace=True)


def traced(folder: Path, adapter: str, chapter: str, layout: str, old: str = "", new: str = "") -> Row:
    """Trace a chapter and a layout of an adapter with a text replaced."""
    source, variant = Path(adapter).read_text(), folder / "variant.py"
    assert not old or source.count(old) == 1
    variant.write_text(source.replace(old, new) if old else source)
    changes = {"last_step": 1 + ("zero_grad" in old)} if chapter == "run" else {}  # of five steps
    return checker_of(adapter).check(chapter, layout, adapter=variant, **changes)


FAST = (
    "ddp: weights_not_loaded",
    "ddp: gradients_not_set_to_zero",
    "pipeline: newest_micro_batch_first",
    "ring: stale_keys_in_backward",
    "tp: joined_matrix_split_as_one",
    "tp: backward_not_summed",
    "tp: key_heads_in_another_order",
)


@pytest.mark.processes
@pytest.mark.parametrize("name", FAST)
def test_a_mistake_is_placed(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    _, _, adapter, _, chapter, _, layout = command(mistake.found_by[-1], mistake.file)
    row = traced(tmp_path, adapter, chapter, layout, mistake.old, mistake.new)
    assert row.verdict == "differs"
    assert re.search(mistake.place, row.trace), row.trace


RECOMPUTED = (
    "__import__('torch.utils.checkpoint').utils.checkpoint.checkpoint(logits_of, model, piece, use_reentrant={})"
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("adapter", "chapter", "layout", "old", "new"),
    [
        (PLAIN_TP, "run", "tp2", "", ""),  # (T, B, D), joined matrices and other names
        (DDP, "run", "dp2", "", ""),  # each document is a padded row
        (TORCH_PP, "step", "pp2", "", ""),  # its trial with uninitialised memory has right rotary angles
        # shards that are stored only, not the heads that a rank computes
        pytest.param(FSDP, "step", "dp4 kv1", "", "", marks=pytest.mark.slow),
        (DDP, "step", "dp2", "logits_of(model, piece)", RECOMPUTED.format(False)),
    ],
)
def test_nothing_is_wrong_where_all_is_equal(
    adapter: str, chapter: str, layout: str, old: str, new: str, tmp_path: Path
) -> None:
    row = traced(tmp_path, adapter, chapter, layout, old, new)
    assert row.verdict == "equal"
    assert re.fullmatch(r"traced: [1-9]\d+ tensors of \d+ of (30|56) modules are equal", row.trace), row.trace


EVALUATED = """        result.grad_norms.append(norm.item())
        with torch.no_grad():
            own = case.evaluation()
            losses = case.token_losses(logits_of(model, own), own["target_ids"]) * weights_of(own)
        result.evaluations.append((losses.sum() / weights_of(own).sum()).item())
"""


@pytest.mark.processes
def test_an_update_is_wrong_before_the_evaluation_after_it(tmp_path: Path) -> None:
    path, source = tmp_path / "variant.py", Path(DDP).read_text().replace("_rates[step]", "_rates[step] * 1.01")
    path.write_text(source.replace("        result.grad_norms.append(norm.item())\n", EVALUATED))
    row = checker_of(DDP).check("step", "dp2", adapter=path, evaluates=True)
    assert (row.difference["what"], row.wrong["phase"]) == ("evaluation", "UPDATE"), row


@pytest.mark.processes
def test_numbers_that_are_a_little_wrong_are_not_those_of_another_token(tmp_path: Path) -> None:
    """Before attention, equal tokens have equal numbers."""
    hook = "lambda *_: _[-1] + 5e-9 * _[-1].sign()"
    line = "    optimizer = adamw(model.parameters(), case)\n"
    wrong = f"    model.model.layers[0].self_attn.q_proj.register_forward_hook({hook})\n{line}"
    row = traced(tmp_path, DDP, "step", "dp2", line, wrong)
    assert "layers.0.self_attn.q_proj output on ranks 0, 1 is " in row.trace
    assert ", off by " in row.trace


@pytest.mark.processes
def test_a_trial_with_any_numbers_is_not_what_is_wrong(tmp_path: Path) -> None:
    """torch's pipeline finds out shapes by a forward with uninitialised memory, here one that becomes NaN."""
    hook = "lambda *_: calls.append(0) or _[-1] * (float('nan') if len(calls) == 1 else 1.1)"
    line = "    model, total, losses ="
    rest = "case.model(), torch.zeros(()), list[Tensor]()\n"
    wrong = f"{line} {rest}    calls = []\n    model.model.layers[2].mlp.down_proj.register_forward_hook({hook})\n"
    row = traced(tmp_path, TORCH_PP, "step", "pp2", f"{line} {rest}", wrong)
    assert "layers.2.mlp.down_proj output on rank 1 is 1.1 times what it should be" in row.trace


@pytest.mark.processes
def test_rotary_angles_do_not_depend_on_the_numbers_of_their_input(tmp_path: Path) -> None:
    """A stage gives the hidden states that it receives, and not embeddings."""
    line = "    modules = ["
    wrong = f"    model.model.layers[2].input_layernorm.eps = 1e-5\n{line}"
    row = traced(tmp_path, TORCH_PP, "step", "pp2", line, wrong)
    assert "layers.2.input_layernorm output on rank 1 is " in row.trace


@pytest.mark.processes
def test_positions_in_another_order_are_told_from_other_positions(tmp_path: Path) -> None:
    row = traced(tmp_path, RING, "step", "cp2", 'piece["position_ids"]', 'piece["position_ids"].flip(1)')
    assert "rotary_emb output on ranks 0, 1 holds row 0, tokens 0-19 in another order" in row.trace


@pytest.mark.processes
def test_what_is_not_compared_is_not_called_equal(tmp_path: Path) -> None:
    compiled = "    model._compiled_call_impl = model._call_impl\n    optimizer = adamw"
    row = traced(tmp_path, DDP, "step", "dp2", "    optimizer = adamw", compiled)
    assert row.verdict == "equal"
    assert row.trace.startswith("not traced: torch.compile"), row.trace


def test_tokens_with_the_same_numbers_are_told_apart_by_their_neighbours() -> None:
    ids = torch.tensor([[5, 1, 2, 3], [5, 4, 1, 2]])
    for rows in (ids[[1, 0]], ids[[1, 0]].T):  # (B, T) and (T, B)
        votes = 10 * (rows.flatten()[:, None] == ids.flatten()).int()
        votes[0, 0] += 1  # a wrong number of this token is one of the other token with its id by accident
        tokens = settle(votes, tuple(rows.shape), 4).view(rows.shape)
        expected = torch.tensor([[4, 5, 6, 7], [0, 1, 2, 3]])
        assert torch.equal(tokens, expected if rows.shape == (2, 4) else expected.T)


def test_parts_are_found_by_their_numbers() -> None:
    whole = torch.rand(6, 4, dtype=torch.float64)
    columns = find(whole[:, [3, 1]], whole)
    assert columns is not None
    assert columns.tolist() == [3, 1]
    assert find(whole[:, :2] + 1e-6, whole) is None
    assert locate(whole[2:4] + 1, whole) is None
    assert locate(whole.flatten()[None, :5], whole) is None

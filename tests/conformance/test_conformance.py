"""The check of trainers: it finds mistakes, and says where; it is independent of picotron, which passes it."""

import dataclasses
import functools
import json
import os
import pickle
import re
import shutil
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from conformance import Case, Part, Result, __version__, rounding
from conformance.__main__ import main
from conformance.case import LOSSES, cross_entropy, weights_of
from conformance.chapters import CHAPTERS, cases_of
from conformance.check import Checker, Row
from conformance.compare import Limits, compare
from conformance.mistakes import MISTAKES, REPORTED, SHOWN
from conformance.mutants import command
from conformance.precision import check_precision
from conformance.reference import Reference, run_reference, train
from conformance.rounding import Rounding, limits_of
from conformance.worker_pool import WorkerPool
from tests.test_structure import imports

DDP, ZERO1, TENSOR, PIPELINE, RING = (
    Path(f"conformance/examples/{name}.py") for name in ("ddp", "zero1", "tensor", "pipeline", "ring")
)
PICOTRON = Path("conformance/adapters/picotron.py")
DISTRIBUTION = tomllib.loads(Path("conformance/pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]


@pytest.mark.parametrize("module", DISTRIBUTION)
def test_a_module_of_the_distribution_imports_nothing_else(module: str) -> None:
    names = {*imports(Path(module.replace(".", "/") + ".py"))}
    own = {name for name in names if name.startswith("conformance.")}
    assert {name.rpartition(".")[0] for name in own} <= {*DISTRIBUTION, "conformance"}
    allowed = {"torch", "transformers", "safetensors", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in names - own} <= allowed


# ---------------------------------------------------------------------------------------------------------- comparison


def right(**changes: object) -> Reference:
    weight = torch.arange(1, 13, dtype=torch.float64).view(3, 4)
    base = Reference(
        [2.0, 1.0], [3.0, 3.0], [{"w": weight}, {"w": weight}], {"w": weight}, initial={"w": torch.zeros(3, 4)}
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def result(gradient: Tensor | None = None, weight: Tensor | None = None, **changes: object) -> Result:
    whole = right().weights["w"]
    given = Result(
        [2.0, 1.0],
        [3.0, 3.0],
        {"w": whole if gradient is None else gradient},
        {"w": whole if weight is None else weight},
    )
    return dataclasses.replace(given, **changes).local()  # type: ignore[arg-type]


def sentence(*results: Result) -> str:
    return str(compare(results, right())[1])


def test_the_first_difference_is_named() -> None:
    whole = right().weights["w"]
    off = whole.clone()
    off[1, 2] = 7.1
    assert sentence(result(), result(gradient=off)) == (
        "step 1: gradient of w[1, 2] on rank 1 is 7.1, not 7 (error 8.3e-03, bound 1.0e-09)"
    )
    assert "step 2: gradient norm on ranks 0, 1 is 6, not 3" in sentence(*[result(grad_norms=[3.0, 6.0])] * 2)
    assert "step 2: weight of w[1, 2] on rank 0 is 7.1" in sentence(result(weight=off))
    assert "nan" in sentence(result(losses=[float("nan"), 1.0]))


def test_what_is_missing_is_a_difference() -> None:
    assert "loss; no rank returned it" in sentence(result(losses=[]))
    assert "1 values for 2 steps" in sentence(result(losses=[2.0]))
    assert "the model has no parameter v" in sentence(
        dataclasses.replace(result(losses=[9.0, 9.0]), weights={"v": Part(torch.ones(1), (0,))})
    )  # before the numbers of another model
    assert "a part of shape [4, 3]" in sentence(result(weight=torch.ones(4, 3)))
    assert "weight; no rank returned it" in sentence(dataclasses.replace(result(), weights={}))
    reference = right(tokens=[(1, 2), (3, 4), (5, 6)])
    assert "are {(2, 2)}, not (2, 2, 2)" in str(compare([result(tokens=[(1, 2), (3, 4)])], reference)[1])


def test_parts_are_compared_where_they_are() -> None:
    whole = right().weights["w"]
    halves = [result(), result()]
    for rank, each in enumerate(halves):
        each.weights = {"w": Part(whole[:, 2 * rank : 2 * rank + 2].clone(), (0, 2 * rank))}
        each.gradients = [{"w": Part(whole.flatten()[6 * rank : 6 * rank + 6].clone(), (6 * rank,))}]
    assert compare(halves, right())[1] is None
    halves[1].gradients[0]["w"].tensor[1] += 1
    assert "gradient of w[1, 3] on rank 1 is 9, not 8" in sentence(*halves)
    assert "step 1: gradient of w[1, 2]; no rank returned it" in sentence(halves[0])


def part_of_rows(size: int) -> Part:
    """Return the part of a matrix (8, 2) of whose halves each of two ranks has two rows."""
    mesh = init_device_mesh("cpu", (size,))
    matrix = torch.arange(16.0).view(2, size, 2, 2)  # halves, ranks, rows, columns
    local = matrix[:, dist.get_rank()].reshape(4, 2)
    return (
        Result(weights={"w": DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)])}).local().weights["w"]
    )


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot gather it")
def test_a_part_in_several_pieces_is_gathered(pool: WorkerPool) -> None:
    for part in pool.run(part_of_rows, 2, 2):
        assert part.start == (0, 0)
        assert part.tensor.equal(torch.arange(16.0).view(8, 2))


@pytest.mark.parametrize("chapter", ["run", "float32", "mixed"])
@pytest.mark.parametrize("without", [("documents", "evaluation"), ("documents", "masks", "weights")])
def test_no_two_meanings_have_the_same_value(chapter: str, without: tuple[str, ...], tmp_path: Path) -> None:
    """A size, a learning rate or a number of targets in place of another one shows. Some steps are clipped."""
    cases = cases_of(chapter, "dp2", "dp1", tmp_path / "cases", without)
    case, config = cases[-1], cases[-1].model().config
    assert len({*case.learning_rates, case.learning_rate * case.min_lr_ratio}) == case.total_steps + 1
    assert case.learning_rates[case.first_step] != case.learning_rate == case.learning_rates[case.warmup_steps]
    rows, length = case.batch(0)["input_ids"].shape
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sizes = [rows, length, heads, kv, width, kv * width]
    sizes += [config.vocab_size, config.hidden_size, config.intermediate_size]
    assert len({*sizes}) == len(sizes)
    assert case.first_step not in (0, case.last_step - case.first_step, case.warmup_steps, case.last_step)
    if "masks" not in without:
        targets = [weights_of(case.batch(step)).sum() for step in range(-1, case.last_step)]
        assert len({round(each.item(), 9) for each in targets}) == len(targets)
        assert all(abs(each.bfloat16().double() / each - 1) > 3e-3 for each in targets)
    norms = run_reference(case).grad_norms
    assert case.max_grad_norm is not None
    assert min(norms) < case.max_grad_norm < max(norms)


Mixed = tuple[list[Case], Reference, Limits]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    folder = tmp_path_factory.mktemp("mixed") / "cases"
    short = dataclasses.replace(CHAPTERS["mixed"], shape=(4, 160))
    with mock.patch.dict(CHAPTERS, mixed=short), mock.patch.object(rounding, "RUNS", 8):
        cases = cases_of("mixed", "dp2", "dp1", folder, ("documents", "evaluation"))
        exact = run_reference(cases[-1])
        return cases, exact, limits_of(cases, exact)


Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight"


def in_bfloat16(gradient: Tensor) -> Tensor:
    return (3 * gradient).bfloat16().double() / 3  # sums of losses, of which 3 are averaged afterwards


@pytest.mark.parametrize(
    ("changes", "name", "of_gradient", "norm", "says"),
    [
        ({}, "", None, 1.0, "None"),
        ({"loss": "larger"}, "", None, 1.0, "all of them together are 1.00"),
        ({}, NORM, in_bfloat16, 1.0, f"gradient of {NORM}.*no more bits than bfloat16"),
        ({}, Q_PROJ, lambda x: x * (1 + 2**-5), 1.0, f"gradient of {Q_PROJ} .*it is 1.03.* times"),
        ({"learning_rate": 1.01e-2}, "", None, 1.0, "its update is 1.01 times AdamW's"),
        ({"eps": 1.01e-2}, "", None, 1.0, "its update is 0.99.* times AdamW's"),
        ({"max_grad_norm": None}, "", None, 1.0, "its update is 1.* times AdamW's"),
        ({"weight_decay": 0.0}, "", None, 1.0, "its update is .* times AdamW's"),
        ({}, "", None, 1 + 2**-14, "gradient norm .* that of the trainer's own gradients"),
    ],
)
def test_faults_below_the_rounding_of_bfloat16_are_found(
    changes: dict[str, Any],
    name: str,
    of_gradient: Callable[[Tensor], Tensor] | None,
    norm: float,
    says: str,
    mixed: Mixed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer is a run whose operations are rounded by other errors than those of the limits."""
    cases, exact, limits = mixed
    monkeypatch.setitem(LOSSES, "larger", lambda *x: cross_entropy(*x) * (1 + 2**-8))
    trained = dataclasses.replace(cases[-1], dtype="float64", **changes)
    model = trained.model()
    if name == Q_PROJ:
        model.get_parameter(name).register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", of_gradient(p.grad)))
    found = train(model, trained, trained.batch, rounding=Rounding(torch.bfloat16, 99, model))
    for step, each in enumerate(found.gradients):
        each |= {name: of_gradient(each[name])} if name == NORM else {}  # after the mode that rounds all operations
        found.grad_norms[step] = norm * torch.nn.utils.get_total_norm([*each.values()]).item()
    difference = None
    parts = list[tuple[Case, list[Result]]]()
    for case in cases:
        parts.append((case, [found.of(case).local()]))
        difference = difference or check_precision(parts, exact.of(case), limits)
    assert re.search(says, str(difference)), difference


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["tp2", "tp4 sp"])
def test_picotron_adds_nothing_to_the_rounding_of_bfloat16(layout: str, mixed: Mixed, tmp_path: Path) -> None:
    cases, *reference = mixed
    folder = Path(shutil.copytree(cases[0].folder, tmp_path / "1"))
    case = dataclasses.replace(cases[0], layout=layout, folder=folder)
    case.write()
    checker, row = Checker(PICOTRON), Row("mixed", layout)
    checker.known[checker.key(cases[-1])] = (*reference,)
    checker.start(case)
    checker.judge(case, row, cases)
    assert row.verdict == "equal", row


def test_weights_of_norms_are_rounded() -> None:
    """In bfloat16, a weight of 1 hides the first small updates."""
    outputs = []
    for weight in (1.0, 1 + 2**-10):
        norm = LlamaRMSNorm(8).double()
        torch.nn.init.constant_(norm.weight, weight)
        with Rounding(torch.bfloat16, 0, norm):
            outputs.append(norm(torch.arange(8.0).double()))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------- whole adapters


@functools.cache
def checker_of(path: Path) -> Checker:
    return Checker(path.resolve())


POLAR = """    def forward(self, x, position_ids):  # as Llama's own code does
        angles = position_ids[..., None].float() * self.inv_freq.float()
        both = torch.polar(torch.ones_like(angles), angles)
        return tuple(torch.cat([part, part], -1).to(x.dtype) for part in (both.real, both.imag))
    model.model.rotary_emb.forward = forward.__get__(model.model.rotary_emb)
"""


@pytest.mark.processes
def test_only_the_last_bits_of_rotary_tables_may_differ(tmp_path: Path) -> None:
    source, path, line = DDP.read_text(), tmp_path / "polar.py", "    optimizer = adamw("
    path.write_text(source.replace(line, POLAR + line))
    row = checker_of(DDP).check("step", "dp2", adapter=path)
    assert row.verdict == "equal", row
    assert "but for float32 rotary tables" in row.detail
    slightly = "p.grad.mul_(1 + 1e-7).clone() for"
    path.write_text(source.replace("p.grad.clone() for", slightly))
    assert checker_of(DDP).check("step", "dp2", adapter=path).verdict == "differs"  # the tables are equal
    path.write_text(source.replace("case.learning_rates[step]", "float(torch.tensor(case.learning_rates[step]))"))
    row = checker_of(DDP).check("run", "dp2", adapter=path, last_step=2)
    assert row.verdict == "differs"  # from the second step on


def test_a_run_resumes_in_a_layout_that_the_adapter_offers() -> None:
    plan = checker_of(DDP).plan(["run"], ["dp2", "tp2", "dp4"])
    assert [*plan] == [("run", "dp2", "dp4"), ("run", "tp2", "tp2"), ("run", "dp4", "dp2")]
    assert [*checker_of(DDP).plan(["run"], ["tp2", "dp2"])][1] == ("run", "dp2", "dp1")


@pytest.mark.processes
def test_a_family_of_the_adapter_s_own(tmp_path: Path) -> None:
    """A stranger's mixture of experts is checked with transformers' model of it."""
    path = tmp_path / "own.py"
    config = {"model_type": "qwen2_moe", "num_experts": 6, "shared_expert_intermediate_size": 24}
    path.write_text(f"{DDP.read_text()}\nCONFIG = {config}\n")
    checker = Checker(path)
    row = checker.check("step", "dp2")
    assert row.verdict == "equal", row
    assert not any("qwen2" in layout for _, layout, _ in checker.plan(["run"]))


def test_mistakes_can_be_planted_and_looked_for() -> None:
    """Each replaces a text that occurs once. Its checks exist, and pages show what they should."""
    for name, mistake in MISTAKES.items():
        assert Path(mistake.file).read_text().count(mistake.old) == 1, name
        for check in mistake.found_by:
            words = command(check, mistake.file)
            exists = check == "fuzz" or words[4] in CHAPTERS or Path(words[-1].partition("::")[0]).exists()
            assert exists, (name, check)
    for page, shown in SHOWN.items():
        assert shown.keys() <= MISTAKES.keys()
        assert f"mutants --page {page}" in Path(f"docs/{page}.md").read_text()
    assert REPORTED.keys() <= MISTAKES.keys()


@pytest.mark.processes
def test_a_row_that_fails_in_the_layout_of_its_resume_names_it(tmp_path: Path) -> None:
    path, line = tmp_path / "trainer.py", "    model, gradients, result ="
    source = DDP.read_text().replace(', "resume")', ",)")
    path.write_text(source.replace(line, f"    case.require(ranks < 4, 'four ranks are too many')\n{line}"))
    row = Checker(path).check("run", "dp2", "dp4")
    assert (row.verdict, row.detail) == ("not offered", "resumed in dp4: four ranks are too many")


EXAMPLES = {DDP: "dp2", ZERO1: "dp2", TENSOR: "tp2", PIPELINE: "pp4", RING: "cp2"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "chapter"),
    [
        pytest.param(path, chapter, marks=() if (path, chapter) == (PIPELINE, "step") else pytest.mark.slow)
        for path in EXAMPLES
        for chapter in CHAPTERS
    ],
    ids=lambda value: value if isinstance(value, str) else value.stem,
)
def test_an_example_is_equal(chapter: str, path: Path) -> None:
    row = checker_of(path).check(chapter, EXAMPLES[path])
    assert row.verdict == ("equal" if chapter in checker_of(path).adapter.CHAPTERS else "not offered"), row


@pytest.mark.processes
def test_rows_with_other_parts_have_other_references() -> None:
    for layout in ("dp2", "dp2 no_weights"):
        assert checker_of(DDP).check("run", layout, last_step=1).verdict == "equal"


@pytest.mark.processes
def test_a_rank_that_waits_forever_and_one_that_raises_are_named(tmp_path: Path) -> None:
    source, path, line = DDP.read_text(), tmp_path / "wrong.py", "        dist.all_reduce(loss)\n"
    path.write_text(source.replace(line, "        rank or dist.recv(loss, 1)\n"))
    checker_of(DDP).check("step", "dp1")  # the process that starts the ranks is there
    checker = Checker(path, timeout=5)
    row = checker.check("step", "dp2")
    number = source.split(line)[0].count("\n") + 1
    assert row.verdict == "hangs"
    assert f"rank 0 is in line {number} of wrong.py; rank 1 is in line " in row.detail
    path.write_text(source.replace(line, "        assert rank == 0, 'rank 1\\n  has no loss'\n"))
    row = checker.check("step", "dp2")
    assert row.verdict == "crashed"
    assert row.detail == "rank 1: AssertionError: rank 1 has no loss"
    path.write_text(source.replace(line, f"        rank and __import__('os')._exit(1)\n{line}"))
    assert checker.check("step", "dp2").detail == "rank 1 has ended its process"


@pytest.mark.processes
def test_no_other_program_gets_the_port_of_ranks_which_can_listen_again(tmp_path: Path) -> None:
    line, place = '    dist.init_process_group("gloo")\n', "('localhost', int(os.environ['MASTER_PORT']))"
    on_rank_1 = "int(os.environ['RANK'])"
    again = "dist.barrier()\n    while dist.get_rank() and not (case.folder / 'ended').exists(): pass\n"
    again += "    dist.destroy_process_group()\n    (case.folder / 'ended').touch()\n"
    for before, says in (
        (f"socket.socket().bind({place})\n", "Address already in use"),
        (f"own = {on_rank_1} or socket.create_server({place})\n", "The server socket has failed to listen"),
        (f"{line.strip()}\n    {again}", ""),
    ):
        path = tmp_path / "adapter.py"
        path.write_text(DDP.read_text().replace(line, f"    import os, socket\n    {before}{line}"))
        row = checker_of(DDP).check("step", "dp2", adapter=path)
        assert (row.verdict == "equal") == (not says)
        assert says in row.detail


def status_of(*words: Any) -> int:
    """Return the exit status of `python -m conformance` with these words."""
    with mock.patch.object(sys, "argv", ["conformance", *map(str, words)]):
        return main()


@pytest.mark.processes
@pytest.mark.parametrize("line", ["LACKS = ('mask',)", "LACKS = 'masks'", "KNOWN = {('step', 'dp1'): 'because'}"])
def test_a_wrong_list_of_an_adapter_is_a_sentence(line: str, tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text(f"{line}\nCHAPTERS = ('step',)\ndef run(case): ...\n")
    with pytest.raises(SystemExit, match=line.partition(" ")[0]):
        status_of(tmp_path / "adapter.py", "--layouts", "dp1")


def test_a_run_that_checks_nothing_is_no_success(tmp_path: Path) -> None:
    adapter = tmp_path / "mistyped.py"
    adapter.write_text("AXES = ('data',)\nCHAPTERS = ('step',)\ndef run(case): ...\n")
    assert status_of(adapter) == 1


@pytest.mark.linux
def test_a_report_that_cannot_be_written_is_a_sentence_before_the_rows(tmp_path: Path) -> None:
    for path in ("/proc/a.json", tmp_path, tmp_path / "no/a.json"):
        with pytest.raises(SystemExit, match="2"):
            status_of(DDP, "--only", "step", "--layouts", "dp1", "--json", path)


@pytest.mark.processes
def test_reports_of_known_and_unknown_differences(tmp_path: Path) -> None:
    """A known difference does not fail. The first unknown one is traced. Both reports name each row once."""
    mistake, adapter = MISTAKES["ddp: forgotten_all_reduce"], tmp_path / "adapter.py"
    wrong = DDP.read_text().replace(mistake.old, mistake.new)
    most = dict.fromkeys(("loss", "gradient", "gradient norm", "weight"), 1.5)
    known = {("step", "dp2"): ("own gradients", most), ("step", "dp1"): ("repaired", most)}
    adapter.write_text(f"{wrong}\nKNOWN = {known}\n")
    reports = "--json", tmp_path / "a.json", "--junit", tmp_path / "a.xml"
    assert status_of(adapter, *reports, "--layouts", "dp1", "dp2", "dp2 tied", "--only", "step") == 1
    found = json.loads((tmp_path / "a.json").read_text())
    equal, known_row, unknown = found["rows"]
    assert found["conformance"] == __version__
    assert [row["verdict"] for row in found["rows"]] == ["equal", "known", "differs"]
    assert "repaired" in equal["detail"]
    assert not known_row["trace"]
    assert unknown["wrong"].items() >= {"step": 1, "phase": "GRADIENTS"}.items()
    tests = ET.parse(tmp_path / "a.xml").getroot().findall("testcase")
    assert [[each.tag for each in test] for test in tests] == [[], ["skipped"], ["failure"]]
    tripled = wrong.replace("gradients.append({name: p.grad.clone()", "gradients.append({name: 3 * p.grad")
    assert tripled != wrong
    adapter.write_text(f"{tripled}\nKNOWN = {known}\n")  # another fault in a row with a known difference
    assert status_of(adapter, "--only", "step", "--layouts", "dp2") == 1


@pytest.mark.processes
def test_a_run_of_another_launcher_is_judged(tmp_path: Path) -> None:
    """The folder can be moved; a rank that has not run is missed."""
    words, moved = (PICOTRON, "--only", "run", "--layouts", "dp2", "--write"), tmp_path / "moved"
    assert status_of(*words, tmp_path / "cases") == 0
    (tmp_path / "cases").rename(moved)
    assert status_of("--judge", moved) == 1  # no rank has run
    with pytest.raises(SystemExit):  # there are cases already
        status_of(*words, moved)
    for path in sorted(moved.glob("*/*")):
        checker_of(PICOTRON).start(Case.read(path))
    assert status_of("--judge", moved) == 0


def save(*what: Any) -> Callable[[Path], Any]:
    """Write an outcome whose header is JSON, with one tensor."""
    return lambda path: save_file({"x": torch.zeros(1)}, path, {"outcome": json.dumps(what)})


def rewrite(**changes: Any) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        case = path.with_name("case.json")
        case.write_text(json.dumps(json.loads(case.read_text()) | changes))

    return write


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "pickle": lambda path: path.write_bytes(pickle.dumps("untrusted")),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: path.with_name("rank2.log").symlink_to("/etc/passwd"),
    "a list": save("result", [1]),
    "no reason": save("crashed", ""),
    "another kind": save("finished", "x"),
    "no numbers": save("result", {"losses": None}),
    "brackets": lambda path: save_file({"x": torch.zeros(1)}, path, {"outcome": "[" * 100_000}),
    "terminal": save("crashed", "\x1b[31mred"),
    "no case": lambda path: path.with_name("case.json").unlink(),
    "many ranks": rewrite(layout="dp99999999"),
    "another chapter": rewrite(chapter="../../x", extra=1),
    "no text": lambda path: (path.unlink(), path.with_name("rank1.stack").write_bytes(b"\xff")),
}


@pytest.mark.processes
def test_damaged_outcomes_cost_one_row_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of another machine: each damage is a verdict, rows beside it are judged, and nothing else is read."""
    checker = checker_of(DDP)
    (case,) = checker.write_cases(checker.plan(["step"], ["dp2"]), tmp_path / "cases")
    checker.start(case)
    (row,) = (tmp_path / "cases").iterdir()
    for name, damage in DAMAGES.items():
        shutil.copytree(row, tmp_path / "cases" / name)
        damage(tmp_path / "cases" / name / "1" / "rank1.safetensors")
    report = tmp_path / "report.xml"
    assert status_of("--judge", tmp_path / "cases", "--junit", report) == 1
    output = capsys.readouterr().out
    assert len(re.findall("^equal", output, re.MULTILINE)) == 1
    assert len(re.findall("^(crashed|hangs|differs)", output, re.MULTILINE)) == len(DAMAGES)
    assert "\x1b" not in output
    assert "root:" not in report.read_text()

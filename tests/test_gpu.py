"""make gpu: every section runs on the CPU with tiny models, and failures of sections are reported."""

import math
import os
import shutil
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from picotron.context_parallel.block_attention import block_forward
from picotron.parallelize import check_layout
from picotron.schedules.costs import model_cost
from tests import test_docs
from tests.gpu import program, trace
from tests.gpu.kernels import attention_checks
from tests.gpu.program import PAGE, SECTIONS, Result, Section, write_lines
from tests.gpu.report import Check, Lines, Options, checked
from tests.gpu.speed import workloads
from tests.gpu.training import layout_checks, layout_run
from tests.parity import LAYOUTS, settings
from tests.support.worker_pool import WorkerPool

CPU = Options(on_gpu=False, compiled=False)
ROWS = {"machine": 7, "kernels": 31, "transformers": 5, "checkpoint": 20, "trace": 20, "speed": 8}  # at least


def test_without_a_gpu_the_program_says_so_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = PAGE.read_bytes()
    assert program.main([]) == program.main(["--only", "kernels"]) == 1
    sentence = "make gpu needs a GPU, and torch finds none on this machine (ARGS=--cpu tries the program on the CPU).\n"
    assert capsys.readouterr().out == 2 * sentence
    assert PAGE.read_bytes() == before


@pytest.mark.parametrize("name", ROWS)
def test_section_runs_on_the_cpu(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    pool.run(write_lines, 1, SECTIONS[name].lines, CPU, tmp_path / "section.md")
    text = (tmp_path / "section.md").read_text()
    assert "failed" not in text
    assert sum(line.startswith("| ") and not line.startswith("|---") for line in text.splitlines()) > ROWS[name]


@pytest.mark.processes
@pytest.mark.parity
@pytest.mark.timeout(900)
def test_all_sections_write_a_page_that_follows_the_rules_of_pages(tmp_path: Path) -> None:
    for path in PAGE.parent.glob("*.md"):
        shutil.copy(path, tmp_path)
    page = tmp_path / PAGE.name
    with mock.patch.object(program, "SECONDS", 800.0):
        assert program.main(["--cpu", "--out", str(page), "--trace", str(tmp_path / "trace")]) == 0
    text = page.read_text()
    assert all(f"\n## {section.title}\n" in text for section in SECTIONS.values())
    assert "picotron, compiled (graphs: 1)" in text
    assert (tmp_path / "trace" / "step.json.gz").exists()
    test_docs.test_link_targets_exist(page)
    test_docs.test_every_block_has_valid_options(page)
    test_docs.test_every_picture_has_the_command_that_makes_it(page)


# ----------------------------------------------------------------------------------------------------------- failures


def succeeds(options: Options) -> Lines:
    yield "all is well"


def raises(options: Options) -> Lines:
    yield "before the error"
    raise RuntimeError("this kernel is broken")


def dies(options: Options) -> Lines:
    yield "before the crash"
    os._exit(1)


def hangs(options: Options) -> Lines:
    yield "before it hangs"
    time.sleep(100)


@pytest.mark.processes
def test_a_failing_section_loses_no_lines_and_no_other_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = {"raises": raises, "dies": dies, "succeeds": succeeds, "hangs": hangs}
    sections = {
        name: Section(f"Section {name}", each, 2 if name == "hangs" else 60) for name, each in functions.items()
    }
    with mock.patch.object(program, "SECTIONS", sections):
        assert program.main(["--cpu", "--out", str(tmp_path / "page.md")]) == 1
    text = (tmp_path / "page.md").read_text()
    for expected in (
        "| Section dies | **failed** |",
        "| Section succeeds | ok |",
        "before the error",
        "RuntimeError: this kernel is broken",
        "before the crash",
        "the worker died",
        "before it hangs",
        "no answer within 2 s",
        "all is well",
    ):
        assert expected in text
    assert "4 sections, 3 failed raises dies hangs" in capsys.readouterr().out


def test_page_shows_an_error_without_ending_its_code_block() -> None:
    result = Result("a line\n", 1.0, "an error with ``` in it")
    text = program.page({"kernels": result})
    assert text.count("```") == 2
    assert "an error with ''' in it" in text


def outcome(checks: Iterable[Check]) -> tuple[list[str], str]:
    """Return the rows of checks, and the message of the error at their end."""
    rows: list[str] = []
    try:
        for line in checked(checks, columns=2):
            rows.append(line)  # noqa: PERF402 -- extend would lose the lines before the error
    except AssertionError as error:
        return rows, str(error)
    return rows, ""


def test_checked_reports_errors_above_the_limit_and_exceptions() -> None:
    checks = {
        "good": Check(["good"], lambda: [0.5, 2.0], 1.0),
        "large": Check(["large"], lambda: [2.0, 0.5], 1.0),
        "nan": Check(["nan"], lambda: [0.5, math.nan], 1.0, judged=2),
        "broken": Check(["broken"], lambda: [[][0]], 1.0),
        "only shown": Check(["only shown"], lambda: [9.0, 9.0], math.inf),
    }
    rows, message = outcome(checks.values())
    failed = {name for name, line in zip(checks, rows, strict=False) if line.endswith("| **failed** |")}
    assert failed == {"large", "nan", "broken"} == {name for name in checks if f"{name}: " in message}
    assert "| broken | IndexError | - |" in rows[3]
    assert outcome([checks["good"], checks["only shown"]])[1] == ""


def test_a_wrong_kernel_fails_its_checks() -> None:
    def without_mask(q: Tensor, k: Tensor, v: Tensor, causal: bool, new_shape: bool) -> tuple[Tensor, Tensor]:
        return block_forward(q, k, v, False)

    assert outcome(attention_checks(CPU))[1] == ""
    with mock.patch("picotron.context_parallel.context_parallel.block_forward", without_mask):
        rows, message = outcome(attention_checks(CPU))
    failed = [row for row in rows if "**failed**" in row]
    assert len(failed) == sum("blocks" in row for row in rows) == 12
    assert "attention to blocks, cp 4, zigzag bfloat16" in message


# ------------------------------------------------------------------------------------------- what runs on a GPU machine


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_layout_for_a_number_of_gpus_is_valid_there(gpus: int) -> None:
    with mock.patch("torch.cuda.device_count", return_value=gpus):
        names = [check.cells[0] for check in layout_checks(Options(), {})]
    assert len(names) == len(set(names))
    fitting = {name for name in LAYOUTS if settings(name)[0].distributed.world_size <= gpus}
    assert fitting <= set(names)
    assert len(fitting) == {1: 0, 2: 0, 4: 15, 8: 48}[gpus]
    assert ("pp2 zbv tied kv4" in names) == (gpus >= 2)
    assert ("dp2 x tp2 sp tied kv4, ranks share GPUs" in names) == (gpus < 4)
    assert "dp1 tied kv4, compiled" in names
    for name in names:
        config, model_config = layout_run(name.split(",")[0], Options(), {})
        assert check_layout(config, model_config)
        assert not config.distributed.use_cpu


def test_workloads_are_the_published_models() -> None:
    smollm, llama = workloads(Options())
    assert model_cost(smollm.model, 2048).parameters == 1_711_376_384
    assert model_cost(llama.model, 4096).parameters == 1_235_814_400
    assert smollm.tokens_per_step == llama.tokens_per_step == 4 * 8192


def test_busy_time_is_that_of_the_union_of_events() -> None:
    events = [{"ts": "0", "dur": 10}, {"ts": 4, "dur": 2}, {"ts": 8, "dur": 4}, {"ts": 20.0, "dur": 5}]
    assert trace.busy_and_span(events) == (17, 25)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_64x3_tn_align8>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer and clipping"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>", "norms"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(at::TensorIteratorBase&)>", "copies and conversions"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "element-wise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda(float)>", "softmax of the loss"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum_functor<float>>>", "sums"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and conversions"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("an unknown kernel", "other"),
    ],
)  # fmt: skip
def test_kernels_are_grouped_by_what_they_compute(kernel: str, group: str) -> None:
    assert trace.group_of(kernel) == group
    assert len(trace.short(kernel)) <= 110
    assert not set("|`[]*{}") & set(trace.short(kernel))


def test_synchronisations_are_counted_by_line() -> None:
    def step() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another warning", stacklevel=1)

    line = step.__code__.co_firstlineno + 2
    cuda = SimpleNamespace(set_sync_debug_mode=mock.Mock())
    with mock.patch.object(torch, "cuda", cuda):
        found = trace.synchronisations(step, torch.device("cuda"))
    assert found == {f"tests/test_gpu.py:{line}": 2}
    assert [call.args for call in cuda.set_sync_debug_mode.call_args_list] == [("warn",), ("default",)]

"""make gpu: every section runs on the CPU with tiny models, and failures of sections are reported."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.gpu import program, trace
from benchmarks.gpu.__main__ import NEEDED
from benchmarks.gpu.fake_cuda import obstacle
from benchmarks.gpu.kernels import attention_checks
from benchmarks.gpu.program import PAGE, SECTIONS, Result, Section, merged, run_section
from benchmarks.gpu.report import Check, Content, Options, Outcome, Part
from benchmarks.gpu.speed import PRICES, micro_batches, priced_rows, workloads
from benchmarks.gpu.training import TWO_RANKS, layout_checks, layout_errors, layout_run, train_on
from conformance.grid import LAYOUTS, settings
from conformance.worker_pool import WorkerError, WorkerPool
from picotron.config import Config
from picotron.context_parallel.block_attention import block_forward
from picotron.model.flops import model_cost
from picotron.parallelize import check_layout
from tests.docs import test_docs

CPU = Options(on_gpu=False, compiled=False)
ROWS = {  # at least
    "transformers": 5, "machine": 8, "speed": 8, "kernels": 31, "rates": 16, "checkpoint": 20, "trace": 20,
}  # fmt: skip


def test_without_a_gpu_the_program_says_so_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = PAGE.read_bytes()
    assert program.main([]) == program.main(["--only", "kernels"]) == 1
    sentence = "make gpu needs a GPU, and torch finds none on this machine (ARGS=--cpu tries the program on the CPU).\n"
    assert capsys.readouterr().out == 2 * sentence
    assert PAGE.read_bytes() == before


WITHOUT = "import runpy, sys; sys.modules |= dict.fromkeys(sys.argv[1:]); runpy.run_module('benchmarks.gpu', run_name='__main__')"


@pytest.mark.processes
def test_missing_packages_are_named_in_one_sentence() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT, "pydantic", "xxhash"], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith(
        f"{sys.executable} has no pydantic, xxhash, which make gpu needs; create .venv with"
    )
    assert len(result.stderr.splitlines()) == 1


def sections_on_the_cpu(pool: WorkerPool, section: Section) -> Result:
    result = Result("here")
    run_section(pool, section, CPU, math.inf, result, lambda: None)
    return result


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("kernels", "checkpoint") else name for name in ROWS],
)
def test_section_runs_on_the_cpu(pool: WorkerPool, name: str) -> None:
    result = sections_on_the_cpu(pool, SECTIONS[name])
    assert result.errors == {}
    assert "failed" not in result.text()
    assert sum(line.startswith("| ") for line in result.lines) > ROWS[name]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_sections_write_a_page_with_the_packages_that_the_program_asks_for(tmp_path: Path) -> None:
    others = [
        re.split("[>=]", each)[0]
        for each in tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    ]
    absent = set(others) - {*NEEDED, "filelock", "huggingface_hub", "jinja2", "safetensors", "tokenizers"}
    assert absent == {"datasets", "matplotlib", "wandb"}
    docs = tmp_path / "docs"  # beside the other folders, to which pages have links
    for path in Path().resolve().iterdir():
        if path.name != docs.name:
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(PAGE.parents[1], docs)
    page = tmp_path / PAGE
    command = [sys.executable, "-c", WITHOUT.replace("sys.argv[1:]", repr([*absent, "pytest", "hypothesis"]))]
    command += ["--cpu", "--out", str(page), "--trace", str(tmp_path / "trace")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{len(SECTIONS)} sections, 0 failed" in result.stdout
    text = page.read_text()
    assert all(f"\n## {section.title}\n" in text for section in SECTIONS.values())
    assert all(name in text for name in ("picotron, compiled", "compiled as a whole", "### Compiled"))
    assert {path.name for path in (tmp_path / "trace").iterdir()} == {"eager.json.gz", "compiled.json.gz"}
    test_docs.test_link_targets_exist(page)
    test_docs.test_every_block_has_valid_options(page)
    test_docs.test_every_picture_has_the_command_that_makes_it(page)


# ----------------------------------------------------------------------------------------------------------- failures


def succeeds() -> Outcome:
    return Outcome(["| all is | well |"])


def raises() -> Outcome:
    raise RuntimeError("this kernel | is broken")


def dies() -> Outcome:
    os._exit(1)


def hangs() -> Outcome:
    time.sleep(100)
    return succeeds()


def is_wrong() -> Outcome:
    return Check(["wrong"], lambda: [2.0], 1.0).run()


PARTS = {"raises": raises, "dies": dies, "succeeds": succeeds, "hangs": hangs, "is wrong": is_wrong}


def failing(options: Options) -> Content:
    return ["a table", *(Part(["row", name], each, 0.5 if each is hangs else 60) for name, each in PARTS.items())]


def succeeding(options: Options) -> Content:
    return [Part(["first"], succeeds, 60), Part(["second"], succeeds, 60)]


@pytest.mark.processes
def test_a_failing_row_loses_no_other_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = {"failing": Section("Failing", failing, 60), "succeeding": Section("Succeeding", succeeding, 60)}
    with mock.patch.object(program, "SECTIONS", sections):
        assert program.main(["--cpu", "--out", str(tmp_path / "page.md")]) == 1
    text = (tmp_path / "page.md").read_text()
    for expected in (
        "| Failing | **failed**: 4 |",
        "| Succeeding | ok |",
        "| row | raises | **failed**: RuntimeError: this kernel / is broken |",
        "| row | dies | **failed**: rank 0: the worker died |",
        "| row | hangs | **failed**: rank 0: no answer within 2.0 s |",
        "| wrong | 2.0e+00 | 1 | **failed** |",
        "**Failed: row, raises**",
    ):
        assert expected in text
    assert text.count("| all is | well |") == 3
    assert "2 sections, 1 failed failing" in capsys.readouterr().out


def test_rows_after_the_time_of_a_section_are_not_run(pool: WorkerPool) -> None:
    result = Result("here")
    pages: list[int] = []
    run_section(pool, Section("", succeeding, 0), CPU, 0.0, result, lambda: pages.append(len(result.lines)))
    assert list(result.errors) == ["first", "second"]
    assert (
        result.lines[0] == "| first | **failed**: not run: the time of its section or of the whole program was over |"
    )
    assert pages == [1, 2]  # written after each row


def test_an_error_does_not_end_its_code_block() -> None:
    text = Result("here", ["a line"], {"a row": "an error\nwith ``` in it"}).text()
    assert text.count("```") == 2
    assert "an error\nwith ''' in it" in text


def test_checks_report_errors_above_the_limit() -> None:
    def on_a_rank() -> list[float]:
        raise WorkerError("rank 1: no answer\nwithin 2 s")

    checks = {
        "good": Check(["good"], lambda: [0.5, 2.0], 1.0),
        "large": Check(["large"], lambda: [2.0, 0.5], 1.0),
        "nan": Check(["nan"], lambda: [0.5, math.nan], 1.0, judged=2),
        "only shown": Check(["only shown"], lambda: [9.0, 9.0], math.inf),
        "broken": Check(["broken"], on_a_rank, 1.0),
    }
    outcomes = {name: check.run() for name, check in checks.items()}
    failed = {name for name, outcome in outcomes.items() if "**failed**" in outcome.lines[0]}
    assert failed == {"large", "nan", "broken"} == {name for name, outcome in outcomes.items() if outcome.problem}
    assert outcomes["broken"].lines == ["| broken | **failed**: within 2 s |"]


def test_a_wrong_kernel_fails_its_checks() -> None:
    def without_mask(q: Tensor, k: Tensor, v: Tensor, causal: bool, new_shape: bool) -> tuple[Tensor, Tensor]:
        return block_forward(q, k, v, False)

    assert not any(check.run().problem for check in attention_checks(CPU))
    with mock.patch("picotron.context_parallel.context_parallel.block_forward", without_mask):
        failed = [check.cells[0] for check in attention_checks(CPU) if check.run().problem]
    assert len(failed) == sum("blocks" in name for name in failed) == 12


# ----------------------------------------------------------------------------------------------------------- the page

WRITTEN = """# GPUs

An introduction.

## Proven without a GPU

a claim

## Results

No run is recorded here yet.

## Estimates

a formula
"""


def test_results_are_merged_into_the_page() -> None:
    first = merged(WRITTEN, {"speed": Result("a GPU", ["fast"], seconds=9), "trace": Result("a GPU", ["### Eager"])})
    assert "No run" not in first
    second = merged(
        first, {"speed": Result("another GPU", ["faster"], {"a row": "an error"}), "machine": Result("a GPU", ["H200"])}
    )
    headings = [line for line in second.splitlines() if line.startswith("## ")]
    titles = [SECTIONS[name].title for name in ("machine", "speed", "trace")]
    assert headings == [f"## {each}" for each in ("Proven without a GPU", "Estimates", "Results", *titles)]
    for kept in ("An introduction.", "a claim", "a formula", "H200", "### Eager", "faster"):
        assert second.count(kept) == 1
    assert "fast\n" not in second
    assert "| Speed and memory | **failed**: 1 | 0 | another GPU |" in second
    assert f"| {titles[2]} | ok | 0 | a GPU |" in second
    assert merged(second, {}) == second


# ------------------------------------------------------------------------------------------- what runs on a GPU machine


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_layout_for_a_number_of_gpus_is_valid_there(gpus: int) -> None:
    with mock.patch("torch.cuda.device_count", return_value=gpus):
        checks = {check.cells[0]: check for check in layout_checks(Options(), {})}
    fitting = {name for name in LAYOUTS if settings(name)[0].distributed.world_size <= max(gpus, 4)}
    names = {name.split(",")[0] for name in checks}
    assert {*fitting, *TWO_RANKS} < names
    assert len(fitting) == {1: 15, 2: 15, 4: 15, 8: 48}[gpus]
    shared = {name: check for name, check in checks.items() if "ranks share a device" in name}
    assert len(shared) == {1: len(TWO_RANKS) + 15, 2: 15}.get(gpus, 0)
    assert all(check.cells[2] == "gloo" for check in shared.values())
    assert "dp1 tied kv4 llama, compiled" in checks
    for name in names:
        config, model_config = layout_run(name, Options(), {})
        assert check_layout(config, model_config)
        assert not config.distributed.use_cpu


def train_without_messages_of_torch(config: Config, model_config: LlamaConfig) -> dict[str, Any]:
    with mock.patch.object(torch.distributed, "batch_isend_irecv", side_effect=AssertionError):
        return train_on(config, model_config)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["pp2 zbv tied kv4 llama", pytest.param("cp2 zigzag ring tied kv8 llama", marks=pytest.mark.slow)]
)
def test_ranks_that_share_a_device_train_with_messages_through_the_host(pool: WorkerPool, name: str) -> None:
    config, model_config = layout_run(name, CPU, {})
    with mock.patch("benchmarks.gpu.training.train_on", train_without_messages_of_torch):
        errors = layout_errors(pool, CPU, config, model_config)
    assert max(errors[:2]) < (1e-9 if config.model.dtype == "float64" else 1e-4)


def test_speed_shows_the_prices_of_every_step() -> None:
    with mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"):
        rows = [line.split(" | ") for each in micro_batches(Options()) for line in priced_rows(each, Options()).lines]
        assert len(rows) == 2 * 2 * 3
        for eager, compiled in zip(rows[::2], rows[1::2], strict=True):
            assert (eager[2], compiled[2]) == ("priced, eager", "priced, compiled")
            assert 0.4 < float(eager[5].rstrip("%")) / 100 < float(compiled[5].rstrip("%")) / 100 < 0.7  # MFU
    with mock.patch("torch.cuda.get_device_name", return_value="another GPU"):
        assert "is not in prices.json" in priced_rows(micro_batches(Options())[0], Options()).lines[0]


PRICE = """
from picotron.explain.hardware import HARDWARE
from benchmarks.gpu.prices import price
from benchmarks.gpu.report import Options
from benchmarks.gpu.speed import micro_batches
from benchmarks.gpu.fake_cuda import restart_with_fake_cuda
restart_with_fake_cuda()
print(*price(micro_batches(Options())[-2], HARDWARE["H200"]).values())
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
def test_prices_are_those_of_the_rates_in_hardware_py() -> None:
    result = subprocess.run([sys.executable, "-c", PRICE], capture_output=True, text=True, check=True)
    prices = json.loads(PRICES.read_text())["NVIDIA H200"]["SmolLM-1.7B"]["16"]
    remedy = "run: python -m benchmarks.gpu.prices"
    assert [float(word) for word in result.stdout.split()] == pytest.approx(list(prices.values()), rel=1e-4), remedy


def test_workloads_are_the_published_models() -> None:
    smollm, llama = workloads(Options())
    assert model_cost(smollm.model, 2048).parameters == 1_711_376_384
    assert model_cost(llama.model, 4096).parameters == 1_235_814_400
    assert (smollm.tokens_per_step, llama.tokens_per_step) == (16 * 2048, 16 * 4096)


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
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, 64>", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16, 64>", "attention"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 64u>", "norms"),
        ("triton_poi_fused__to_copy_add_cat_mul_neg_3", "fused (torch.compile)"),
        ("triton_red_fused_native_layer_norm_exp_0", "fused (torch.compile)"),
        ("void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4, "
         "TrivialOffsetCalculator<2, unsigned int>, at::native::memory::LoadWithCast<2>>", "gradient accumulation"),
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

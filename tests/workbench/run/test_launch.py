"""Errors and hangs that concern other ranks or the hub are one sentence; a signal shows where a process is."""

import contextlib
import datetime
import logging
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import constants

from conformance.worker_pool import WorkerPool
from picotron.config import Config
from picotron.console import UserError
from tests.support.messages import error_of
from tests.support.oracle import make_config, tiny_llama
from tests.support.program import run
from tests.support.training import CPU
from workbench.pipelines.engine import check_model
from workbench.run import hub, launch
from workbench.run.launch import (
    ALLOCATOR_VARIABLES,
    check_same_config,
    init_process_group,
    missing_ranks,
    sentence_of,
    set_up_device,
)


def with_files_of_its_own(*machines: tuple[Config, Path]) -> str:
    config, folder = machines[dist.get_rank()]
    with contextlib.chdir(folder):
        model_config, plan = check_model(config)
    return error_of(lambda: check_same_config(config, model_config, plan.identity))


def test_ranks_with_other_configs_or_files_are_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    """Replicas that start from other weights would train without an error. So would other models or schedules in files
    of one name, on machines of their own.
    """
    machines = []
    for keys, changes, order, sentence in (
        ({}, {}, "1F0,1F1", "no error"),
        ({"environment__OMP_NUM_THREADS": 3}, {}, "1F0,1F1", "no error"),
        ({"training__seed": 7}, {}, "1F0,1F1", "rank 1 has training.seed=7, but rank 0 has 42"),
        ({}, {"rms_norm_eps": 0.1}, "1F0,1F1", "rank 1 has the model's rms_norm_eps=0.1, but"),
        ({}, {}, "1F1,1F0", "rank 1 has the schedule's SHA-256='"),
    ):
        folder = tmp_path / str(len(machines))
        tiny_llama(**changes).save_pretrained(folder / "model")
        (folder / "order.csv").write_text(f"0F0,0F1,0B0,0B1\n{order},1B0,1B1\n")
        machines.append((make_config("pp2 m2", model__name="model", pp_engine="csv:order.csv", **keys), folder))
        found = pool.run(with_files_of_its_own, 2, machines[0], machines[-1])
        assert found == [found[0]] * 2
        assert sentence in found[0]


def call_alone(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(1), group=group)


def wait_for_others() -> str | None:
    """Let rank 0 call a collective that rank 1 does not call. Returns the sentence of rank 0."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 1:
        return None
    try:
        call_alone(group)
    except RuntimeError as error:
        return missing_ranks(error)
    raise AssertionError("the collective succeeded on one rank")


def test_a_rank_that_waits_in_vain_says_where(pool: WorkerPool) -> None:
    sentence, nothing = pool.run(wait_for_others, 2)
    assert sentence is not None
    assert nothing is None
    assert sentence.startswith("timed out: other ranks did not reach call_alone (tests/workbench/run/test_launch.py:")
    assert "), called by wait_for_others (tests/workbench/run/test_launch.py:" in sentence


def test_errors_of_others_and_of_the_system_are_sentences() -> None:
    for error in (ValueError("Timed out waiting for a friend"), RuntimeError("out of memory"), OSError("by peer")):
        assert missing_ranks(error) is None
    assert "another rank has ended" in str(missing_ranks(RuntimeError("writev [::1]:2: Broken pipe")))
    for many in (
        OSError(24, "Too many open files"),
        RuntimeError("[enforce fail at device.cc:186] Too many open files"),
    ):
        assert "ulimit -n" in str(sentence_of(many))
    unmapped = OSError("/tmp/torchinductor_me/a.so: failed to map segment from shared object.")
    assert "TORCHINDUCTOR_CACHE_DIR" in str(sentence_of(RuntimeError(f"InductorError: OSError: {unmapped}")))


def test_a_port_that_another_program_has_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = f"{other.getsockname()[1]}"
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        with (
            mock.patch.dict("os.environ", variables),
            pytest.raises(UserError, match=f"MASTER_PORT is in use .*{port}"),
        ):
            init_process_group(make_config(), CPU)


@pytest.mark.processes
def test_sigusr2_prints_the_stack_and_the_process_continues() -> None:
    program = (
        "import signal; from workbench.run.launch import logger, set_up_logging\n"
        "def here(): signal.raise_signal(signal.SIGUSR2)\n"
        "set_up_logging(); set_up_logging(); here(); logger.info('continues')"  # once, if a cell runs again
    )
    done = run("-c", program)
    assert done.stdout == "continues\n"
    assert 'File "<string>", line 2 in here' in done.stderr


@pytest.mark.parametrize("variable", [None, "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpu_memory_grows_in_place_unless_the_user_has_settings(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:128")
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    real = torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: calls.append(text) or real(text))
    assert set_up_device(make_config(distributed__use_cpu=False)) == torch.device("cuda", 0)
    assert calls == ([] if variable else ["expandable_segments:True"]) + [0]  # before the device gets its first memory


def test_blocks_of_attention_in_bfloat16_need_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"device_count": 1, "set_device": None, "get_device_capability": (7, 5), "get_device_name": "Tesla T4"}
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    config = make_config("cp2", distributed__use_cpu=False, model__dtype="bfloat16")
    with pytest.raises(UserError, match="'bfloat16' on Tesla T4"):
        set_up_device(config)


@pytest.mark.parametrize(("backend", "is_bound"), [(None, True), ("gloo", False)])
def test_only_nccl_is_bound_to_its_device_and_all_groups_wait_as_long(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, is_bound: bool
) -> None:
    """`new_group` takes the timeout of its backend, as `init_process_group` does without a timeout."""
    device, c10d = torch.device("cuda", 0), dist.distributed_c10d
    monkeypatch.setattr(c10d, "default_pg_nccl_timeout", datetime.timedelta(minutes=10))  # None in builds for CPUs
    with mock.patch.object(dist, "init_process_group") as init, mock.patch.object(launch, "check_same_config"):
        init_process_group(make_config(distributed__backend=backend, distributed__use_cpu=False), device)
    assert init.call_args.args == (backend or "nccl",)
    assert init.call_args.kwargs["device_id"] == (device if is_bound else None)
    assert "timeout" not in init.call_args.kwargs
    for each in ("gloo", "nccl"):
        assert c10d._get_default_timeout(dist.Backend(each)) == launch.TIMEOUT


def test_a_hub_that_does_not_answer_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.is_reachable.cache_clear()
    with mock.patch.object(hub, "get_session") as session, caplog.at_level(logging.WARNING, "picotron"):
        session.return_value.head.side_effect = TimeoutError("no answer")
        hub.connect("nobody/model")
        hub.connect("nobody/data")
    hub.is_reachable.cache_clear()
    session.return_value.head.assert_called_once_with(constants.ENDPOINT, timeout=hub.SECONDS)
    assert constants.HF_HUB_OFFLINE
    assert [message.split(";")[0] for message in caplog.messages] == [
        "no connection to the Hugging Face Hub (no answer)"
    ]

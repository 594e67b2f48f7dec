"""A rank of a training run on a fake GPU: tensors have shapes and a CUDA device but no memory, and nothing is computed.

    restart_with_fake_cuda()
    with fake_cuda_rank(config, model_config, rank=3) as run, OperationsOfInterest():
        loss = run.train_step(run.model, run.data_loader)

The step is that of train.py, and autograd works as on a GPU, in a thread of the device. So a `TorchDispatchMode`, such
as OperationsOfInterest here, sees every operation of forward, backward and the optimizer with the shapes, dtypes and
devices that it has on a GPU. Two things stand behind this: torch's FakeTensorMode, and a device that never answers with
an error, see fake_cuda.cpp. The latter has to be in the process before torch is, so a program either restarts itself or
is started with the variables of `fake_cuda_environment`. The other ranks do not exist, see `fake_rank`.

Data-dependent operations, such as `.item()`, raise an error, because a fake tensor has no value; a dispatch mode that
expects them has to answer them itself.
"""

import contextlib
import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from conformance.training import pipeline_of
from picotron import parallelize
from picotron.config import Config
from picotron.context_parallel.ulysses import sequence_order
from picotron.data.loader import MicroBatchDataLoader
from picotron.data.rows import TextRows
from picotron.data_parallel.data_parallel import DataParallel
from picotron.model.llama import rope_frequencies
from picotron.model.placement import Index
from picotron.optimizer.learning_rate import make_scheduler
from picotron.optimizer.optimizer import AdamW, make_optimizer
from picotron.pipeline_parallel.train_step import Step
from picotron.run.metrics import Metrics
from workbench.explain.fake_group import fake_rank
from workbench.pipelines.engine import check_layout
from workbench.pipelines.plan import SchedulePlan

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
LIBRARY = "libpicotron_fake_cuda.so"
DEVICE = torch.device("cuda", 0)


def obstacle() -> str | None:
    """Return why a fake GPU is impossible here, or None."""
    if sys.platform != "linux":
        return "a fake GPU needs LD_PRELOAD, and so Linux"
    if shutil.which("g++") is None:
        return "a fake GPU needs the C++ compiler g++"
    if torch.version.hip:
        return "a fake GPU needs torch's build for CPUs or for CUDA, not for ROCm"
    addmm = torch.ops.aten.addmm
    if addmm.dtype in decomposition_table and decomposition_table[addmm.dtype] is decomposition_table[addmm.default]:
        return f"a fake GPU needs a newer torch than {torch.__version__}, whose fake addmm has no out_dtype"
    return None


def fake_cuda_environment(folder: Path) -> dict[str, str]:
    """Compile the fake device into `folder`. Returns the variables of the environment with which Python loads it."""
    assert obstacle() is None, obstacle()
    torch_folder = Path(torch.__file__).parent
    paths = [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"]
    library = folder / LIBRARY
    command = ["g++", "-std=c++20", "-shared", "-fPIC", *paths, str(SOURCE), "-o", str(library)]
    subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}


def restart_with_fake_cuda() -> None:
    """Run this program again with the fake device, and exit with its status; return if it already has the device."""
    preloaded = os.environ.pop("LD_PRELOAD", "")  # removed for the programs that this one starts
    if Path(preloaded).name == LIBRARY:
        ctypes.CDLL(preloaded).install_fake_cuda()
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(subprocess.run(sys.orig_argv, env=fake_cuda_environment(Path(folder)), check=False).returncode)


def without_memory(array: np.ndarray) -> Tensor:
    """Return a fake tensor for a micro-batch of numbers, in the place of torch.from_numpy."""
    return torch.empty(array.shape, dtype=torch.int64)


def pinned(tensor: Any) -> Any:
    """Mark a tensor as pinned. Pinned memory needs a driver."""
    tensor.marked_as_pinned = True
    return tensor


@dataclasses.dataclass(frozen=True)
class FakeRun:
    """The objects of a rank in train.py."""

    config: Config
    model_config: LlamaConfig
    plan: SchedulePlan
    model: DataParallel
    optimizer: AdamW
    scheduler: Any
    data_loader: MicroBatchDataLoader
    metrics: Metrics
    train_step: Step
    evaluate: Step


def define_kernels() -> torch.library.Library:
    """Declare kernels for two operations, which torch's build for CPUs decomposes into several. Autograd would then
    save other tensors than on a GPU. FakeTensorMode never calls them.

    Returns:
        The declarations, which last as long as this object.
    """

    def kernel(*arguments: Any) -> Any:
        raise AssertionError("a CUDA tensor is not fake")

    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name in ("_fused_rms_norm", "silu_backward") if torch.version.cuda is None else ():
        library.impl(name, kernel)
    return library


def fake_weights(name: str, shape: torch.Size, index: Index) -> Tensor:
    """A `ReadTensor` of weights without memory."""
    return torch.empty(shape)[index]


@contextlib.contextmanager
def fake_cuda_rank(
    config: Config,
    model_config: LlamaConfig,
    rank: int = 0,
    device_name: str = "NVIDIA H200",
    observer: TorchDispatchMode | None = None,
) -> Iterator[FakeRun]:
    """Play a rank on a fake GPU. Yields its objects; inside of the context, all new tensors are fake.

    Args:
        config: config of the run. Its `compile` is ignored, because torch.compile needs a driver.
        device_name: name of the GPU, from which the metrics take its peak FLOP/s.
        observer: dispatch mode that sees all operations, from the allocation of the parameters on.
    """
    assert not config.distributed.use_cpu
    config = config.model_copy(update={"training": config.training.model_copy(update={"compile": False})})
    plan = check_layout(config, model_config)
    dtype = getattr(torch, config.model.dtype)
    kernels = define_kernels()
    with contextlib.ExitStack() as stack:
        # The functions that would call the driver.
        stack.enter_context(mock.patch("torch.from_numpy", without_memory))
        stack.enter_context(mock.patch("torch.Tensor.pin_memory", pinned))
        stack.enter_context(mock.patch("torch.cuda.get_device_name", return_value=device_name))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)))
        stack.enter_context(mock.patch("torch.cuda.max_memory_allocated", return_value=0))
        for function in (sequence_order, rope_frequencies):
            stack.callback(function.cache_clear)  # fake tensors cannot be used in the context of another rank
        stack.enter_context(fake_rank(rank, config.distributed))

        # On the meta device, `Module.to` replaces parameters in a way that fake tensors do not support, so the model is
        # built with ordinary meta tensors until its parameters are allocated.
        materialise = parallelize.materialise

        def materialise_as_fake(*arguments: Any) -> None:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(observer or contextlib.nullcontext())
            materialise(*arguments)

        with mock.patch.object(parallelize, "materialise", materialise_as_fake):
            pipeline, train_step, evaluate = pipeline_of(config, model_config, DEVICE, dtype)
            model = parallelize.build_model(config, model_config, pipeline, DEVICE, dtype, fake_weights)
        optimizer = make_optimizer(model, config)
        length = config.training.seq_length
        one_row = TextRows(np.zeros(length + 1, np.uint16), length)  # used again for every sample
        yield FakeRun(
            config=config,
            model_config=model_config,
            plan=plan,
            model=model,
            optimizer=optimizer,
            scheduler=make_scheduler(optimizer, config.training),
            data_loader=MicroBatchDataLoader(one_row, config, DEVICE),
            metrics=Metrics(config, model_config, DEVICE, dtype),
            train_step=train_step,
            evaluate=evaluate,
        )
    del kernels

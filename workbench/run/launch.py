"""Start and end of a process: logging, device, process group, stop signals, and the exit after an error."""

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import hashlib
import itertools
import logging
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, its functions would keep the default group alive, see `forget_groups`
from torch.distributed.rendezvous import rendezvous
from tqdm import tqdm

from picotron import process_group_manager as pgm
from picotron.config import Config, Distributed
from picotron.console import UserError
from workbench.console import LinePrinter, first_line, is_rank_0, print_line
from workbench.run.all_ranks import run_on_all_ranks
from workbench.run.free_models import free_models
from workbench.run.stop_signals import LAUNCHERS, StopSignals

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger("picotron")

PRINTER = LinePrinter()  # one for all calls of `set_up_logging`, as of cells of a notebook
NUMBERS = "RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"  # variables that torchrun sets
TIMEOUT = datetime.timedelta(minutes=30)  # for a rank that waits for others; gloo's own
RUNS = itertools.count()  # of this process, one after the other
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # settings of users; torch reads both
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h; see man mallopt


def set_up_logging() -> None:
    """Log progress on the console, see `set_log_level`. After SIGUSR2 or a crash, a process prints its stacks."""
    faulthandler.enable(file=2)  # sys.stderr may be an object without a file
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR2, file=2)
    logger.addHandler(PRINTER)
    set_log_level()


def set_log_level() -> None:
    """Log progress on rank 0, warnings on the first rank of every machine, and only errors on the other ranks."""
    first_of_machine = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if is_rank_0():
        logger.setLevel(logging.INFO)
    else:
        logger.setLevel(logging.WARNING if first_of_machine else logging.ERROR)


def is_launched() -> bool:
    """Return whether a launcher, such as torchrun or `run_ranks`, has started this process as a rank. If not, remove
    what another program may have left of a launcher's variables.

    Raises:
        UserError: a variable is missing, or no number.
    """
    if "RANK" not in os.environ:
        for name in NUMBERS:
            os.environ.pop(name, None)
        return False
    found = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | os.environ
    for name in (*NUMBERS, "MASTER_ADDR"):
        value = found.get(name, "")
        if not (value.isdecimal() or (value and name == "MASTER_ADDR")):
            raise UserError(
                f"RANK is set in the environment, but {name}={value!r} cannot be used; unset RANK, or let torchrun start the "
                f"processes, which sets all variables"
            )
    return True


def end_with_launcher() -> None:
    """Let a thread send SIGTERM to this process when the one that has started it, or called `run_ranks`, has ended."""
    parent, caller = LAUNCHERS.get(os.getpid(), os.getppid()), multiprocessing.parent_process()
    sentinels = [caller.sentinel] if caller else []

    def watch() -> None:
        while os.getppid() == parent and not multiprocessing.connection.wait(sentinels, 1.0):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def check_world_size(distributed: Distributed, world_size: int) -> None:
    """Raise a UserError unless the layout has as many ranks as processes were started."""
    if distributed.world_size != world_size:
        d = distributed
        raise UserError(
            f"dp_size={d.dp_size} x pp_size={d.pp_size} x cp_size={d.cp_size} x tp_size={d.tp_size} needs {d.world_size} "
            f"processes, but {world_size} started; use torchrun --nproc_per_node {d.world_size}, or change the sizes"
        )


def has_gpu_per_rank() -> bool:
    """Return whether this machine has a GPU for each of its ranks. Else, programs without a key `use_cpu` compute on
    the CPU.
    """
    return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def has_bfloat16_attention(device: torch.device) -> bool:
    """Return whether a GPU has kernels of attention in bfloat16: Ampere and later ones."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def set_up_device(config: Config) -> torch.device:
    """Select this process's device, and set its number of threads and the level of its log of pipeline actions.

    Raises:
        UserError: there is no GPU for this process.
    """
    logging.getLogger("picotron.pipeline").setLevel(config.logging.level.upper())
    torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    if config.distributed.use_cpu:
        keep_freed_memory()
        return torch.device("cpu")
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if count == 0:
        raise UserError("this machine has no CUDA device; run on the CPU with --distributed.use_cpu true")
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no GPU, because this process sees only {count}; start at most {count} processes on "
            f"this machine, or let each of them see all GPUs: leave out srun's --gpus-per-task, or unset CUDA_VISIBLE_DEVICES"
        )
    if not ALLOCATOR_VARIABLES & os.environ.keys():
        # Memory grows in place, so that freed parts of different sizes leave fewer gaps. A variable could be too late:
        # some versions of torch read it when they are imported.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_device(local_rank)
    layout, device = config.distributed, torch.device("cuda", local_rank)
    needs_kernel = layout.cp_size > 1 and layout.cp_engine != "ulysses" and config.model.dtype == "bfloat16"
    if needs_kernel and not has_bfloat16_attention(device):
        raise UserError(
            f"distributed.cp_engine={layout.cp_engine!r} has no kernel for model.dtype='bfloat16' on "
            f"{torch.cuda.get_device_name(device)}; use model.dtype='float16', or cp_engine='ulysses'"
        )
    return device


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next step instead of returning it to the kernel, which clears every
    page that it gives out again. Without glibc, this has no effect.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest value that glibc accepts


def init_process_group(
    config: Config,
    device: torch.device,
    model_config: "PreTrainedConfig | None" = None,
    schedule: str | None = None,
) -> None:
    """Connect to the other ranks; a process that neither torchrun nor `run_ranks` has started forms a group of one.

    Args:
        model_config, schedule: see `check_same_config`.
    """
    backend = config.distributed.backend or ("nccl" if device.type == "cuda" else "gloo")
    # With a device, NCCL creates the communicators of all groups here and in `new_group`, where an error names its
    # cause, not within the first step. torch takes gloo for a backend that does the same, and fails.
    device_id = device if backend == "nccl" else None
    # Of several communicators at once, NCCL then starts kernels in the order of their calls, without which ranks could
    # wait for each other's.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    # Ranks may compile a first step for longer than NCCL's 10 minutes. `new_group` reads this default, too.
    dist.distributed_c10d.default_pg_nccl_timeout = TIMEOUT
    store: dist.Store = dist.HashStore()
    rank, size = 0, 1
    if not is_launched():
        check_world_size(config.distributed, size)
    elif os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # The processes need not be reachable from other machines, nor by this machine's name, which may be unknown.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    try:
        if is_launched():  # each run of a program needs its own keys in the store
            store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
            store = dist.PrefixStore(f"run {next(RUNS)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    except RuntimeError as error:
        reason = first_line(error).rpartition(". ")[2]
        if "EADDRINUSE" in reason:
            raise UserError(
                f"MASTER_PORT is in use on this machine ({reason}); set another number for all ranks"
            ) from error
        if backend != "gloo" or missing_ranks(error):
            raise
        remedy = "is GLOO_SOCKET_IFNAME a name that `ip link` prints?"
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            remedy = "to restart ranks, torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        raise UserError(f"gloo finds no network: {reason}; {remedy}") from error
    atexit.register(forget_groups)
    check_same_config(config, model_config, schedule)


def forget_groups() -> None:
    """Free models and groups, if the groups are destroyed. Else gloo's threads would live on, and one that still frees
    a tensor when Python itself ends would abort the process.
    """
    if not dist.is_initialized():
        free_models()
        pgm.process_group_manager = None  # type: ignore[assignment]


def connect(
    config: Config, model_config: "PreTrainedConfig | None" = None, schedule: str | None = None
) -> torch.device:
    """Select this process's device, connect to the other ranks, and create the process groups of the layout.

    Args:
        model_config, schedule: see `check_same_config`.
    """
    device, layout = set_up_device(config), config.distributed
    init_process_group(config, device, model_config, schedule)
    pgm.setup_process_group_manager(layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size)
    return device


def check_same_config(config: Config, model_config: "PreTrainedConfig | None", schedule: str | None) -> None:
    """Raise a UserError on every rank if the ranks have different configs, apart from `environment`, or have read
    different models or schedules from their files.

    Args:
        model_config: config of the model; None: the program has a model of its own.
        schedule: `identity` of the plan of the pipeline, if a plan runs it.
    """
    sections = config.model_dump(mode="json", exclude={"environment"})
    own = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    own["the schedule's SHA-256"] = hashlib.sha256((schedule or "").encode()).hexdigest()[:24]
    if model_config is not None:
        own |= {f"the model's {key}": value for key, value in model_config.to_dict().items()}
        del own["the model's transformers_version"]  # of this machine, not of the model
    check_same(own)


def check_same(own: dict[str, Any]) -> None:
    """Raise a UserError on every rank if the ranks have different values of a key."""
    first, *others = run_on_all_ranks(lambda: own)
    for rank, other in enumerate(others, 1):
        for key in first | other:
            if first.get(key) != other.get(key):
                raise UserError(
                    f"rank {rank} has {key}={other.get(key)!r}, but rank 0 has {first.get(key)!r}; start all processes "
                    f"with the same config and the same files"
                )


def missing_ranks(error: Exception) -> str | None:
    """Return a sentence if torch could not reach other ranks, with the line at which this rank waited for them. Return
    None for any other error, which has its cause on this rank.
    """
    timed_out = any(
        text in str(error) for text in ("Timed out waiting", "wait timeout", "Connect timeout", "monitoredBarrier")
    )
    lost = any(text in str(error) for text in ("by peer", "Broken pipe"))
    if not isinstance(error, RuntimeError) or not (timed_out or lost):
        return None
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}torch{os.sep}" not in frame.filename
    ]
    calls = (f"{frame.name} ({os.path.relpath(frame.filename)}:{frame.lineno})" for frame in frames[:-4:-1])
    place = ", called by ".join(calls)
    if timed_out:
        return (
            f"timed out: other ranks did not reach {place}; compare this with the lines of the other ranks, because all ranks of "
            f"a group must call the same collectives in the same order (docs/debugging.md)"
        )
    return f"another rank has ended: read its error first; this rank was in {place}"


def sentence_of(error: Exception) -> str | None:
    """Return the sentence that tells a user what to do: that of a UserError, or one about a limit of the system. Return
    None for any other error, whose traceback is needed.
    """
    if isinstance(error, UserError):
        return str(error)
    if "Too many open files" in str(error):
        return "this process may not open more files; raise the limit, such as by `ulimit -n 4096`"
    if "failed to map segment from shared object" in str(error):
        return (
            "torch.compile writes machine code into a folder that is mounted with noexec; set TORCHINDUCTOR_CACHE_DIR to "
            "another folder, or training.compile to false"
        )
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return (
            f"a process that tokenises has ended ({first_line(error)}), as it does if memory runs out; use a smaller "
            f"dataset.num_proc"
        )
    return None


def exit_after_signal(number: int) -> NoReturn:
    """Exit with the status that shells report for a program ended by a signal.

    torchrun has the same exit code, 1, for stopped runs and for failed ones. If it has received the signal itself, it
    then prints a traceback. `run_ranks` does neither.
    """
    logger.info("stopped by %s, without an error", signal.Signals(number).name)
    sys.exit(128 + number)


def end_wandb() -> None:
    """Let wandb write what it still holds, if this rank has a run of it: the process ends without its own end."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        with contextlib.suppress(Exception):  # the run's error is what counts
            wandb.finish(exit_code=1)


def exit_on_error(main: Callable[[], None]) -> None:
    """Call `main`. If it raises, print the error and exit immediately, so that the other ranks are stopped.

    An error is printed as a sentence, if it has one (see `sentence_of`), else as a traceback. A rank that waited for
    others in vain prints the line at which it waited.
    """
    # Triton 3.9, which comes with torch 2.15, prints its objects that are still there at the end. Another call, such as
    # of a notebook's cell, would keep the model of an earlier one, whose memory is not freed yet.
    if not gc.get_freeze_count() and ("triton" not in sys.modules or torch.__version__ < "2.15"):
        gc.freeze()  # what has been imported need not be looked at again, and the program ends faster
    tqdm.set_lock(threading.RLock())  # its own has a semaphore, which Python 3.14 reports if a rank is killed
    rank = os.environ.get("RANK", "0")
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see `begin`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if is_launched() and "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_launcher()
        main()
    except KeyboardInterrupt:  # before the first step
        print_line("", end="")  # flushes what the program has printed
        print_line(f"\n[rank {rank}] interrupted", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that shells and launchers see that it was not an error
    except Exception as error:
        end_wandb()  # before the sentence, which is the last thing on the screen
        print_line("", end="")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step left to finish
        if rank != "0" and StopSignals.received:
            # Usually the launcher sent it because another rank failed and printed why; this error is a consequence.
            name = type(error).__name__
            print_line(f"[rank {rank}] ended with {name} after signal {StopSignals.received}", file=sys.stderr)
            os._exit(1)
        if sentence := missing_ranks(error):
            if "timed out" not in sentence:
                time.sleep(1)  # `run_ranks` stops this rank when the one with the error exits
            print_line(f"\n[rank {rank}] error: {sentence}\n", file=sys.stderr)
            time.sleep(3)  # torchrun stops the other ranks when the first one exits; they print their sentence, too
            os._exit(1)
        if rank != "0":
            # Most user errors are found by all ranks at the same time, and torchrun stops all of them when the first
            # one exits. Rank 0 gets time to print the error once; the others print theirs only if rank 0 had none.
            time.sleep(3)
        sentence = sentence_of(error)
        message = f"\n{traceback.format_exc()}" if sentence is None else f" error: {sentence}\n"
        print_line(f"\n[rank {rank}]{message}", file=sys.stderr)
        os._exit(1)  # sys.exit would wait for, or abort in, threads of a process group whose peers are gone

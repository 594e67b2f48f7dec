"""What is left: how a process starts, messages that skip groups of one or carry mistakes, the dtype of sums, and how a
run ends.
"""

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from picotron.config import Config, UserError

logger = logging.getLogger("picotron")
T = TypeVar("T")


def set_up_logging() -> None:
    """Rank 0 tells what happens, the others only what goes wrong."""
    rank = int(os.environ.get("RANK", 0))
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)


def set_up_device(config: Config) -> torch.device:
    """This process's device, and how many threads it may use."""
    os.environ["TOKENIZERS_PARALLELISM"] = str(config.environment.TOKENIZERS_PARALLELISM).lower()
    torch.set_num_threads(config.environment.OMP_NUM_THREADS)
    if config.distributed.use_cpu:
        return torch.device("cpu")
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if count == 0:
        raise UserError("this machine has no CUDA device; run on the CPU with --distributed.use_cpu true")
    if local_rank >= count:
        raise UserError(
            f"process {local_rank} of this machine needs a GPU of its own, but it has {count}; start {count}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def init_process_group(config: Config, device: torch.device) -> None:
    """Meet the other processes that torchrun started; without torchrun, this process is all there is."""
    backend = config.distributed.backend or ("nccl" if device.type == "cuda" else "gloo")
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


# torch 2.13 renamed them and warns about the names that are the only ones in 2.11
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.all_reduce`: in place; free in a group of one; None is the group of all ranks."""
    if dist.get_world_size(group) == 1:
        return None
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype to add up numbers like those of x in: float32 or wider. In bfloat16, 256 + 1 = 256."""
    return torch.promote_types(x.dtype, torch.float32)


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Do `work` on every rank of a group; all get all results, by rank.

    Raises:
        UserError: `work` raised it somewhere; then it is raised everywhere, since nobody should go on alone.
    """
    mine: tuple[T | None, str]
    try:
        mine = (work(), "")
    except UserError as error:
        mine = (None, str(error))
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for _, mistake in everyone:
        if mistake:
            raise UserError(mistake)
    return [result for result, _ in everyone]


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def ignore_stop_signals(_: int) -> None:
    """For the workers of a data loader: a terminal or a scheduler sends signals to them too, but the run still needs
    them to finish its step.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (what Slurm can send before the time limit) ask a run to end after its step.

    Until then they only leave a note, and so does a second one: torchrun passes on what the terminal has sent already.
    """

    received = 0  # the number of the signal

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    @staticmethod
    def _note(number: int, _: Any) -> None:
        StopSignals.received = number

    def agreed(self) -> int:
        """The signal that some rank received, or 0: the same on every rank, which all have to call it."""
        number = torch.tensor(self.received)
        all_reduce(number, self.group, dist.ReduceOp.MAX)
        if number:
            logger.info("%s: the run ends after this step", signal.Signals(int(number)).name)
        return int(number)


def exit_on_error(main: Callable[[], None]) -> None:
    """Run `main`; if it raises, say so and end this process at once, so that torchrun ends the others.

    A mistake of the user's is one sentence, anything else a traceback.
    """
    rank = int(os.environ.get("RANK", 0))
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step left to finish
        if rank > 0 and StopSignals.received:
            # As a rule torchrun has sent it because another rank has failed and said why; this is a consequence.
            print(f"[rank {rank}] ended by signal {StopSignals.received} and {type(error).__name__}", file=sys.stderr)
            os._exit(1)
        if rank > 0:
            # Most mistakes are found by all ranks at once. torchrun ends everyone when the first one leaves: rank 0
            # gets the time to say it once for all, and the others speak only if it had nothing to say.
            time.sleep(3)
        if isinstance(error, UserError):
            print(f"\n[rank {rank}] error: {error}\n", file=sys.stderr, flush=True)
        else:
            print(f"\n[rank {rank}]\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)  # sys.exit would wait for, or abort in, threads of a process group whose peers are gone

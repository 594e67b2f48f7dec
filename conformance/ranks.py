"""The ranks of a case: processes with torchrun's variables, started by one process that has imported the libraries.

    python -m conformance.ranks                   run the ranks of cases, of which standard input has a line each: the
                                                  adapter, the folder of the case, the time limit
    torchrun -m conformance.ranks ADAPTER FOLDER  be a rank of this case (any launcher that sets RANK, WORLD_SIZE, ...)

A process that is forked (on Linux) starts in milliseconds, any other in seconds: it imports torch and transformers.
"""

import contextlib
import faulthandler
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import transformers
import transformers.models.llama.modeling_llama  # so that forked processes need not import it

from conformance.case import Case
from conformance.result import NotOffered, Result, kind_of, write_outcome
from conformance.trace_recorder import recording

CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")  # macOS may crash after a fork
GRACE = 3.0  # seconds that the other ranks have after the first error


def load_adapter(path: Path) -> ModuleType:
    """Import an adapter. Its top level must not compute, because processes are forked afterwards."""
    spec = importlib.util.spec_from_file_location("adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapter"] = module  # for classes that are pickled
    spec.loader.exec_module(module)
    return module


def run_rank(adapter: Path, case: Case, rank: int) -> None:
    """Run a case on this rank, and write its outcome: the result, or the kind and the reason of a failure."""
    path = case.folder / f"rank{rank}.safetensors"
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # no trainer may rely on equal seeds
    try:
        module = load_adapter(adapter)
        with recording(case, rank):
            found = module.run(case)
        if not isinstance(found, Result):
            raise TypeError(f"run(case) should return a Result, not {type(found).__name__}")
        write_outcome(path, "result", vars(found.local()))
    except NotOffered as error:
        write_outcome(path, "not offered", str(error))
    except BaseException:
        write_outcome(path, "crashed", traceback.format_exc())


def be_rank(adapter: Path, case: Case, rank: int, port: int) -> None:
    """Be a rank. At the end, wait to be killed: others may still read from this rank."""
    size, log = str(case.world_size), os.open(case.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with open(case.folder / f"rank{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        run_rank(adapter, case, rank)
        while True:
            signal.pause()


def serve(adapter: Path, case: Case, timeout: float) -> None:
    """Start the ranks of a case, and kill them at the end, see `wait_for_ranks`."""
    # While this socket is bound, no other program is given its port. It does not listen, so rank 0 can, several times.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("localhost", 0))
    port = held.getsockname()[1]
    if sys.platform != "linux":  # elsewhere, it would get the connections to rank 0
        held.close()
    ranks: dict[int, Any] = {}
    try:
        for rank in range(case.world_size):
            ranks[rank] = CONTEXT.Process(target=be_rank, args=(adapter, case, rank, port))  # type: ignore[attr-defined]
            ranks[rank].start()
        wait_for_ranks(case, ranks, timeout)
    finally:
        for process in ranks.values():  # all at once: a rank that loses its connection to another would report an error
            process.kill()
        for process in ranks.values():
            process.join()
        held.close()


def wait_for_ranks(case: Case, ranks: dict[int, Any], timeout: float) -> None:
    """Wait until all ranks are ready, after an error, or until the time is over; then they write where they are. Ranks
    that have ended are removed.
    """
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        for rank, process in [*ranks.items()]:
            if process.exitcode is not None:
                del ranks[rank]
                end = min(end, time.monotonic() + GRACE)
        ready = [path for rank in ranks if (path := case.folder / f"rank{rank}.safetensors").exists()]
        if len(ready) == len(ranks):
            return
        if end > time.monotonic() + GRACE and any(kind_of(each) != "result" for each in ready):
            end = time.monotonic() + GRACE
        time.sleep(0.01)
    for process in ranks.values():
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.05)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    if len(sys.argv) == 3:  # under torchrun
        run_rank(Path(sys.argv[1]), Case.read(Path(sys.argv[2])), int(os.environ["RANK"]))
        if dist.is_initialized():
            dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # Python's own end can abort in a thread of gloo that still frees a tensor
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an adapter prints is not a reply
    for line in sys.stdin:
        adapter, folder, timeout = json.loads(line)
        with contextlib.suppress(Exception):  # the ranks report it
            load_adapter(Path(adapter))  # imports its libraries once
        serve(Path(adapter), Case.read(Path(folder)), timeout)
        print("done", file=replies, flush=True)


if __name__ == "__main__":
    main()

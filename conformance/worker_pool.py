"""A pool of processes that stay alive between tests, so that running a function on n ranks takes milliseconds.

    losses = pool.run(train_ten_steps, 4, config)     # train_ten_steps(config) on ranks 0 to 3 of a gloo group

Where processes can fork, they come from a fork server that has imported torch and transformers but has not computed
anything. So new workers start quickly, and a worker that hangs or dies can be replaced.
"""

import atexit
import datetime
import gc
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from picotron import process_group_manager
from workbench.run.free_models import free_models
from workbench.run.start_method import START_METHOD

CONTEXT = multiprocessing.get_context("forkserver" if START_METHOD == "fork" else START_METHOD)
CONTEXT.set_forkserver_preload(["transformers.models.llama.modeling_llama"])


class WorkerError(AssertionError):
    """Failure on one or more ranks, with their tracebacks."""


def _work(connection: multiprocessing.connection.Connection, backend: str) -> None:
    """Serve requests: receive (function, arguments, rank, size, rendezvous file), send (succeeded, result)."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module="picotron")
    while True:
        try:
            function, arguments, rank, size, rendezvous = pickle.loads(connection.recv_bytes())
            gc.freeze()  # `free_models` need not look at what has been imported, which saves 0.2 s
            store = dist.FileStore(rendezvous, size)
            timeout = datetime.timedelta(seconds=60)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            torch.manual_seed(0)  # ranks must build equal models
            answer = (True, function(*arguments))
            if dist.is_initialized():
                dist.barrier()  # other ranks may still be connecting to this one
        except EOFError:  # the tests are over
            return
        except BaseException:
            answer = (False, traceback.format_exc())
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # compiled code has the names of its groups, which the next ones get again
        # The threads of a gloo group end with its last reference, so drop those held here and by the function.
        function = arguments = None
        process_group_manager.process_group_manager = None  # type: ignore[assignment]
        logging.getLogger("picotron").setLevel(logging.NOTSET)  # the function may have silenced it
        free_models()
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send_bytes(pickle.dumps(answer))


class WorkerPool:
    """The processes. `backend` is that of their groups. Processes that use GPUs need the context `spawn`."""

    def __init__(self, backend: str = "gloo", context: multiprocessing.context.BaseContext = CONTEXT) -> None:
        self.backend, self.context = backend, context
        self.processes: list[Any] = []
        self.connections: list[multiprocessing.connection.Connection] = []
        atexit.register(self.close)

    def _grow(self, size: int) -> None:
        while len(self.processes) < size:
            ours, theirs = self.context.Pipe()
            # not a daemon, because daemons cannot start processes, as tokenising does
            process = self.context.Process(target=_work, args=(theirs, self.backend))  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def close(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            process.kill()
            process.join()
        self.processes, self.connections = [], []

    def run(self, function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 120) -> list[Any]:
        """Run `function(*arguments)` in a new group of `size` processes. Returns the results by rank.

        `function` is pickled by name, so it must be defined at the top level of a module.

        Raises:
            WorkerError: `function` raised on some rank, a worker died, or `timeout` seconds passed. All workers are
                replaced.
        """
        self._grow(size)
        with tempfile.TemporaryDirectory() as folder:
            for rank, connection in enumerate(self.connections[:size]):
                connection.send_bytes(pickle.dumps((function, arguments, rank, size, f"{folder}/rendezvous")))
            answers, errors = self._collect(size, timeout)
        if errors:
            self.close()
            raise WorkerError("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))
        return [answers[rank] for rank in range(size)]

    def _collect(self, size: int, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Return answers and errors by rank. After the first error, the other ranks have one second to respond."""
        waiting = {connection: rank for rank, connection in enumerate(self.connections[:size])}
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if not errors:
                    errors = dict.fromkeys(waiting.values(), f"no answer within {timeout} s")
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    succeeded, result = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    succeeded, result = False, "the worker died"
                if succeeded:
                    answers[rank] = result
                else:
                    errors[rank] = result
                    deadline = min(deadline, time.monotonic() + 1)
        return answers, errors

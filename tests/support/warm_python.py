"""A `python` that starts in milliseconds, because its programs are forks of one process that has imported torch.

    subprocess.run([python(), "train.py", "--config", "docs/small.json"])

It takes a script, `-m` or `-c`, and starts Python itself for all else, or if streams are closed or variables change
Python. The program has a session of its own.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

MODULES = (
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "pydantic.functional_validators",
    "pydantic.main",
)
SHARED = "WARM_PYTHON"  # variable with the command, if processes share one
FORWARDED = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


@functools.cache
def python() -> str:
    """Start the process that forks, unless the process that hands out tests has. Returns the path of the command,
    beside which there is a `torchrun`. All end with the process that started them.
    """
    if sys.platform != "linux":
        return sys.executable
    if started := os.environ.get(SHARED):
        return started
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    address = folder / "socket"
    commands = {
        "python": [sys.executable, "-IS", __file__, str(address), sys.executable],
        "torchrun": [f"{folder}/python", "-m", "torch.distributed.run"],
    }
    for name, command in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (folder / name).chmod(0o755)
    variables = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, __file__, str(address)], env=variables, start_new_session=True)
    while not address.exists():
        assert server.poll() is None
        time.sleep(0.02)
    return str(folder / "python")


def ask(address: str, interpreter: str, words: list[str]) -> None:
    """Let the server run a program with the folder, variables and streams of this process, and end as it does."""
    while words[:1] in (["-u"], ["-B"]):  # what multiprocessing passes on of a variable that is passed on, too
        os.environ |= {"PYTHONUNBUFFERED": "1"} if words[0] == "-u" else {}
        words = words[1:]
    is_plain = words and (words[0] in ("-m", "-c") or not words[0].startswith("-"))
    changes_python = {"PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONWARNINGS"} & os.environ.keys()
    has_streams = all(os.path.exists(f"/proc/self/fd/{stream}") for stream in range(3))
    if not is_plain or changes_python or not has_streams or signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        os.execv(interpreter, [interpreter, *words])
    descriptors = [each for each in range(256) if os.path.exists(f"/proc/self/fd/{each}")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        message = json.dumps([words, os.getcwd(), dict(os.environ), descriptors]).encode()
        socket.send_fds(connection, [message], descriptors)
        program = int(connection.recv(100))
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(program, number))
        status = int(connection.recv(100))
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(address: str) -> list[str]:
    """Fork for each request until the parent has ended. Returns, in the fork, the words of the program."""
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # freeing torch's operators takes longer than most programs
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address} of its own")
        listener.listen()
        Path(f"{address} of its own").rename(address)  # it exists when it can be used
        while os.getppid() == parent:
            ready = select.select([listener], [], [], 1.0)[0]
            with contextlib.suppress(ChildProcessError):  # there is none
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not ready:
                continue
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return watch(connection)
            connection.close()
    shutil.rmtree(Path(address).parent)
    os._exit(0)


def watch(connection: socket.socket) -> list[str]:
    """Fork the program, and tell its process and its status. If whoever asks has ended, kill it."""
    message, received, *_ = socket.recv_fds(connection, 2**20, 256)
    words, folder, variables, descriptors = json.loads(message)
    program = os.fork()
    if program == 0:
        connection.close()
        os.setsid()
        copies = [fcntl.fcntl(each, fcntl.F_DUPFD, 256) for each in received]  # above all numbers that they get
        os.closerange(min(received), 256)
        for copy, descriptor in zip(copies, descriptors, strict=True):
            os.dup2(copy, descriptor)
        os.closerange(256, max(copies) + 1)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        return list(words)
    connection.send(str(program).encode())
    if connection in select.select([connection, os.pidfd_open(program)], [], [])[0]:
        os.killpg(program, signal.SIGKILL)
        os._exit(1)
    connection.send(str(os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])).encode())
    os._exit(0)


def run(words: list[str]) -> None:
    """Run a program as Python does."""
    from multiprocessing import util

    started_by_exec = util.spawnv_passfds

    def spawnv_passfds(path: Any, arguments: Any, descriptors: Any) -> int:
        """Start a process of multiprocessing; its fork server begins as a fork, too, unless it would lack threads."""
        command, *words = arguments[arguments.index("-c") + 1 :]
        if "multiprocessing.forkserver" not in command or len(os.listdir("/proc/self/task")) > 1:
            return started_by_exec(path, arguments, descriptors)
        process = os.fork()
        if process == 0:
            sys.argv = ["-c", *words]
            begin_fork_server(command, {0, 1, 2, *descriptors})
        return process

    util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.executable = str(Path(sys.argv[1]).parent / "python")
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    first, *rest = words
    folder = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    before = [] if os.environ.get("PYTHONSAFEPATH") else [folder]
    before += [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:1] = before
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], main.__dict__)
    else:
        sys.argv = words
        main.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)


def begin_fork_server(command: str, descriptors: set[int]) -> None:
    """Become the process of which multiprocessing's processes are forks, without the parent's descriptors and locks."""
    from multiprocessing import forkserver

    try:
        for each in {int(name) for name in os.listdir("/proc/self/fd")} - descriptors:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(each)
        for number in FORWARDED:
            if callable(signal.getsignal(number)):  # as a new program
                signal.signal(number, signal.SIG_DFL)
        importlib.reload(forkserver)
        sys.modules["__main__"] = ModuleType("__main__")
        exec(command, {})
    finally:
        os._exit(0)


def leave(status: int) -> NoReturn:
    """End as a program does, but for the objects of modules, which take longer to free than most programs to run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.closed or stream.flush()
        except OSError:
            status = 120  # as Python, if what it has printed is lost
    os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ask(sys.argv[1], sys.argv[2], sys.argv[3:])
    words = serve(sys.argv[1])
    try:
        run(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            leave(end.code or 0)
        print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        leave(0)
    leave(1)

"""Ranks start from a clean process, end as programs do, and never outlive the program that has started them."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from picotron.console import UserError
from tests.support.program import arguments, metrics, run, wait_until
from workbench.run.launch import is_launched
from workbench.run.ranks import run_ranks

ENDS = """
import contextlib, multiprocessing.context, os, signal, sys, time
import torch.distributed as dist
from picotron.console import UserError
from workbench.run import ranks
from workbench.run.ranks import run_ranks

ranks.GRACE_SECONDS = 2.0
how, at, starts = sys.argv[1], int(sys.argv[2]), [0]
os.environ.setdefault("LAUNCHER", str(os.getpid()))

def end():
    if how == "error":
        raise BlockingIOError("no process is left")
    os.kill(int(os.environ["LAUNCHER"]), int(how))

def work():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        end()
        time.sleep(1000)
    dist.barrier()  # where no Python handler of a signal runs

def start(self, real=multiprocessing.context.ForkServerProcess.start):
    starts[0] += 1
    if starts[0] == at:
        end()
    real(self)

if __name__ == "__main__":
    print(os.getsid(0), flush=True)
    multiprocessing.context.ForkServerProcess.start = start
    with contextlib.suppress(UserError):
        run_ranks(4, work)
    print("goes on", flush=True)
    time.sleep(1000)  # as a notebook does
"""

IMPORTS_LONG = """
import workbench.run.begin, os, time
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
from workbench.run.launch import exit_on_error
exit_on_error(lambda: time.sleep(1000))
"""

OF_ANOTHER = """
import sys
sys.argv = ["train.py"]  # in the fork server, which imports train, too
import workbench.run.begin
from multiprocessing import forkserver
print(forkserver._forkserver._forkserver_pid)
"""

AS_IN_A_NOTEBOOK = """
import os, sys, threading, time
import torch, torch.distributed as dist
from workbench.run.ranks import run_ranks

torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)  # starts threads, which a fork would lack
torch.set_default_dtype(torch.float64)
files = []

class Sum:
    def __init__(self, start): self.total = start

def write_late(path):
    time.sleep(0.5)
    open(path, "w").write("late")

def work():
    torch.set_num_threads(2)
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), Sum(torch.ones(600, 600) @ torch.ones(600, 600))
    dist.all_reduce(found.total)
    files.append(open(f"{sys.argv[1]}/file{rank}", "w"))
    files[0].write(f"{found.total.sum():g} {found.total.dtype} {os.environ['CELL']} {cell}")
    threading.Thread(target=write_late, args=(f"{sys.argv[1]}/late{rank}",)).start()
    if cell == 3:
        sys.exit("the reason")

for cell in (1, 2):
    os.environ["CELL"] = str(cell)
    if cell == 2:
        sys.ps1, __file__ = ">>> ", "train.py"  # at the prompt, Python 3.13 runs a file with a guard
    run_ranks(2, work)
    print(*[open(f"{sys.argv[1]}/{name}").read() for name in ("file0", "file1", "late0", "late1")], sep="; ")
thread = threading.Thread(target=run_ranks, args=(2, lambda: sys.stdout.write("in a thread\\n")))  # in one piece
thread.start()
thread.join()
cell = 3
run_ranks(2, work)
"""

SEEDS = """
import os
import torch
from workbench.run.ranks import run_ranks
torch.cuda.manual_seed_all = lambda seed: os.write(1, b"seed of GPUs: %d\\n" % seed)  # in one piece

def work(): pass

if __name__ == "__main__":
    torch.manual_seed(5)
    run_ranks(2, work)
"""


def processes_of(session: int) -> int:
    table = subprocess.run(["ps", "-eo", "sid,stat"], capture_output=True, text=True, check=True).stdout
    return sum(row.split()[0] == str(session) and "Z" not in row for row in table.splitlines())


@pytest.mark.processes
def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    """The launcher is killed, or an error ends its call, when it starts the first, second, ... rank, and afterwards."""
    (tmp_path / "ends.py").write_text(ENDS)
    variables = {**os.environ, "PYTHONPATH": os.getcwd()}
    kill, hang_up = str(int(signal.SIGKILL)), str(int(signal.SIGHUP))
    launchers = []
    for how, at in [(kill, 1), (kill, 3), (kill, 0), (hang_up, 2), ("error", 3)]:
        words = [sys.executable, tmp_path / "ends.py", how, str(at)]
        launchers.append(subprocess.Popen(words, stdout=subprocess.PIPE, env=variables, start_new_session=True))
    sessions = [int(each.stdout.readline()) for each in launchers]
    *ended, notebook = launchers
    assert [each.wait(120) for each in ended] == [-signal.SIGKILL] * 3 + [128 + signal.SIGHUP]
    assert notebook.stdout.readline() == b"goes on\n"
    wait_until(lambda: [*map(processes_of, sessions)] == [0] * 4 + [3])  # it, and what starts processes
    os.kill(sessions[-1], signal.SIGKILL)
    assert notebook.stdout.read() == b""  # nobody holds the pipe any more


@pytest.mark.cold
@pytest.mark.processes
def test_a_rank_whose_torchrun_is_killed_while_it_imports_ends() -> None:
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    words = ["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", IMPORTS_LONG]
    torchrun = subprocess.Popen(words, env=variables | {"TORCHELASTIC_RUN_ID": "1"}, stdout=subprocess.PIPE)
    torchrun.stdout.readline()
    torchrun.kill()
    torchrun.communicate(timeout=120)  # until the rank has closed the pipe


@pytest.mark.cold
@pytest.mark.processes
def test_ranks_of_a_notebook_start_clean_and_end_as_programs(tmp_path: Path) -> None:
    """Its program has no guard. It has computed with threads, and SIGCHLD is ignored."""
    (program := tmp_path / "program.py").write_text(AS_IN_A_NOTEBOOK)
    words = ["sh", "-c", 'trap "" CHLD; exec "$@"', "sh", sys.executable, program, tmp_path]
    variables = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=240)
    cells = [f"4.32e+08 torch.float64 {i} {i}; 4.32e+08 torch.float64 {i} {i}; late; late" for i in (1, 2)]
    assert done.stdout.splitlines() == [*cells, "in a thread", "in a thread"]
    assert (done.returncode, set(done.stderr.splitlines())) == (1, {"the reason"})


@pytest.mark.processes
def test_a_program_with_the_arguments_of_another_starts_no_fork_server() -> None:
    assert run("-c", OF_ANOTHER).stdout == "None\n"


@pytest.mark.processes
def test_a_function_that_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match="cannot be sent to the ranks"):
        run_ranks(2, lambda: bool(lock))


@pytest.mark.processes
def test_ranks_draw_with_the_seed_of_their_program_on_gpus_too(tmp_path: Path) -> None:
    (tmp_path / "seeds.py").write_text(SEEDS)
    assert run(tmp_path / "seeds.py", PYTHONPATH=os.getcwd()).stdout.splitlines() == ["seed of GPUs: 5"] * 3


@pytest.mark.linux
@pytest.mark.processes
def test_a_run_ends_well_without_a_log(tmp_path: Path) -> None:
    closed = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, ['python', 'train.py', *sys.argv[1:]])"
    run("-c", closed, *arguments(tmp_path / "run", 2, 1))
    assert len(metrics(tmp_path / "run")) == 4
    assert (tmp_path / "run" / "step_00000004").is_dir()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "WORLD_SIZE='' cannot be used"),
        ({"RANK": "", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK='' cannot be used"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK='x' cannot be used"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR='' cannot be used"),
    ],
)
def test_nonsense_in_the_environment_is_an_error(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(text)):
        is_launched()


def test_what_other_launchers_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert not is_launched()
    assert not {"WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys()

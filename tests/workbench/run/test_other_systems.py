"""Programs on a system without what only Linux has: forks of programs, /proc, and a list of usable cores."""

import re
from pathlib import Path

import pytest

from tests.support.examples import save_model
from tests.support.program import arguments, metrics, run
from tests.support.samples import with_template

# Python imports this file in each process that starts, also in those that programs start.
WITHOUT_LINUX = """
import os, sys, sysconfig, urllib.request  # the last two ask for the real system
sysconfig.get_config_vars()
sys.platform = "darwin"
del os.sched_getaffinity
stat = os.stat
os.stat = lambda path, *more, **keys: stat("no file" if str(path).startswith("/proc/") else path, *more, **keys)

def refuse(event, arguments):
    # the fork server's forks are safe everywhere
    if (event == "os.fork" and sys.argv[0] != "-c") or (event == "open" and str(arguments[0]).startswith("/proc/")):
        raise OSError(f"{event} {arguments} on a system without it")

sys.addaudithook(refuse)
"""


@pytest.fixture
def without_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # there, it is lo0


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_is_the_same_without_forks(tmp_path: Path, folder: str, request: pytest.FixtureRequest) -> None:
    """Its ranks, and the processes that tokenise, are new ones. Its messages are there, too."""
    text = tmp_path / "a.txt"
    text.write_text("".join(f"def f{i}(x): return x + {i}\n" for i in range(2000)))
    keys = {"dataset.name": text, "dataset.num_proc": 2, "model.tokenizer": folder, "training.eval_frequency": 0}
    losses, outputs = [], []
    for name in ("forks", "spawned"):
        result = run("train.py", *arguments(tmp_path / name, 2, 1, **keys), XDG_CACHE_HOME=str(tmp_path / name))
        losses.append([(record["loss"], record["grad_norm"]) for record in metrics(tmp_path / name)])
        outputs.append(len(result.stdout.splitlines()))
        request.getfixturevalue("without_linux")
    assert losses[0] == losses[1]
    assert outputs[0] == outputs[1] > 4


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("without_linux")
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("generate.py --checkpoint FOLDER --chat --pp_size 2 --max_new_tokens 3", "> hello"),
        ("-m conformance conformance/examples/ddp.py --only step --layouts dp2", "equal       step         dp2.*"),
        ("-m puzzles 2 --adapter FOLDER/ring.py", "RIGHT: .*"),
        ("train.py --config docs/small.json --explain --hardware this", ".* tokens/s on CPU"),
        ("-m torch.distributed.run --nproc_per_node 2 -m steps.only_dp", "step 10 .*"),
    ],
    ids=["generate", "conformance", "puzzles", "explain", "steps"],
)
def test_programs_run_without_forks(command: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text("from puzzles.solutions.p02_ring import ring_all_reduce as p02_ring")
    with_template(save_model(tmp_path), "{% for message in messages %}{{ message.content }}{% endfor %}")
    result = run(*command.replace("FOLDER", str(tmp_path)).split(), given="hello\n")
    assert re.search(f"^{line}$", result.stdout, re.MULTILINE), result.stdout

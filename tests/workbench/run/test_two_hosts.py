"""One run on two hosts: network namespaces on this machine, each with its own name, address, processes and clock."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.program import TORCHRUN, arguments, metrics, run

NAMES = ("picotron-h0", "picotron-h1")
ADDRESSES = ("10.99.7.1", "10.99.7.2")
TP = {"distributed.tp_size": 2}
LATE = """
from datetime import datetime, timedelta
from torch.distributed import run
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

class Clock:
    now = staticmethod(lambda zone: datetime.now(zone) - timedelta(hours=1))

dynamic_rendezvous.datetime = Clock
run.main()
"""


def ip(command: str, **more: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *command.split()], capture_output=True, text=True, **{"check": True, **more})


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """Command prefixes that run a command on each of two hosts, connected by a virtual cable."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("virtual hosts need root, ip and unshare: apt-get install iproute2 util-linux")
    if (made := ip(f"netns add {NAMES[0]}", check=False)).returncode:
        pytest.skip(f"this machine does not allow network namespaces: {made.stderr.strip()}")
    files = [Path("/etc/netns") / name / "hosts" for name in NAMES]  # `ip netns exec` mounts them as /etc/hosts
    try:
        ip(f"netns add {NAMES[1]}")
        ip(f"link add eth0 netns {NAMES[0]} type veth peer name eth0 netns {NAMES[1]}")
        for name, address, file in zip(NAMES, ADDRESSES, files, strict=True):
            ip(f"-n {name} address add {address}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
            file.parent.mkdir(parents=True)
            file.write_text("127.0.0.1 localhost\n" + "".join(map("{} {}\n".format, ADDRESSES, NAMES)))
        isolate = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        yield [
            ["ip", "netns", "exec", name, *isolate, "sh", "-c", f'hostname {name}; exec "$@"', "sh"] for name in NAMES
        ]
    finally:
        for name, file in zip(NAMES, files, strict=True):
            ip(f"netns delete {name}", check=False)
            shutil.rmtree(file.parent, ignore_errors=True)


def run_on(hosts: list[list[str]], folder: Path) -> list[tuple[int, str]]:
    """Train on both hosts, each with a cache of its own. torchrun gets the arguments of template/base_job.slurm. The
    clock of the second host is an hour late.

    Returns:
        The exit code and the output of each host.
    """
    same = " ".join(re.findall(r"--rdzv_(?:backend|conf) \S+", Path("template/base_job.slurm").read_text()))
    options = ["--nproc_per_node", "1", "--nnodes", "2", *same.split(), "--rdzv_endpoint", f"{NAMES[0]}:29400"]
    options += ["--rdzv_id", "1", "train.py", *arguments(folder / "two", 1, 4, **TP)]
    torchrun = TORCHRUN[:-1], ["-c", LATE]
    processes = [
        subprocess.Popen(
            [*host, sys.executable, *torchrun[i], *options],
            env=os.environ | {"XDG_CACHE_HOME": str(folder / f"cache{i}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i, host in enumerate(hosts)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.processes
def test_two_hosts_write_the_metrics_of_one_host(hosts: list[list[str]], tmp_path: Path) -> None:
    run("train.py", *arguments(tmp_path / "one", 1, 4, **TP))
    results = run_on(hosts, tmp_path)
    assert [code for code, _ in results] == [0, 0], "\n".join(output for _, output in results)
    fields = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    two, one_host = (
        [[line[field] for field in fields] for line in metrics(tmp_path / name)] for name in ("two", "one")
    )
    assert len(two) == 4
    assert two == one_host
    for i in range(2):
        assert list(tmp_path.glob(f"cache{i}/picotron/tokens-*/tokens.uint16"))

"""A real Slurm on this machine: Debian's packages, a controller and two nodes, started and stopped by the tests.

It needs root, but neither systemd nor cgroups. It does not disturb another Slurm on the machine: all its files are in a
folder of the test, its ports are free ones, and it has a separate munge daemon (for authentication).
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]
NODES = 2
CPUS = 4  # of each node, according to slurm.conf


class NoSlurmError(Exception):
    """Slurm cannot run here. The message is the reason."""


def install() -> None:
    """Install the packages, unless they are installed already."""
    if os.geteuid() != 0:
        raise NoSlurmError("Slurm for the tests needs root")
    if all(shutil.which(program) for program in ("slurmctld", "slurmd", "sbatch", "munged")):
        return
    if not shutil.which("apt-get"):
        raise NoSlurmError(f"Slurm is not installed, and there is no apt-get to install {' '.join(PACKAGES)}")
    options = ["Acquire::Retries=0", "Acquire::http::Timeout=20", "DPkg::Lock::Timeout=60"]
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        result = subprocess.run([*apt, *command], env=environment, capture_output=True, text=True)
    if result.returncode:
        raise NoSlurmError(f"Slurm is not installed, and apt-get failed: {result.stderr.strip().splitlines()[-1]}")


def free_ports(count: int) -> list[int]:
    """Return different ports that no process uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def write_config(folder: Path) -> Path:
    """Write slurm.conf. Unlike on a cluster, the two nodes are one host, and waiting times are short."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    # Without this file, slurmd does not start on machines where no cgroups are mounted.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    host, (port, *ports) = socket.gethostname().partition(".")[0], free_ports(1 + NODES)
    nodes = "\n".join(
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs={CPUS} RealMemory=1000"
        for i in range(NODES)
    )
    config = folder / "slurm.conf"
    config.write_text(f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
KillWait=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
""")
    return config


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster within the context. Yields the environment variables with which Slurm's programs use it.

    Raises:
        NoSlurmError: Slurm cannot be installed.
    """
    install()
    config = write_config(folder)
    environment = {**os.environ, "SLURM_CONF": str(config)}
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    munge = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    commands = [
        ["munged", "--foreground", "--force", *(f"--{option}={folder}/munge.{end}" for option, end in munge.items())],
        ["slurmctld", "-D", "-f", str(config)],
        *(["slurmd", "-D", "-N", f"n{i}", "-f", str(config)] for i in range(NODES)),
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    with (folder / "daemons.log").open("wb") as log:
        try:
            for command in commands:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
                if command[0] == "munged":
                    wait_for(lambda: (folder / "munge.socket").exists(), daemons, log.name)
            wait_for(lambda: idle_nodes(environment) == NODES, daemons, log.name)
            yield environment
            subprocess.run(["scancel", "--me"], env=environment, check=True)
            wait_for(lambda: idle_nodes(environment) == NODES, daemons, log.name)
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(30)


def idle_nodes(environment: dict[str, str]) -> int:
    """Number of nodes that run no job."""
    command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    return int(output or 0)


def wait_for(condition, daemons: list[subprocess.Popen[bytes]], log: str) -> None:
    """Wait until a condition is true. If a daemon ends, or after 60 seconds, fail with the daemons' log."""
    end = time.monotonic() + 60
    while not condition():
        assert all(daemon.poll() is None for daemon in daemons), Path(log).read_text()
        assert time.monotonic() < end, Path(log).read_text()
        time.sleep(0.1)

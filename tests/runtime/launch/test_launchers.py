"""Shows A5. The example trains under every launcher, and on two hosts, with the losses of one process."""

import contextlib
import csv
import os
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRAINER = Path(os.environ["TESSERA_BIN"]) / "train_transformer"
ARGUMENTS = [str(ROOT / "LICENSE"), "--steps", "4", "--width", "32", "--layers", "2"]
PORT = 29517
ON_LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TIMEOUT = 120  # seconds


def environment(**variables: str) -> dict[str, str]:
    return os.environ | ON_LOOPBACK | variables


def losses(path: Path) -> list[float]:
    with path.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def trainer(path: Path) -> list[str]:
    return [str(TRAINER), *ARGUMENTS, "--losses", str(path)]


def run_all(commands: list[list[str]], environments: list[dict[str, str]]) -> None:
    """Runs one process per rank, and ends all of them if one does not end."""
    processes = [subprocess.Popen(command, env=env) for command, env in zip(commands, environments)]
    try:
        for process in processes:
            assert process.wait(timeout=TIMEOUT) == 0, process.args
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """Returns the losses of one process without any launcher."""
    path = tmp_path_factory.mktemp("alone") / "losses.csv"
    subprocess.run(trainer(path), env=environment(), check=True, timeout=TIMEOUT)
    values = losses(path)
    assert len(values) == 4 and values[-1] < values[0]
    return values


# Shows A5.
def test_torchrun(expected, tmp_path):
    torchrun = Path(sys.executable).parent / "torchrun"
    launch = [str(torchrun), "--no-python", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, *trainer(tmp_path / "losses.csv")], env=environment(), check=True, timeout=TIMEOUT)
    assert losses(tmp_path / "losses.csv") == pytest.approx(expected, rel=1e-4)


# Shows A5.
def test_torchrun_starts_again_after_a_failure(expected, tmp_path):
    torchrun = Path(sys.executable).parent / "torchrun"
    launch = [str(torchrun), "--no-python", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    fails_once = '"$@" && test "$TORCHELASTIC_RESTART_COUNT" = 1'
    subprocess.run([*launch, "bash", "-c", fails_once, "trainer", *trainer(tmp_path / "losses.csv")], env=environment(),
                   check=True, timeout=TIMEOUT)
    assert losses(tmp_path / "losses.csv") == pytest.approx(expected, rel=1e-4)


# Shows A5.
def test_torchrun_starts_again_if_only_one_of_two_hosts_fails(expected, tmp_path):
    # Only the agent of the host that fails counts the restart. The other one's first worker waits until its agent ends it.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [str(Path(sys.executable).parent / "torchrun"), "--no-python", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1",
              "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    worker = 'first="$1" after="$2"; shift 2; "$@" || exit; test -e "$first" && exit; echo > "$first"; eval "$after"'
    commands = [[*launch, "bash", "-c", worker, "trainer", str(tmp_path / f"first-{host}"), after, *trainer(tmp_path / "losses.csv")]
                for host, after in enumerate(("sleep 100", "exit 1"))]
    run_all(commands, [environment(), environment()])
    assert losses(tmp_path / "losses.csv") == pytest.approx(expected, rel=1e-4)


# Shows A5.
def test_mpirun(expected, tmp_path):
    launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    subprocess.run([*launch, *trainer(tmp_path / "losses.csv")], env=environment(MASTER_PORT=str(PORT)),
                   check=True, timeout=TIMEOUT)
    assert losses(tmp_path / "losses.csv") == pytest.approx(expected, rel=1e-4)


# Shows A5.
def test_variables_of_slurm(expected, tmp_path):
    # srun itself needs a cluster's daemons; these are the variables that it gives each task.
    environments = [environment(SLURM_PROCID=str(rank), SLURM_NTASKS="2", SLURM_LOCALID=str(rank), SLURM_STEP_ID="0",
                                SLURM_STEP_NODELIST="localhost", MASTER_PORT=str(PORT + 1)) for rank in range(2)]
    run_all([trainer(tmp_path / "losses.csv")] * 2, environments)
    assert losses(tmp_path / "losses.csv") == pytest.approx(expected, rel=1e-4)


@contextlib.contextmanager
def two_hosts():
    """Yields the names of two network namespaces that a virtual cable connects: 10.99.0.1 and 10.99.0.2."""
    suffix = uuid.uuid4().hex[:6]
    names = [f"tessera-{suffix}-{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"t{suffix}a", "netns", names[0], "type", "veth", "peer", "name", f"t{suffix}b", "netns", names[1])
        for name, side, address in zip(names, "ab", ("10.99.0.1", "10.99.0.2")):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"t{suffix}{side}")
            ip("-n", name, "link", "set", f"t{suffix}{side}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"t{suffix}{side}") for name, side in zip(names, "ab")]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


# Shows A5.
def test_two_hosts(expected, tmp_path):
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and ip to make network namespaces")
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        commands = [["ip", "netns", "exec", name, *trainer(tmp_path / "losses.csv")] for name, _ in hosts]
        environments = [environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="10.99.0.1",
                                    MASTER_PORT=str(PORT + 2), GLOO_SOCKET_IFNAME=interface)
                        for rank, (_, interface) in enumerate(hosts)]
        run_all(commands, environments)
    assert losses(tmp_path / "losses.csv") == pytest.approx(expected, rel=1e-4)


# Shows A5.
def test_a_variable_that_makes_no_sense_is_named(tmp_path):
    run = subprocess.run(trainer(tmp_path / "losses.csv"), capture_output=True, text=True, timeout=TIMEOUT, check=False,
                         env=environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="x"))
    assert run.returncode != 0
    assert "MASTER_PORT" in run.stderr and "'x'" in run.stderr

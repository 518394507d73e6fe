"""Runs a trainer on several ranks."""

import json
import os
import subprocess
from pathlib import Path


def run_on_ranks(command: list, ranks: int, python: Path) -> dict:
    """Runs a program, or a Python script, on `ranks` ranks of one thread each. Returns the JSON that rank 0 printed."""
    is_script = Path(command[0]).suffix == ".py"
    launch = [python.parent / "torchrun", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    if launch and not is_script:
        launch.append("--no-python")
    if not launch and is_script:
        launch = [python]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([str(word) for word in [*launch, *command]], capture_output=True, text=True,
                          env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])

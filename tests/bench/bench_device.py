"""Where the benchmarks train: on the CPU, or on GPUs with a rank for each."""

import dataclasses
import subprocess
from pathlib import Path

from build import build, runtime_definitions


@dataclasses.dataclass(frozen=True)
class Device:
    name: str  # cpu or cuda
    num_gpus: int = 0

    def ranks(self, wanted: int) -> int:
        """Returns `wanted`, but at most one rank for each GPU, as NCCL needs. Ranks on the CPU share its cores."""
        return min(wanted, self.num_gpus) if self.name == "cuda" else wanted

    def build(self, program: str, *others: str, tools: Path, python: Path) -> Path:
        """Builds a program of this folder for the device, and other targets with it. Returns the program's path."""
        definitions = runtime_definitions(python)
        if self.name == "cuda":
            program += "_cuda"
            definitions += ("TESSERA_CUDA=ON",)
        build("release", targets=(program, *others), definitions=definitions)
        return tools / program


def find_device(name: str, python: Path) -> Device:
    """Raises RuntimeError if there is no such device."""
    if name == "cpu":
        return Device(name)
    count = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    found = subprocess.run([python, "-c", count], capture_output=True, text=True, check=True).stdout
    if int(found) == 0:
        raise RuntimeError("--device cuda: PyTorch finds no GPU on this machine")
    return Device(name, int(found))

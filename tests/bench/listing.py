"""Start-up and listing: `ckpt-inspect ls` in every format against the ways of Python libraries."""

from pathlib import Path

from side_by_side import Contender, Result, compare, run_once

PEERS = Path(__file__).with_name("peers.py")


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    results = []
    for count in [291] if quick else [291, 10_000, 100_000]:
        folder = work / f"listing-{count}"
        folder.mkdir(parents=True, exist_ok=True)
        dcp, torch_file = folder / "dcp", folder / "model.pt"
        run_once([python, PEERS.with_name("make_checkpoint.py"), "many-tensors", "--tensors", str(count),
                  "--dcp", dcp, "--torch", torch_file])
        for name, options in {
            "native": ["--to", "native", "--world-size", "4", "--strategy", "dim0"],
            "dcp-4": ["--to", "dcp", "--world-size", "4", "--strategy", "dim0"],
            "safetensors": ["--to", "safetensors"],
        }.items():
            run_once([tools / "ckpt-reshard", dcp, folder / name, "--overwrite", "--quiet", *options])
        safetensors_file = next((folder / "safetensors").glob("*.safetensors"))

        def ours(path: Path) -> list[str]:
            return [tools / "ckpt-inspect", "ls", path]

        def peer(way: str, path: Path) -> list[str]:
            return [python, PEERS, way, path]

        rounds = 5 if quick else 25
        slow = 1 if quick else 5
        label = f"list {count} tensors"
        results += compare(f"{label}: DCP", [
            Contender("PyTorch read_metadata", peer("list-dcp", folder / "dcp-4"), rounds=slow),
            Contender("ckpt-inspect, DCP, 4 ranks", ours(folder / "dcp-4")),
            Contender("ckpt-inspect, native, 4 ranks", ours(folder / "native")),
        ], rounds=rounds)
        results += compare(f"{label}: torch.save", [
            Contender("torch.load, mmap", peer("list-torch", torch_file), rounds=slow),
            Contender("ckpt-inspect, torch.save", ours(torch_file)),
        ], rounds=rounds)
        results += compare(f"{label}: safetensors", [
            Contender("safe_open", peer("list-safetensors", safetensors_file), rounds=slow),
            Contender("header as JSON, Python", peer("list-safetensors-header", safetensors_file)),
            Contender("ckpt-inspect, safetensors", ours(folder / "safetensors")),
        ], rounds=rounds)
    results += compare("start a process", [
        Contender("true", ["true"]),
        Contender("ckpt-inspect --version", [tools / "ckpt-inspect", "--version"]),
        Contender("python -c pass", [python, "-c", "pass"]),
    ], rounds=5 if quick else 25)
    return results

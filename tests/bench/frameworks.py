"""Moves of checkpoints of training frameworks to safetensors, against verl's model merger, DeepSpeed's zero_to_fp32, and `cp` with sync."""

import os
import shutil
from pathlib import Path

from peer_packages import peer_packages
from side_by_side import Contender, Result, compare, remove, run_once

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "framework_sources.py"
VERL = HERE.parent / "interop" / "frameworks" / "verl_ranks.py"


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    folder = work / "frameworks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ |= {"PYTHONPATH": str(peer_packages("frameworks")), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    layers, rounds = (1, 2) if quick else (6, 5)
    results = []
    for source in ("verl", "zero", "megatron"):
        saved, moved, theirs, copy = (folder / f"{source}-{what}" for what in ("saved", "moved", "theirs", "copy"))
        run_once([python, "-B", SOURCES, source, saved, layers])
        move = [tools / "ckpt-reshard", "--quiet", saved, moved, "--to", "safetensors", "--only", "model", "--rename", "model.=",
                "--extra-files", "leave"]
        run_once(move)  # makes the files that `cp` copies
        result = folder / f"{source}-result"
        moved.rename(result)
        nbytes = sum(file.stat().st_size for file in result.iterdir())
        contenders = [Contender("cp and sync", ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "copy", result, copy], prepare=remove(copy)),
                      Contender("ckpt-reshard", move, prepare=remove(moved))]
        if source == "verl":
            merge = [python, "-B", VERL, "merge", saved, theirs]
            results += compare(f"verl, rank files to bfloat16, {nbytes / 2e9:.2g} GB", [
                Contender("verl's model merger", merge, prepare=remove(theirs)),
                Contender("ckpt-reshard --cast bfloat16", [*move, "--cast", "bfloat16"], prepare=remove(moved))], rounds=min(rounds, 3))
        elif source == "zero":
            convert = [python, "-B", saved / "zero_to_fp32.py", saved, theirs, "--safe_serialization"]
            results += compare(f"ZeRO stage 2 to fp32, {nbytes / 1e9:.2g} GB", [
                Contender("zero_to_fp32.py", convert, prepare=remove(theirs)),
                Contender("ckpt-reshard", move, prepare=remove(moved))], rounds=min(rounds, 3))
        results += compare(f"{source} to safetensors, {nbytes / 1e9:.2g} GB", contenders, rounds=rounds)
        for path in (saved, moved, theirs, copy, result):
            shutil.rmtree(path, ignore_errors=True)
    run_once(["sync"])
    shutil.rmtree(folder)
    return results

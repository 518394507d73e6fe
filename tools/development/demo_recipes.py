"""Moves a PyTorch model with Adam's moments to Megatron's names and shapes by a recipe, and back; then by a wrong recipe."""

import shutil
import subprocess

from build import build
from console import heading, say
from debian_packages import install_packages
from demo import environment_with, show_and_run, show_command
from places import ROOT
from python_environment import python_environment

WORK = ROOT / "build" / "demo-recipes"
RECIPE = "recipes/hf-to-megatron-qwen3-moe.json"
# Names in the file begin with the key of the model's dict. `config.json` with the sizes is beside the file, but not beside the result.
PREFIX = ["--set", "prefix=model."]
SIZES = ["--set", "heads=4", "--set", "kv_heads=2", "--set", "head_dim=16"]


def demo_recipes(*, torch_version: str | None) -> int:
    """Returns 0 if every tensor comes back bit for bit, and `diff --recipe` finds the swapped K and V."""
    install_packages({"build", "python"})
    python = python_environment(torch_version)
    build("dev", targets=("ckpt-inspect", "ckpt-reshard"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    saved, moved, back, wrong = WORK / "hf" / "step2.pt", WORK / "megatron.pt", WORK / "back.pt", WORK / "wrong.pt"

    heading("PyTorch trains a Qwen3-MoE with the names of Hugging Face, two steps of Adam")
    show_and_run(["python", "-B", "docs/examples/recipes/train_qwen3_moe.py", str(saved.parent)], python)

    heading("Does the recipe fit, and does it lose nothing? No tensor is read")
    show_and_run(["ckpt-inspect", "recipe", "check", RECIPE, str(saved), *PREFIX], python)

    heading("To Megatron's names and shapes: Q, K and V in one tensor by groups of heads, gate above up, moments with them")
    show_and_run(["ckpt-reshard", str(saved), str(moved), "--recipe", RECIPE, *PREFIX], python)
    for checkpoint in (saved, moved):
        show_and_run(["ckpt-inspect", "ls", str(checkpoint), "*layers.0.self_att*"], python)

    heading("Back again: equal to the bit")
    show_and_run(["ckpt-reshard", str(moved), str(back), "--recipe", RECIPE, "--inverse", *PREFIX, *SIZES], python)
    show_and_run(["ckpt-inspect", "diff", str(saved), str(back)], python)

    heading("A recipe that swaps K and V fits, too. `diff --recipe` compares its result with what the right recipe makes")
    swapped = WORK / "swapped.json"
    swapped.write_text((ROOT / RECIPE).read_text().replace("q|k|v", "q|v|k"))
    show_and_run(["ckpt-reshard", str(saved), str(wrong), "--recipe", str(swapped), *PREFIX], python)
    command = show_command(["ckpt-inspect", "diff", str(saved), str(wrong), "--recipe", RECIPE, *PREFIX])
    found = subprocess.run(command, cwd=ROOT, env=environment_with(python), capture_output=True, text=True, check=False)
    say(found.stdout + found.stderr)
    # K and V are in the fused tensor of each of the 2 layers, and in its 2 moments.
    is_found = found.returncode == 1 and found.stdout.count("self_attention.linear_qkv.weight") >= 6
    say("The swapped K and V were found." if is_found else "The swapped K and V were NOT found.")
    return 0 if is_found else 1

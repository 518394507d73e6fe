"""The recipes of recipes/ against transformers 5, which fuses experts, and Megatron. Needs their packages (see CMakeLists.txt)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "frameworks")]
import megatron_logits as sizes  # noqa: E402
from ckpt_tools import reshard, succeed  # noqa: E402
from test_recipes import HEADS, logits_of_meta, model_of, recipe_file  # noqa: E402

KINDS = {"experts": ("transformers-v4-to-v5-experts", "hf-to-megatron-qwen3-moe"),
         "mixtral": ("transformers-v4-to-v5-mixtral", "hf-to-megatron-mixtral"),
         "deepseek": ("transformers-v4-to-v5-experts", "hf-to-megatron-deepseek-v3")}


def save(model, folder):
    """Saves a model's logits, its state dict (`state.pt`), and what `save_pretrained` writes (`hub`). Returns the logits."""
    torch.manual_seed(19)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        logits = model(sizes.token_ids()).logits
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(logits, folder / "logits")
    model.save_pretrained(folder / "hub")
    return logits


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """A model with experts: its kind, its folder, its logits."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save(model_of(request.param), folder)


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_computes(model, logits):
    with torch.no_grad():
        assert torch.allclose(model.eval()(sizes.token_ids()).logits, logits, atol=1e-5, rtol=0)


def test_the_recipe_makes_what_transformers_5_has_in_memory_and_back(saved, tmp_path):
    """`save_pretrained` writes the names of version 4; the state dict in memory has the fused tensors."""
    kind, folder, logits = saved
    recipe, _ = KINDS[kind]
    options = ["--recipe", str(recipe_file(recipe))]
    assert "proved" in succeed("ckpt-inspect", "recipe", "check", str(recipe_file(recipe)), folder / "hub")
    fused = torch.load(reshard(folder / "hub", tmp_path / "fused.pt", *options))
    assert_same_tensors(fused, torch.load(folder / "state.pt"))
    loaded = model_of(kind)
    loaded.load_state_dict(fused, strict=True)
    assert_computes(loaded, logits)
    back = reshard(folder / "state.pt", tmp_path / "back", "--to", "safetensors", *options, "--inverse")
    assert_same_tensors(load_file(back / "model.safetensors"), load_file(folder / "hub/model.safetensors"))


def test_transformers_5_loads_what_was_moved(saved, tmp_path):
    """A state dict with fused tensors is moved to names of version 4. With a config.json, the result is a folder for
    `from_pretrained`."""
    import transformers

    kind, folder, logits = saved
    recipe, _ = KINDS[kind]
    moved = reshard(folder / "state.pt", tmp_path / "moved", "--to", "safetensors", "--extra-files-from", folder / "hub",
                    "--recipe", str(recipe_file(recipe)), "--inverse")
    assert_computes(transformers.AutoModelForCausalLM.from_pretrained(moved), logits)


def assert_megatron_computes(kind, recipe, folder, tmp_path):
    recipe = str(recipe_file(recipe))
    assert "proved" in succeed("ckpt-inspect", "recipe", "check", recipe, folder / "hub")
    moved = reshard(folder / "hub", tmp_path / "weights.pt", "--recipe", recipe)
    program = [sys.executable, "-B", HERE.parent / "frameworks/megatron_logits.py", kind, moved, folder / "logits"]
    computed = subprocess.run(program, capture_output=True, text=True)
    assert computed.returncode == 0, computed.stderr
    values = {"layers": sizes.LAYERS} if kind == "deepseek" else HEADS
    back = reshard(moved, tmp_path / "back", "--to", "safetensors", "--recipe", recipe, "--inverse",
                   *(f"--set={name}={value}" for name, value in values.items()))
    assert_same_tensors(load_file(back / "model.safetensors"), load_file(folder / "hub/model.safetensors"))


def test_megatron_computes_what_transformers_5_does(saved, tmp_path):
    kind, folder, _ = saved
    assert_megatron_computes(kind, KINDS[kind][1], folder, tmp_path)


def test_a_dense_model_computes_the_same_in_megatron_and_with_metas_names(tmp_path):
    logits = save(model_of("dense"), tmp_path)
    assert_same_tensors(load_file(tmp_path / "hub/model.safetensors"), torch.load(tmp_path / "state.pt"))
    assert_megatron_computes("dense", "hf-to-megatron-llama", tmp_path, tmp_path)
    moved = reshard(tmp_path / "hub", tmp_path / "meta.pt", "--recipe", str(recipe_file("hf-to-meta-llama")))
    assert torch.allclose(logits_of_meta(torch.load(moved), sizes.token_ids()), logits, atol=1e-5, rtol=0)


def test_gpt_oss_needs_no_recipe(tmp_path):
    """`save_pretrained` writes the names and shapes that are in memory, as in transformers 4."""
    import transformers

    save(transformers.GptOssForCausalLM(transformers.GptOssConfig(
        vocab_size=sizes.VOCABULARY, hidden_size=sizes.HIDDEN, num_hidden_layers=2, num_attention_heads=sizes.HEADS,
        num_key_value_heads=sizes.KV_HEADS, head_dim=sizes.HEAD_DIM, intermediate_size=sizes.EXPERT_FEED_FORWARD,
        num_local_experts=sizes.EXPERTS, num_experts_per_tok=sizes.CHOSEN_EXPERTS)), tmp_path)
    moved = load_file(reshard(tmp_path / "state.pt", tmp_path / "moved", "--to", "safetensors") / "model.safetensors")
    assert_same_tensors(moved, load_file(tmp_path / "hub/model.safetensors"))
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj_bias"} < moved.keys()

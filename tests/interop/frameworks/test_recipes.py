"""Moves models by the recipes of recipes/. Both frameworks compute the same logits. Needs their packages (see
CMakeLists.txt)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import megatron_logits as sizes  # noqa: E402
from ckpt_tools import reshard, run, succeed  # noqa: E402

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PREFIX = ["--set", "prefix=model."]
HEADS = {"heads": sizes.HEADS, "kv_heads": sizes.KV_HEADS, "head_dim": sizes.HEAD_DIM}


def recipe_file(name):
    return HERE.parents[2] / "recipes" / f"{name}.json"


def model_of(kind):
    import transformers

    options = {"vocab_size": sizes.VOCABULARY, "hidden_size": sizes.HIDDEN, "num_hidden_layers": sizes.LAYERS,
               "num_attention_heads": sizes.HEADS, "intermediate_size": sizes.FEED_FORWARD, "rms_norm_eps": 1e-6,
               "tie_word_embeddings": False}
    grouped = options | {"num_key_value_heads": sizes.KV_HEADS, "head_dim": sizes.HEAD_DIM}
    if kind == "dense":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped))
    if kind == "experts":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
            **grouped, num_experts=sizes.EXPERTS, num_experts_per_tok=sizes.CHOSEN_EXPERTS, norm_topk_prob=True,
            moe_intermediate_size=sizes.EXPERT_FEED_FORWARD, decoder_sparse_step=1))
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(
            **grouped | {"intermediate_size": sizes.EXPERT_FEED_FORWARD, "rope_theta": 10000.0, "sliding_window": None},
            num_local_experts=sizes.EXPERTS, num_experts_per_tok=sizes.CHOSEN_EXPERTS))
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(
        **options, num_key_value_heads=sizes.HEADS, moe_intermediate_size=sizes.EXPERT_FEED_FORWARD,
        n_routed_experts=sizes.EXPERTS, num_experts_per_tok=sizes.CHOSEN_EXPERTS, n_shared_experts=1, n_group=2, topk_group=1,
        first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5, max_position_embeddings=64,
        q_lora_rank=sizes.Q_LORA, kv_lora_rank=sizes.KV_LORA, qk_nope_head_dim=sizes.NOPE, qk_rope_head_dim=sizes.ROPE,
        v_head_dim=sizes.V_HEAD_DIM))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return model


def hugging_face(kind, folder):
    """Saves a model of transformers with Adam's state after two steps, and its logits."""
    torch.manual_seed(5)
    model = model_of(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = sizes.token_ids()
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None:  # no token chose this expert
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    folder.mkdir()
    names = [name for name, _ in model.named_parameters()]
    state = {names[number]: of for number, of in optimizer.state_dict()["state"].items()}
    torch.save({"model": model.state_dict(), "optim": {"state": state}}, folder / "step.pt")
    model.config.save_pretrained(folder)
    with torch.no_grad():
        torch.save(model.eval()(ids).logits, folder / "logits")
    return folder / "step.pt"


def there_and_back(step, folder, recipe, values):
    """Moves a checkpoint by a recipe and back, moments included. Returns the file between."""
    there = ["--recipe", str(recipe), *PREFIX]
    assert "proved" in succeed("ckpt-inspect", "recipe", "check", str(recipe), step, *PREFIX)
    moved = reshard(step, folder / "moved.pt", *there)
    back = reshard(moved, folder / "back.pt", *there, "--inverse", *(f"--set={name}={value}" for name, value in values.items()))
    assert "equal" in succeed("ckpt-inspect", "diff", step, back)
    return moved


def assert_loads_into_transformers(torch_dist, recipe, model, atol=0.0):
    """Moves a torch_dist checkpoint to a folder of Hugging Face with the config of `model`; its logits must be those of `model`."""
    import transformers

    folder = reshard(torch_dist, torch_dist.parent / f"{torch_dist.name}.hf", "--to", "safetensors", "--recipe", str(recipe),
                     "--inverse", "--only", "model", "--only", "lm_head", "--extra-files-from", model)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        found = loaded.eval()(sizes.token_ids()).logits
    assert torch.allclose(found, torch.load(model / "logits"), atol=atol, rtol=0)


ATTENTION = ("q|k|v", "q|v|k", "self_attention.linear_qkv")


@pytest.mark.parametrize("kind, recipe, values, swap", [
    ("dense", "hf-to-megatron-llama", HEADS, ATTENTION),
    ("experts", "hf-to-megatron-qwen3-moe", HEADS, ATTENTION),
    ("mixtral", "hf-to-megatron-mixtral", HEADS, ("w1|w3", "w3|w1", "mlp.experts.local_experts.0.linear_fc1")),
    ("deepseek", "hf-to-megatron-deepseek-v3", {"layers": sizes.LAYERS}, ("gate|up", "up|gate", "mlp.linear_fc1")),
], ids=["dense", "experts", "mixtral", "deepseek"])
def test_megatron_computes_what_hugging_face_does(tmp_path, kind, recipe, values, swap):
    """Megatron loads the moved weights from a state dict and from a torch_dist checkpoint. Moments are moved too, and a
    move back gives every bit back. If a recipe swaps two parts, `diff` names the tensors."""
    recipe = recipe_file(recipe)
    step = hugging_face(kind, tmp_path / "hf")
    moved = there_and_back(step, tmp_path, recipe, values)
    torch.save(torch.load(moved)["model"], tmp_path / "weights.pt")
    torch_dist = reshard(step, tmp_path / "torch_dist", "--to", "megatron", "--recipe", str(recipe), *PREFIX)
    for weights in (tmp_path / "weights.pt", torch_dist):
        program = [sys.executable, "-B", HERE / "megatron_logits.py", kind, weights, step.parent / "logits"]
        computed = subprocess.run(program, capture_output=True, text=True)
        assert computed.returncode == 0, computed.stderr
    assert_loads_into_transformers(torch_dist, recipe, step.parent)
    swapped = tmp_path / "swapped.json"
    swapped.write_text(recipe.read_text().replace(swap[0], swap[1]))
    wrong = reshard(step, tmp_path / "wrong.pt", "--recipe", str(swapped), *PREFIX)
    differs = run("ckpt-inspect", "diff", step, wrong, "--recipe", str(recipe), *PREFIX)
    assert differs.returncode == 1 and f"model.decoder.layers.0.{swap[2]}.weight" in differs.stdout


@pytest.mark.parametrize("kind, recipe", [
    ("dense", "hf-to-megatron-llama"), ("experts", "hf-to-megatron-qwen3-moe"), ("mixtral", "hf-to-megatron-mixtral"),
    ("deepseek", "hf-to-megatron-deepseek-v3")])
def test_transformers_computes_what_megatron_does(tmp_path, kind, recipe):
    """transformers loads a model that Megatron made and saved as torch_dist."""
    program = [sys.executable, "-B", HERE / "megatron_logits.py", kind, "save", tmp_path / "torch_dist", tmp_path / "logits"]
    saved = subprocess.run(program, capture_output=True, text=True)
    assert saved.returncode == 0, saved.stderr
    model_of(kind).config.save_pretrained(tmp_path)
    assert_loads_into_transformers(tmp_path / "torch_dist", recipe_file(recipe), tmp_path, atol=1e-5)


def logits_of_meta(weights, ids):
    """Computes the logits of a Llama with Meta's names: RoPE rotates pairs of neighbouring elements, as complex numbers."""
    def norm(name, x):
        return weights[name] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def heads(name, x, count):
        return (x @ weights[name].T).view(*x.shape[:-1], count, sizes.HEAD_DIM)

    def turned(x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        angles = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(0, sizes.HEAD_DIM, 2) / sizes.HEAD_DIM)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)

    x = weights["tok_embeddings.weight"][ids]
    for layer in range(sizes.LAYERS):
        at = f"layers.{layer}."
        inner = norm(f"{at}attention_norm.weight", x)
        q = turned(heads(f"{at}attention.wq.weight", inner, sizes.HEADS))
        k = turned(heads(f"{at}attention.wk.weight", inner, sizes.KV_HEADS))
        v = heads(f"{at}attention.wv.weight", inner, sizes.KV_HEADS)
        k, v = (part.repeat_interleave(sizes.HEADS // sizes.KV_HEADS, 2) for part in (k, v))
        found = torch.nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        x = x + found.transpose(1, 2).flatten(-2) @ weights[f"{at}attention.wo.weight"].T
        inner = norm(f"{at}ffn_norm.weight", x)
        gate, up = (inner @ weights[f"{at}feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"{at}feed_forward.w2.weight"].T
    return norm("norm.weight", x) @ weights["output.weight"].T


def test_a_model_with_metas_names_computes_what_hugging_face_does(tmp_path):
    step = hugging_face("dense", tmp_path / "hf")
    moved = there_and_back(step, tmp_path, recipe_file("hf-to-meta-llama"), HEADS)
    expected = torch.load(step.parent / "logits")
    assert torch.allclose(logits_of_meta(torch.load(moved)["model"], sizes.token_ids()), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind, recipe", [("experts", "transformers-v4-to-v5-experts"), ("deepseek", "transformers-v4-to-v5-experts"),
                                          ("mixtral", "transformers-v4-to-v5-mixtral")])
def test_fused_experts_are_the_experts_in_order(tmp_path, kind, recipe):
    """transformers 5 fuses experts like this: gate above up, one expert after the other."""
    step = hugging_face(kind, tmp_path / "hf")
    moved = torch.load(there_and_back(step, tmp_path, recipe_file(recipe), {}))["model"]
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    model = torch.load(step)["model"]
    front = f"model.layers.1.{'block_sparse_moe' if kind == 'mixtral' else 'mlp'}.experts"
    gate, up, down = (torch.stack([model[f"{front}.{e}.{name}.weight"] for e in range(sizes.EXPERTS)]) for name in names)
    assert torch.equal(moved["model.layers.1.mlp.experts.gate_up_proj"], torch.cat([gate, up], 1))
    assert torch.equal(moved["model.layers.1.mlp.experts.down_proj"], down)


def model_that_predicts_further(config):
    """Makes a DeepSeek-V3 with one more layer, which predicts a further token (MTP), under DeepSeek's names. Returns
    the state dict, and the logits of that layer."""
    import transformers

    layers = config.num_hidden_layers
    config.num_hidden_layers = layers + 1
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    model.model.config.num_hidden_layers = layers  # the last layer (MTP) does not belong to the model itself
    norm = type(model.model.norm)
    parts = {"enorm": norm(sizes.HIDDEN, 1e-6), "hnorm": norm(sizes.HIDDEN, 1e-6), "shared_head.norm": norm(sizes.HIDDEN, 1e-6),
             "eh_proj": torch.nn.Linear(2 * sizes.HIDDEN, sizes.HIDDEN, bias=False)}
    for parameter in (parameter for module in (model, *parts.values()) for parameter in module.parameters()):
        parameter.add_(torch.randn_like(parameter) * 0.05)
    ids = sizes.token_ids()
    hidden, following = model.model(ids).last_hidden_state, model.model.embed_tokens(ids.roll(-1))
    joined = parts["eh_proj"](torch.cat([parts["enorm"](following), parts["hnorm"](hidden)], -1))
    places = torch.arange(sizes.LENGTH)[None]
    found = model.model.layers[layers](joined, position_ids=places, position_embeddings=model.model.rotary_emb(joined, places))
    found = parts["shared_head.norm"](found[0] if isinstance(found, tuple) else found)
    front = f"model.layers.{layers}."
    state = model.state_dict() | {f"{front}{name}.weight": part.weight for name, part in parts.items()}
    state |= {f"{front}embed_tokens.weight": state["model.embed_tokens.weight"].clone(),
              f"{front}shared_head.head.weight": state["lm_head.weight"].clone()}
    return state, model.lm_head(found)[:, :-1]  # no token follows the last one


@torch.no_grad()
def test_megatron_predicts_further_tokens_as_deepseek_does(tmp_path):
    """transformers has no MTP layer, so this file computes the formula of DeepSeek's report with transformers' layers."""
    torch.manual_seed(7)
    state, logits = model_that_predicts_further(model_of("deepseek").config)
    torch.save(state, tmp_path / "state.pt")
    torch.save(logits, tmp_path / "logits")
    recipe = ["--recipe", str(recipe_file("hf-to-megatron-deepseek-v3")), f"--set=layers={sizes.LAYERS}"]
    assert "proved" in succeed("ckpt-inspect", "recipe", "check", recipe[1], tmp_path / "state.pt", recipe[2])
    moved = reshard(tmp_path / "state.pt", tmp_path / "moved.pt", *recipe)
    program = [sys.executable, "-B", HERE / "megatron_logits.py", "mtp", moved, tmp_path / "logits"]
    computed = subprocess.run(program, capture_output=True, text=True)
    assert computed.returncode == 0, computed.stderr
    program[4] = reshard(tmp_path / "state.pt", tmp_path / "torch_dist", "--to", "megatron", *recipe)
    computed = subprocess.run(program, capture_output=True, text=True)
    assert computed.returncode == 0, computed.stderr
    back = torch.load(reshard(moved, tmp_path / "back.pt", *recipe, "--inverse"))
    copies = {name for name in state if name.endswith(("3.embed_tokens.weight", "3.shared_head.head.weight"))}
    assert len(copies) == 2 and back.keys() == state.keys() - copies
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.items())

"""Sums of checkpoints against PyTorch's own sums and averages."""

import json

import pytest
import torch
from ckpt_tools import reshard, run, succeed
from safetensors.torch import load_file, save_file

SEEDS = range(4)


def weights(seed):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    return {"embed": random(31, 17).to(torch.bfloat16), "up": random(8, 3, 3, 5), "norm": random(9).half(),
            "scale": random().double(), "empty": torch.zeros(0, 3), "ids": torch.arange(5)}


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """Makes checkpoints in several formats and shardings. Returns their paths and their tensors."""
    folder = tmp_path_factory.mktemp("series")
    ways = [["--world-size", "3"], ["--to", "dcp", "--world-size", "2"], ["--world-size", "2", "--strategy", "dim1"], []]
    paths = []
    for seed in SEEDS:
        path = folder / f"{seed}.safetensors"
        save_file(weights(seed), path)
        paths.append(reshard(path, folder / f"moved-{seed}", *ways[seed]))
    return paths, [weights(seed) for seed in SEEDS]


def rounded_once(numbers, dtype):
    """PyTorch rounds float64 to 16 bits through float32, that is twice. This function first rounds to odd, so that the
    result is rounded once."""
    if numbers.dtype != torch.float64 or dtype.itemsize > 2:
        return numbers.to(dtype)
    near = numbers.float()
    bits = near.view(torch.int32)
    bits = torch.where(near.double().abs() > numbers.abs(), bits - 1, bits)
    bits = torch.where(near.double() != numbers, bits | 1, bits)
    return bits.view(torch.float32).to(dtype)


def assert_equals(path, first, sum_of, cast=None):
    for name, tensor in load_file(path).items():
        wanted = first[name]
        if wanted.is_floating_point():
            dtype = cast if cast and wanted.dim() > 0 else wanted.dtype
            wanted = rounded_once(sum_of(name), dtype)
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name


def combine(destination, *arguments):
    succeed("ckpt-reshard", "combine", destination, *arguments)
    return destination


@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_weighted_sum_is_that_of_torch_rounded_once(series, tmp_path, threads):
    paths, states = series
    factors = [0.3, -1.7, 1e-3, 2.5]
    terms = [word for factor, path in zip(factors, paths) for word in ("--linear", f"{factor}={path}")]

    def total(name):
        result = factors[0] * states[0][name].double()
        for factor, state in zip(factors[1:], states[1:]):
            result = result + factor * state[name].double()
        return result

    assert_equals(combine(tmp_path / "sum.safetensors", *terms, "--threads", threads), states[0], total)
    cast = combine(tmp_path / "cast.safetensors", *terms, "--cast", "float16", "--threads", threads)
    assert_equals(cast, states[0], total, torch.float16)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_a_moving_average_follows_the_formula_of_swa_utils(series, tmp_path, accumulate):
    from torch.optim.swa_utils import get_ema_avg_fn

    paths, states = series
    average = get_ema_avg_fn(0.9)

    def moving(name):
        result = states[0][name].to(getattr(torch, accumulate))
        for state in states[1:]:
            result = average(result, state[name].to(result.dtype), None)
        return result

    path = combine(tmp_path / "ema.safetensors", *paths, "--ema", "0.9", "--accumulate", accumulate)
    assert_equals(path, states[0], moving)


def test_the_mean_is_that_of_an_averaged_model(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.LayerNorm(30))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    paths = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        averaged.update_parameters(model)
        torch.save(model.state_dict(), tmp_path / f"{seed}.pt")
        paths.append(tmp_path / f"{seed}.pt")
    mean = load_file(combine(tmp_path / "mean.safetensors", "--average", *paths))
    for name, wanted in averaged.module.state_dict().items():
        torch.testing.assert_close(mean[name], wanted, rtol=1e-6, atol=1e-6)  # PyTorch rounds after each step


@pytest.mark.parametrize("kind", ["product", "replaced"])
def test_an_adapter_that_changes_a_tied_weight_says_that_both_names_change(kind, tmp_path):
    """Shows A2. The embedding, which the adapter does not name, is the same tensor as the head."""
    weight = torch.arange(6.0).reshape(3, 2)
    torch.save({"embed.weight": weight, "head.weight": weight, "up.weight": weight + 1}, tmp_path / "base.pt")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    name = "base_model.model.head."
    save_file({name + "weight": weight * 2} if kind == "replaced" else
              {name + "lora_A.weight": torch.ones(1, 2), name + "lora_B.weight": torch.ones(3, 1)}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["head"] if kind == "product" else [],
              "modules_to_save": ["head"] if kind == "replaced" else None}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    def notes(*options):
        document = json.loads(succeed("ckpt-reshard", "combine", tmp_path / "merged.pt", "--base", tmp_path / "base.pt", "--lora",
                                      adapter, "--overwrite", "--json", *options))
        return [note["found"] for note in document["notes"]]

    assert notes() == ["tied tensors, which stay tied and change together: 'embed.weight' and 'head.weight'"]
    merged = torch.load(tmp_path / "merged.pt")
    assert torch.equal(merged["embed.weight"], merged["head.weight"]) and not torch.equal(merged["embed.weight"], weight)
    assert notes("--only", "!embed") == []


def test_a_tied_tensor_may_be_stored_under_another_of_its_names(tmp_path):
    """torch.save stores a tensor under the first of its names, which depends on the order of the modules."""
    for name, order in (("a", ("embed", "up", "head")), ("b", ("head", "up", "embed"))):
        shared = torch.ones(3) if name == "a" else torch.full((3,), 3.0)
        state = {"embed": shared, "head": shared, "up": torch.ones(2)}
        torch.save({key: state[key] for key in order}, tmp_path / f"{name}.pt")
    weights = [word for name in "ab" for word in ("--linear", f"0.5={tmp_path / name}.pt")]
    merged = torch.load(combine(tmp_path / "merged.pt", *weights))
    assert torch.equal(merged["embed"], torch.full((3,), 2.0)) and merged["head"].data_ptr() == merged["embed"].data_ptr()
    torch.save({"head": torch.ones(3), "up": torch.ones(2), "embed": torch.ones(3)}, tmp_path / "b.pt")  # two tensors
    process = run("ckpt-reshard", "combine", tmp_path / "other.pt", *weights)
    assert process.returncode == 3 and "head: combine: expected tied to embed" in process.stderr, process.stderr


def save_model(folder, heads):
    folder.mkdir()
    save_file({"q": torch.arange(8.0).reshape(4, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"heads": heads}))
    return folder


SWAP = {"schema": 1, "rest": "keep", "variables": {"heads": {"config": "heads"}},
        "rules": [{"from": "q", "to": "wq", "ops": [{"unflatten": {"dim": 0, "sizes": ["heads", -1]}}, {"transpose": [0, 1]}, {"flatten": {"dim": 0, "sizes": [-1, "heads"]}}]}]}


@pytest.mark.parametrize("verb", ["combine", "merge"])
@pytest.mark.parametrize("other, given, code", [(2, [], 0), (1, [], 3), (1, ["--set", "heads=2"], 0)])
def test_a_recipe_does_not_take_the_numbers_of_one_source_for_another(verb, other, given, code, tmp_path):
    """The numbers of a recipe come from config.json. The sources' files may differ in what the recipe does not need, and if it changes
    nothing of a merge's further source."""
    code = 0 if verb == "merge" else code
    first, second = save_model(tmp_path / "a", 2), save_model(tmp_path / "b", other)
    if verb == "merge":
        save_file({"k": torch.ones(2)}, second / "model.safetensors")
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(config | {"note": "of no rule"}))
    (tmp_path / "recipe.json").write_text(json.dumps(SWAP))
    sources = [first, second, tmp_path / "sum"] if verb == "merge" else [tmp_path / "sum", "--linear", f"1={first}", "--linear", f"1={second}"]
    moved = run("ckpt-reshard", verb, *sources, "--recipe", tmp_path / "recipe.json", *given)
    assert moved.returncode == code, moved.stderr
    refusal = f"{second}/config.json: variable heads: expected 2, as in {first}/config.json, found 1"
    assert (refusal in moved.stderr) == (code == 3), moved.stderr


@pytest.mark.parametrize("prefix, code", [("a.", 0), ("b.", 3)])
def test_a_source_that_a_recipe_does_not_change_may_have_other_numbers(prefix, code, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(SWAP))
    sources = [f"{name}={save_model(tmp_path / name, heads)}" for name, heads in (("a", 2), ("b", 1))]
    moved = run("ckpt-reshard", "merge", *sources, tmp_path / "both", "--recipe", tmp_path / "recipe.json", "--set", f"prefix={prefix}")
    assert moved.returncode == code, moved.stderr


def test_layers_that_share_tensors_of_an_adapter_all_change(tmp_path):
    """PEFT saves adapter_model.bin with torch.save, which keeps ties."""
    layers = ["first", "second"]
    base = {f"{layer}.{part}": torch.ones(3, 2) if part == "weight" else torch.zeros(3) for layer in layers for part in ("weight", "bias")}
    save_file(base, tmp_path / "base.safetensors")
    down, up, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [10.0], [100.0]]), torch.ones(3)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    torch.save({f"base_model.model.{layer}.{part}": tensor for layer in layers
                for part, tensor in {"lora_A.weight": down, "lora_B.weight": up, "bias": bias}.items()}, adapter / "adapter_model.bin")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    moved = reshard(adapter, tmp_path / "moved", "--to", "native")
    for source in (adapter, moved):
        merged = load_file(combine(tmp_path / f"{source.name}.safetensors", "--base", tmp_path / "base.safetensors", "--lora", source))
        for layer in layers:
            assert torch.equal(merged[f"{layer}.weight"], 1 + up @ down), (source, layer)
            assert torch.equal(merged[f"{layer}.bias"], bias), (source, layer)

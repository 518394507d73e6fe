"""`combine` against mergekit's merges of small models of transformers. Needs their packages (see CMakeLists.txt)."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from ckpt_tools import succeed  # noqa: E402

NAMES = ("base", "math", "code")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def models(request, tmp_path_factory):
    """A folder with a base and two models that are near it."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(17)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=160,
        tie_word_embeddings=False)).to(request.param)
    for name in NAMES:
        model.save_pretrained(folder / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
    return folder


def merged(folder, method, weights, base=None, **parameters):
    """Returns the tensors that mergekit writes."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    stored = load_file(folder / "base/model.safetensors")["model.norm.weight"].dtype
    config = {"merge_method": method, "dtype": str(stored).removeprefix("torch."), "parameters": parameters,
              "models": [{"model": str(folder / name), "parameters": {"weight": weight}} for name, weight in weights.items()]}
    if base:
        config["base_model"] = str(folder / base)
    out = folder / f"mergekit-{len(list(folder.iterdir()))}"
    run_merge(MergeConfiguration.model_validate(config), str(out),
              MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True, allow_crimes=True))
    return load_file(next(out.glob("*.safetensors")))


def combined(folder, *options):
    """Returns the tensors that `combine` writes."""
    out = folder / f"combined-{len(list(folder.iterdir()))}"
    succeed("ckpt-reshard", "combine", out, "--to", "safetensors", "--quiet", *options)
    return load_file(out / "model.safetensors")


def exact(folder, weights, divisor=1.0):
    """Returns the weighted sum in float64, and the sum of its terms' absolute values, which bounds the rounding errors."""
    loaded = {name: load_file(folder / name / "model.safetensors") for name in weights}
    terms = {tensor: [weight * loaded[name][tensor].double() / divisor for name, weight in weights.items()] for tensor in loaded["base"]}
    return {tensor: (sum(each), sum(term.abs() for term in each)) for tensor, each in terms.items()}


def assert_near(found, theirs, sums, computed_in):
    """`found` is nowhere further from the exact sum than mergekit's result. mergekit's result is as near as its
    roundings allow."""
    assert found.keys() == theirs.keys() == sums.keys()
    for name, (number, size) in sums.items():
        assert found[name].dtype == theirs[name].dtype
        ours, other = ((each[name].double() - number).abs() for each in (found, theirs))
        assert (ours <= other + 1e-15 * size).all(), name
        allowed = torch.finfo(found[name].dtype).eps / 2 * number.abs() + 3 * torch.finfo(computed_in).eps * size
        assert (other <= allowed).all(), (name, (other / allowed).max())


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def linear(models, weights):
    return [f"--linear={weight}={models / name}" for name, weight in weights.items()]


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_rounds_no_worse_than_mergekit(models, normalize):
    """mergekit adds up in float32, with fused products. `combine` adds up in float64."""
    weights = {"base": 0.5, "math": 0.3, "code": 0.4}
    options = ["--normalize"] if normalize else []
    theirs = merged(models, "linear", weights, normalize=normalize)
    sums = exact(models, weights, sum(weights.values()) if normalize else 1.0)
    assert_near(combined(models, *linear(models, weights), *options), theirs, sums, torch.float32)


@pytest.mark.parametrize("normalize", [True, False])
def test_linear_in_float32_equals_mergekit_where_products_are_exact(models, normalize):
    weights = {"base": 0.5, "math": 0.25, "code": 2.0}
    options = ["--accumulate", "float32", *(["--normalize"] if normalize else [])]
    assert_equal(combined(models, *linear(models, weights), *options), merged(models, "linear", weights, normalize=normalize))


def test_the_mean_in_float32_equals_mergekits(models):
    theirs = merged(models, "linear", dict.fromkeys(NAMES, 1.0), normalize=True)
    assert_equal(combined(models, "--average", *(models / name for name in NAMES), "--accumulate", "float32"), theirs)


def test_task_arithmetic_rounds_no_worse_than_mergekit(models):
    """mergekit computes in the dtype of the models, also in bfloat16."""
    theirs = merged(models, "task_arithmetic", {"math": 0.5, "code": 0.25}, base="base")
    weights = {"base": 1.0, "math": 0.5, "code": 0.25}
    found = combined(models, f"--base={models / 'base'}", f"--linear=0.5={models / 'math'}", f"--linear=-0.5={models / 'base'}",
                     f"--linear=0.25={models / 'code'}", f"--linear=-0.25={models / 'base'}")
    sums = exact(models, weights | {"base": 1.0 - 0.5 - 0.25})
    sizes = exact(models, weights)
    sums = {name: (number, sizes[name][1] + 2 * size) for name, (number, size) in sums.items()}
    assert_near(found, theirs, sums, found["model.norm.weight"].dtype)

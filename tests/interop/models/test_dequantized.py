"""The numbers of `--dequantize` equal those of the libraries that quantize, bit for bit, on the CPU. Needs their
packages (see CMakeLists.txt)."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from ckpt_tools import reshard, run  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32]
ROWS, COLUMNS = 32, 384


def random(*shape, dtype=torch.bfloat16):
    """Numbers of very different sizes, with a zero row and a zero block."""
    torch.manual_seed(11)
    numbers = torch.randn(*shape) * torch.exp2(torch.randint(-40, 40, (*shape[:-1], 1)).float())
    numbers[..., 1, :] = 0
    numbers[..., 2, :32] = 0
    return numbers.to(dtype)


def bits(*shape):
    """Returns random bytes. If there is room, each of the 256 values occurs."""
    torch.manual_seed(12)
    flat = torch.randint(0, 256, shape, dtype=torch.uint8).flatten()
    flat[:256] = torch.arange(256, dtype=torch.uint8)[:flat.numel()]
    return flat.view(shape)


def dequantized(folder, tensors, quantization, dtype):
    """Writes a model with quantized weights, and returns the result of `--dequantize`. Numbers that are too large
    become infinite, as in PyTorch."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    moved = reshard(folder, folder.with_name("numbers"), "--to", "safetensors", "--dequantize", str(dtype).removeprefix("torch."),
                    "--on-overflow", "infinity")
    return load_file(moved / "model.safetensors")


def assert_equal_bits(found, expected, *, zeros_are_equal=False):
    """Expects equal bits. Two NaNs count as equal, whatever their sign and payload."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    integers = {2: torch.int16, 4: torch.int32}[found.itemsize]
    same = found.contiguous().view(integers) == expected.contiguous().view(integers)
    same |= found.isnan() & expected.isnan()
    if zeros_are_equal:
        same |= (found == 0) & (expected == 0)
    assert same.all(), f"{(~same).sum()} of {same.numel()}: {found[~same][:4]}, expected {expected[~same][:4]}"


def compressed_tensors(**weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def mx(codes, scales, elements):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    return MXTensor(codes, scales.view(torch.float8_e8m0fnu), elements, 32, torch.float32, KernelPreference.EMULATED, None, False)


def quantized_mx(elements, shape=(ROWS, COLUMNS)):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(random(*shape), elements, 32)


def all_mx(elements):
    """Returns all codes with all scales: the exponents -127 to 127, and 255, which is NaN."""
    columns = 256 if elements is torch.float4_e2m1fn_x2 else 512
    codes = bits(1, columns // 2 if elements is torch.float4_e2m1fn_x2 else columns).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, columns // 32)
    return mx(codes if elements is torch.float4_e2m1fn_x2 else codes.view(elements), scales, elements)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [quantized_mx, all_mx])
@pytest.mark.parametrize("elements", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_mxfp8_is_as_in_torchao(tmp_path, elements, make, dtype):
    weight = make(elements)
    tensors = {"up.weight": weight.qdata, "up.weight_scale": weight.scale.view(torch.uint8)}
    found = dequantized(tmp_path / "model", tensors, {"quant_method": "compressed-tensors"}, dtype)
    assert_equal_bits(found["up.weight"], weight.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [quantized_mx, all_mx])
@pytest.mark.parametrize("suffix", ["_packed", ""])
def test_mxfp4_is_as_in_torchao(tmp_path, suffix, make, dtype):
    weight = make(torch.float4_e2m1fn_x2)
    tensors = {f"up.weight{suffix}": weight.qdata, "up.weight_scale": weight.scale.view(torch.uint8)}
    found = dequantized(tmp_path / "model", tensors, {"quant_method": "compressed-tensors"}, dtype)
    assert_equal_bits(found["up.weight"], weight.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_of_gpt_oss_is_as_in_torchao(tmp_path, dtype):
    """The checkpoint has the transpose of the blocks, for each expert."""
    weight = quantized_mx(torch.float4_e2m1fn_x2, (3, ROWS, COLUMNS))
    tensors = {"experts.up_proj_blocks": weight.qdata.view(3, ROWS, COLUMNS // 32, 16),
               "experts.up_proj_scales": weight.scale.view(torch.uint8).view(3, ROWS, COLUMNS // 32)}
    found = dequantized(tmp_path / "model", tensors, {"quant_method": "mxfp4"}, dtype)
    assert_equal_bits(found["experts.up_proj"], weight.dequantize(dtype).transpose(1, 2))


def nvfp4(weight, scale):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if scale == "random":
        codes, scales = bits(256, 64), bits(256, 1).view(torch.float8_e4m3fn).repeat(1, 8)
        return NVFP4Tensor(codes, scales, 16, torch.float32, torch.tensor(0.37))
    return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["quantized", "random"])
def test_nvfp4_in_modelopts_layout_is_as_in_torchao(tmp_path, scale, dtype):
    weight = nvfp4(random(ROWS, COLUMNS), scale)
    tensors = {"up.weight": weight.qdata, "up.weight_scale": weight.scale, "up.weight_scale_2": weight.per_tensor_scale}
    found = dequantized(tmp_path / "model", tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, dtype)
    assert_equal_bits(found["up.weight"], weight.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_scaled_fp8_is_as_in_torchao(tmp_path, granularity, stored, dtype):
    from torchao.quantization import PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    kind = {"tensor": PerTensor(), "row": PerRow(), "block": PerBlock([8, 128])}[granularity]
    weight = Float8Tensor.from_hp(random(ROWS, COLUMNS), granularity=kind)
    weight.qdata.view(torch.uint8).view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    weight.scale = weight.scale.to(stored)
    name = "up.weight_scale_inv" if granularity == "block" else "up.weight_scale"
    quantization = {"quant_method": "fp8", "weight_block_size": [8, 128]} if granularity == "block" else compressed_tensors(num_bits=8)
    found = dequantized(tmp_path / "model", {"up.weight": weight.qdata, name: weight.scale}, quantization, dtype)
    assert_equal_bits(found["up.weight"], weight.dequantize(dtype))


def packed(codes, num_bits):
    """Packs integers as compressed-tensors does: the lowest code is 0, and the first code is in the lowest bits."""
    words = (codes.to(torch.int64) + 2 ** (num_bits - 1)).unflatten(-1, (-1, 32 // num_bits))
    return (words << (torch.arange(32 // num_bits) * num_bits)).sum(-1).to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
@pytest.mark.parametrize("num_bits, group", [(8, 32), (8, COLUMNS), (4, 32), (4, 128), (2, 64)])
def test_integers_in_groups_are_as_in_torchao(tmp_path, num_bits, group, mapping, dtype):
    """torchao computes in the dtype of the weight, so the weight is given the dtype of `--dequantize`."""
    from torchao.quantization.quant_primitives import MappingType
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import IntxUnpackedToInt8Tensor

    weight = IntxUnpackedToInt8Tensor.from_hp(random(ROWS, COLUMNS, dtype=dtype), (1, group), getattr(torch, f"int{num_bits}"),
                                              mapping_type=getattr(MappingType, mapping))
    tensors = {"up.weight_scale": weight.scale}
    if num_bits == 8:
        tensors |= {"up.weight": weight.qdata, "up.weight_zero_point": weight.zero_point}
    else:
        tensors |= {"up.weight_packed": packed(weight.qdata, num_bits), "up.weight_shape": torch.tensor([ROWS, COLUMNS])}
        if mapping == "ASYMMETRIC":
            tensors["up.weight_zero_point"] = packed(weight.zero_point.t(), num_bits).t()
    quantization = compressed_tensors(num_bits=num_bits, strategy="group", group_size=group, symmetric=mapping == "SYMMETRIC")
    found = dequantized(tmp_path / "model", tensors, quantization, dtype)
    assert_equal_bits(found["up.weight"], weight.dequantize())


def quantized_linear():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    quantize_(model, Int8WeightOnlyConfig(version=2))
    return model.state_dict()


def test_a_checkpoint_of_torchao_itself_is_refused_by_name(tmp_path):
    """In torch.save files its tensors are objects of torchao's classes; in safetensors they have torchao's own names."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    torch.save(quantized_linear(), tmp_path / "step.pt")
    tensors, texts = flatten_tensor_state_dict(quantized_linear())
    save_file(tensors, tmp_path / "model.safetensors", metadata=texts)
    for file, tensor, found in [("step.pt", "0.weight", "found a tensor of class torchao.quantization.Int8Tensor"),
                                ("model.safetensors", "0._weight_qdata", "expected a scheme that can be dequantized "
                                 "(docs/combine.md#quantized-weights), found torchao")]:
        refused = run("ckpt-reshard", tmp_path / file, tmp_path / "numbers", "--dequantize", "bfloat16")
        assert refused.returncode == 3 and f"{file}: {tensor}: " in refused.stderr and found in refused.stderr
        assert not (tmp_path / "numbers").exists()


def exported_by_modelopt(folder, config):
    """Quantizes a small Llama and exports it, in the way in which NVIDIA's checkpoints were made."""
    import modelopt.torch.quantization as quantization
    import transformers
    from modelopt.torch.export import export_hf_checkpoint

    torch.manual_seed(13)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384,
        architectures=["LlamaForCausalLM"], tie_word_embeddings=False)).to(torch.bfloat16)
    quantized = quantization.quantize(model, getattr(quantization, config), lambda each: each(torch.arange(16)[None]))
    export_hf_checkpoint(quantized, export_dir=folder)
    return load_file(folder / "model.safetensors")


def numbers_of_modelopt(config, codes, scales, second_scale, dtype):
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    if config.startswith("NVFP4"):
        options = {"scale": scales, "double_scale": second_scale, "block_sizes": {-1: 16}}
        return NVFP4QTensor((codes.shape[0], codes.shape[1] * 2), dtype, codes).dequantize(dtype, **options)
    if config.startswith("MXFP4"):
        return MXFP4QTensor((codes.shape[0], codes.shape[1] * 2), dtype, codes).dequantize(dtype, scale=scales, block_sizes={-1: 32})
    if config.startswith("MXFP8"):
        return MXFP8QTensor(codes.shape, dtype, codes).dequantize(dtype, scale=scales)
    blocks = {0: 128, 1: 128} if scales.ndim == 4 else None
    scales = scales[:, 0, :, 0] if blocks else scales
    scales = scales[:, None] if scales.ndim == 1 else scales
    # ModelOpt would round the scale to bfloat16 first.
    return FP8QTensor(codes.shape, dtype, codes).dequantize(torch.float32, scale=scales, block_sizes=blocks).to(dtype)


@pytest.mark.parametrize("config", ["NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "MXFP8_DEFAULT_CFG",
                                    "MXFP4_DEFAULT_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"])
def test_what_modelopt_exports_has_its_numbers(tmp_path, config):
    stored = exported_by_modelopt(tmp_path / "model", config)
    for dtype in DTYPES:
        moved = reshard(tmp_path / "model", tmp_path / str(dtype), "--to", "safetensors", "--dequantize", str(dtype).removeprefix("torch."))
        numbers = load_file(moved / "model.safetensors")
        quantized = [name for name in numbers if f"{name}_scale" in stored]
        assert len(quantized) == 7, numbers.keys()
        for name in quantized:
            parts = stored[name], stored[f"{name}_scale"], stored.get(f"{name}_scale_2")
            # The code for -0 is 0 in ModelOpt's nvfp4; elsewhere it is -0.
            assert_equal_bits(numbers[name], numbers_of_modelopt(config, *parts, dtype), zeros_are_equal=config.startswith("NVFP4"))
        assert not (moved / "hf_quant_config.json").exists()
        rest = numbers.keys() - set(quantized)
        assert rest and all(torch.equal(numbers[name], stored[name]) for name in rest)

"""Writes checkpoints of frameworks by hand. Each function returns what the checkpoint holds."""

import json

import torch
from safetensors.torch import save_file

MOMENTS = ("exp_avg", "exp_avg_sq")


def random_weights(rng, maker):
    return {maker.text_key(): maker.normal([rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.choice([0, 1, 2, 2, 3]))])
            for _ in range(rng.randint(1, 6))}


def parts_of(vectors, ranks):
    """Returns each rank's part of vectors that are padded and cut, and the number of elements of padding in it."""
    sizes = [-(-vector.numel() // ranks) for vector in vectors]
    padded = [torch.cat([v, v.new_full((size * ranks - v.numel(),), torch.nan)]) for v, size in zip(vectors, sizes)]
    parts = [torch.cat([v[rank * size:][:size] for v, size in zip(padded, sizes)]) for rank in range(ranks)]
    return parts, [int(part.isnan().sum()) for part in parts]


def write_deepspeed(path, rng, maker):
    """Cuts weights and moments into vectors: ZeRO's stage 1 cuts one vector of each group, stage 3 each parameter."""
    stage, ranks, weights = rng.choice([1, 3]), rng.choice([1, 2, 3]), random_weights(rng, maker)
    state = {name: {kind: maker.normal(weight.shape) for kind in MOMENTS} | {"step": torch.tensor(3.0)}
             for name, weight in weights.items()}
    names, cut = list(weights), rng.randrange(len(weights))
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": part} for part in (names[:cut], names[cut:]) if part]

    def cut_group(group, tensor_of):
        vectors = [tensor_of(name).flatten() for name in group["params"]]
        return parts_of([torch.cat(vectors)] if stage == 1 else vectors, ranks)

    fp32 = [cut_group(group, weights.get) for group in groups]
    moments = [{kind: cut_group(group, lambda name: state[name][kind])[0] for kind in MOMENTS} for group in groups]
    step = path / "global_step3"
    step.mkdir(parents=True)
    (path / "latest").write_text(step.name)
    for rank in range(ranks):
        base = {"state": {i: {kind: parts[rank] for kind, parts in kinds.items()} | {"step": torch.tensor(3.0)}
                          for i, kinds in enumerate(moments)},
                "param_groups": [group | {"params": [i]} for i, group in enumerate(groups)]}
        own = [parts[rank] for parts, _ in fp32]
        optimizer = {"zero_stage": 3, "fp32_flat_groups": own, "optimizer_state_dict": base, "partition_count": ranks}
        if stage == 1:
            optimizer = {"zero_stage": 1, "single_partition_of_fp32_groups": own, "base_optimizer_state": base,
                         "partition_count": [ranks] * len(groups), "group_paddings": [sizes[rank] for _, sizes in fp32]}
        torch.save({"ds_version": "0.19.8", "optimizer_state_dict": optimizer},
                   step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model = weights | {"buffer": torch.arange(3), "tied.second": weights[names[0]]}
    module = {name: torch.empty(0) if stage == 3 and name != "buffer" else leaf for name, leaf in model.items()}
    shapes = [{name: weights[name].shape for name in group["params"]} for group in groups]
    for rank in range(ranks if stage == 3 else 1):
        torch.save({"ds_version": "0.19.8", "dp_world_size": ranks, "module": module, "param_shapes": shapes,
                    "shared_params": {"tied.second": names[0]}, "epoch": 3},
                   step / (f"zero_pp_rank_{rank}_" * (stage == 3) + "mp_rank_00_model_states.pt"))
    return {"model": model, "optim": {"state": state, "param_groups": groups}, "epoch": 3}


def write_quantized(path, rng, maker):
    """Writes float8 codes with one scale, or one for each block. Returns the numbers, and their dtype."""
    block, dtype = rng.choice([None, 2, 4]), rng.choice([torch.bfloat16, torch.float32, torch.float64])
    tensors = random_weights(rng, maker)
    numbers = dict(tensors)
    for layer in ("up", "down.0"):
        codes = maker.normal([rng.choice([1, 3, 8]), rng.choice([2, 4, 5])]).to(torch.float8_e4m3fn)
        scale = maker.normal([-(-size // block) for size in codes.shape] if block else [1])
        repeated = scale.repeat_interleave(block, 0).repeat_interleave(block, 1) if block else scale.expand(codes.shape)
        tensors |= {f"{layer}.weight": codes, f"{layer}.weight_scale{'_inv' * bool(block)}": scale}
        numbers[f"{layer}.weight"] = (codes.float() * repeated[:codes.size(0), :codes.size(1)]).to(dtype)
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "fp8"} | ({"weight_block_size": [block, block]} if block else {})
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return numbers, dtype

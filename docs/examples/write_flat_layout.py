"""Writes the flat layout of a live FSDP1 model, for checkpoints that hold bare flat vectors.

An FSDP1 LOCAL_STATE_DICT checkpoint stores one flat vector per wrapped module and does not say
which parameters it contains. Run this once in the trainer, on any rank, after FSDP has wrapped the
model, and keep the file beside the checkpoint:

    from write_flat_layout import write_flat_layout
    write_flat_layout(model, "flat-layout.json", prefix="model.")  # prefix: the model's key in the checkpoint

    ckpt-reshard CHECKPOINT DST --to native --flat-layout flat-layout.json

With use_orig_params=True the local state dict also has this rank's shard of every parameter under
the parameter's name. Drop these entries before you save, because all ranks would write the same key:

    state = {k: v for k, v in model.state_dict().items() if k.endswith("_flat_param")}

Units: elements. Offsets count from the start of the flat vector. `numel_padded` is the length of
the vector in the checkpoint: all parameters, the gaps between them and the padding at the end.
A tied parameter is listed once for each of its names, with the same offset.
"""

import json

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

WRAPPER = "_fsdp_wrapped_module."


def flat_layout(model, prefix=""):
    """Returns the layout of every flat parameter of `model` (an FSDP module) as JSON-ready data."""
    units = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDP) or module._handle is None:
            continue
        module_prefix = prefix + (name + "." if name else "").replace(WRAPPER, "")
        flat_param = module._handle.flat_param
        params, offset, shapes = [], 0, iter(zip(flat_param._fqns, flat_param._shapes))
        for numel, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask):
            if not is_padding:
                fqn, shape = next(shapes)
                params.append({"fqn": module_prefix + fqn, "shape": list(shape), "offset": offset})
            offset += numel
        by_fqn = {entry["fqn"]: entry for entry in params}
        for shared in flat_param._shared_param_infos:
            first = ".".join(filter(None, [shared.prim_module_name, shared.prim_param_name]))
            second = ".".join(filter(None, [shared.module_name, shared.param_name]))
            params.append(by_fqn[module_prefix + first] | {"fqn": module_prefix + second})
        units.append(
            {
                "key": module_prefix + "_flat_param",
                "dtype": str(flat_param.dtype).removeprefix("torch."),
                "numel_padded": offset,
                "params": params,
            }
        )
    return {"schema": 1, "units": units}


def write_flat_layout(model, path, prefix=""):
    with open(path, "w") as file:
        json.dump(flat_layout(model, prefix), file, indent=1)

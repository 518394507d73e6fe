#pragma once

namespace tessera::fsdp {

/// Makes `torch::save` refuse parameters of which this rank holds a shard: it would write that
/// shard, or the unit's whole memory, under the parameter's name. torch's pickler calls a function
/// per device for extra metadata; this one adds none and throws. Does not replace a function that
/// is set already. Returns true.
bool refuse_in_torch_save();

}  // namespace tessera::fsdp

#pragma once

namespace tessera::fsdp {

/// Makes `torch::save` refuse parameters of which this rank holds only a shard: `torch::save` would
/// write that shard, or the unit's whole memory, under the parameter's name. To do so, sets the
/// function that torch's pickler calls per device for extra metadata; Tessera's function throws for
/// such parameters, and adds no metadata. Does not replace a function that is set already. Always
/// returns true.
bool refuse_in_torch_save();

}  // namespace tessera::fsdp

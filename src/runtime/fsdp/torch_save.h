#pragma once

namespace tessera::fsdp {

/// Makes `torch::save` refuse parameters of which this rank holds only a shard: `torch::save` would
/// write that shard, or the unit's whole memory, under the parameter's name. To do so, registers a
/// function that torch's pickler calls for each tensor (one function for each device type, CPU and
/// CUDA). The function throws for such parameters, and adds nothing to the pickle. If another
/// library has registered a function for a device type already, that function stays, and shards on
/// such devices are not refused. Returns true, so that the initializer of a static variable can
/// call it.
bool refuse_in_torch_save();

}  // namespace tessera::fsdp

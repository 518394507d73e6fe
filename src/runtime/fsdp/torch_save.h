#pragma once

namespace tessera::fsdp {

/// Makes `torch::save` refuse parameters of which this rank holds a part: it would write that part,
/// or all of the unit's memory that it lies in, under the name of the whole. torch's pickler asks a
/// function of the device what else to note of each tensor; this one notes nothing, and throws. One
/// that somebody has set before stays. Returns true.
bool refuse_in_torch_save();

}  // namespace tessera::fsdp

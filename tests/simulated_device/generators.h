#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace tessera::sim {

/// Returns the default generator of a device.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
/// Returns a CPU generator for one operator, and advances `generator`. Call it when the operator is
/// launched, as CUDA's generators do: the numbers then do not depend on when the operator runs.
at::Generator take_numbers(at::Generator generator);

}  // namespace tessera::sim

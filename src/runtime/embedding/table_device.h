#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/runtime/embedding/shard.h"

namespace tessera::embedding {

/// Returns the device for all tables of a collection, see ShardOptions::device. Throws:
/// Error(invalid_argument) if the weights are on several devices and no device is chosen, or if the
/// mesh's collectives run on another type of device.
at::Device device_for_tables(const EmbeddingBagCollectionBase& collection, const dist::Mesh& mesh,
                             const ShardOptions& options);

/// Calls `allocate`. Throws: Error(unsupported) naming table, device and bytes if the device has
/// too little memory. `nbytes`: what `allocate` needs in all.
void allocate_table(const std::string& table, at::Device device, std::uint64_t nbytes,
                    const std::function<void()>& allocate);

}  // namespace tessera::embedding

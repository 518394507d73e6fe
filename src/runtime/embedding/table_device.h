#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/runtime/embedding/shard.h"

namespace tessera::embedding {

/// Returns the device for all tables of a collection, see ShardOptions::device. Throws:
/// Error(invalid_argument) if the weights are on several devices and no device is chosen, or if
/// there are several ranks and the mesh's collectives run on another device.
at::Device device_for_tables(const EmbeddingBagCollectionBase& collection, const dist::Mesh& mesh,
                             const ShardOptions& options);

/// The purpose of memory, for messages.
struct TableMemory {
  std::string table;
  std::string what = "a table and its optimizer state";
  std::uint64_t nbytes = 0;
};
/// Calls `allocate`. Throws: Error(unsupported) naming table, device and bytes if the device has
/// too little memory. On the CPU, every c10::Error in `allocate` is reported as too little memory.
void allocate_on(at::Device device, const TableMemory& memory,
                 const std::function<void()>& allocate);
/// As `allocate_on`, for pinned host memory. `allocate` must only allocate, because
/// every error in it is reported as too little memory: libtorch has no special error for that.
void allocate_pinned(const TableMemory& memory, const std::function<void()>& allocate);

}  // namespace tessera::embedding

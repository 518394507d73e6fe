#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/embedding/fused_state.h"
#include "runtime/embedding/side_stream.h"
#include "runtime/embedding/table_kernels.h"

namespace tessera::embedding {

/// The rows of a table that are on a device. The whole table and its optimizer state are in pinned
/// host memory. A slot is a place for one row and its state. If a row needs a slot, the cache takes
/// a free slot. If none is free, it takes the slot of the row that was looked up longest ago
/// (counted in batches), and, if that row has changed, writes it back first. Copies run on a side
/// stream. Not thread-safe.
class RowCache {
 public:
  /// `weight` and `state`: this rank's whole shard, in pinned memory. Do not change their storage.
  RowCache(std::string table, at::Tensor weight, const FusedState& state, std::int64_t num_slots,
           std::shared_ptr<SideStream> stream);

  /// Throws Error(unsupported) with the table and both numbers if `ids` has more different rows
  /// than the cache has slots. Changes nothing.
  void check_room(std::span<const std::int64_t> ids);
  /// Brings the rows in `ids` to the device and writes the slot of each id to `slots`. The current
  /// stream waits for the rows. The host waits only for copies that an earlier call started.
  /// Requires: `check_room` has accepted these ids.
  void fetch(std::span<const std::int64_t> ids, std::span<std::int64_t> slots);
  /// Call it when the current stream changes the rows in these slots, so that the cache writes them
  /// back later.
  void mark_changed(std::span<const std::int64_t> slots);
  /// Writes changed rows to host memory and empties the cache. Waits for the device.
  void write_back();

  /// Returns the slots, as a table of `num_slots` rows.
  TableTensors tensors(std::int64_t step);
  /// Returns a number that changes when a row loses its slot.
  std::uint64_t generation() const { return generation_; }

 private:
  /// A copy of rows to host memory that may still run.
  struct WriteBack {
    at::Tensor rows;  // [n] int64, on the host
    std::vector<at::Tensor> values;
    c10::Event end;
  };
  std::vector<std::int64_t> distinct_rows(std::span<const std::int64_t> ids);
  std::vector<std::int64_t> take_slots(std::int64_t num_slots);
  void start_write_back(std::span<const std::int64_t> slots);
  void finish_write_back();
  std::int64_t num_slots() const { return static_cast<std::int64_t>(row_of_slot_.size()); }

  std::string table_;
  std::shared_ptr<SideStream> stream_;
  std::vector<at::Tensor> on_host_;    // weight, then the state's slots
  std::vector<at::Tensor> on_device_;  // the same tensors with `num_slots` rows each
  FusedState device_state_;
  std::vector<std::int32_t> slot_of_row_;  // -1: not on the device
  std::vector<std::int64_t> row_of_slot_;  // -1: free
  std::vector<std::uint64_t> last_batch_;  // by slot: the last batch that looked up its row
  std::vector<bool> is_changed_;           // by slot: the row has changed since it was fetched
  std::vector<std::uint64_t> seen_in_;     // by row: the last call of `distinct_rows` that saw it
  std::uint64_t num_calls_ = 0;
  std::uint64_t num_batches_ = 0;
  std::uint64_t generation_ = 0;
  std::optional<WriteBack> write_back_;
};

}  // namespace tessera::embedding

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::test {

using Bytes = std::vector<std::byte>;

/// Returns the bytes of a region, copied row by row from the row-major bytes of a whole tensor.
/// Does not use CopyRuns, so that tests can check CopyRuns against this function.
Bytes gather_region(std::span<const std::byte> whole, std::span<const std::int64_t> shape,
                    const Region& region, std::uint64_t itemsize);

/// Copies the bytes of a region, row by row, into the row-major bytes of a whole tensor.
void scatter_region(std::span<const std::byte> region_bytes, std::span<const std::int64_t> shape,
                    const Region& region, std::uint64_t itemsize, std::span<std::byte> whole);

/// Returns the row-major bytes of a whole tensor, read from all its pieces. Elements that no piece
/// holds are zero.
Bytes whole_tensor(const formats::CheckpointReader& reader, std::size_t tensor_index);

/// Returns the row-major bytes of values, e.g. `bytes_of<float>({1, 2})`.
template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto raw = std::as_bytes(std::span(values));
  return Bytes(raw.begin(), raw.end());
}

/// A checkpoint in memory. Thread-safe after it has been filled.
class MemoryCheckpoint final : public formats::CheckpointReader {
 public:
  explicit MemoryCheckpoint(std::string path = "memory", int world_size = 1);
  /// Makes a checkpoint with these contents. `piece_bytes[t][p]`: the bytes of piece p of tensor t.
  MemoryCheckpoint(std::string path, formats::CheckpointContents contents,
                   std::vector<std::vector<Bytes>> piece_bytes, std::vector<Value> values);

  /// Adds a tensor that is cut into `pieces`; if there are none, it is one piece on rank 0. Returns
  /// the entry, so that a test can change it. The next `add` invalidates the reference.
  formats::TensorEntry& add(TensorMeta meta, const Bytes& whole,
                            std::vector<formats::Piece> pieces = {});
  formats::ValueEntry& add_value(std::string name, Value value);
  void add_alias(std::string fqn, std::string target);

  formats::CheckpointContents& contents_for_change() { return contents_; }
  /// Returns the stored bytes of one piece, so that a test can damage them.
  Bytes& piece_bytes(std::string_view fqn, std::size_t piece_index);
  /// Returns what the checkpoint reports as missing, so that a test can change it. Does not affect
  /// reads.
  formats::MissingData& missing_data_for_change() { return missing_data_; }
  /// Returns the result of dict_orders(), so that a test can change it; empty at first.
  std::vector<std::vector<std::string>>& dict_orders_for_change() { return dict_orders_; }
  /// Makes every read of a piece throw Error(corruption).
  void fail_reads_of(std::string_view fqn, std::size_t piece_index);

  formats::Format format() const override { return formats::Format::native; }
  const std::string& path() const override { return path_; }
  const formats::CheckpointContents& contents() const override { return contents_; }
  std::vector<std::vector<std::string>> dict_orders() const override { return dict_orders_; }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override;
  Value read_value(std::size_t value_index) const override;
  formats::PieceStorage piece_storage(std::size_t tensor_index,
                                      std::size_t piece_index) const override;
  void check_files(const formats::FindingSink&) const override {}
  std::vector<std::string> data_files() const override { return {}; }
  formats::MissingData find_missing_data() const override { return missing_data_; }
  void verify(const formats::FindingSink& sink, const formats::ProgressSink& progress,
              int num_threads) const override;

 private:
  std::size_t index_of(std::string_view fqn) const;

  std::string path_;
  formats::CheckpointContents contents_;
  std::vector<std::vector<Bytes>> piece_bytes_;  // parallel to contents_.tensors
  std::vector<Value> values_;                    // parallel to contents_.values
  formats::MissingData missing_data_;
  std::vector<std::vector<std::string>> dict_orders_;
  std::set<std::pair<std::string, std::size_t>> failing_;
};

/// Writes a checkpoint into memory. Throws std::logic_error if the caller breaks a rule that this
/// checks: blocks must have the size that `block_numel` says, must be written once, and all must be
/// written before the one commit. Does not check that they come in write order.
class MemoryWriter final : public formats::CheckpointWriter {
 public:
  /// `block_nbytes`: the largest size of a block. Requires: sorted contents, as for any writer.
  MemoryWriter(formats::CheckpointContents contents, std::vector<Value> values,
               std::uint64_t block_nbytes = 64);

  const formats::CheckpointContents& contents() const override { return contents_; }
  std::span<const PieceId> write_order() const override;
  std::int64_t block_numel(PieceId piece) const override;
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override;
  void abandon() noexcept override;
  void commit() override;

  bool committed() const { return committed_; }
  bool abandoned() const { return abandoned_; }
  std::int64_t num_blocks() const { return static_cast<std::int64_t>(written_.size()); }
  /// Returns the written checkpoint. Requires: `commit` has been called.
  MemoryCheckpoint result(std::string path = "memory") const;

 private:
  using BlockId = std::pair<std::size_t, std::int64_t>;  // place in write order, first element

  formats::CheckpointContents contents_;
  std::vector<Value> values_;
  std::uint64_t block_nbytes_;
  std::vector<PieceId> order_;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> place_in_order_;
  mutable std::mutex mutex_;
  std::vector<std::vector<Bytes>> piece_bytes_;
  std::set<BlockId> written_;
  std::size_t num_blocks_expected_ = 0;
  bool committed_ = false;
  std::atomic<bool> abandoned_ = false;
};

}  // namespace tessera::test

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

/// Returns the region's elements, taken row by row out of a whole tensor's row-major bytes. Written
/// without CopyRuns, so that tests can check against it.
Bytes gather_region(std::span<const std::byte> whole, std::span<const std::int64_t> shape,
                    const Region& region, std::uint64_t itemsize);

/// Puts the region's elements, row by row, into a whole tensor's row-major bytes.
void scatter_region(std::span<const std::byte> region_bytes, std::span<const std::int64_t> shape,
                    const Region& region, std::uint64_t itemsize, std::span<std::byte> whole);

/// Returns a tensor's row-major bytes, put together from all pieces of any reader. Elements that
/// no piece holds are zero.
Bytes whole_tensor(const formats::CheckpointReader& reader, std::size_t tensor_index);

/// Returns the row-major bytes of values, e.g. `bytes_of<float>({1, 2})`.
template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto raw = std::as_bytes(std::span(values));
  return Bytes(raw.begin(), raw.end());
}

/// A checkpoint that lies in memory. Thread-safe once it is filled.
class MemoryCheckpoint final : public formats::CheckpointReader {
 public:
  explicit MemoryCheckpoint(std::string path = "memory", int world_size = 1);
  /// Takes contents as they are, with `piece_bytes[tensor][piece]` and `values[value]`.
  MemoryCheckpoint(std::string path, formats::CheckpointContents contents,
                   std::vector<std::vector<Bytes>> piece_bytes, std::vector<Value> values);

  /// Adds a tensor cut into pieces; without pieces, one piece on rank 0 that is all of it.
  /// Returns the entry, so that a test can say more about it. The entry moves when more is added.
  formats::TensorEntry& add(TensorMeta meta, const Bytes& whole,
                            std::vector<formats::Piece> pieces = {});
  formats::ValueEntry& add_value(std::string name, Value value);
  void add_alias(std::string fqn, std::string target);

  formats::CheckpointContents& contents_for_change() { return contents_; }
  /// The stored bytes of one piece, e.g. to damage them.
  Bytes& piece_bytes(std::string_view fqn, std::size_t piece_index);
  /// What the checkpoint says is lost; reads do not know of it.
  formats::MissingData& missing_data_for_change() { return missing_data_; }
  /// Names in the order that a file would keep; none at first.
  std::vector<std::vector<std::string>>& dict_orders_for_change() { return dict_orders_; }
  /// Makes every read of that piece throw Error(corruption).
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

/// Takes a checkpoint into memory, and holds the caller to every rule of CheckpointWriter: blocks
/// of the announced size, each once, started in write order, all there before commit. A broken
/// rule is a std::logic_error.
class MemoryWriter final : public formats::CheckpointWriter {
 public:
  /// `block_nbytes` bounds the blocks. Requires: sorted contents, as for any writer.
  MemoryWriter(formats::CheckpointContents contents, std::vector<Value> values,
               std::uint64_t block_nbytes = 64);

  const formats::CheckpointContents& contents() const override { return contents_; }
  std::vector<PieceId> write_order() const override;
  std::int64_t block_numel(PieceId piece) const override;
  void write_block(PieceId piece, std::int64_t begin, std::span<const std::byte> bytes) override;
  void abandon() noexcept override;
  void commit() override;

  bool committed() const { return committed_; }
  bool abandoned() const { return abandoned_; }
  std::int64_t num_blocks() const { return static_cast<std::int64_t>(written_.size()); }
  /// Returns what was written. Requires: committed.
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

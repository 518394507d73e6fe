#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "embedding_kernels/bags.h"

namespace tessera::embedding {

/// The rows of each table that a batch looks up (touched rows) and, for each row, its occurrences:
/// the positions in the batch whose id is this row. A backward uses them.
///
/// [Note: Order of sums] The gradient of a row is the sum of weight * gradient of the bag over its
/// occurrences, in batch order: by feature, then sample, then place in the bag. A row with more
/// than `kBlockOccurrences` occurrences is hot: each block of `kBlockOccurrences` occurrences is
/// summed from zero, then the blocks' sums are added in order. So several threads can sum one hot
/// row, and any number of threads gives the same bits.
class TouchedRows {
 public:
  static constexpr std::int64_t kBlockOccurrences = 1024;

  static constexpr std::int64_t num_blocks_of(std::int64_t num_occurrences) {
    return (num_occurrences + kBlockOccurrences - 1) / kBlockOccurrences;
  }

  struct Occurrence {
    std::uint32_t sample;
    std::uint32_t column;  // first column of the id's feature in the pooled output
    float weight;
  };
  /// A half-open range of columns.
  struct Columns {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    std::int64_t numel() const { return end - begin; }
  };
  struct HotRow {
    std::int64_t index;        // index into the table's touched rows
    std::int64_t first_block;  // index of its first block among all blocks of the table's hot rows
  };

  /// The touched rows of one table, `rows.size()` of them.
  struct OfTable {
    std::span<const std::int64_t> rows;  // ascending, each once
    /// [rows + 1]: row i has the occurrences [offsets[i], offsets[i + 1]).
    std::span<const std::uint32_t> offsets;
    std::span<const Occurrence> occurrences;  // sorted by row, then in batch order
    std::span<const HotRow> hot_rows;         // ascending by `index`
    std::int64_t num_blocks = 0;              // number of blocks of all its hot rows
    std::int64_t num_samples = 0;             // samples of the batch
    Columns columns{};                        // columns of the table's bags in the pooled output

    std::int64_t num_rows() const { return static_cast<std::int64_t>(rows.size()); }
    std::int64_t num_occurrences() const { return static_cast<std::int64_t>(occurrences.size()); }
    std::int64_t begin_of(std::int64_t index) const {
      return offsets[static_cast<std::size_t>(index)];
    }
    std::int64_t end_of(std::int64_t index) const {
      return offsets[static_cast<std::size_t>(index) + 1];
    }
    std::int64_t first_block_of(std::int64_t hot_index) const;
  };

  /// Finds the touched rows of a batch. Reuses memory of earlier batches. Throws:
  /// Error(unsupported) if a table has 2^32 rows or more, or the batch has 2^32 ids or samples or
  /// more.
  void assign(std::span<const TableView> tables, const Bags& bags, int num_threads);

  /// Returns views that are valid until the next `assign`.
  OfTable operator[](int table) const;

 private:
  struct Table {
    std::vector<std::int64_t> rows{};
    std::vector<std::uint32_t> offsets{};
    std::vector<Occurrence> occurrences{};
    std::vector<HotRow> hot_rows{};
    // How many elements of the vectors above are used. The vectors themselves never shrink.
    std::size_t num_rows = 0;
    std::size_t num_occurrences = 0;
    std::int64_t num_blocks = 0;
    std::int64_t num_samples = 0;
    Columns columns{};
  };
  /// Memory of one thread. An entry has a row number in its upper 32 bits and a position in the
  /// table's ids in its lower 32 bits. Sorted as numbers, entries are in the order of sums.
  struct Scratch {
    std::vector<std::uint64_t> entries{};
    std::vector<std::uint64_t> sorted{};
    std::vector<Occurrence> in_batch_order{};
  };

  static void gather(const Bags& bags, std::span<const int> features, Scratch& scratch);
  static void group(std::span<const std::uint64_t> sorted, const Scratch& scratch, Table& table);
  static void find_hot_rows(Table& table);

  std::vector<Table> tables_{};
  std::vector<Scratch> scratch_{};
};

/// Returns the touched rows of a batch.
TouchedRows touched_rows(std::span<const TableView> tables, const Bags& bags, int num_threads);

}  // namespace tessera::embedding

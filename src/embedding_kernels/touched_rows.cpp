#include "embedding_kernels/touched_rows.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <limits>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/parallel.h"

namespace tessera::embedding {
namespace {

constexpr int kRowShift = 32;  // an entry is `row << kRowShift | place`
constexpr std::uint64_t kPlaceMask = 0xFFFFFFFFU;
constexpr int kMaxDigitBits = 11;  // so that the counters of one pass fit into the L1 cache
constexpr std::size_t kMinRadixNumel = 512;  // for fewer entries, comparison sort is faster

/// Makes a vector at least this long. Never shrinks it, so that later batches do not initialise its
/// memory again.
template <class T>
void grow(std::vector<T>& vector, std::size_t numel) {
  if (vector.size() < numel) vector.resize(numel);
}

/// Moves entries to `to`, sorted by one digit of their row number (stable).
void scatter_by_digit(std::span<const std::uint64_t> from, std::span<std::uint64_t> to, int shift,
                      int digit_bits) {
  const std::uint64_t mask = (std::uint64_t{1} << digit_bits) - 1;
  std::array<std::uint32_t, std::size_t{1} << kMaxDigitBits> next{};
  for (const std::uint64_t entry : from) ++next[(entry >> shift) & mask];
  std::uint32_t begin = 0;
  for (std::uint64_t digit = 0; digit <= mask; ++digit) {
    const std::uint32_t numel = next[digit];
    next[digit] = begin;
    begin += numel;
  }
  for (const std::uint64_t entry : from) to[next[(entry >> shift) & mask]++] = entry;
}

/// Sorts entries by row, with as few passes as the number of rows allows (stable). Returns the
/// sorted entries, which are in one of the two spans.
std::span<const std::uint64_t> sort_entries(std::span<std::uint64_t> entries,
                                            std::span<std::uint64_t> other, std::int64_t num_rows) {
  if (entries.size() < kMinRadixNumel) {
    std::ranges::sort(entries);
    return entries;
  }
  const auto row_bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(num_rows - 1)));
  const int num_passes = (row_bits + kMaxDigitBits - 1) / kMaxDigitBits;
  for (int pass = 0; pass < num_passes; ++pass) {
    const int digit_bits = (row_bits + num_passes - 1) / num_passes;
    scatter_by_digit(entries, other, kRowShift + pass * digit_bits, digit_bits);
    std::swap(entries, other);
  }
  return entries;
}

std::size_t num_ids_of(const Bags& bags, std::span<const int> features) {
  std::int64_t num_ids = 0;
  for (const int feature : features) {
    const auto first_bag = static_cast<std::size_t>(feature * bags.batch);
    num_ids +=
        bags.offsets[first_bag + static_cast<std::size_t>(bags.batch)] - bags.offsets[first_bag];
  }
  return static_cast<std::size_t>(num_ids);
}

TouchedRows::Columns columns_of(const Bags& bags, std::span<const int> features, std::int64_t dim) {
  TouchedRows::Columns columns;
  for (const int feature : features) {
    const std::int64_t begin = bags.column_of_feature[static_cast<std::size_t>(feature)];
    if (columns.end == 0) columns.begin = begin;
    columns.begin = std::min(columns.begin, begin);
    columns.end = std::max(columns.end, begin + dim);
  }
  return columns;
}

void check_fits(std::string_view what, std::int64_t found) {
  constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();
  if (found <= kMost) return;
  throw Error::expected(ErrorKind::unsupported, {}, what, "at most " + std::to_string(kMost),
                        std::to_string(found));
}

}  // namespace

void TouchedRows::gather(const Bags& bags, std::span<const int> features, Scratch& scratch) {
  std::size_t place = 0;
  for (const int feature : features) {
    const std::int64_t* offsets = bags.offsets.data() + feature * bags.batch;
    const auto column =
        static_cast<std::uint32_t>(bags.column_of_feature[static_cast<std::size_t>(feature)]);
    for (std::int64_t sample = 0; sample < bags.batch; ++sample) {
      for (std::int64_t i = offsets[sample]; i < offsets[sample + 1]; ++i, ++place) {
        const auto id = static_cast<std::size_t>(i);
        scratch.entries[place] = static_cast<std::uint64_t>(bags.ids[id]) << kRowShift | place;
        scratch.in_batch_order[place] = {.sample = static_cast<std::uint32_t>(sample),
                                         .column = column,
                                         .weight = bags.weights.empty() ? 1.0F : bags.weights[id]};
      }
    }
  }
}

void TouchedRows::group(std::span<const std::uint64_t> sorted, const Scratch& scratch,
                        Table& table) {
  grow(table.occurrences, sorted.size());
  grow(table.rows, sorted.size() + 1);
  grow(table.offsets, sorted.size() + 1);
  std::size_t num_rows = 0;
  std::uint64_t previous = std::numeric_limits<std::uint64_t>::max();
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const std::uint64_t row = sorted[i] >> kRowShift;
    table.occurrences[i] = scratch.in_batch_order[sorted[i] & kPlaceMask];
    // Writes the row in any case, and counts it only if it is new. This avoids an unpredictable
    // branch.
    table.rows[num_rows] = static_cast<std::int64_t>(row);
    table.offsets[num_rows] = static_cast<std::uint32_t>(i);
    num_rows += row != previous ? 1 : 0;
    previous = row;
  }
  table.offsets[num_rows] = static_cast<std::uint32_t>(sorted.size());
  table.num_rows = num_rows;
  table.num_occurrences = sorted.size();
}

void TouchedRows::find_hot_rows(Table& table) {
  table.hot_rows.clear();
  table.num_blocks = 0;
  for (std::size_t i = 0; i < table.num_rows; ++i) {
    const std::int64_t numel = table.offsets[i + 1] - table.offsets[i];
    if (numel <= kBlockOccurrences) continue;
    table.hot_rows.push_back(
        {.index = static_cast<std::int64_t>(i), .first_block = table.num_blocks});
    table.num_blocks += num_blocks_of(numel);
  }
}

void TouchedRows::assign(std::span<const TableView> tables, const Bags& bags, int num_threads) {
  std::vector<std::vector<int>> features_of_table(tables.size());
  for (std::size_t feature = 0; feature < bags.table_of_feature.size(); ++feature) {
    const auto table = static_cast<std::size_t>(bags.table_of_feature[feature]);
    features_of_table[table].push_back(static_cast<int>(feature));
  }
  check_fits("ids of a batch", static_cast<std::int64_t>(bags.ids.size()));
  check_fits("samples of a batch", bags.batch);
  for (const TableView& table : tables) check_fits("rows of a table", table.rows);

  tables_.resize(tables.size());
  const int num_workers = std::max(1, std::min(num_threads, static_cast<int>(tables.size())));
  scratch_.resize(static_cast<std::size_t>(num_workers));
  std::atomic<std::size_t> next_table{0};
  parallel_for(num_workers, num_threads, {}, [&](std::int64_t worker) {
    Scratch& scratch = scratch_[static_cast<std::size_t>(worker)];
    for (std::size_t table = next_table++; table < tables.size(); table = next_table++) {
      const std::size_t numel = num_ids_of(bags, features_of_table[table]);
      grow(scratch.entries, numel);
      grow(scratch.sorted, numel);
      grow(scratch.in_batch_order, numel);
      gather(bags, features_of_table[table], scratch);
      group(sort_entries(std::span(scratch.entries).first(numel),
                         std::span(scratch.sorted).first(numel), tables[table].rows),
            scratch, tables_[table]);
      find_hot_rows(tables_[table]);
      tables_[table].num_samples = bags.batch;
      tables_[table].columns = columns_of(bags, features_of_table[table], tables[table].dim);
    }
  });
}

TouchedRows::OfTable TouchedRows::operator[](int table) const {
  const Table& found = tables_[static_cast<std::size_t>(table)];
  const std::size_t num_offsets = found.offsets.empty() ? 0 : found.num_rows + 1;
  return {.rows = std::span(found.rows).first(found.num_rows),
          .offsets = std::span(found.offsets).first(num_offsets),
          .occurrences = std::span(found.occurrences).first(found.num_occurrences),
          .hot_rows = found.hot_rows,
          .num_blocks = found.num_blocks,
          .num_samples = found.num_samples,
          .columns = found.columns};
}

std::int64_t TouchedRows::OfTable::first_block_of(std::int64_t hot_index) const {
  return std::ranges::lower_bound(hot_rows, hot_index, {}, &HotRow::index)->first_block;
}

TouchedRows touched_rows(std::span<const TableView> tables, const Bags& bags, int num_threads) {
  TouchedRows rows;
  rows.assign(tables, bags, num_threads);
  return rows;
}

}  // namespace tessera::embedding

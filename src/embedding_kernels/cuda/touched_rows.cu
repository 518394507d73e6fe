#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "embedding_kernels/cuda/algorithms.cuh"
#include "embedding_kernels/cuda/elements.cuh"
#include "embedding_kernels/cuda/kernels.h"

namespace tessera::embedding::cuda {
namespace {

using Occurrence = TouchedRows::Occurrence;
constexpr std::int64_t kBlockOccurrences = embedding::TouchedRows::kBlockOccurrences;

struct Feature {
  std::uint64_t table;
  std::uint32_t column;
};

/// Writes for each id of the batch its key (table and row), its position among the ids, and its
/// Occurrence.
__global__ void list_places(const Feature* features, std::int64_t num_bags, std::int64_t batch,
                            const std::int64_t* ids, const std::int64_t* offsets,
                            const float* weights, int row_bits, std::uint64_t* keys,
                            std::uint32_t* places, Occurrence* occurrences) {
  for (std::int64_t bag = first_item(); bag < num_bags; bag += num_warps()) {
    const Feature& feature = features[bag / batch];
    for (std::int64_t i = offsets[bag] + lane(); i < offsets[bag + 1]; i += kWarpThreads) {
      keys[i] = feature.table << row_bits | static_cast<std::uint64_t>(ids[i]);
      places[i] = static_cast<std::uint32_t>(i);
      occurrences[i] = {.sample = static_cast<std::uint32_t>(bag % batch),
                        .column = feature.column,
                        .weight = weights == nullptr ? 1.0F : weights[i]};
    }
  }
}

__device__ std::int64_t first_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ std::int64_t num_threads() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

__global__ void gather(const Occurrence* from, const std::uint32_t* places, std::int64_t numel,
                       Occurrence* to) {
  for (std::int64_t i = first_thread(); i < numel; i += num_threads()) to[i] = from[places[i]];
}

__global__ void blocks_of_hot_rows(const std::uint32_t* counts, const std::uint32_t* num_rows,
                                   std::uint32_t* num_blocks) {
  for (std::int64_t i = first_thread(); i < *num_rows; i += num_threads()) {
    const std::uint32_t count = counts[i];
    num_blocks[i] =
        count > kBlockOccurrences
            ? static_cast<std::uint32_t>((count + kBlockOccurrences - 1) / kBlockOccurrences)
            : 0;
  }
}

/// Finds where each table's rows begin in `keys`, and where the last table's rows end.
__global__ void find_tables(const std::uint64_t* keys, const std::uint32_t* num_rows, int row_bits,
                            int num_tables, std::uint32_t* begins) {
  for (std::int64_t table = first_thread(); table <= num_tables; table += num_threads()) {
    const std::uint64_t key = static_cast<std::uint64_t>(table) << row_bits;
    std::uint32_t begin = 0;
    std::uint32_t end = *num_rows;
    while (begin < end) {
      const std::uint32_t middle = begin + (end - begin) / 2;
      if (keys[middle] < key) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    begins[table] = begin;
  }
}

__global__ void write_rows(const std::uint64_t* keys, std::int64_t numel, int row_bits,
                           std::int64_t* rows) {
  const std::uint64_t mask = (std::uint64_t{1} << row_bits) - 1;
  for (std::int64_t i = first_thread(); i < numel; i += num_threads()) {
    rows[i] = static_cast<std::int64_t>(keys[i] & mask);
  }
}

unsigned num_blocks_of_threads(std::int64_t num_threads) {
  return num_blocks_for(num_threads, kBlockThreads);
}

int bits_for(std::int64_t numel) {
  const std::int64_t last = std::max<std::int64_t>(numel, 1) - 1;
  return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(last)));
}

void check_fits(const char* what, std::int64_t found, std::int64_t most) {
  if (found <= most) return;
  throw Error::expected(ErrorKind::unsupported, {}, what, "at most " + std::to_string(most),
                        std::to_string(found));
}

/// Returns the number of ids of a batch. Throws if ids or samples are too many for the kernels'
/// counters.
std::int64_t checked_num_ids(const Bags& bags) {
  const auto num_ids = static_cast<std::int64_t>(bags.ids.size());
  check_fits("ids of a batch on a GPU", num_ids, std::numeric_limits<int>::max());  // cub's limit
  check_fits("samples of a batch", bags.batch, std::numeric_limits<std::uint32_t>::max());
  return num_ids;
}

}  // namespace

TouchedRows::TouchedRows(std::span<const TableView> tables, const Bags& bags, cudaStream_t stream)
    : stream_(stream),
      num_ids_(checked_num_ids(bags)),
      num_tables_(static_cast<int>(tables.size())),
      num_rows_(1, stream),
      table_begins_(num_tables_ + 1, stream) {
  for (const TableView& table : tables) row_bits_ = std::max(row_bits_, bits_for(table.rows));
  has_features_aligned_to_four_ = are_features_aligned_to_four(bags);
  num_rows_.fill_with_zeros();
  table_begins_.fill_with_zeros();
  first_blocks_ = DeviceArray<std::uint32_t>(num_ids_ + 1, stream);
  first_blocks_.fill_with_zeros();
  if (num_ids_ == 0) return;
  sort(bags);
  group();
  count_blocks();
}

void TouchedRows::sort(const Bags& bags) {
  std::vector<Feature> features;
  for (std::size_t i = 0; i < bags.table_of_feature.size(); ++i) {
    features.push_back({.table = static_cast<std::uint64_t>(bags.table_of_feature[i]),
                        .column = static_cast<std::uint32_t>(bags.column_of_feature[i])});
  }
  const DeviceArray<Feature> on_device(std::span<const Feature>(features), stream_);
  const DeviceArray<std::uint64_t> keys(num_ids_, stream_);
  const DeviceArray<std::uint32_t> places(num_ids_, stream_);
  const DeviceArray<std::uint32_t> sorted_places(num_ids_, stream_);
  const DeviceArray<Occurrence> in_batch_order(num_ids_, stream_);
  const std::int64_t num_bags = bags.num_features() * bags.batch;
  launch(list_places, num_blocks_for(num_bags), kBlockThreads, 0, stream_, on_device.data(),
         num_bags, bags.batch, bags.ids.data(), bags.offsets.data(),
         bags.weights.empty() ? nullptr : bags.weights.data(), row_bits_, keys.data(),
         places.data(), in_batch_order.data());
  check(cudaGetLastError(), "list places");

  sorted_keys_ = DeviceArray<std::uint64_t>(num_ids_, stream_);
  sort_pairs(keys.data(), sorted_keys_.data(), places.data(), sorted_places.data(), num_ids_,
             row_bits_ + bits_for(num_tables_), stream_);
  occurrences_ = DeviceArray<Occurrence>(num_ids_, stream_);
  launch(gather, num_blocks_of_threads(num_ids_), kBlockThreads, 0, stream_, in_batch_order.data(),
         sorted_places.data(), num_ids_, occurrences_.data());
  check(cudaGetLastError(), "gather");
}

void TouchedRows::group() {
  keys_ = DeviceArray<std::uint64_t>(num_ids_, stream_);
  counts_ = DeviceArray<std::uint32_t>(num_ids_, stream_);
  counts_.fill_with_zeros();  // because the sums include the elements after the last row
  offsets_ = DeviceArray<std::uint32_t>(num_ids_, stream_);
  run_lengths(sorted_keys_.data(), keys_.data(), counts_.data(), num_rows_.data(),
              static_cast<int>(num_ids_), stream_);
  exclusive_sums(counts_.data(), offsets_.data(), num_ids_, stream_);
  launch(find_tables, num_blocks_of_threads(num_tables_ + 1), kBlockThreads, 0, stream_,
         keys_.data(), num_rows_.data(), row_bits_, num_tables_, table_begins_.data());
  check(cudaGetLastError(), "find tables");
}

void TouchedRows::count_blocks() {
  DeviceArray<std::uint32_t> num_blocks(num_ids_ + 1, stream_);
  num_blocks.fill_with_zeros();
  launch(blocks_of_hot_rows, num_blocks_of_threads(num_ids_), kBlockThreads, 0, stream_,
         counts_.data(), num_rows_.data(), num_blocks.data());
  check(cudaGetLastError(), "count blocks");
  exclusive_sums(num_blocks.data(), first_blocks_.data(), num_ids_ + 1, stream_);
}

TouchedRows::View TouchedRows::view() const {
  return {.keys = keys_.data(),
          .offsets = offsets_.data(),
          .counts = counts_.data(),
          .first_blocks = first_blocks_.data(),
          .occurrences = occurrences_.data(),
          .num_rows = num_rows_.data(),
          .table_begins = table_begins_.data(),
          .num_ids = num_ids_,
          .row_bits = row_bits_};
}

std::pair<std::uint32_t, std::uint32_t> TouchedRows::range_of(int table) const {
  std::uint32_t range[2] = {0, 0};
  check(cudaMemcpyAsync(range, table_begins_.data() + table, sizeof range, cudaMemcpyDeviceToHost,
                        stream_),
        "copy");
  check(cudaStreamSynchronize(stream_), "wait");
  return {range[0], range[1]};
}

std::int64_t TouchedRows::num_rows(int table) const {
  const auto [begin, end] = range_of(table);
  return end - begin;
}

void TouchedRows::copy_rows(int table, std::int64_t* rows) const {
  const auto [begin, end] = range_of(table);
  if (begin == end) return;
  launch(write_rows, num_blocks_of_threads(end - begin), kBlockThreads, 0, stream_,
         keys_.data() + begin, end - begin, row_bits_, rows);
  check(cudaGetLastError(), "write rows");
}

}  // namespace tessera::embedding::cuda

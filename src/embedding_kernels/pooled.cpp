#include "embedding_kernels/pooled.h"

#include <algorithm>

#include "embedding_kernels/bag_block.h"
#include "embedding_kernels/instruction_sets.h"
#include "tessera/base/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "embedding_kernels/pooled.cpp"
#include <hwy/foreach_target.h>

#include "embedding_kernels/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::embedding::HWY_NAMESPACE {

/// Gives sum_rows the rows and weights of the ids in a block.
template <class T>
struct NamedRows {
  const T* weights;
  std::int64_t dim;
  const std::int64_t* ids;
  const float* id_weights;
  std::int64_t end;
  std::int64_t ahead;

  NamedRows(const BagBlock& block, const T* table_weights)
      : weights(table_weights),
        dim(block.table.dim),
        ids(block.ids),
        id_weights(block.weights),
        end(block.offsets[block.num_bags]),
        ahead(rows_ahead<T>(block.table.dim)) {}

  const T* row(std::int64_t i) const { return weights + ids[i] * dim; }
  const T* row_ahead(std::int64_t i) const { return row(HWY_MIN(i + ahead, end - 1)); }
  float weight(std::int64_t i) const { return id_weights == nullptr ? 1.0F : id_weights[i]; }
};

void pool_block(const BagBlock& block, float* out, std::int64_t out_stride) {
  with_weights(block.table, [&]<class T>(const T* weights) HWY_ATTR {
    const NamedRows<T> rows(block, weights);
    for (std::int64_t bag = 0; bag < block.num_bags; ++bag) {
      sum_rows(rows, block.offsets[bag], block.offsets[bag + 1], rows.dim, out + bag * out_stride);
    }
  });
}

void multiply_block(const BagBlock& block, const float* gradient, std::int64_t stride, float* out) {
  with_weights(block.table, [&]<class T>(const T* weights) HWY_ATTR {
    const NamedRows<T> rows(block, weights);
    for (std::int64_t bag = 0; bag < block.num_bags; ++bag) {
      for (std::int64_t i = block.offsets[bag]; i < block.offsets[bag + 1]; ++i) {
        prefetch_to_read(rows.row_ahead(i), rows.dim);
        out[i] = product(gradient + bag * stride, rows.row(i), rows.dim);
      }
    }
  });
}

}  // namespace tessera::embedding::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::embedding {
namespace {

HWY_EXPORT(pool_block);
HWY_EXPORT(multiply_block);

constexpr std::int64_t kBlockBags = 256;

/// Calls `body(block, feature, first_sample)` for blocks that together contain each bag exactly
/// once.
template <class Body>
void for_blocks(std::span<const TableView> tables, const Bags& bags, int num_threads,
                const Body& body) {
  const std::int64_t blocks_per_feature = (bags.batch + kBlockBags - 1) / kBlockBags;
  parallel_for(bags.num_features() * blocks_per_feature, num_threads, {}, [&](std::int64_t task) {
    const std::int64_t feature = task / blocks_per_feature;
    const std::int64_t first_sample = task % blocks_per_feature * kBlockBags;
    const int table = bags.table_of_feature[static_cast<std::size_t>(feature)];
    const BagBlock block{
        .table = tables[static_cast<std::size_t>(table)],
        .ids = bags.ids.data(),
        .weights = bags.weights.empty() ? nullptr : bags.weights.data(),
        .offsets = bags.offsets.data() + feature * bags.batch + first_sample,
        .num_bags = std::min(kBlockBags, bags.batch - first_sample),
    };
    body(block, static_cast<std::size_t>(feature), first_sample);
  });
}

}  // namespace

void pooled_sums(std::span<const TableView> tables, const Bags& bags, float* out,
                 std::int64_t out_stride, int num_threads) {
  for_blocks(tables, bags, num_threads,
             [&](const BagBlock& block, std::size_t feature, std::int64_t first_sample) {
               float* first = out + first_sample * out_stride + bags.column_of_feature[feature];
               HWY_DYNAMIC_DISPATCH(pool_block)(block, first, out_stride);
             });
}

void sample_weight_gradients(std::span<const TableView> tables, const Bags& bags,
                             const PooledGradient& gradient, float* out, int num_threads) {
  for_blocks(tables, bags, num_threads,
             [&](const BagBlock& block, std::size_t feature, std::int64_t first_sample) {
               const float* first =
                   gradient.data + first_sample * gradient.stride + bags.column_of_feature[feature];
               HWY_DYNAMIC_DISPATCH(multiply_block)(block, first, gradient.stride, out);
             });
}

}  // namespace tessera::embedding
#endif  // HWY_ONCE

#include <algorithm>
#include <vector>

#include "embedding_kernels/cuda/elements.cuh"
#include "embedding_kernels/cuda/kernels.h"

namespace tessera::embedding::cuda {
namespace {

struct Feature {
  TableView table;
  std::int64_t column;
};

struct DeviceBags {
  const Feature* features;
  std::int64_t num_bags;
  std::int64_t batch;
  const std::int64_t* ids;
  const std::int64_t* offsets;
  const float* weights;  // null: each weight is 1
};

/// Pools bags, one per warp. The lanes of the warp divide the columns among them.
__global__ void pool_bags(DeviceBags bags, float* out, std::int64_t out_stride) {
  for (std::int64_t bag = first_item(); bag < bags.num_bags; bag += num_warps()) {
    const Feature& feature = bags.features[bag / bags.batch];
    float* out_bag = out + bag % bags.batch * out_stride + feature.column;
    const std::int64_t begin = bags.offsets[bag];
    const std::int64_t end = bags.offsets[bag + 1];
    with_weights(feature.table, [&](const auto* weights) {
      const std::int64_t dim = feature.table.dim;
      for (std::int64_t column = lane(); column < dim; column += kWarpThreads) {
        float sum = 0;
#pragma unroll 4
        for (std::int64_t i = begin; i < end; ++i) {
          const float weight = bags.weights == nullptr ? 1.0F : bags.weights[i];
          sum = fmaf(weight, to_float(weights[bags.ids[i] * dim + column]), sum);
        }
        out_bag[column] = sum;
      }
    });
  }
}

/// Does what `pool_bags` does: `num_lanes` lanes of a warp take a bag, four columns each. Requires:
/// each row of a table and of `out` is aligned to four elements.
__global__ void pool_bags_in_fours(DeviceBags bags, float* out, std::int64_t out_stride,
                                   int num_lanes) {
  const int bags_per_warp = kWarpThreads / num_lanes;
  for (std::int64_t bag = first_item() * bags_per_warp + lane() / num_lanes; bag < bags.num_bags;
       bag += num_warps() * bags_per_warp) {
    const Feature& feature = bags.features[bag / bags.batch];
    float* out_bag = out + bag % bags.batch * out_stride + feature.column;
    const std::int64_t begin = bags.offsets[bag];
    const std::int64_t end = bags.offsets[bag + 1];
    with_weights(feature.table, [&](const auto* weights) {
      const std::int64_t dim = feature.table.dim;
      for (std::int64_t column = lane() % num_lanes * kColumnsAtOnce; column < dim;
           column += num_lanes * kColumnsAtOnce) {
        Four sum{};
#pragma unroll 4
        for (std::int64_t i = begin; i < end; ++i) {
          const float weight = bags.weights == nullptr ? 1.0F : bags.weights[i];
          const Four row = load_four(weights + bags.ids[i] * dim + column);
          for (int k = 0; k < kColumnsAtOnce; ++k) sum.v[k] = fmaf(weight, row.v[k], sum.v[k]);
        }
        store_four(out_bag + column, sum);
      }
    });
  }
}

__global__ void multiply_bags(DeviceBags bags, const float* gradient, std::int64_t stride,
                              float* out) {
  for (std::int64_t bag = first_item(); bag < bags.num_bags; bag += num_warps()) {
    const Feature& feature = bags.features[bag / bags.batch];
    const float* bag_gradient = gradient + bag % bags.batch * stride + feature.column;
    const std::int64_t begin = bags.offsets[bag];
    const std::int64_t end = bags.offsets[bag + 1];
    with_weights(feature.table, [&](const auto* weights) {
      const std::int64_t dim = feature.table.dim;
      for (std::int64_t i = begin; i < end; ++i) {
        float sum = 0;
        for (std::int64_t column = lane(); column < dim; column += kWarpThreads) {
          sum = fmaf(bag_gradient[column], to_float(weights[bags.ids[i] * dim + column]), sum);
        }
        sum = sum_over_lanes(sum);
        if (lane() == 0) out[i] = sum;
      }
    });
  }
}

/// The bags of a batch as kernels need them. Copies the arrays that are in host memory to the
/// device.
class BagsOnDevice {
 public:
  BagsOnDevice(std::span<const TableView> tables, const Bags& bags, cudaStream_t stream)
      : features_(features_of(tables, bags), stream),
        view_{.features = features_.data(),
              .num_bags = bags.num_features() * bags.batch,
              .batch = bags.batch,
              .ids = bags.ids.data(),
              .offsets = bags.offsets.data(),
              .weights = bags.weights.empty() ? nullptr : bags.weights.data()} {}

  const DeviceBags& view() const { return view_; }

 private:
  static std::vector<Feature> features_of(std::span<const TableView> tables, const Bags& bags) {
    std::vector<Feature> features;
    for (std::size_t i = 0; i < bags.table_of_feature.size(); ++i) {
      const auto table = static_cast<std::size_t>(bags.table_of_feature[i]);
      features.push_back({.table = tables[table], .column = bags.column_of_feature[i]});
    }
    return features;
  }

  DeviceArray<Feature> features_;
  DeviceBags view_;
};

/// Returns whether `pool_bags_in_fours` can pool these bags.
bool can_pool_in_fours(std::span<const TableView> tables, const Bags& bags, const float* out,
                       std::int64_t out_stride) {
  return out_stride % kColumnsAtOnce == 0 && is_aligned_to_four(out) &&
         are_features_aligned_to_four(bags) &&
         std::ranges::all_of(tables, has_rows_aligned_to_four);
}

}  // namespace

void pooled_sums(std::span<const TableView> tables, const Bags& bags, float* out,
                 std::int64_t out_stride, cudaStream_t stream) {
  const BagsOnDevice on_device(tables, bags, stream);
  const DeviceBags& view = on_device.view();
  if (view.num_bags == 0) return;
  if (can_pool_in_fours(tables, bags, out, out_stride)) {
    std::int64_t max_dim = 0;
    for (const TableView& table : tables) max_dim = std::max(max_dim, table.dim);
    const int num_lanes = num_lanes_for(max_dim);
    launch(pool_bags_in_fours, num_blocks_for(view.num_bags * num_lanes / kWarpThreads + 1),
           kBlockThreads, 0, stream, view, out, out_stride, num_lanes);
    check(cudaGetLastError(), "pooled sums");
    return;
  }
  launch(pool_bags, num_blocks_for(view.num_bags), kBlockThreads, 0, stream, view, out, out_stride);
  check(cudaGetLastError(), "pooled sums");
}

void sample_weight_gradients(std::span<const TableView> tables, const Bags& bags,
                             const PooledGradient& gradient, float* out, cudaStream_t stream) {
  const BagsOnDevice on_device(tables, bags, stream);
  const DeviceBags& view = on_device.view();
  if (view.num_bags == 0) return;
  launch(multiply_bags, num_blocks_for(view.num_bags), kBlockThreads, 0, stream, view,
         gradient.data, gradient.stride, out);
  check(cudaGetLastError(), "gradients of sample weights");
}

}  // namespace tessera::embedding::cuda

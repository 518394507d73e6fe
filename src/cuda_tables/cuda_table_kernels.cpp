#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/types.h>

#include "embedding_kernels/cuda/device_memory.h"
#include "embedding_kernels/cuda/kernels.h"
#include "runtime/embedding/table_kernels.h"
#include "runtime/embedding/table_views.h"
#include "tessera/runtime/embedding/shard.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

/// Makes the device of a tensor current while this lives. `stream`: the device's current stream.
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor& tensor)
      : guard(tensor.device()),
        stream(c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream()) {}
  c10::DeviceGuard guard;
  cudaStream_t stream;
};

/// Runs Tessera's kernels. `row_gradients`, `apply_row_gradients` and `touched_rows` run ATen's
/// operators instead: these give one gradient and one row for each id. So the host need not wait
/// for the device to learn how many different rows the batch looks up.
class CudaTableBackward final : public TableBackward {
 public:
  CudaTableBackward(std::vector<TableTensors> tables, const FeatureBags& bags,
                    const OutputGradient& gradient)
      : tables_(std::move(tables)),
        gradient_(gradient),
        touched_(views_of(tables_), view_of(bags), OnDeviceOf(gradient.rows).stream),
        table_of_feature_(bags.table_of_feature.begin(), bags.table_of_feature.end()),
        column_of_feature_(bags.column_of_feature.begin(), bags.column_of_feature.end()),
        feature_begins_(bags.feature_begins.begin(), bags.feature_begins.end()),
        bags_(bags) {
    bags_.table_of_feature = table_of_feature_;
    bags_.column_of_feature = column_of_feature_;
    bags_.feature_begins = feature_begins_;
  }

  void fused_update(std::span<const int> tables, const FusedOptimizer& optimizer) override {
    std::vector<TableUpdate> updates;
    for (const int table : tables) updates.push_back(update_of(tensors(table), table, optimizer));
    const OnDeviceOf on(gradient_.rows);
    cuda::fused_update(updates, touched_, view_of(gradient_), on.stream);
  }

  Tensor dense_gradient(int table) override {
    const Tensor& weight = tensors(table).weight;
    Tensor dense = torch::zeros(weight.sizes(), weight.options().dtype(at::kFloat));
    const OnDeviceOf on(gradient_.rows);
    cuda::add_dense_gradient(touched_, table, weight.size(1), view_of(gradient_),
                             dense.mutable_data_ptr<float>(), on.stream);
    return dense;
  }

  RowGradients row_gradients(int table, const FusedOptimizer& optimizer) override {
    return by_aten().row_gradients(table, optimizer);
  }
  void apply_row_gradients(int table, const FusedOptimizer& optimizer,
                           const RowGradients& gradients, std::int64_t row_width) override {
    by_aten().apply_row_gradients(table, optimizer, gradients, row_width);
  }
  Tensor touched_rows(int table) override { return by_aten().touched_rows(table); }

 private:
  TableBackward& by_aten() {
    if (!by_aten_) by_aten_ = aten_table_kernels()->backward(tables_, bags_, gradient_);
    return *by_aten_;
  }
  const TableTensors& tensors(int table) const { return tables_[static_cast<std::size_t>(table)]; }

  std::vector<TableTensors> tables_;
  OutputGradient gradient_;
  cuda::TouchedRows touched_;
  std::vector<int> table_of_feature_;
  std::vector<std::int64_t> column_of_feature_;
  std::vector<std::int64_t> feature_begins_;
  FeatureBags bags_;
  std::unique_ptr<TableBackward> by_aten_;
};

class CudaTableKernels final : public TableKernels {
 public:
  void pooled(std::span<const TableTensors> tables, const FeatureBags& bags, Tensor& to) override {
    const OnDeviceOf on(to);
    cuda::pooled_sums(views_of(tables), view_of(bags), to.mutable_data_ptr<float>(), to.size(1),
                      on.stream);
  }

  Tensor sample_weight_gradients(std::span<const TableTensors> tables, const FeatureBags& bags,
                                 const OutputGradient& gradient) override {
    Tensor result = torch::zeros({bags.ids.numel()}, gradient.rows.options());
    const OnDeviceOf on(result);
    cuda::sample_weight_gradients(views_of(tables), view_of(bags), view_of(gradient),
                                  result.mutable_data_ptr<float>(), on.stream);
    return result;
  }

  std::unique_ptr<TableBackward> backward(std::vector<TableTensors> tables, const FeatureBags& bags,
                                          const OutputGradient& gradient) override {
    const OnDeviceOf on(gradient.rows);
    return std::make_unique<CudaTableBackward>(std::move(tables), bags, gradient);
  }
};

}  // namespace

void use_cuda_kernels() {
  cuda::device_allocator = {
      .allocate =
          [](std::size_t nbytes, cudaStream_t stream) {
            return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(nbytes, stream);
          },
      .free = [](void* memory,
                 cudaStream_t /*stream*/) { c10::cuda::CUDACachingAllocator::raw_delete(memory); }};
  register_table_kernels(at::kCUDA, [] { return std::make_unique<CudaTableKernels>(); });
}

}  // namespace tessera::embedding

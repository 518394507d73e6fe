#include <c10/core/Event.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <set>

#include "cuda/needs_cuda.h"
#include "runtime/support/checks.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::Block;
using test::Transformer;

Transformer on_gpu(const FullyShardOptions& options) {
  Transformer model = test::seeded<Transformer>();
  model->to(at::Device(torch::kCUDA, 0));
  fully_shard(*model, options);
  return model;
}

// Shows B15.
TEST(CudaStreamsTest, EachNameHasItsOwnStream) {
  TESSERA_NEEDS_CUDA();
  Transformer model = on_gpu({});
  forward(model, test::some_ids().to(torch::kCUDA)).sum().backward();
  std::set<c10::StreamId> ids;
  for (const NamedStream& named : streams(*model)) {
    EXPECT_TRUE(named.stream.device().is_cuda());
    ids.insert(named.stream.id());
  }
  EXPECT_EQ(ids.size(), 5U);
}

/// Keeps the current stream busy for about half a second.
void compute_for_long(const at::Tensor& square) {
  at::Tensor product = square;
  for (int i = 0; i < 100; ++i) product = torch::matmul(product, square);
}

// Shows B14.
TEST(CudaStreamsTest, AGatherDoesNotWaitForWhatIsBeingComputed) {
  TESSERA_NEEDS_CUDA();
  // In another dtype parameters are gathered on one rank too.
  Transformer model = on_gpu(
      {.policy = ModuleWrapPolicy<Block>(), .mixed_precision = {.param_dtype = torch::kBFloat16}});
  const at::Tensor ids = test::some_ids().to(torch::kCUDA);
  const at::Tensor square = torch::eye(8192, torch::device(torch::kCUDA).dtype(torch::kFloat));
  compute_for_long(square);
  forward(model, ids).to(torch::kFloat).sum().backward();  // warm: allocators, kernels
  torch::cuda::synchronize();

  const at::NoGradGuard no_grad;
  const ForwardScope scope(*model);
  compute_for_long(square);
  touch(model->embedding->weight);
  c10::Event gathered(torch::kCUDA);
  c10::Event computed(torch::kCUDA);
  for (const NamedStream& named : streams(*model)) {
    if (named.name == "unshard") gathered.record(named.stream);
    if (named.name == "default") computed.record(named.stream);
  }
  gathered.synchronize();
  EXPECT_FALSE(computed.query());
  torch::cuda::synchronize();
}

// Shows B14.
TEST(CudaStreamsTest, MemoryStaysTheSameOverManySteps) {
  TESSERA_NEEDS_CUDA();
  Transformer model = on_gpu(
      {.policy = ModuleWrapPolicy<Block>(), .mixed_precision = {.param_dtype = torch::kBFloat16}});
  const at::Tensor ids = test::some_ids().to(torch::kCUDA);
  std::int64_t after_ten = 0;
  for (int step = 0; step < 50; ++step) {
    model->zero_grad();
    forward(model, ids).to(torch::kFloat).sum().backward();
    torch::cuda::synchronize();
    const std::int64_t allocated =
        c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
    if (step == 10) after_ten = allocated;
    if (step > 10) {
      ASSERT_EQ(allocated, after_ten) << step;
    }
  }
}

}  // namespace
}  // namespace tessera

#include <c10/core/Event.h>
#include <gmock/gmock.h>

#include <set>

#include "accelerator/accelerator.h"
#include "runtime/support/checks.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::Block;
using test::Transformer;
using test::accelerator::device;

class StreamsTest : public test::AcceleratorTest {};

Transformer on_device(const FullyShardOptions& options) {
  Transformer model = test::seeded<Transformer>();
  model->to(device());
  fully_shard(*model, options);
  return model;
}

// Shows B15.
TEST_P(StreamsTest, EachNameHasItsOwnStream) {
  Transformer model = on_device({});
  forward(model, test::some_ids().to(device())).sum().backward();
  std::vector<std::string> names;
  std::set<c10::StreamId> ids;
  for (const NamedStream& named : streams(*model)) {
    EXPECT_EQ(named.stream.device(), device());
    names.push_back(named.name);
    ids.insert(named.stream.id());
  }
  EXPECT_THAT(names, ::testing::ElementsAre("default", "unshard", "pre_unshard", "post_backward",
                                            "all_reduce"));
  EXPECT_EQ(ids.size(), 5U);
}

/// Keeps the current stream busy for about half a second on a GPU.
void compute_for_long(const at::Tensor& square) {
  at::Tensor product = square;
  for (int i = 0; i < 100; ++i) product = torch::matmul(product, square);
}

// Shows B14.
TEST_P(StreamsTest, AGatherDoesNotWaitForWhatIsBeingComputed) {
  if (GetParam() == "Eager") GTEST_SKIP() << "work runs as soon as it is launched";
  // With another param_dtype, parameters are gathered even on one rank.
  Transformer model = on_device(
      {.policy = ModuleWrapPolicy<Block>(), .mixed_precision = {.param_dtype = torch::kBFloat16}});
  const at::Tensor ids = test::some_ids().to(device());
  const std::int64_t width = device().is_cuda() ? 8192 : 128;
  const at::Tensor square = torch::eye(width, torch::device(device()).dtype(torch::kFloat));
  compute_for_long(square);
  forward(model, ids).to(torch::kFloat).sum().backward();  // warm: allocators, kernels
  test::accelerator::synchronize(device());

  const at::NoGradGuard no_grad;
  const ForwardScope scope(*model);
  compute_for_long(square);
  touch(model->embedding->weight);
  c10::Event gathered(device().type());
  c10::Event computed(device().type());
  for (const NamedStream& named : streams(*model)) {
    if (named.name == "unshard") gathered.record(named.stream);
    if (named.name == "default") computed.record(named.stream);
  }
  gathered.synchronize();
  EXPECT_FALSE(computed.query());
  test::accelerator::synchronize(device());
}

// Shows B14.
TEST_P(StreamsTest, MemoryStaysTheSameOverManySteps) {
  Transformer model = on_device(
      {.policy = ModuleWrapPolicy<Block>(), .mixed_precision = {.param_dtype = torch::kBFloat16}});
  const at::Tensor ids = test::some_ids().to(device());
  std::int64_t after_ten = 0;
  const int num_steps = device().is_cuda() ? 50 : 20;
  for (int step = 0; step < num_steps; ++step) {
    model->zero_grad();
    forward(model, ids).to(torch::kFloat).sum().backward();
    test::accelerator::synchronize(device());
    const std::int64_t allocated = test::accelerator::allocated_nbytes(device());
    if (step == 10) after_ten = allocated;
    if (step > 10) {
      ASSERT_EQ(allocated, after_ten) << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, StreamsTest, ::testing::ValuesIn(test::accelerator::modes()),
                         test::name_of_mode);

}  // namespace
}  // namespace tessera

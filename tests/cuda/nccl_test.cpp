#include "tessera/runtime/dist/mesh.h"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "cuda/needs_cuda.h"
#include "runtime/support/checks.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

// Shows A5.
TEST(NcclTest, SaysWhichDeviceIsMissing) {
  const std::string error = test::error_of([] { dist::nccl(99); });
  EXPECT_THAT(error, HasSubstr("NCCL: expected a CUDA device with the index 99"));
  if (!torch::cuda::is_available()) {
    EXPECT_THAT(error, HasSubstr("found no CUDA device"));
  }
}

dist::Mesh nccl_mesh_of_one() {
  return dist::connect(c10::make_intrusive<c10d::HashStore>(), 0, 1, {.transport = dist::nccl(0)});
}

// Shows A5.
TEST(NcclTest, CarriesEveryCollectiveOfOneRank) {
  TESSERA_NEEDS_CUDA();
  const dist::Mesh mesh = nccl_mesh_of_one();
  dist::Group& group = *mesh.world();
  const at::Tensor input = torch::arange(5, torch::device(torch::kCUDA).dtype(torch::kFloat));
  at::Tensor output = torch::zeros_like(input);
  group.all_gather(output, input, "a").wait();
  EXPECT_TRUE(output.equal(input));
  at::Tensor reduced = torch::zeros_like(input);
  group.reduce_scatter(reduced, input, "a").wait();
  EXPECT_TRUE(reduced.equal(input));
  group.all_reduce(output, "a").wait();
  group.broadcast(output, 0, "a").wait();
  EXPECT_TRUE(output.equal(input));
  EXPECT_EQ(group.max(2.5, "a"), 2.5);
  EXPECT_EQ(group.traffic().all_gather, 5 * sizeof(float));  // not 0: the backend ran it
}

/// Collects the warnings of PyTorch while it exists.
class CountedWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }

  std::vector<std::string> messages;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

// Shows A5.
TEST(NcclTest, ShutsDownWithItsLastUser) {
  TESSERA_NEEDS_CUDA();
  CountedWarnings warnings;
  {
    const dist::Mesh mesh = nccl_mesh_of_one();
    const at::Tensor input = torch::ones(5, torch::device(torch::kCUDA).dtype(torch::kFloat));
    mesh.world()->all_reduce(input, "a").wait();
  }
  EXPECT_THAT(warnings.messages, ::testing::IsEmpty());
}

// Shows B12.
TEST(NcclTest, ClipsAndTrains) {
  TESSERA_NEEDS_CUDA();
  const dist::Mesh mesh = nccl_mesh_of_one();
  test::Transformer model = test::seeded<test::Transformer>();
  model->to(mesh.world()->device());
  fully_shard(*model, {.mesh = mesh,
                       .policy = ModuleWrapPolicy<test::Block>(),
                       .mixed_precision = {.param_dtype = torch::kBFloat16}});
  forward(model, test::some_ids().to(torch::kCUDA)).to(torch::kFloat).sum().backward();
  EXPECT_GT(clip_grad_norm_(*model, 1e-3), 1e-3);
  EXPECT_NEAR(clip_grad_norm_(*model, 1e9), 1e-3, 1e-5);
}

}  // namespace
}  // namespace tessera

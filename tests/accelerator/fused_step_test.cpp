#include <gmock/gmock.h>

#include "accelerator/accelerator.h"
#include "runtime/optim/stepped_optimizers.h"

namespace tessera {
namespace {

class FusedStepTest : public test::AcceleratorTest {};

// Shows B23. The simulated device has no fused kernels: the optimizer's own step is used there.
TEST_P(FusedStepTest, EqualsTheOptimizersOwnStep) {
  for (const test::OptimizerVariant& variant : test::optimizer_variants()) {
    SCOPED_TRACE(variant.name);
    const at::Device device = test::accelerator::device();
    test::expect_fused_steps_equal_own(variant, at::kFloat, device, 8, 2e-5);
    test::expect_fused_steps_equal_own(variant, at::kBFloat16, device, 4, 0.03);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, FusedStepTest, ::testing::ValuesIn(test::accelerator::modes()),
                         test::name_of_mode);

}  // namespace
}  // namespace tessera

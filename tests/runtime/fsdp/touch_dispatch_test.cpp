#include "runtime/fsdp/touch_dispatch.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::fsdp {
namespace {

/// Fills the storage when an operator is about to read it, as a gather does.
class FillingListener final : public TouchListener {
 public:
  explicit FillingListener(at::Tensor whole) : whole_(std::move(whole)) {}
  void touched(const at::Tensor& /*argument*/) override {
    const at::NoGradGuard no_grad;
    if (num_calls++ == 0) whole_.fill_(2);
  }
  int num_calls = 0;

 private:
  at::Tensor whole_;  // without the key
};

// Gathers depend on this: see docs/decisions/0014-the-key-that-sees-operators.md.
TEST(TouchDispatchTest, AnOperatorIsSeenBeforeAutograd) {
  const at::Tensor storage = torch::zeros({3, 3});
  at::Tensor parameter = with_touch_key(storage).requires_grad_();
  FillingListener listener(storage);
  const TouchRegistration registration(storage.storage(), listener);

  const at::Tensor result = torch::ones({3, 3}).mm(parameter.t()).sum();
  ASSERT_GT(listener.num_calls, 0)
      << "this libtorch (" << TORCH_VERSION << ") calls no fallback for kTouchKey: fully_shard "
      << "would gather nothing (docs/decisions/0014-the-key-that-sees-operators.md)";
  EXPECT_EQ(result.item<float>(), 9 * 3 * 2)  // nine sums of three twos
      << "the operator must run after the fallback";

  result.backward();
  EXPECT_TRUE(parameter.grad().defined()) << "autograd must see what the fallback passes on";
  EXPECT_TRUE(torch::equal(parameter.grad(), torch::full({3, 3}, 3.0F)));
}

TEST(TouchDispatchTest, OperatorsWithoutTheKeyAreNotSeen) {
  const at::Tensor storage = torch::zeros({3});
  FillingListener listener(storage);
  const TouchRegistration registration(storage.storage(), listener);
  EXPECT_EQ((torch::ones({3}) + storage).sum().item<float>(), 3);
  EXPECT_EQ(listener.num_calls, 0);
}

}  // namespace
}  // namespace tessera::fsdp

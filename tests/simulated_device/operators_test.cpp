#include <gmock/gmock.h>
#include <torch/torch.h>

#include "simulated_device/support.h"

namespace tessera {
namespace {

using sim::Schedule;

class OperatorsTest : public test::OnEachSchedule {};

std::vector<at::Tensor> linear_and_gradients(at::Device device) {
  torch::manual_seed(1);
  const auto leaf = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes).to(device).requires_grad_();
  };
  const at::Tensor x = leaf({4, 3});
  const at::Tensor weight = leaf({2, 3});
  const at::Tensor bias = leaf({2});
  const at::Tensor y = torch::nn::functional::linear(x, weight, bias);
  y.square().sum().backward();
  return {y.detach().cpu(), x.grad().cpu(), weight.grad().cpu(), bias.grad().cpu()};
}

TEST_P(OperatorsTest, LinearEqualsTheCpuBitForBit) {
  const auto expected = linear_and_gradients(at::kCPU);
  const auto found = linear_and_gradients(sim::device(0));
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  EXPECT_THAT(sim::take_races(), ::testing::IsEmpty());
}

/// Returns losses and parameters of a small classifier under AdamW.
std::vector<at::Tensor> train(at::Device device) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(8, 16),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                              torch::nn::GELU(), torch::nn::Linear(16, 4));
  const at::Tensor x = torch::randn({32, 8}).to(device);
  const at::Tensor y = torch::randint(4, {32}).to(device);
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<at::Tensor> results;
  sim::take_waiting_operators();  // those that copied from the host
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::nn::functional::cross_entropy(model->forward(x), y);
    loss.backward();
    optimizer.step();
    results.push_back(loss.detach());
  }
  EXPECT_THAT(sim::take_waiting_operators(), ::testing::IsEmpty());
  for (const at::Tensor& parameter : model->parameters()) results.push_back(parameter.detach());
  for (at::Tensor& result : results) result = result.cpu();
  return results;
}

TEST_P(OperatorsTest, TrainingEqualsTheCpu) {
  const auto expected = train(at::kCPU);
  const auto found = train(sim::device(0));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-5, 1e-6)) << i;
  }
  EXPECT_THAT(sim::take_races(), ::testing::IsEmpty());
}

TEST_P(OperatorsTest, DropoutDrawsFromTheGeneratorOfTheDevice) {
  const auto dropped = [](int device) {
    return torch::dropout(torch::ones({64}, sim::device(device)), 0.5, true).cpu();
  };
  torch::manual_seed(7);
  const at::Tensor cpu_before = at::detail::getDefaultCPUGenerator().get_state();
  const at::Tensor first = dropped(0);
  const at::Tensor second = dropped(0);
  const at::Tensor on_other_device = dropped(1);
  EXPECT_FALSE(first.equal(second));
  EXPECT_TRUE(first.equal(on_other_device));
  EXPECT_TRUE(at::detail::getDefaultCPUGenerator().get_state().equal(cpu_before));
  torch::manual_seed(7);
  EXPECT_TRUE(dropped(0).equal(first));
}

TEST_P(OperatorsTest, AutocastComputesInTheDtypeOfTheDevice) {
  const auto [type, dtype] = std::pair(sim::device(0).type(), at::kBFloat16);
  at::autocast::set_autocast_enabled(type, true);
  at::autocast::set_autocast_dtype(type, dtype);
  const at::Tensor product =
      torch::matmul(torch::ones({2, 2}, sim::device(0)), torch::ones({2, 2}, sim::device(0)));
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(type, false);
  EXPECT_EQ(product.scalar_type(), dtype);
}

TEST_P(OperatorsTest, AnOperatorWhoseShapeDependsOnValuesMakesTheHostWait) {
  const at::Tensor numbers = torch::tensor({0, 3, 0, 5}).to(sim::device(0));
  EXPECT_THAT(sim::take_waiting_operators(), ::testing::ElementsAre("copy from the host"));
  const at::Tensor found = numbers.nonzero();
  EXPECT_EQ(found.size(0), 2);
  EXPECT_THAT(sim::take_waiting_operators(), ::testing::Contains("aten::nonzero"));
}

INSTANTIATE_TEST_SUITE_P(Schedules, OperatorsTest,
                         ::testing::Values(Schedule::lazy, Schedule::eager, Schedule::threads),
                         test::name_of_schedule);

}  // namespace
}  // namespace tessera

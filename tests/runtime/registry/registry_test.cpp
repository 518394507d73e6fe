#include "tessera/runtime/registry/registry.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::registry {
namespace {

struct PlainImpl : torch::nn::Module {};

struct First final : ModuleState {
  explicit First(int given) : number(given) {}
  int number;
};
struct Second final : ModuleState {};

// Shows B9.
TEST(RegistryTest, LookingUpChangesNothing) {
  const auto module = std::make_shared<PlainImpl>();
  const std::size_t before = num_modules();
  EXPECT_EQ(find<First>(*module), nullptr);
  EXPECT_EQ(num_modules(), before);
  EXPECT_TRUE(module->named_parameters().is_empty());
  EXPECT_TRUE(module->named_buffers().is_empty());
}

TEST(RegistryTest, KeepsOneStateOfEachType) {
  const auto module = std::make_shared<PlainImpl>();
  attach(*module, std::make_shared<First>(1));
  attach(*module, std::make_shared<First>(2));
  EXPECT_EQ(find<First>(*module)->number, 2);
  EXPECT_EQ(find<Second>(*module), nullptr);
  attach(*module, std::make_shared<Second>());
  EXPECT_EQ(find<First>(*module)->number, 2);
  EXPECT_NE(find<Second>(*module), nullptr);
}

TEST(RegistryTest, LetsGoOfStatesOfDeadModules) {
  std::weak_ptr<First> state;
  {
    const auto module = std::make_shared<PlainImpl>();
    attach(*module, std::make_shared<First>(1));
    state = find<First>(*module);
    EXPECT_FALSE(state.expired());
  }
  num_modules();
  EXPECT_TRUE(state.expired());
}

// Shows B22.
TEST(RegistryTest, AModuleOnTheStackIsRefused) {
  PlainImpl module;
  try {
    attach(module, std::make_shared<First>(1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("shared_ptr"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::registry

#include "tessera/runtime/registry/registry.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <new>

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

// Shows B9.
TEST(RegistryTest, AModuleAtTheAddressOfADeadOneHasNoState) {
  struct UsesTheRegistry final : ModuleState {
    explicit UsesTheRegistry(std::shared_ptr<PlainImpl> its) : other(std::move(its)) {}
    ~UsesTheRegistry() override { find<First>(*other); }
    std::shared_ptr<PlainImpl> other;
  };
  alignas(PlainImpl) std::byte memory[sizeof(PlainImpl)];
  const auto make_module = [&] {
    return std::shared_ptr<PlainImpl>(new (memory) PlainImpl,
                                      [](PlainImpl* module) { module->~PlainImpl(); });
  };
  const std::size_t before = num_modules();
  std::shared_ptr<PlainImpl> module = make_module();
  const auto old_state = std::make_shared<First>(1);
  attach(*module, old_state);
  attach(*module, std::make_shared<UsesTheRegistry>(std::make_shared<PlainImpl>()));
  note_applied(*module, "replicate", dist::Mesh());
  module.reset();
  module = make_module();
  EXPECT_EQ(find<First>(*module), nullptr);
  EXPECT_EQ(applied_api(*module), std::nullopt);
  EXPECT_FALSE(applied_mesh(*module));
  attach(*module, std::make_shared<Second>());  // also if no clean-up of dead modules is due
  EXPECT_EQ(find<First>(*module), nullptr);
  EXPECT_NE(find<Second>(*module), nullptr);
  EXPECT_EQ(old_state.use_count(), 1);
  EXPECT_EQ(num_modules(), before + 1);
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

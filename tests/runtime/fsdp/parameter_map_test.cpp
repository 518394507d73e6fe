#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

using test::Transformer;

// Shows C6.
TEST(ParameterMapTest, EveryRankHoldsWhatTheMapSays) {
  for (const int world_size : {1, 2, 3}) {
    test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
      const Transformer unsharded = test::seeded<Transformer>();
      const Transformer model = test::sharded_transformer(mesh);
      const at::NoGradGuard no_grad;
      const auto shards = model->named_parameters();
      for (const auto& whole : unsharded->named_parameters()) {
        const auto location = flat_param_of(*model, whole.key());
        ASSERT_TRUE(location) << whole.key();
        EXPECT_EQ(location->numel, whole.value().numel());
        EXPECT_TRUE(whole.value().sizes() == at::IntArrayRef(location->shape));
        ASSERT_EQ(location->held.size(), static_cast<std::size_t>(world_size));
        std::int64_t end = 0;
        for (const FlatRange& range : location->held) {
          if (range.numel() == 0) continue;
          EXPECT_EQ(range.begin, end);  // one after the other, without gaps
          end = range.end;
        }
        EXPECT_EQ(end, location->numel);
        const FlatRange& own = location->held[static_cast<std::size_t>(mesh.rank())];
        EXPECT_TRUE(shards[whole.key()].flatten().equal(
            whole.value().flatten().narrow(0, own.begin, own.numel())))
            << whole.key();
      }
    });
  }
}

// Shows C6.
TEST(ParameterMapTest, BackFromElementsToNames) {
  const Transformer model = test::sharded_transformer({});
  const std::string fqn = "blocks.1.up.weight";
  const auto location = flat_param_of(*model, fqn);
  ASSERT_TRUE(location);
  EXPECT_EQ(element_at(location->flat_param, location->offset + 7), (ElementOfParameter{fqn, 7}));
  // LayerNorm's weight has 10 elements, and what follows begins at a multiple of 16 bytes.
  EXPECT_EQ(element_at(location->flat_param, 9), (ElementOfParameter{"blocks.1.norm.weight", 9}));
  EXPECT_EQ(element_at(location->flat_param, 10), std::nullopt);
}

// Shows C6.
TEST(ParameterMapTest, ATiedParameterByAnyName) {
  const Transformer model = test::sharded_transformer({});
  const auto first = flat_param_of(*model, "embedding.weight");
  const auto other = flat_param_of(*model, "head.weight");
  ASSERT_TRUE(first && other);
  EXPECT_EQ(first->offset, other->offset);
  EXPECT_FALSE(flat_param_of(*model, "head.bias"));
  EXPECT_FALSE(flat_param_of(*model, ""));
}

// Shows C6.
TEST(ParameterMapTest, AParameterThatIsTiedAcrossUnitsByAnyName) {
  Transformer model = test::seeded<Transformer>();
  fully_shard(*model, {.policy = ModuleWrapPolicy<test::Block, test::TiedHead>()});
  for (const char* const name : {"embedding.weight", "head.weight"}) {
    const auto location = flat_param_of(*model, name);
    ASSERT_TRUE(location) << name;
    EXPECT_EQ(location->flat_param.module_fqn, "head");
    EXPECT_EQ(location->shape, (Shape{19, 10}));
  }
  EXPECT_FALSE(flat_param_of(*model->embedding, "weight"));  // its unit is not in this module
}

}  // namespace
}  // namespace tessera

#include <torch/torch.h>

#include "runtime/embedding/sharded_training.h"
#include "runtime/support/checks.h"

// Shows D7, D8, D9. Sharded tables give the same results as unsharded ones.

namespace tessera {
namespace {

using test::PlanKind;
using test::Trained;
using test::Way;

using Case = std::tuple<std::size_t, int>;  // plan kind, ranks

std::string name_of_case(const testing::TestParamInfo<Case>& info) {
  return test::plan_kinds()[std::get<0>(info.param)].name + "_" +
         std::to_string(std::get<1>(info.param));
}

class ShardedEmbeddingTest : public testing::TestWithParam<Case> {};

// Shows D7, D8, D9.
TEST_P(ShardedEmbeddingTest, EqualsTheUnshardedCollection) {
  const PlanKind& kind = test::plan_kinds()[std::get<0>(GetParam())];
  const int world_size = std::get<1>(GetParam());
  at::set_num_threads(1);
  const std::vector<Way> ways = test::all_ways();
  std::vector<Trained> alone;
  for (const Way& way : ways) {
    alone.push_back(test::train_alone(world_size, way));
  }
  test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
    at::set_num_threads(1);
    for (std::size_t i = 0; i < ways.size(); ++i) {
      test::expect_shards_of(alone[i], test::train_sharded(mesh, kind, ways[i]), ways[i], mesh);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Plans, ShardedEmbeddingTest,
                         testing::Combine(testing::Range(std::size_t{0}, std::size_t{8}),
                                          testing::Values(2, 3)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(SlowPlans, ShardedEmbeddingTest,
                         testing::Combine(testing::Range(std::size_t{0}, std::size_t{8}),
                                          testing::Values(1, 4)),
                         name_of_case);

}  // namespace
}  // namespace tessera

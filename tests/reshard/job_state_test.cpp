#include "tessera/reshard/job_state.h"

#include <gmock/gmock.h>

namespace tessera::reshard {
namespace {

using formats::StateKind;
using ::testing::ElementsAre;

TEST(JobStateTest, ValuesTellWhatIsOptimizerState) {
  JobState state{.has_kinds_by_name = true};
  for (const std::string name : {"opt.state.0.odd", "state.model.fc.w", "state.opt.state.x.odd"}) {
    state.tensors.push_back({.meta = {name, DType::float32, {4}}});
  }
  const auto kinds = [&] {
    std::vector<StateKind> found;
    const auto contents = share_out(state, {});
    EXPECT_TRUE(contents.values.empty()) << "the caller adds them";
    for (const auto& tensor : contents.tensors) found.push_back(tensor.kind);
    return found;
  };
  EXPECT_THAT(kinds(), ElementsAre(StateKind::plain, StateKind::plain, StateKind::plain));
  state.value_names = {"opt.state.0.step", "state.opt.param_groups.0.lr"};
  EXPECT_THAT(kinds(), ElementsAre(StateKind::opaque, StateKind::plain, StateKind::opaque));
}

}  // namespace
}  // namespace tessera::reshard

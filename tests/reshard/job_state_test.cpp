#include "tessera/reshard/job_state.h"

#include <gmock/gmock.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>

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

TEST(JobStateTest, TheDigestTellsKeysApartThatAreSpelledAlike) {
  const auto digest = [](formats::KeyPath path) {
    JobState state;
    state.tensors.push_back(
        {.meta = {"o.0", DType::float32, {4}}, .key_path = std::move(path), .layout = {}});
    return layout_digest(state, formats::Format::native);
  };
  const std::set<std::string> digests{digest({"o", "0"}), digest({"o", std::int64_t{0}}),
                                      digest({"o", formats::NonStringKey{"0"}}), digest({})};
  EXPECT_EQ(digests.size(), 4U);
}

}  // namespace
}  // namespace tessera::reshard

#include "reshard/journaled_options.h"

#include <gmock/gmock.h>

namespace tessera::reshard {
namespace {

/// Returns the entries that must be equal even if the two plans are equal.
formats::ResumeIdentity compared_always(const JournaledOptions& options) {
  formats::ResumeIdentity identity = identity_of_options(options);
  std::erase_if(identity, [](const auto& entry) {
    return entry.first.starts_with(formats::kPlanExplanation);
  });
  return identity;
}

// Two recipes may make tensors of the same names and shapes out of the same pieces: the plans are
// equal, the elements are not.
TEST(JournaledOptionsTest, WhatChangesElementsAloneIsComparedAlways) {
  const JournaledOptions with_recipe{.recipe = "a", .set = {"heads=2"}};
  const auto identity = compared_always(with_recipe);
  EXPECT_EQ(identity.size(), 2U);
  EXPECT_EQ(identity, compared_always({.strategy = "dim0", .recipe = "a", .set = {"heads=2"}}));
  EXPECT_NE(identity, compared_always({.recipe = "b", .set = {"heads=2"}}));
  EXPECT_NE(identity, compared_always({.recipe = "a", .set = {"heads=4"}}));
  EXPECT_NE(identity, compared_always({.recipe = "a", .inverse = true, .set = {"heads=2"}}));
  EXPECT_NE(compared_always({.flat_layout = "a"}), compared_always({.flat_layout = "b"}));
  EXPECT_NE(compared_always({.preference = formats::MergePreference::first}),
            compared_always({.preference = formats::MergePreference::last}));
}

// A journal of an earlier release has no such entries, and must still match.
TEST(JournaledOptionsTest, OptionsThatAreNotGivenAddNothing) {
  EXPECT_TRUE(compared_always({}).empty());
}

}  // namespace
}  // namespace tessera::reshard

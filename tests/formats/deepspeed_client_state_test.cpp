#include "formats/deepspeed/client_state.h"

#include <gtest/gtest.h>

namespace tessera::formats::deepspeed {
namespace {

// Shows F2. A member of `client_state` that clashes gets another name.
TEST(ClientStateTest, NamesThatAreEqualOrWithinEachOtherClash) {
  const OwnNames own(
      {"model.up.weight", "optim", "deepspeed.global_steps", "deepspeed.loss.scale"});
  for (const char* const name :
       {"deepspeed", "deepspeed.loss", "deepspeed.global_steps", "deepspeed.global_steps.a",
        "optim", "optim.foo", "model", "model.other"}) {
    EXPECT_TRUE(own.clashes(name)) << name;
  }
  for (const char* const name : {"deepspeed.foo", "deepspeed.global", "deep", "modell", "epoch"}) {
    EXPECT_FALSE(own.clashes(name)) << name;
  }
}

// Shows F2. Without own entries in `model` and `optim`, the user's need no other name.
TEST(ClientStateTest, WithoutOwnEntriesNothingClashes) {
  const OwnNames own({"epoch"});
  for (const char* const name : {"model", "model.w", "optim.foo", "deepspeed"}) {
    EXPECT_FALSE(own.clashes(name)) << name;
  }
}

}  // namespace
}  // namespace tessera::formats::deepspeed

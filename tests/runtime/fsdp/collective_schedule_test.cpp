#include "runtime/fsdp/collective_schedule.h"

#include <gmock/gmock.h>

#include "runtime/fsdp/collective_agreement.h"
#include "runtime/support/checks.h"

namespace tessera::fsdp {
namespace {

using Direction = PhaseKey::Direction;
using Proposal = CollectiveSchedule::Proposal;
using Role = CollectiveSchedule::DueCollective::Role;
using DueCollectives = CollectiveSchedule::DueCollectives;
using Verb = Collective::Verb;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::size_t kNumHandles = 4;

Collective unshard(std::size_t handle) {
  return {Verb::unshard, handle};
}
Collective reduce(std::size_t handle) {
  return {Verb::reduce, handle};
}

Collective meet(std::size_t module) {
  return {Verb::meet, module};
}

std::string text_of(Verb verb) {
  return verb == Verb::unshard ? "unshard " : verb == Verb::reduce ? "reduce " : "meet ";
}

/// Returns a text for each collective that is due, such as `own unshard 2`.
std::vector<std::string> texts(const DueCollectives& due) {
  std::vector<std::string> found;
  for (const auto& each : due) {
    const std::string role = each.role == Role::own     ? "own "
                             : each.role == Role::ahead ? "ahead "
                                                        : "joined ";
    found.push_back(role + text_of(each.what.verb) + std::to_string(each.what.handle));
  }
  return found;
}

const PhaseKey kForward{.direction = Direction::forward};
const PhaseKey kBackward{.direction = Direction::backward};

std::vector<bool> all_needed() {
  return std::vector<bool>(2 * kNumHandles, true);
}

/// A schedule whose list for `key` is `what`.
CollectiveSchedule learned(const PhaseKey& key, const std::vector<Collective>& what,
                           const PrefetchRule& rule = {}) {
  CollectiveSchedule schedule;
  schedule.set_prefetch(std::vector<PrefetchRule>(kNumHandles, rule));
  schedule.begin_phase(key);
  EXPECT_FALSE(schedule.is_following());
  for (const Collective& each : what) schedule.take_agreed(schedule.propose(each), true);
  schedule.end_phase(all_needed());
  schedule.begin_phase(key);
  EXPECT_TRUE(schedule.is_following());
  return schedule;
}

/// Returns the list of a phase. Acts as a rank that needs none of the collectives.
std::vector<std::string> list_of(CollectiveSchedule schedule, const PhaseKey& key) {
  schedule.begin_phase(key);
  return texts(schedule.rest());
}

// Shows B10.
TEST(CollectiveScheduleTest, WhatARankDoesNotNeedItJoins) {
  CollectiveSchedule schedule = learned(kForward, {unshard(0), unshard(1), unshard(2), unshard(3)});
  EXPECT_THAT(texts(*schedule.need(unshard(0))), ElementsAre("own unshard 0"));
  EXPECT_THAT(texts(*schedule.need(unshard(2))), ElementsAre("joined unshard 1", "own unshard 2"));
  EXPECT_THAT(texts(schedule.rest()), ElementsAre("joined unshard 3"));
  EXPECT_THAT(schedule.needed(), ElementsAre(true, false, false, false, true, false, false, false));
}

// Shows B10.
TEST(CollectiveScheduleTest, WhatWasPassedCannotBeHadAgain) {
  CollectiveSchedule schedule = learned(kForward, {unshard(0), unshard(1), unshard(0)});
  EXPECT_TRUE(schedule.need(unshard(1)));
  EXPECT_THAT(texts(*schedule.need(unshard(0))), ElementsAre("own unshard 0"));
  EXPECT_FALSE(schedule.need(unshard(0)));
  EXPECT_FALSE(schedule.need(unshard(3)));
}

// Shows B21.
TEST(CollectiveScheduleTest, TheNextUnitIsGatheredAheadInTheSameOrderWhateverIsNeeded) {
  const std::vector<Collective> list{unshard(3), reduce(3),  unshard(2),
                                     reduce(2),  unshard(1), reduce(1)};
  const PrefetchRule pre{.backward = BACKWARD_PRE};
  CollectiveSchedule schedule = learned(kBackward, list, pre);
  EXPECT_THAT(texts(*schedule.need(unshard(3))), ElementsAre("own unshard 3", "ahead unshard 2"));
  EXPECT_THAT(texts(schedule.gradients_ready(3)), ElementsAre("own reduce 3"));
  EXPECT_THAT(texts(*schedule.need(unshard(2))), ElementsAre("ahead unshard 1"));
  EXPECT_THAT(texts(schedule.gradients_ready(2)), ElementsAre("own reduce 2"));
  EXPECT_TRUE(schedule.need(unshard(1))->empty());
  EXPECT_THAT(texts(schedule.gradients_ready(1)), ElementsAre("own reduce 1"));
  // The same for a rank that needs unit 1 alone, and one that needs nothing.
  schedule = learned(kBackward, list, pre);
  EXPECT_THAT(texts(*schedule.need(unshard(1))),
              ElementsAre("joined unshard 3", "joined unshard 2", "joined reduce 3",
                          "own unshard 1", "joined reduce 2"));
  EXPECT_THAT(texts(schedule.rest()), ElementsAre("joined reduce 1"));
  schedule = learned(kBackward, list, pre);
  EXPECT_THAT(texts(schedule.rest()),
              ElementsAre("joined unshard 3", "joined unshard 2", "joined reduce 3",
                          "joined unshard 1", "joined reduce 2", "joined reduce 1"));
}

// Shows B21.
TEST(CollectiveScheduleTest, WhatWasGatheredAheadInVainIsPassed) {
  CollectiveSchedule schedule =
      learned(kForward, {unshard(0), unshard(1), unshard(2)}, {.forward = ForwardPrefetch::next});
  EXPECT_THAT(texts(*schedule.need(unshard(0))), ElementsAre("own unshard 0", "ahead unshard 1"));
  EXPECT_FALSE(schedule.has_passed(1));
  EXPECT_THAT(texts(*schedule.need(unshard(2))), ElementsAre("own unshard 2"));
  EXPECT_TRUE(schedule.has_passed(1));
}

// Shows B10.
TEST(CollectiveScheduleTest, WhatWasToBeAheadButWasJoinedIsNoMoreToBeHad) {
  CollectiveSchedule schedule =
      learned(kForward, {unshard(0), unshard(1)}, {.forward = ForwardPrefetch::next});
  EXPECT_TRUE(schedule.need(unshard(0)));
  schedule.note_not_kept(1);
  EXPECT_FALSE(schedule.need(unshard(1)));
}

// Shows B17.
TEST(CollectiveScheduleTest, OneUnitThatIsEarlyIsHeldBackNotTwo) {
  CollectiveSchedule schedule = learned(kBackward, {reduce(3), reduce(2), reduce(1), reduce(0)});
  EXPECT_TRUE(schedule.gradients_ready(2).empty());  // unit 3 may still become ready
  EXPECT_THAT(texts(schedule.gradients_ready(1)),
              ElementsAre("joined reduce 3", "own reduce 2", "own reduce 1"));
  EXPECT_THAT(texts(schedule.rest()), ElementsAre("joined reduce 0"));
}

// Shows B17.
TEST(CollectiveScheduleTest, OneThatIsEarlyGoesWhenItsTurnComes) {
  CollectiveSchedule schedule = learned(kBackward, {reduce(3), reduce(2)});
  EXPECT_TRUE(schedule.gradients_ready(2).empty());
  EXPECT_THAT(texts(schedule.gradients_ready(3)), ElementsAre("own reduce 3", "own reduce 2"));
}

/// Rank 1 needs a collective that is not in the list: all add it where rank 1 needed it.
/// Shows B10.
TEST(CollectiveScheduleTest, WhatIsMissingJoinsTheListWhereItWasNeeded) {
  const std::vector<Collective> list{unshard(0), unshard(2), unshard(3)};
  CollectiveSchedule rank0 = learned(kForward, list);
  CollectiveSchedule rank1 = learned(kForward, list);
  for (const std::size_t handle : {0UL, 2UL, 3UL}) EXPECT_TRUE(rank0.need(unshard(handle)));
  EXPECT_TRUE(rank0.rest().empty());
  EXPECT_TRUE(rank1.need(unshard(0)));
  EXPECT_FALSE(rank1.need(unshard(1)));
  EXPECT_THAT(texts(rank1.rest()), ElementsAre("joined unshard 2", "joined unshard 3"));
  for (CollectiveSchedule* rank : {&rank0, &rank1}) rank->stop_following();
  const Proposal missing = rank1.propose(unshard(1));
  EXPECT_EQ(missing, (Proposal{unshard(1), 1}));
  rank0.take_agreed(missing, false);
  rank1.take_agreed(missing, true);
  // Unit 3 comes later in the list: it is gathered again in this phase, but not listed twice.
  const Proposal again = rank1.propose(unshard(3));
  EXPECT_EQ(again, (Proposal{unshard(3), std::nullopt}));
  rank0.take_agreed(again, false);
  rank1.take_agreed(again, true);
  for (CollectiveSchedule* rank : {&rank0, &rank1}) {
    rank->end_phase(all_needed());
    EXPECT_THAT(list_of(*rank, kForward), ElementsAre("joined unshard 0", "joined unshard 1",
                                                      "joined unshard 2", "joined unshard 3"));
  }
}

// Shows B10.
TEST(CollectiveScheduleTest, AGradientThatComesTooLateGetsASecondReduction) {
  CollectiveSchedule schedule = learned(kBackward, {reduce(1), unshard(0), reduce(0)});
  EXPECT_THAT(texts(*schedule.need(unshard(0))), ElementsAre("joined reduce 1", "own unshard 0"));
  EXPECT_TRUE(schedule.gradients_ready(1).empty());
  EXPECT_THAT(texts(schedule.rest()), ElementsAre("joined reduce 0"));
  schedule.stop_following();
  const Proposal late = schedule.propose(reduce(1));
  ASSERT_TRUE(late.insert_at);
  schedule.take_agreed(late, true);
  schedule.end_phase(all_needed());
  schedule.begin_phase(kBackward);
  EXPECT_THAT(texts(*schedule.need(unshard(0))), ElementsAre("joined reduce 1", "own unshard 0"));
  EXPECT_THAT(texts(schedule.gradients_ready(1)), ElementsAre("own reduce 1"));
}

// Shows D5.
TEST(CollectiveScheduleTest, WhereRanksDoNotMeetTheListIsForgottenFromThereOn) {
  const std::vector<Collective> list{unshard(0), meet(3), unshard(1)};
  CollectiveSchedule rank0 = learned(kForward, list), rank1 = learned(kForward, list);
  EXPECT_THAT(texts(*rank0.need(meet(3))), ElementsAre("joined unshard 0", "own meet 3"));
  EXPECT_THAT(texts(*rank1.need(unshard(1))),
              ElementsAre("joined unshard 0", "joined meet 3", "own unshard 1"));
  for (CollectiveSchedule* rank : {&rank0, &rank1}) {
    rank->forget_from(1);
    EXPECT_FALSE(rank->is_following());
  }
  EXPECT_EQ(rank0.propose(meet(3)), (Proposal{meet(3), 1}));
  const Proposal first = rank1.propose(unshard(1));
  EXPECT_EQ(first, (Proposal{unshard(1), 1}));
  rank0.take_agreed(first, false);
  rank1.take_agreed(first, true);
  const Proposal second = rank1.propose(meet(3));
  EXPECT_EQ(second, (Proposal{meet(3), 2}));
  rank0.take_agreed(second, true);
  rank1.take_agreed(second, true);
  const Proposal third = rank0.propose(unshard(1));
  rank0.take_agreed(third, true);
  rank1.take_agreed(third, false);
  for (CollectiveSchedule* rank : {&rank0, &rank1}) {
    rank->end_phase(all_needed());
    EXPECT_THAT(list_of(*rank, kForward), ElementsAre("joined unshard 0", "joined unshard 1",
                                                      "joined meet 3", "joined unshard 1"));
  }
}

// Shows B10.
TEST(CollectiveScheduleTest, WhatNoRankNeedsAnyMoreLeavesTheList) {
  CollectiveSchedule schedule = learned(kForward, {unshard(0), unshard(1)});
  std::vector<bool> is_needed(2 * kNumHandles, true);
  is_needed[2] = false;  // the gather of unit 1
  for (int i = 0; i < CollectiveSchedule::kNumIdlePhases; ++i) {
    if (i > 0) schedule.begin_phase(kForward);
    EXPECT_THAT(texts(schedule.rest()), ElementsAre("joined unshard 0", "joined unshard 1")) << i;
    schedule.end_phase(is_needed);
  }
  EXPECT_THAT(list_of(schedule, kForward), ElementsAre("joined unshard 0"));
}

// Shows B10.
TEST(CollectiveScheduleTest, PhasesThatDifferHaveListsOfTheirOwn) {
  CollectiveSchedule schedule = learned(kForward, {unshard(0)});
  schedule.end_phase(all_needed());
  for (const PhaseKey& other :
       {kBackward, PhaseKey{.kind = PassKind::inference}, PhaseKey{.number = 1}}) {
    schedule.begin_phase(other);
    EXPECT_FALSE(schedule.is_following());
    schedule.end_phase(all_needed());
  }
  schedule.begin_phase(kForward);
  EXPECT_TRUE(schedule.is_following());
  schedule.abort_phase();
  schedule.begin_phase(kForward);
  EXPECT_FALSE(schedule.is_following());
}

Request asks(std::optional<Proposal> proposal, Direction direction = Direction::forward) {
  return {direction, std::move(proposal), "something"};
}

// Shows B10.
TEST(AgreementTest, ReductionsGoFirstThenGathersInTheOrderOfTheTree) {
  const auto chosen = [](const std::vector<Request>& requests) {
    return choose(requests, "shard");
  };
  const Proposal gather1{unshard(1), 0}, gather2{unshard(2), 0}, reduce1{reduce(1), 0},
      reduce2{reduce(2), 0};
  EXPECT_EQ(chosen({asks({}), asks({})}), std::nullopt);
  EXPECT_EQ(chosen({asks({}), asks(gather2), asks(gather1)}), gather1);
  const auto backward = [](const std::optional<Proposal>& proposal) {
    return asks(proposal, Direction::backward);
  };
  EXPECT_EQ(chosen({backward(gather1), backward(gather2)}), gather2);
  EXPECT_EQ(chosen({backward(gather2), backward(reduce1)}), reduce1);
  EXPECT_EQ(chosen({backward(reduce1), backward({}), backward(reduce2)}), reduce2);
}

// Shows B10.
TEST(AgreementTest, OnePlaceInTheListServesAllWhoNeedIt) {
  const Collective what = unshard(1);
  const auto chosen = choose(
      std::vector{asks(Proposal{what, 2}), asks(Proposal{what, {}}), asks(Proposal{what, 5})}, "");
  EXPECT_EQ(chosen, (Proposal{what, 5}));
}

// Shows D5.
TEST(AgreementTest, RanksMeetOnceAllAskForIt) {
  const Proposal gather{unshard(1), 0}, meeting{meet(3), 0}, other{meet(2), 0};
  const auto chosen = [](const std::vector<Request>& requests) {
    return choose(requests, "shard");
  };
  EXPECT_EQ(chosen({asks(meeting), asks(gather)}), gather);
  EXPECT_EQ(chosen({asks(gather), asks(meeting)}), gather);
  EXPECT_EQ(chosen({asks(meeting), asks(meeting)}), meeting);
  for (const auto& instead : {std::optional<Proposal>(), std::optional(other)}) {
    EXPECT_THAT(test::error_of([&] {
                  chosen({asks(meeting), asks(instead)});
                }),
                HasSubstr("order of collectives: expected all ranks of shard to something"));
  }
}

// Shows B22.
TEST(AgreementTest, RanksInDifferentPhasesAreTold) {
  const std::string error = test::error_of([] {
    choose(std::vector{asks({}), asks({}, Direction::backward)}, "shard");
  });
  EXPECT_THAT(error, HasSubstr("in the forward on rank 0"));
  EXPECT_THAT(error, HasSubstr("in the backward on rank 1"));
}

}  // namespace
}  // namespace tessera::fsdp

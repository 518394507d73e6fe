#include "formats/key_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::formats {
namespace {

using testing::ElementsAre;

TensorEntry tensor(std::string fqn, KeyPath path, std::uint32_t dict_order) {
  TensorEntry entry;
  entry.meta.fqn = std::move(fqn);
  entry.key_path = std::move(path);
  entry.dict_order = dict_order;
  return entry;
}

KeyPath keys(std::vector<std::string> names) {
  return {names.begin(), names.end()};
}

// {"b": {"z": w, "a": 1}, "a": w, "c": alias}
CheckpointContents nested() {
  CheckpointContents contents;
  contents.tensors = {tensor("a", {}, 3), tensor("b.z", keys({"b", "z"}), 1)};
  contents.aliases = {{"c", "a", {}, 4}};
  contents.values = {{"b.a", keys({"b", "a"}), 2}};
  return contents;
}

TEST(KeyOrderTest, EachDictHasItsOwnOrder) {
  const CheckpointContents contents = nested();
  EXPECT_EQ(num_reordered_dicts(contents), 2U);
  EXPECT_THAT(entries_in_dict_order(contents), ElementsAre(1, 3, 0, 2));
  EXPECT_THAT(names_in_dict_order(contents), ElementsAre("b.z", "a", "c"));
  EXPECT_EQ(key_order_text(contents), "1,3,0,2");
}

TEST(KeyOrderTest, TheOrderOfNamesIsNoOrder) {
  CheckpointContents contents = nested();
  for (auto& entry : contents.tensors) entry.dict_order = 0;
  for (auto& entry : contents.aliases) entry.dict_order = 0;
  for (auto& entry : contents.values) entry.dict_order = 0;
  EXPECT_EQ(num_reordered_dicts(contents), 0U);
  EXPECT_EQ(key_order_text(contents), "");
  EXPECT_THAT(names_in_dict_order(contents), ElementsAre("a", "b.z", "c"));
}

TEST(KeyOrderTest, ListsKeepTheirPositions) {
  CheckpointContents contents;
  contents.tensors = {tensor("l.0", {"l", std::int64_t{0}}, 9),
                      tensor("l.1", {"l", std::int64_t{1}}, 2),
                      tensor("l.10", {"l", std::int64_t{10}}, 1)};
  EXPECT_EQ(num_reordered_dicts(contents), 0U);
  EXPECT_THAT(entries_in_dict_order(contents), ElementsAre(0, 1, 2));
}

TEST(KeyOrderTest, NumbersAreKeysInTheirOwnOrder) {
  CheckpointContents contents;
  const auto number = [](std::string json) {
    return KeyPath{"state", NonStringKey{std::move(json)}};
  };
  contents.tensors = {tensor("state.0", number("0"), 1), tensor("state.10", number("10"), 3),
                      tensor("state.9", number("9"), 2)};
  EXPECT_EQ(num_reordered_dicts(contents), 1U);
  EXPECT_EQ(key_order_text(contents), "0,2,1");
}

TEST(KeyOrderTest, TheTextGivesTheOrderBack) {
  CheckpointContents contents;
  for (int i = 0; i < 30; ++i) {
    contents.values.push_back({std::string(1, static_cast<char>('A' + i)), {}, 0});
  }
  for (std::size_t i = 0; i < 30; ++i) {
    contents.values[i].dict_order = static_cast<std::uint32_t>(i < 20 ? i + 100 : i);
  }
  const std::string text = key_order_text(contents);
  EXPECT_EQ(text, "20-29,0-19");
  CheckpointContents read = contents;
  for (ValueEntry& value : read.values) value.dict_order = 0;
  ASSERT_TRUE(set_key_order(read, text));
  EXPECT_EQ(key_order_text(read), text);
}

TEST(KeyOrderTest, TextsWithoutEachNumberOnceAreRefused) {
  for (const char* const text :
       {"", "0", "0,1,2", "0,1,2,3,4", "0,0,1,2", "0-3,3", "3-0", "1-4", "0,1,2,x", "0,,1,2,3",
        "0,1,2,3,", "-1,0,1,2", "0-", "0-99999999999", "18446744073709551616", "0 ,1,2,3"}) {
    SCOPED_TRACE(text);
    CheckpointContents contents = nested();
    EXPECT_FALSE(set_key_order(contents, text));
    EXPECT_THAT(entries_in_dict_order(contents), ElementsAre(1, 3, 0, 2));
  }
}

// Writers refuse such paths, but the planner counts entries before a writer sees them.
TEST(KeyOrderTest, AnEntryAtThePlaceOfADictIsNoError) {
  CheckpointContents contents;
  contents.tensors = {tensor("a", {}, 2), tensor("a.b", keys({"a", "b"}), 1),
                      tensor("a.c", keys({"a", "c"}), 0)};
  EXPECT_THAT(entries_in_dict_order(contents), ElementsAre(0, 2, 1));
}

}  // namespace
}  // namespace tessera::formats

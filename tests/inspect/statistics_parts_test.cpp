#include "inspect/statistics_parts.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/json.h"
#include "inspect/selection_part.h"
#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"

namespace tessera::inspect {
namespace {

using test::MemoryCheckpoint;
using test::ThrowsError;

MemoryCheckpoint numbers() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  MemoryCheckpoint checkpoint;
  checkpoint.add({"thirds", DType::float32, {3}},
                 test::bytes_of<float>({1.0F / 3, -2.0F / 3, 1e30F}));
  checkpoint.add({"specials", DType::float32, {4}},
                 test::bytes_of<float>({kNan, kInfinity, -kInfinity, 0}));
  checkpoint.add({"nan", DType::float32, {1}}, test::bytes_of<float>({kNan}));
  checkpoint.add({"empty", DType::float32, {0}}, {});
  checkpoint.add({"huge", DType::uint64, {2}},
                 test::bytes_of<std::uint64_t>({~std::uint64_t{0}, 1}));
  checkpoint.add({"small", DType::uint64, {1}}, test::bytes_of<std::uint64_t>({7}));
  checkpoint.add({"negative", DType::int64, {2}}, test::bytes_of<std::int64_t>({-(1LL << 62), 5}));
  checkpoint.add({"whole", DType::float64, {2}}, test::bytes_of<double>({3, 4}));
  return checkpoint;
}

Selection everything_in(const MemoryCheckpoint& checkpoint) {
  return select(checkpoint.contents(), NameSelection(), checkpoint.path());
}

// Returns the documents of `stats --part`, written as text and read back.
std::vector<PartOfStatistics> statistics_of_parts(const MemoryCheckpoint& checkpoint,
                                                  int num_parts) {
  std::vector<PartOfStatistics> parts;
  for (int i = 0; i < num_parts; ++i) {
    const Selection part =
        part_of_selection(checkpoint.contents(), everything_in(checkpoint), i, num_parts);
    const auto statistics = compute_statistics(checkpoint, part.tensors, {});
    Value::List entries;
    for (std::size_t j = 0; j < statistics.size(); ++j) {
      Value::Dict entry = exact_statistics(statistics[j]);
      entry.emplace_back("name", checkpoint.contents().tensors[part.tensors[j]].meta.fqn);
      entries.emplace_back(std::move(entry));
    }
    const Value document(Value::Dict{{"stats", std::move(entries)}});
    parts.push_back({"part-" + std::to_string(i), parse_json(value_to_json(document), "part")});
  }
  return parts;
}

TEST(StatisticsPartsTest, JoinedPartsAreTheStatisticsOfOneProcessToTheBit) {
  const MemoryCheckpoint checkpoint = numbers();
  const Selection all = everything_in(checkpoint);
  const auto whole = compute_statistics(checkpoint, all.tensors, {});
  for (const int num_parts : {1, 2, 3, 20}) {
    const auto joined =
        join_statistics(statistics_of_parts(checkpoint, num_parts), checkpoint.contents(), all);
    ASSERT_EQ(joined.size(), whole.size());
    for (std::size_t i = 0; i < whole.size(); ++i) {
      SCOPED_TRACE(checkpoint.contents().tensors[all.tensors[i]].meta.fqn);
      EXPECT_EQ(joined[i].numel, whole[i].numel);
      EXPECT_EQ(joined[i].num_zeros, whole[i].num_zeros);
      EXPECT_EQ(joined[i].num_nan, whole[i].num_nan);
      EXPECT_EQ(joined[i].num_positive_inf, whole[i].num_positive_inf);
      EXPECT_EQ(joined[i].num_negative_inf, whole[i].num_negative_inf);
      EXPECT_EQ(joined[i].min, whole[i].min);
      EXPECT_EQ(joined[i].max, whole[i].max);
      EXPECT_EQ(joined[i].sum, whole[i].sum);
      EXPECT_EQ(joined[i].squared_deviations_sum, whole[i].squared_deviations_sum);
    }
  }
}

TEST(StatisticsPartsTest, APartThatIsMissingGivenTwiceOrOfOtherTensorsIsNamed) {
  const MemoryCheckpoint checkpoint = numbers();
  const auto join = [&](std::vector<PartOfStatistics> parts) {
    return [&checkpoint, parts = std::move(parts)] {
      join_statistics(parts, checkpoint.contents(), everything_in(checkpoint));
    };
  };
  const auto parts = statistics_of_parts(checkpoint, 2);
  EXPECT_THAT(join({parts[0]}), ThrowsError(ErrorKind::mismatch, "is a part missing?"));
  EXPECT_THAT(join({parts[0], parts[1], parts[0]}),
              ThrowsError(ErrorKind::mismatch, "is one part given twice?"));
  MemoryCheckpoint other;
  other.add({"thirds", DType::float32, {1}}, test::bytes_of<float>({1}));
  EXPECT_THAT(join(statistics_of_parts(other, 1)),
              ThrowsError(ErrorKind::mismatch, "numel: expected 3 of the checkpoint, found 1"));
  other.add({"more", DType::float32, {1}}, test::bytes_of<float>({1}));
  EXPECT_THAT(join(statistics_of_parts(other, 2)),
              ThrowsError(ErrorKind::mismatch, "another checkpoint"));
}

TEST(StatisticsPartsTest, ADocumentOfAnotherKindIsRefusedByMember) {
  const MemoryCheckpoint checkpoint = numbers();
  const auto join = [&](const std::string& text) {
    return [&checkpoint, text] {
      join_statistics({{"part", parse_json(text, "part")}}, checkpoint.contents(),
                      everything_in(checkpoint));
    };
  };
  EXPECT_THAT(join("{}"), ThrowsError(ErrorKind::corruption, "part: stats: expected a list"));
  EXPECT_THAT(join(R"({"stats": [{}]})"), ThrowsError(ErrorKind::corruption, "part: name"));
  EXPECT_THAT(join(R"({"stats": [{"name": "nan", "numel": -1}]})"),
              ThrowsError(ErrorKind::corruption, "numel: expected a count"));
  const std::string begin =
      R"({"stats": [{"name": "nan", "numel": 1, "zeros": 0, "nan": 1, "positive_inf": 0,
          "negative_inf": 0, "min": null, "max": )";
  EXPECT_THAT(join(R"({"stats": [{"name": "nan", "numel": 1, "zeros": 1, "nan": 1,
                       "positive_inf": 0, "negative_inf": 0}]})"),
              ThrowsError(ErrorKind::corruption, "nan: expected counts that are at most numel"));
  EXPECT_THAT(join(begin + R"("x"}]})"), ThrowsError(ErrorKind::corruption, "max: expected a num"));
  EXPECT_THAT(join(begin + R"(null, "sum": "0x1pq"}]})"),
              ThrowsError(ErrorKind::corruption, "sum: expected a hexadecimal number"));
}

}  // namespace
}  // namespace tessera::inspect

#include "tessera/reshard/base_comparison.h"

#include <gmock/gmock.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reshard/equal_pieces_text.h"
#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {
namespace {

using formats::PiecePair;
using test::bytes_of;
using test::MemoryCheckpoint;
using test::ThrowsError;

/// A base checkpoint in memory.
class MemoryBase final : public formats::BaseCheckpoint {
 public:
  explicit MemoryBase(MemoryCheckpoint checkpoint, std::string identity = "x")
      : checkpoint_(std::move(checkpoint)), identity_(std::move(identity)) {}
  const formats::CheckpointReader& reader() const override { return checkpoint_; }
  std::string identity() const override { return identity_; }
  std::vector<PiecePair> worth_linking(std::vector<PiecePair> equal) const override {
    return equal;
  }

 private:
  MemoryCheckpoint checkpoint_;
  std::string identity_;
};

constexpr std::int64_t kNumel = 3 << 18;  // three blocks of 1 MiB

MemoryCheckpoint checkpoint_with(std::size_t changed_element) {
  MemoryCheckpoint checkpoint("memory", 2);
  std::vector<float> numbers(kNumel);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  checkpoint.add({"a", DType::float32, {kNumel}}, bytes_of(numbers));
  if (changed_element < numbers.size()) numbers[changed_element] = -1.0F;
  checkpoint.add({"b", DType::float32, {kNumel}}, bytes_of(numbers),
                 {{Box{{0}, {kNumel - 5}}, 0}, {Box{{kNumel - 5}, {5}}, 1}});
  checkpoint.add({"c", DType::int64, {2}}, bytes_of<std::int64_t>({1, 2}));
  return checkpoint;
}

std::vector<std::string> names_of(const std::vector<PiecePair>& pairs) {
  std::vector<std::string> names;
  for (const PiecePair& pair : pairs) {
    names.push_back(std::string(1, "abc"[pair.piece.tensor_index]) +
                    std::to_string(pair.piece.piece_index));
  }
  return names;
}

std::vector<std::string> equal_names(const MemoryCheckpoint& source, const MemoryBase& base,
                                     std::optional<int> rank = {}) {
  const Plan plan = plan_reshard(source.contents(), "memory", {});
  return names_of(find_equal_pieces(plan, source, base, {.num_threads = 2}, rank));
}

TEST(BaseComparisonTest, OneChangedElementAnywhereMakesItsPieceDiffer) {
  const MemoryBase base(checkpoint_with(kNumel));
  EXPECT_THAT(equal_names(checkpoint_with(kNumel), base),
              testing::ElementsAre("a0", "b0", "b1", "c0"));
  for (const std::size_t changed :
       {std::size_t{0}, std::size_t{kNumel} / 2, std::size_t{kNumel} - 6}) {
    EXPECT_THAT(equal_names(checkpoint_with(changed), base),
                testing::ElementsAre("a0", "b1", "c0"));
  }
  EXPECT_THAT(equal_names(checkpoint_with(kNumel - 1), base),
              testing::ElementsAre("a0", "b0", "c0"));
}

TEST(BaseComparisonTest, ARankComparesItsOwnPieces) {
  const MemoryBase base(checkpoint_with(kNumel));
  EXPECT_THAT(equal_names(checkpoint_with(0), base, 1), testing::ElementsAre("b1"));
}

TEST(BaseComparisonTest, OtherDtypesShapesKindsAndRegionsAreNotCompared) {
  MemoryCheckpoint other("memory", 2);
  other.add({"a", DType::int32, {kNumel}}, bytes_of(std::vector<std::int32_t>(kNumel)));
  other.add({"b", DType::float32, {kNumel}}, bytes_of(std::vector<float>(kNumel)),
            {{FlatRange{0, kNumel - 5}, 0}, {FlatRange{kNumel - 5, kNumel}, 1}});
  other.add({"c", DType::int64, {2}}, bytes_of<std::int64_t>({1, 2})).kind =
      formats::StateKind::opaque;
  EXPECT_THAT(equal_names(checkpoint_with(kNumel), MemoryBase(std::move(other))),
              testing::IsEmpty());
}

TEST(BaseComparisonTest, ADamagedBaseIsAnError) {
  MemoryCheckpoint damaged = checkpoint_with(kNumel);
  damaged.fail_reads_of("c", 0);
  const MemoryBase base(std::move(damaged));
  EXPECT_THAT([&] { equal_names(checkpoint_with(kNumel), base); },
              ThrowsError(ErrorKind::corruption, "c"));
}

TEST(BaseComparisonTest, RanksTellEachOtherTheirEqualPieces) {
  const MemoryBase base(checkpoint_with(kNumel));
  const MemoryCheckpoint source = checkpoint_with(0);
  const Plan plan = plan_reshard(source.contents(), "memory", {});
  const auto pairs = formats::pair_pieces(plan.destination, base.reader().contents());
  std::vector<std::string> texts;
  for (const int rank : {0, 1}) {
    texts.push_back(equal_pieces_to_text(
        base, pairs, find_equal_pieces(plan, source, base, {.num_threads = 1}, rank)));
  }
  EXPECT_EQ(texts[0], "x 0-1 3-4");
  EXPECT_EQ(texts[1], "x 2-3");
  EXPECT_THAT(names_of(equal_pieces_from_texts(base, pairs, texts, "path")),
              testing::ElementsAre("a0", "b1", "c0"));
  const MemoryBase another(checkpoint_with(kNumel), "y");
  EXPECT_THAT([&] { equal_pieces_from_texts(another, pairs, texts, "path"); },
              ThrowsError(ErrorKind::mismatch, "on rank 0"));
}

}  // namespace
}  // namespace tessera::reshard

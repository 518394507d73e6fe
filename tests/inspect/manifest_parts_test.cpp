#include "inspect/manifest_parts.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "inspect/selection_part.h"
#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"

namespace tessera::inspect {
namespace {

using test::MemoryCheckpoint;
using test::ThrowsError;

MemoryCheckpoint a_checkpoint() {
  MemoryCheckpoint checkpoint;
  for (int i = 0; i < 9; ++i) {
    std::vector<float> numbers(static_cast<std::size_t>(1 << i));
    std::iota(numbers.begin(), numbers.end(), static_cast<float>(i));
    checkpoint.add({"t" + std::to_string(i), DType::float32, {1 << i}},
                   test::bytes_of<float>(numbers));
  }
  checkpoint.add_alias("tied", "t3");
  checkpoint.add_value("epoch", Value(7));
  return checkpoint;
}

Selection all_of(const MemoryCheckpoint& checkpoint) {
  return select(checkpoint.contents(), NameSelection(), checkpoint.path());
}

std::vector<PartOfManifest> parts_of(const MemoryCheckpoint& checkpoint, int num_parts) {
  std::vector<PartOfManifest> parts;
  for (int i = 0; i < num_parts; ++i) {
    const Selection part =
        part_of_selection(checkpoint.contents(), all_of(checkpoint), i, num_parts);
    parts.push_back({"part-" + std::to_string(i), compute_manifest(checkpoint, part, {})});
  }
  return parts;
}

TEST(ManifestPartsTest, JoinedPartsAreTheManifestOfOneProcess) {
  const MemoryCheckpoint checkpoint = a_checkpoint();
  const Selection all = all_of(checkpoint);
  const Manifest whole = compute_manifest(checkpoint, all, {});
  for (const int number : {1, 2, 3, 20}) {
    auto parts = parts_of(checkpoint, number);
    std::ranges::reverse(parts);
    EXPECT_EQ(join_manifests(parts, checkpoint.contents(), all), whole) << number;
  }
}

TEST(ManifestPartsTest, APartThatIsMissingOrGivenTwiceIsNamed) {
  const MemoryCheckpoint checkpoint = a_checkpoint();
  const auto join = [&](std::vector<PartOfManifest> parts) {
    return [&checkpoint, parts = std::move(parts)] {
      join_manifests(parts, checkpoint.contents(), all_of(checkpoint));
    };
  };
  auto parts = parts_of(checkpoint, 2);
  EXPECT_THAT(join({parts[0]}), ThrowsError(ErrorKind::mismatch, "found this name in no part"));
  EXPECT_THAT(join({parts[0], parts[1], parts[1]}),
              ThrowsError(ErrorKind::mismatch, "found this name also in part-1"));
  parts[1].manifest.entries.front().name = "other";
  EXPECT_THAT(join({parts[0], parts[1]}), ThrowsError(ErrorKind::mismatch, "other"));
}

}  // namespace
}  // namespace tessera::inspect

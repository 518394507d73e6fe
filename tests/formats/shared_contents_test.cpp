#include "tessera/formats/shared_contents.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/temporary_directory.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {
namespace {

CheckpointContents contents_with(std::vector<Piece> pieces) {
  CheckpointContents contents;
  contents.tensors.push_back({.meta = {"w", DType::float32, {4, 2}}, .pieces = std::move(pieces)});
  return contents;
}

TEST(SharedContentsTest, ContentsOfSomebodyElseAreCopiedWhenTheyAreChanged) {
  const CheckpointContents contents = contents_with({{Box{{0, 0}, {4, 2}}, 0}});
  SharedContents shared = SharedContents::of(contents);
  EXPECT_EQ(&*shared, &contents);
  shared.edit().world_size = 7;
  EXPECT_EQ(shared->world_size, 7);
  EXPECT_EQ(contents.world_size, 1);
}

TEST(SharedContentsTest, CopiesShareUntilOneIsChanged) {
  SharedContents shared(contents_with({}));
  const CheckpointContents* const before = &*shared;
  shared.edit().world_size = 2;
  EXPECT_EQ(&*shared, before);  // not copied, as no other object has the contents
  SharedContents copy = shared;
  EXPECT_EQ(&*copy, before);
  copy.edit().world_size = 3;
  EXPECT_EQ(shared->world_size, 2);
  EXPECT_EQ(copy->world_size, 3);
}

/// Starts a writer that gets contents without a copy. Returns whether it holds a copy.
bool copies(Format format, const std::string& name, const CheckpointContents& contents) {
  const test::TemporaryDirectory folder;
  CreateOptions options;
  options.format = format;
  const auto writer = writer_of(format).start(FileSystem::posix(), folder / name,
                                              SharedContents::of(contents), {}, options);
  return writer->contents().tensors.data() != contents.tensors.data();
}

TEST(SharedContentsTest, WritersOfManyTensorsHoldNoCopyOfAPlan) {
  const CheckpointContents whole = contents_with({{Box{{0, 0}, {4, 2}}, 0}});
  EXPECT_FALSE(copies(Format::native, "native", whole));
  EXPECT_FALSE(copies(Format::dcp, "dcp", whole));
  EXPECT_FALSE(copies(Format::safetensors, "one.safetensors", whole));
}

TEST(SharedContentsTest, AWriterThatLeavesOutReplicasHoldsItsOwn) {
  CheckpointContents replicas = contents_with({{Box{{0, 0}, {4, 2}}, 0}, {Box{{0, 0}, {4, 2}}, 1}});
  replicas.world_size = 2;
  EXPECT_TRUE(copies(Format::dcp, "dcp", replicas));
  EXPECT_EQ(replicas.tensors[0].pieces.size(), 2U);
}

}  // namespace
}  // namespace tessera::formats

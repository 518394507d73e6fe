#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "formats/dcp.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class DcpWriterTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = std::filesystem::path(testing::TempDir()) /
                 testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(directory_);
    std::filesystem::create_directories(directory_);
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string path(const std::string& name) const { return directory_ / name; }

  std::vector<std::string> files(const std::string& name) const {
    return FileSystem::posix().list_directory(path(name));
  }
  std::string content(const std::string& name) const {
    return read_file(FileSystem::posix(), path(name), 1 << 30);
  }

  std::filesystem::path directory_;
};

TensorEntry tensor(std::string fqn, Shape shape, std::vector<std::pair<Box, int>> pieces) {
  TensorEntry entry;
  entry.meta = {std::move(fqn), DType::float32, std::move(shape)};
  for (auto& [box, rank] : pieces) entry.pieces.push_back({std::move(box), rank});
  return entry;
}

/// Four ranks: one tensor by rows with nothing for the last rank, one on rank 0 alone, one of
/// several blocks, a replicated one, an empty one; and a value.
CheckpointContents contents() {
  CheckpointContents all;
  all.world_size = 4;
  all.tensors.push_back(tensor("a.rows", {3, 4},
                               {{Box{{0, 0}, {1, 4}}, 0},
                                {Box{{1, 0}, {1, 4}}, 1},
                                {Box{{2, 0}, {1, 4}}, 2},
                                {Box{{3, 0}, {0, 4}}, 3}}));
  all.tensors.push_back(tensor("b.large", {1000, 1000}, {{Box{{0, 0}, {1000, 1000}}, 0}}));
  all.tensors.push_back(tensor("c.replicated", {2}, {{Box{{0}, {2}}, 0}, {Box{{0}, {2}}, 1}}));
  all.tensors.push_back(tensor("d.empty", {0, 5}, {}));
  all.values.push_back({"step", {}});
  return all;
}

/// Returns the bytes of a block. All bytes have one value, which depends on piece and `begin`.
std::vector<std::byte> block_bytes(const CheckpointWriter& writer, CheckpointWriter::PieceId id,
                                   std::int64_t begin) {
  const TensorEntry& entry = writer.contents().tensors[id.tensor_index];
  const std::int64_t numel =
      std::min(writer.block_numel(id), numel_of(entry.pieces[id.piece_index].region) - begin);
  return std::vector<std::byte>(static_cast<std::size_t>(numel) * itemsize(entry.meta.dtype),
                                std::byte(begin + 17 * static_cast<std::int64_t>(id.piece_index)));
}

struct WrittenBlock {
  CheckpointWriter::PieceId piece;
  std::int64_t begin;
};

std::vector<WrittenBlock> blocks_of(const CheckpointWriter& writer) {
  std::vector<WrittenBlock> blocks;
  for (const auto& id : writer.write_order()) {
    const auto& region = writer.contents().tensors[id.tensor_index].pieces[id.piece_index].region;
    for (std::int64_t begin = 0; begin < numel_of(region); begin += writer.block_numel(id)) {
      blocks.push_back({id, begin});
    }
  }
  return blocks;
}

void write_pieces(CheckpointWriter& writer) {
  for (const WrittenBlock& block : blocks_of(writer)) {
    writer.write_block(block.piece, block.begin, block_bytes(writer, block.piece, block.begin));
  }
  writer.commit();
}

TEST_F(DcpWriterTest, EachRankThatHoldsSomethingHasOneFile) {
  const auto writer = create_dcp(FileSystem::posix(), path("out"), contents(), {7});
  write_pieces(*writer);
  EXPECT_THAT(files("out"),
              ElementsAre(".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"));
}

TEST_F(DcpWriterTest, OneReplicaIsWrittenByTheRankWithLessToWrite) {
  const auto writer = create_dcp(FileSystem::posix(), path("out"), contents(), {7});
  const TensorEntry* replicated = writer->contents().find_tensor("c.replicated");
  ASSERT_EQ(replicated->pieces.size(), 1u);
  EXPECT_EQ(replicated->pieces[0].rank, 1);
}

TEST_F(DcpWriterTest, EmptyTensorKeepsOneEmptyPieceAndOthersNone) {
  const auto writer = create_dcp(FileSystem::posix(), path("out"), contents(), {7});
  EXPECT_EQ(writer->contents().find_tensor("d.empty")->pieces.size(), 1u);
  EXPECT_EQ(writer->contents().find_tensor("a.rows")->pieces.size(), 3u);
}

TEST_F(DcpWriterTest, BytesDoNotDependOnTheOrderOfBlocksOrThreads) {
  write_pieces(*create_dcp(FileSystem::posix(), path("in_order"), contents(), {7}));

  const auto writer = create_dcp(FileSystem::posix(), path("backwards"), contents(), {7});
  std::vector<WrittenBlock> blocks = blocks_of(*writer);
  std::ranges::reverse(blocks);
  std::vector<std::thread> threads;
  for (std::size_t first = 0; first < 3; ++first) {
    threads.emplace_back([&, first] {
      for (std::size_t i = first; i < blocks.size(); i += 3) {
        writer->write_block(blocks[i].piece, blocks[i].begin,
                            block_bytes(*writer, blocks[i].piece, blocks[i].begin));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  writer->commit();

  ASSERT_EQ(files("in_order"), files("backwards"));
  for (const std::string& name : files("in_order")) {
    EXPECT_TRUE(content("in_order/" + name) == content("backwards/" + name)) << name;
  }
}

// Without this check, another block could be missing in a checkpoint that looks complete.
TEST_F(DcpWriterTest, ABlockThatIsWrittenTwiceIsAnInternalError) {
  CheckpointContents large;
  large.tensors.push_back(tensor("a", {2000, 1000}, {{Box{{0, 0}, {2000, 1000}}, 0}}));
  const auto writer = create_dcp(FileSystem::posix(), path("out"), large, {});
  const auto write = [&](const WrittenBlock& block) {
    writer->write_block(block.piece, block.begin, block_bytes(*writer, block.piece, block.begin));
  };
  const std::vector<WrittenBlock> blocks = blocks_of(*writer);
  ASSERT_EQ(blocks.size(), 2U);
  write(blocks[0]);
  EXPECT_THROW(write(blocks[0]), InternalError);
}

TEST_F(DcpWriterTest, APieceOfOneBlockThatIsWrittenTwiceIsAnInternalError) {
  const auto writer = create_dcp(FileSystem::posix(), path("out"), contents(), {7});
  const WrittenBlock block = blocks_of(*writer).front();
  const auto write = [&] {
    writer->write_block(block.piece, block.begin, block_bytes(*writer, block.piece, block.begin));
  };
  write();
  EXPECT_THROW(write(), InternalError);
}

TEST_F(DcpWriterTest, NothingStandsAtTheDestinationWithoutCommit) {
  {
    const auto writer = create_dcp(FileSystem::posix(), path("out"), contents(), {7});
    const WrittenBlock block = blocks_of(*writer).front();
    writer->write_block(block.piece, block.begin, block_bytes(*writer, block.piece, block.begin));
  }
  EXPECT_TRUE(FileSystem::posix().list_directory(directory_).empty());
}

TEST_F(DcpWriterTest, CheckpointWithoutAnythingIsMetadataAlone) {
  create_dcp(FileSystem::posix(), path("out"), {}, {})->commit();
  EXPECT_THAT(files("out"), ElementsAre(".metadata"));
}

TEST_F(DcpWriterTest, RefusesWhatDcpCannotHold) {
  const auto message_for = [&](const auto& change) -> std::string {
    CheckpointContents changed = contents();
    change(changed);
    try {
      create_dcp(FileSystem::posix(), path("out"), changed, {7});
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message_for([](auto& c) {
                c.tensors[0].pieces.edit()[0].region = FlatRange{0, 4};
              }),
              HasSubstr("a.rows: piece: expected a box, found flat[0:4]"));
  EXPECT_THAT(
      message_for([](auto& c) {
        c.aliases.push_back({"tied", "a.rows", {}});
      }),
      HasSubstr("tied: tied tensors: expected none (DCP cannot store ties; store the tensor under "
                "each of its names), found a tie to 'a.rows'"));
  EXPECT_THAT(message_for([](auto& c) {
                c.tensors[0].key_path = {"a", "columns"};
              }),
              HasSubstr("a.rows: key path: expected keys that give the name when joined by dots, "
                        "found keys that give a.columns"));
  EXPECT_THAT(message_for([](auto& c) {
                c.tensors[0].pieces.push_back({Box{{0, 0}, {1, 2}}, 3});
              }),
              HasSubstr("a.rows: pieces: expected one box at each offset"));
  EXPECT_THAT(message_for([](auto& c) {
                c.tensors.push_back(tensor("w.deep", Shape(33, 1), {{whole_box(Shape(33, 1)), 0}}));
              }),
              HasSubstr("w.deep: shape: expected at most 32 dimensions, found 33 dimensions"));
  EXPECT_THAT(message_for([](auto& c) { c.tensors[0].pieces.edit()[0].rank = 4; }),
              HasSubstr("a.rows: rank of a piece: expected a rank below 4, found 4"));
  EXPECT_TRUE(FileSystem::posix().list_directory(directory_).empty());
}

TEST_F(DcpWriterTest, RefusesValuesThatCouldNotBeReadBack) {
  Value deep = Value::List{};
  for (int i = 0; i < 64; ++i) deep = Value::List{std::move(deep)};
  for (const Value& value : {deep, Value(Value::BigInt{std::string(1000, '9')})}) {
    try {
      create_dcp(FileSystem::posix(), path("out"), contents(), {value});
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::unsupported);
      EXPECT_THAT(error.what(), HasSubstr("a file with this value could not be read: pickle: "));
    }
  }
  EXPECT_TRUE(FileSystem::posix().list_directory(directory_).empty());
}

}  // namespace
}  // namespace tessera::formats

#include "formats/stored_chunks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>

#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/files.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/executor.h"

// Moves that copy compressed chunks without decoding them: see [Note: Stored chunks].

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::NativeWriteOptions;
using test::Bytes;
using test::files_of;
using test::MemoryCheckpoint;
using test::TemporaryDirectory;
using test::ThrowsError;
using test::zstd_options;

constexpr std::int64_t kRowsOfChunk = 128;  // rows of 512 bytes in a chunk of zstd_options()

/// Reads from an open checkpoint. Counts the chunks that it returns compressed (given), and the
/// reads that decode (decoded).
class CountingSource final : public formats::TensorSource, public formats::ChunkSource {
 public:
  explicit CountingSource(const CheckpointReader& base)
      : base_(base), chunks_(dynamic_cast<const formats::ChunkSource&>(base)) {}

  const formats::CheckpointContents& contents() const override { return base_.contents(); }
  void read_piece(std::size_t tensor_index, std::size_t piece_index, FlatRange range,
                  std::span<std::byte> out) const override {
    ++num_decoded_;
    base_.read_piece(tensor_index, piece_index, range, out);
  }
  std::optional<formats::StoredChunk> read_chunk(std::size_t tensor_index, std::size_t piece_index,
                                                 FlatRange range, std::int64_t chunk_numel,
                                                 tessera::detail::ByteBuffer& room) const override {
    auto chunk = chunks_.read_chunk(tensor_index, piece_index, range, chunk_numel, room);
    if (chunk) ++num_given_;
    return chunk;
  }
  int num_decoded() const { return num_decoded_; }
  int num_given() const { return num_given_; }

 private:
  const CheckpointReader& base_;
  const formats::ChunkSource& chunks_;
  mutable std::atomic<int> num_decoded_ = 0;
  mutable std::atomic<int> num_given_ = 0;
};

struct Counts {
  int num_given = 0;
  int num_decoded = 0;
  friend bool operator==(const Counts&, const Counts&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Counts& counts) {
    return out << counts.num_given << " given, " << counts.num_decoded << " decoded";
  }
};

/// Returns a checkpoint with one tensor `w` of rows of 512 bytes, in bfloat16.
MemoryCheckpoint one_tensor(std::int64_t num_rows) {
  test::Random random(5);
  MemoryCheckpoint source("memory");
  const auto nbytes = static_cast<std::uint64_t>(num_rows) * 512;
  source.add({"w", DType::bfloat16, {num_rows, 256}}, test::weight_like_bytes(nbytes, 2, random));
  return source;
}

void move(const formats::TensorSource& source, const Plan& plan, const std::string& path,
          const NativeWriteOptions& options) {
  const auto writer = formats::create_native(FileSystem::posix(), path, plan.destination, {},
                                             OverwritePolicy::refuse, options);
  execute(plan, source, *writer, {.num_threads = 3});
  writer->commit();
}

/// Moves a checkpoint to native with zstd on `world_size` ranks.
void compress(const MemoryCheckpoint& source, const std::string& path, int world_size,
              const NativeWriteOptions& options = zstd_options()) {
  move(source, plan_reshard(source.contents(), source.path(), {.world_size = world_size}), path,
       options);
}

/// Moves the native checkpoint at `from` to `to`, and counts chunks.
Counts move_counted(const std::string& from, const std::string& to, PlanOptions plan_options,
                    const NativeWriteOptions& options = zstd_options()) {
  const auto reader = formats::open_native(FileSystem::posix(), from);
  const CountingSource source(*reader);
  plan_options.format = formats::Format::native;
  move(source, plan_reshard(reader->contents(), from, plan_options), to, options);
  return {source.num_given(), source.num_decoded()};
}

TEST(StoredChunksTest, ChunksThatFitMoveWithoutBeingDecoded) {
  const TemporaryDirectory folder;
  const MemoryCheckpoint source = one_tensor(8 * kRowsOfChunk);
  compress(source, folder / "2", 2);
  for (const int world_size : {1, 2, 4, 8}) {
    const std::string name = std::to_string(world_size);
    EXPECT_EQ(move_counted(folder / "2", folder / ("moved-" + name), {.world_size = world_size}),
              (Counts{.num_given = 8, .num_decoded = 0}))
        << name;
    compress(source, folder / ("encoded-" + name), world_size);
    EXPECT_EQ(files_of(folder / ("moved-" + name)), files_of(folder / ("encoded-" + name))) << name;
  }
}

TEST(StoredChunksTest, OtherChunksAreDecodedAndEncoded) {
  const TemporaryDirectory folder;
  const MemoryCheckpoint source = one_tensor(8 * kRowsOfChunk);
  compress(source, folder / "2", 2);
  // Ranks get 342, 342 and 340 rows, so only the first two chunks of rank 0 are chunks of the
  // source. The other 7 chunks need elements of 2 chunks each, read in one call for each piece.
  const Counts counts = move_counted(folder / "2", folder / "3", {.world_size = 3});
  EXPECT_EQ(counts.num_given, 2);
  EXPECT_GE(counts.num_decoded, 7);
  compress(source, folder / "encoded", 3);
  EXPECT_EQ(files_of(folder / "3"), files_of(folder / "encoded"));
}

TEST(StoredChunksTest, AShortLastChunkAndARawChunkMoveAsTheyAre) {
  const TemporaryDirectory folder;
  MemoryCheckpoint source = one_tensor(3 * kRowsOfChunk + 40);
  test::Random random(6);
  const Bytes noise = test::random_bytes(kRowsOfChunk * 512, random);
  std::memcpy(source.piece_bytes("w", 0).data() + noise.size(), noise.data(), noise.size());
  compress(source, folder / "1", 1);
  EXPECT_EQ(move_counted(folder / "1", folder / "moved", {.world_size = 1}),
            (Counts{.num_given = 4, .num_decoded = 0}));
  EXPECT_EQ(files_of(folder / "moved"), files_of(folder / "1"));
}

TEST(StoredChunksTest, APieceWhoseFirstChunkIsRawBecomesPlain) {
  const TemporaryDirectory folder;
  MemoryCheckpoint source = one_tensor(4 * kRowsOfChunk);
  test::Random random(6);
  const Bytes noise = test::random_bytes(kRowsOfChunk * 512, random);
  std::memcpy(source.piece_bytes("w", 0).data() + 2 * noise.size(), noise.data(), noise.size());
  compress(source, folder / "1", 1);
  move_counted(folder / "1", folder / "2", {.world_size = 2});  // the noise begins rank 1's piece
  compress(source, folder / "encoded", 2);
  EXPECT_EQ(files_of(folder / "2"), files_of(folder / "encoded"));
}

TEST(StoredChunksTest, OtherOptionsDecodeEveryChunk) {
  const TemporaryDirectory folder;
  compress(one_tensor(4 * kRowsOfChunk), folder / "1", 1);
  NativeWriteOptions level = zstd_options(), large = zstd_options(), plain;
  level.zstd_level = 3;
  large.chunk_nbytes = 131072;
  plain.plain_block_nbytes = 65536;
  EXPECT_EQ(move_counted(folder / "1", folder / "level", {}, level), (Counts{0, 4}));
  EXPECT_EQ(move_counted(folder / "1", folder / "large", {}, large), (Counts{0, 2}));
  EXPECT_EQ(move_counted(folder / "1", folder / "plain", {}, plain), (Counts{0, 4}));
  EXPECT_EQ(move_counted(folder / "1", folder / "cast", {.cast = DType::float32}), (Counts{0, 8}));
}

TEST(StoredChunksTest, AnInterruptedMoveOfChunksIsResumed) {
  const TemporaryDirectory folder;
  compress(one_tensor(32 * kRowsOfChunk), folder / "1", 1);
  const auto reader = formats::open_native(FileSystem::posix(), folder / "1");
  const Plan plan = plan_reshard(reader->contents(), folder / "1",
                                 {.format = formats::Format::native, .world_size = 2});
  formats::CreateOptions create{.format = formats::Format::native, .native = zstd_options()};
  create.journal = formats::JournalOptions{};
  {
    const auto writer = start_move(plan, *reader, FileSystem::posix(), folder / "2", create);
    std::stop_source stop;
    std::atomic<int> num_moved = 0;
    const auto progress = [&](std::uint64_t) {
      if (++num_moved == 10) stop.request_stop();
    };
    EXPECT_THROW(execute(plan, *reader, *writer,
                         {.num_threads = 2, .stop = stop.get_token(), .progress = progress}),
                 Error);
    EXPECT_TRUE(writer->keep_work());
  }
  create.journal->kept_work = formats::KeptWork::resume;
  std::atomic<std::uint64_t> resumed_nbytes = 0;
  finish_move(plan, *reader, *start_move(plan, *reader, FileSystem::posix(), folder / "2", create),
              {.resumed = [&](std::uint64_t nbytes) { resumed_nbytes += nbytes; }});
  EXPECT_GE(resumed_nbytes, std::uint64_t{10 * 65536});
  compress(one_tensor(32 * kRowsOfChunk), folder / "encoded", 2);
  EXPECT_EQ(files_of(folder / "2"), files_of(folder / "encoded"));
}

TEST(StoredChunksTest, ADamagedChunkIsRefusedWithItsPlace) {
  const TemporaryDirectory folder;
  compress(one_tensor(4 * kRowsOfChunk), folder / "1", 1);
  const std::string file = folder / "1/rank-00000.h5";
  std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
  damaged.seekp(static_cast<std::streamoff>(std::filesystem::file_size(file) / 2));
  damaged.put('\x55').put('\xAA').put('\x55');
  damaged.close();
  EXPECT_THAT([&] { move_counted(folder / "1", folder / "2", {.world_size = 2}); },
              ThrowsError(ErrorKind::corruption, "rank-00000.h5: w: bytes"));
  EXPECT_FALSE(std::filesystem::exists(folder / "2"));
}

}  // namespace
}  // namespace tessera::reshard

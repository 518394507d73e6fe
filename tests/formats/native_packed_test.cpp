#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "formats/native/packed_pieces.h"
#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "tessera/formats/native.h"

namespace tessera::formats {
namespace {

using test::findings_of;
using test::version_of;

using namespace tessera::test;
using Compression = NativeWriteOptions::Compression;

/// A checkpoint with `num_small` small pieces of all dtypes on three ranks, replicas, a scalar, an
/// empty tensor, an alias, and pieces of 64 KiB and more.
MemoryCheckpoint many_pieces(std::int64_t num_small) {
  MemoryCheckpoint checkpoint("many", 3);
  Random random(7);
  const auto add = [&](const std::string& name, DType dtype, Shape shape,
                       std::vector<Piece> pieces) {
    const auto nbytes = static_cast<std::uint64_t>(numel_of(shape)) * itemsize(dtype);
    checkpoint.add({name, dtype, std::move(shape)},
                   weight_like_bytes(nbytes, itemsize(dtype), random), std::move(pieces));
  };
  std::int64_t num_left = num_small - 4;
  for (int i = 0; num_left > 0; ++i) {
    const auto dtype = *dtype_from_code(static_cast<std::uint8_t>(i % kNumDTypes));
    const std::string name = "layers." + std::to_string(i) + ".w";
    if (num_left >= 3) {
      add(name, dtype, {5, 3},
          {{Box{{0, 0}, {5, 2}}, 2}, {Box{{0, 2}, {5, 1}}, 0}, {Box{{0, 0}, {5, 2}}, 1}});
      num_left -= 3;
    } else {
      add(name, dtype, {5, 3}, {{FlatRange{0, 15}, 1}});
      --num_left;
    }
  }
  add("flat", DType::float32, {5, 4}, {{FlatRange{0, 7}, 0}, {FlatRange{7, 20}, 2}});
  add("scalar", DType::float32, {}, {{Box{}, 1}});
  add("big", DType::bfloat16, {300, 400},
      {{Box{{0, 0}, {100, 400}}, 0}, {Box{{100, 0}, {200, 400}}, 1}});
  add("edge", DType::uint8, {65536 + 65535}, {{Box{{0}, {65536}}, 0}, {Box{{65536}, {65535}}, 1}});
  add("empty", DType::int64, {0, 7}, {});
  checkpoint.add_value("step", Value(3));
  checkpoint.add_alias("tied", "big");
  return checkpoint;
}

TEST(NativePackedTest, OnlyCheckpointsWithManySmallPiecesHaveVersion2) {
  const TemporaryDirectory folder;
  for (const auto& [num_small, version] :
       {std::pair{native::kMinPackedPieces - 1, 1u}, {native::kMinPackedPieces, 2u}}) {
    const std::string path = folder / std::to_string(num_small);
    write_native(many_pieces(num_small), path);
    for (const char* name : {"index.h5", "rank-00000.h5", "rank-00002.h5"}) {
      EXPECT_EQ(version_of(path + "/" + name), version) << num_small << name;
    }
  }
}

TEST(NativePackedTest, EveryPieceReadsAsItWasWritten) {
  const TemporaryDirectory folder;
  const MemoryCheckpoint source = many_pieces(native::kMinPackedPieces);
  for (const NativeWriteOptions& options : {NativeWriteOptions{}, zstd_options()}) {
    const bool is_plain = options.compression == Compression::none;
    const std::string path = folder / (is_plain ? "plain" : "zstd");
    write_native(source, path, options);
    const auto reader = open_native(FileSystem::posix(), path);
    EXPECT_THAT(findings_of(*reader), testing::IsEmpty());
    for (std::size_t t = 0; t < source.contents().tensors.size(); ++t) {
      const TensorEntry& tensor = source.contents().tensors[t];
      ASSERT_EQ(reader->contents().tensors[t].meta, tensor.meta);
      for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
        const FlatRange all{0, numel_of(tensor.pieces[p].region)};
        Bytes expected(static_cast<std::size_t>(all.end) * itemsize(tensor.meta.dtype));
        Bytes found(expected.size());
        source.read_piece(t, p, all, expected);
        reader->read_piece(t, p, all, found);
        ASSERT_EQ(found, expected) << tensor.meta.fqn << " " << p;
      }
    }
  }
}

TEST(NativePackedTest, FilesAreEqualForAnyNumberOfThreads) {
  const TemporaryDirectory folder;
  const MemoryCheckpoint source = many_pieces(native::kMinPackedPieces + 50);
  for (const NativeWriteOptions& options : {NativeWriteOptions{}, zstd_options()}) {
    const std::string form = options.compression == Compression::none ? "plain" : "zstd";
    write_native(source, folder / (form + "1"), options, 1);
    write_native(source, folder / (form + "4"), options, 4);
    EXPECT_EQ(files_of(folder / (form + "1")), files_of(folder / (form + "4")));
  }
}

TEST(NativePackedTest, TheIndexIsRebuiltByteForByte) {
  const TemporaryDirectory folder;
  const std::string path = folder / "checkpoint";
  write_native(many_pieces(native::kMinPackedPieces), path);
  const auto before = files_of(path);
  std::filesystem::remove(path + "/index.h5");
  rebuild_native_index(FileSystem::posix(), path);
  EXPECT_EQ(files_of(path), before);
}

TEST(NativePackedTest, AChangedByteInAPackedPieceNamesItsTensor) {
  const TemporaryDirectory folder;
  const std::string path = folder / "checkpoint";
  write_native(many_pieces(native::kMinPackedPieces), path);
  const auto reader = open_native(FileSystem::posix(), path);
  const auto t = static_cast<std::size_t>(reader->contents().find_tensor("scalar") -
                                          reader->contents().tensors.data());
  const auto range = reader->piece_storage(t, 0).byte_range;
  std::string bytes = read_all(path + "/rank-00001.h5");
  bytes[range->begin] ^= 1;
  write_file(path + "/rank-00001.h5", bytes);
  const auto findings = findings_of(*open_native(FileSystem::posix(), path));
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings.front().where.fqn, "scalar");
  EXPECT_EQ(findings.front().rule, "checksum");
}

}  // namespace
}  // namespace tessera::formats

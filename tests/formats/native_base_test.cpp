#include "formats/native/native_base.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/formats/base_checkpoint.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/parts.h"

namespace tessera::formats {
namespace {

using namespace tessera::test;
using test::linked_files;
using test::open_base_at;
using test::version_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::int64_t kFrozenNumel = 200'000;
constexpr std::int64_t kTrainedNumel = 20'000;

/// A model on two ranks. `frozen` and `bias` depend on `frozen_seed` alone, the rest on `step`.
MemoryCheckpoint model(std::uint64_t step, std::uint64_t frozen_seed = 1) {
  MemoryCheckpoint checkpoint("model", 2);
  Random frozen(frozen_seed);
  Random trained(1000 + step);
  const std::int64_t half = kFrozenNumel / 2;
  checkpoint.add({"frozen", DType::float32, {kFrozenNumel}},
                 weight_like_bytes(kFrozenNumel * 4, 4, frozen),
                 {{Box{{0}, {half}}, 0}, {Box{{half}, {half}}, 1}});
  checkpoint.add({"bias", DType::bfloat16, {100}}, random_bytes(200, frozen),
                 {{Box{{0}, {100}}, 1}});
  checkpoint.add(
      {"trained", DType::float32, {kTrainedNumel}}, random_bytes(kTrainedNumel * 4, trained),
      {{FlatRange{0, kTrainedNumel / 2}, 0}, {FlatRange{kTrainedNumel / 2, kTrainedNumel}, 1}});
  checkpoint.add({"empty", DType::int64, {0, 7}}, {});
  checkpoint.add_alias("tied", "frozen");
  checkpoint.add_value("step", Value(static_cast<std::int64_t>(step)));
  return checkpoint;
}

/// The pieces of `source` that have the same bytes in the base.
std::vector<PiecePair> equal_pairs(const CheckpointReader& source, const BaseCheckpoint& base) {
  std::vector<PiecePair> equal;
  for (const PiecePair& pair : pair_pieces(source.contents(), base.reader().contents())) {
    const TensorEntry& tensor = source.contents().tensors[pair.piece.tensor_index];
    const FlatRange all{0, numel_of(tensor.pieces[pair.piece.piece_index].region)};
    Bytes own(static_cast<std::size_t>(all.end) * itemsize(tensor.meta.dtype));
    Bytes of_base(own.size());
    source.read_piece(pair.piece.tensor_index, pair.piece.piece_index, all, own);
    base.reader().read_piece(pair.base_piece.tensor_index, pair.base_piece.piece_index, all,
                             of_base);
    if (own == of_base) equal.push_back(pair);
  }
  return equal;
}

NativeWriteOptions with_base(const CheckpointReader& source, const std::string& base_path,
                             NativeWriteOptions options = {}) {
  const auto base = open_base_at(base_path);
  options.linked = link_pieces(base, source.contents(), {equal_pairs(source, *base), {}});
  return options;
}

ino_t inode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_ino;
}

TEST(NativeBaseTest, EqualPiecesStayInTheFilesOfTheBase) {
  for (const NativeWriteOptions& options : {NativeWriteOptions{}, zstd_options()}) {
    const TemporaryDirectory folder;
    write_native(model(1), folder / "1", options);
    const MemoryCheckpoint second = model(2);
    write_native(second, folder / "2", with_base(second, folder / "1", options));
    expect_holds(folder / "2", second);
    EXPECT_EQ(version_of(folder / "2/index.h5"), 3u);
    EXPECT_EQ(version_of(folder / "2/rank-00000.h5"), 3u);
    const auto names = linked_files(folder / "2");
    ASSERT_THAT(names, SizeIs(2));
    EXPECT_EQ(inode_of(folder / ("2/" + names[0])), inode_of(folder / "1/rank-00000.h5"));
    EXPECT_EQ(inode_of(folder / ("2/" + names[1])), inode_of(folder / "1/rank-00001.h5"));
    EXPECT_LT(read_all(folder / "2/rank-00000.h5").size(), kTrainedNumel * 4u);
  }
}

TEST(NativeBaseTest, LinksTheFileThatASymbolicLinkOfTheBaseNames) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  std::filesystem::rename(folder / "1/rank-00000.h5", folder / "1/moved.h5");
  std::filesystem::create_symlink("moved.h5", folder / "1/rank-00000.h5");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  expect_holds(folder / "2", second);
  for (const std::string& name : linked_files(folder / "2")) {
    EXPECT_FALSE(std::filesystem::is_symlink(folder / ("2/" + name))) << name;
  }
}

TEST(NativeBaseTest, NothingWritesIntoALinkedFile) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  EXPECT_THAT([&] { FileSystem::posix().open_for_update(folder / "1/rank-00000.h5"); },
              ThrowsError(ErrorKind::already_exists, "a file with a second name"));
}

TEST(NativeBaseTest, ACheckpointIsWholeWithoutItsBase) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  const MemoryCheckpoint third = model(3);
  write_native(third, folder / "3", with_base(third, folder / "2"));
  std::filesystem::remove_all(folder / "1");
  std::filesystem::copy(folder / "3", folder / "copy");
  std::filesystem::remove_all(folder / "2");
  expect_holds(folder / "3", third);
  expect_holds(folder / "copy", third);
}

TEST(NativeBaseTest, AChainLinksTheFilesThatHoldThePieces) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  const MemoryCheckpoint third = model(3);
  write_native(third, folder / "3", with_base(third, folder / "2"));
  EXPECT_EQ(linked_files(folder / "3"), linked_files(folder / "2"));
}

TEST(NativeBaseTest, AFileThatIsMostlyUnusedIsNotLinked) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint other = model(1, 2);  // only `trained` and the value are in the base
  const NativeWriteOptions options = with_base(other, folder / "1");
  EXPECT_EQ(options.linked, nullptr);
  write_native(other, folder / "2", options);
  EXPECT_THAT(linked_files(folder / "2"), IsEmpty());
  EXPECT_EQ(version_of(folder / "2/index.h5"), 1u);
}

TEST(NativeBaseTest, EqualCheckpointsGiveEqualFilesForAnyNumberOfThreads) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "a", with_base(second, folder / "1"), 1);
  write_native(second, folder / "b", with_base(second, folder / "1"), 4);
  EXPECT_EQ(files_of(folder / "a"), files_of(folder / "b"));
}

TEST(NativeBaseTest, TheIndexIsRebuiltByteForByte) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  const auto before = files_of(folder / "2");
  std::filesystem::remove(folder / "2/index.h5");
  rebuild_native_index(FileSystem::posix(), folder / "2");
  EXPECT_EQ(files_of(folder / "2"), before);
  const std::string linked = folder / ("2/" + linked_files(folder / "2").front());
  std::filesystem::remove(linked);
  std::filesystem::remove(folder / "2/index.h5");
  EXPECT_THAT([&] { rebuild_native_index(FileSystem::posix(), folder / "2"); },
              ThrowsError(ErrorKind::corruption, linked + ": file of the base: expected a file"));
}

TEST(NativeBaseTest, RanksTogetherWriteTheFilesThatOneWriterDoes) {
  const TemporaryDirectory folder;
  FileSystem& fs = FileSystem::posix();
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  PartOptions options{.format = Format::native, .native = with_base(second, folder / "1")};
  write_native(second, folder / "alone", options.native);
  fs.make_directory(folder / "together");
  const std::vector<Value> values = {Value(2)};
  for (int rank = 0; rank < 2; ++rank) {
    write_all(second,
              *create_part(fs, folder / "together", second.contents(), values, rank, options));
  }
  const std::uint64_t token =
      join_parts(fs, folder / "together", second.contents(), values, options);
  for (int rank = 0; rank < 2; ++rank) seal_part(fs, folder / "together", rank, token, options);
  finish_parts(fs, folder / "together", second.contents(), values, options);
  EXPECT_EQ(files_of(folder / "together"), files_of(folder / "alone"));
}

TEST(NativeBaseTest, ARankWithOtherLinkedPiecesIsRefused) {
  const TemporaryDirectory folder;
  FileSystem& fs = FileSystem::posix();
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  const PartOptions linked{.format = Format::native, .native = with_base(second, folder / "1")};
  const PartOptions unlinked{.format = Format::native};
  fs.make_directory(folder / "2");
  const std::vector<Value> values = {Value(2)};
  write_all(second, *create_part(fs, folder / "2", second.contents(), values, 0, linked));
  write_all(second, *create_part(fs, folder / "2", second.contents(), values, 1, unlinked));
  EXPECT_THAT([&] { join_parts(fs, folder / "2", second.contents(), values, linked); },
              ThrowsError(ErrorKind::corruption, "rank-00001.h5: part"));
}

TEST(NativeBaseTest, VerifyFindsDamageInALinkedFileAndNamesTheTensor) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  const auto reader = open_native(FileSystem::posix(), folder / "2");
  const auto t = static_cast<std::size_t>(reader->contents().find_tensor("frozen") -
                                          reader->contents().tensors.data());
  const PieceStorage storage = reader->piece_storage(t, 1);
  const std::string path = folder / ("2/" + storage.file);
  EXPECT_THAT(storage.file, HasSubstr("base-"));
  const std::string sound = read_all(path);
  const auto with_flipped = [&](std::size_t at) {
    std::string bytes = sound;
    bytes[at] ^= 1;
    write_file(path, bytes);  // writes into the file that both checkpoints have
    return findings_of(folder / "2");
  };
  const auto findings = with_flipped(storage.byte_range->begin + 5);
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_EQ(findings.front().where.fqn, "frozen");
  EXPECT_EQ(findings.front().where.path, path);
  EXPECT_EQ(findings.front().rule, "checksum");
  EXPECT_THAT(findings_of(folder / "1"), SizeIs(1));
  EXPECT_THAT([&] { whole_tensor(*open_native(FileSystem::posix(), folder / "2"), t); },
              ThrowsError(ErrorKind::corruption, "frozen"));
  EXPECT_THAT(with_flipped(5000), SizeIs(1));  // in the structure
  EXPECT_THAT(with_flipped(30), SizeIs(1));    // in the header
}

TEST(NativeBaseTest, DamageThatTheCheckpointDoesNotUseIsNoFindingOfIt) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  const auto base = open_native(FileSystem::posix(), folder / "1");
  const auto t = static_cast<std::size_t>(base->contents().find_tensor("trained") -
                                          base->contents().tensors.data());
  std::string bytes = read_all(folder / "1/rank-00000.h5");
  bytes[base->piece_storage(t, 0).byte_range->begin] ^= 1;
  write_file(folder / "1/rank-00000.h5", bytes);
  EXPECT_THAT(findings_of(folder / "1"), SizeIs(1));
  EXPECT_THAT(findings_of(folder / "2"), IsEmpty());
}

TEST(NativeBaseTest, AMissingOrWrongLinkedFileIsFound) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  write_native(model(4), folder / "4");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  const std::string path = folder / ("2/" + linked_files(folder / "2").front());
  std::filesystem::remove(path);
  const auto reader = open_native(FileSystem::posix(), folder / "2");
  EXPECT_THAT(reader->find_missing_data().pieces, SizeIs(1));
  std::vector<Finding> findings = findings_of(folder / "2");
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_EQ(findings.front().where.path, path);
  std::filesystem::copy(folder / "4/rank-00000.h5", path);
  findings = findings_of(folder / "2");
  ASSERT_THAT(findings, SizeIs(1));
  EXPECT_THAT(findings.front().found, HasSubstr("checkpoint id"));
}

/// The index of a checkpoint of one tensor, which lies in the second of two linked files.
native::Index linked_index() {
  native::Index index;
  index.format_version = native::kLinkedVersion;
  index.chunk_nbytes = 65536;
  index.contents.edit().tensors = {
      {.meta = {"w", DType::float32, {4}}, .pieces = {{Box{{0}, {4}}, 0}}}};
  index.storage.add(1);
  index.storage.set(
      {0, 0},
      {.file = 2, .encoding = native::Encoding::plain, .begin = 5000, .checksum_or_table = 7});
  index.linked_places = {3};
  index.rank_files = {{.nbytes = 8192}};
  index.linked_files = {
      {.checkpoint_id = 5, .world_size = 1, .chunk_nbytes = 65536, .record = {.nbytes = 8192}},
      {.checkpoint_id = 6, .world_size = 1, .chunk_nbytes = 65536, .record = {.nbytes = 8192}}};
  return index;
}

native::Index decode(const std::vector<std::byte>& bytes) {
  native::FileHeader header;
  header.version = native::kLinkedVersion;
  header.world_size = 1;
  return native::decode_index(bytes, header, "index.h5");
}

TEST(NativeBaseTest, AnIndexThatNamesLinkedFilesWronglyIsRefused) {
  const native::Index sound = linked_index();
  EXPECT_EQ(decode(native::encode_index(sound)).linked_files, sound.linked_files);
  EXPECT_EQ(decode(native::encode_index(sound)).stored({0, 0}), sound.stored({0, 0}));
  EXPECT_EQ(decode(native::encode_index(sound)).linked_places, sound.linked_places);
  const auto refuses = [&](const std::string& text, const auto& change) {
    native::Index index = linked_index();
    change(index);
    EXPECT_THAT([&] { decode(native::encode_index(index)); },
                ThrowsError(ErrorKind::corruption, text));
  };
  refuses("linked files: expected files sorted by name, each once",
          [](auto& index) { std::swap(index.linked_files[0], index.linked_files[1]); });
  refuses("linked files", [](auto& index) { index.linked_files[1].checkpoint_id = 5; });
  refuses("world size of a linked file", [](auto& index) { index.linked_files[0].rank = 1; });
  refuses("version of a linked file",
          [](auto& index) { index.linked_files[0].format_version = 9; });
  refuses("chunk size", [](auto& index) { index.linked_files[0].chunk_nbytes = 0; });
  refuses("w: byte range: expected within [4096, 5001)",
          [](auto& index) { index.linked_files[1].record.nbytes = 5001; });
  std::vector<std::byte> bytes = native::encode_index(sound);
  const std::vector<std::byte> link = {std::byte{3}, std::byte{1}, std::byte{3}, std::byte{1}};
  const auto found = std::search(bytes.begin(), bytes.end(), link.begin(), link.end());
  ASSERT_NE(found, bytes.end());
  found[1] = std::byte{2};
  EXPECT_THAT([&] { decode(bytes); },
              ThrowsError(ErrorKind::corruption, "linked file: expected less than 2, found 2"));
}

TEST(NativeBaseTest, ABaseThatCannotServeIsRefused) {
  const TemporaryDirectory folder;
  FileSystem& fs = FileSystem::posix();
  write_native(model(1), folder / "1");
  EXPECT_THAT([&] { open_base_at(folder / "none"); }, ThrowsError(ErrorKind::not_found, "none"));
  EXPECT_THAT([&] { BaseCheckpoint::open(fs, folder / "1", *parse_format("dcp")); },
              ThrowsError(ErrorKind::unsupported, "native"));
  EXPECT_THAT([&] { check_base(fs, folder / "1", folder / "1/"); },
              ThrowsError(ErrorKind::invalid_argument, "the destination itself"));
  EXPECT_THAT([&] { check_base(fs, folder / "1", folder / "1/2"); },
              ThrowsError(ErrorKind::invalid_argument, "a folder that contains the destination"));
  std::filesystem::create_directory_symlink(folder / "1", folder / "link");
  EXPECT_THAT([&] { check_base(fs, folder / "link", folder / "1"); },
              ThrowsError(ErrorKind::invalid_argument, "the destination itself"));
  EXPECT_THAT([&] { check_base(fs, "/proc/self", folder / "2"); },
              ThrowsError(ErrorKind::invalid_argument, "a checkpoint on another file system"));
  write_file(folder / "1/index.h5", read_all(folder / "1/index.h5").substr(0, 5000));
  EXPECT_THAT([&] { open_base_at(folder / "1"); }, ThrowsError(ErrorKind::corruption, "index.h5"));
}

TEST(NativeBaseTest, ABaseThatIsRemovedOrReplacedDuringTheSaveIsNoticed) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  const NativeWriteOptions options = with_base(second, folder / "1");
  std::filesystem::remove_all(folder / "1");
  EXPECT_THAT([&] { write_native(second, folder / "2", options); },
              ThrowsError(ErrorKind::not_found, "has been removed since the base was opened"));
  write_native(model(4), folder / "1");
  EXPECT_THAT([&] { write_native(second, folder / "2", options); },
              ThrowsError(ErrorKind::mismatch, "has changed since the base was opened"));
  EXPECT_FALSE(std::filesystem::exists(folder / "2"));
  EXPECT_FALSE(std::filesystem::exists(folder / "2.partial"));
}

TEST(NativeBaseTest, RemovingOlderCheckpointsLeavesTheOthersWhole) {
  const TemporaryDirectory folder;
  std::string last;
  for (int step = 1; step <= 5; ++step) {
    const MemoryCheckpoint source = model(static_cast<std::uint64_t>(step));
    const std::string path = folder / ("step-" + std::to_string(step));
    write_native(source, path, last.empty() ? NativeWriteOptions{} : with_base(source, last));
    keep_last(FileSystem::posix(), folder.path(), 2, last_component(path));
    last = path;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "step-3"));
  expect_holds(folder / "step-4", model(4));
  expect_holds(folder / "step-5", model(5));
}

TEST(NativeBaseTest, ACheckpointReplacesAnEarlierOneOfItsSeries) {
  const TemporaryDirectory folder;
  write_native(model(1), folder / "1");
  const MemoryCheckpoint second = model(2);
  write_native(second, folder / "2", with_base(second, folder / "1"));
  const MemoryCheckpoint third = model(3);
  write_native(third, folder / "1", with_base(third, folder / "2"), 1, OverwritePolicy::replace);
  expect_holds(folder / "1", third);
  expect_holds(folder / "2", second);
}

}  // namespace
}  // namespace tessera::formats

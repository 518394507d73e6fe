// Patched pieces of native checkpoints ([Note: Patched pieces]).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "formats/native/index.h"
#include "formats/native/native_checkpoint.h"
#include "formats/native/rank_file.h"
#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/formats/base_checkpoint.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/parts.h"
#include "tessera/reshard/base_comparison.h"
#include "tessera/reshard/planner.h"

namespace tessera::formats {
namespace {

using namespace tessera::test;
using reshard::RowChanges;
using test::linked_files;
using test::open_base_at;
using test::version_of;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr std::int64_t kTableRows = 20'000;
constexpr std::int64_t kTableColumns = 9;

/// A table, its state of one element for each row, and a layer that always changes, on two ranks.
class Model {
 public:
  Model()
      : random_(77),
        table_(weight_like_bytes(kTableRows * kTableColumns * 4, 4, random_)),
        state_(random_bytes(kTableRows * 4, random_)),
        layer_(random_bytes(50'000, random_)) {}

  /// Changes up to `num_rows` random rows of the table and of its state, and all of the layer.
  void train(std::int64_t num_rows) {
    for (std::int64_t i = 0; i < num_rows; ++i) {
      const std::int64_t row = random_.between(0, kTableRows);
      ++reinterpret_cast<unsigned char&>(table_[static_cast<std::size_t>(
          row * kTableColumns * 4 + random_.between(0, kTableColumns * 4))]);
      ++reinterpret_cast<unsigned char&>(state_[static_cast<std::size_t>(row * 4)]);
    }
    layer_ = random_bytes(layer_.size(), random_);
  }
  void change_all_rows() {
    for (std::byte& byte : table_) byte ^= std::byte{1};
    for (std::byte& byte : state_) byte ^= std::byte{1};
  }

  MemoryCheckpoint checkpoint() const {
    MemoryCheckpoint checkpoint("model", 2);
    const std::int64_t cut = kTableRows / 2 + 3;
    checkpoint.add({"table", DType::float32, {kTableRows, kTableColumns}}, table_,
                   {{Box{{0, 0}, {cut, kTableColumns}}, 0},
                    {Box{{cut, 0}, {kTableRows - cut, kTableColumns}}, 1}});
    checkpoint.add({"table_state", DType::float32, {kTableRows}}, state_,
                   {{Box{{0}, {kTableRows}}, 1}});
    checkpoint.add({"layer", DType::uint8, {50'000}}, layer_, {{Box{{0}, {50'000}}, 0}});
    checkpoint.add_alias("tied", "table");
    std::ranges::sort(checkpoint.contents_for_change().tensors, {},
                      [](const auto& tensor) { return tensor.meta.fqn; });
    return checkpoint;
  }

 private:
  mutable Random random_;
  Bytes table_;
  Bytes state_;
  Bytes layer_;
};

/// Options for a checkpoint with a base, as a move makes them.
NativeWriteOptions with_patched_base(const CheckpointReader& source, const std::string& base_path,
                                     RowChanges row_changes = RowChanges::write_rows,
                                     NativeWriteOptions options = {}) {
  const auto base = open_base_at(base_path);
  const reshard::Plan plan = reshard::plan_reshard(source.contents(), "model", {});
  options.linked =
      link_pieces(base, source.contents(),
                  reshard::find_equal_pieces(plan, source, *base, row_changes, {.num_threads = 2}));
  return options;
}

/// Writes the model's checkpoint `step` into the folder, with the one before as its base. Returns
/// what was written.
MemoryCheckpoint write_step(const Model& model, const TemporaryDirectory& folder, int step) {
  MemoryCheckpoint checkpoint = model.checkpoint();
  write_native(checkpoint, folder / std::to_string(step),
               with_patched_base(checkpoint, folder / std::to_string(step - 1)));
  return checkpoint;
}

native::Index index_of(const std::string& path) {
  return native::open_native_checkpoint(FileSystem::posix(), path)->index();
}

/// Returns each patched piece, as the name of its tensor and its index: `table 1`.
std::vector<std::string> patched(const std::string& path) {
  const native::Index index = index_of(path);
  std::vector<std::string> names;
  for (const auto& [id, patch] : index.patches) {
    names.push_back(index.contents->tensors[id.tensor_index].meta.fqn + " " +
                    std::to_string(id.piece_index));
  }
  return names;
}

std::uint64_t own_nbytes(const std::string& path) {
  std::uint64_t nbytes = 0;
  for (const auto& [name, bytes] : files_of(path)) {
    if (!name.starts_with("base-")) nbytes += bytes.size();
  }
  return nbytes;
}

TEST(NativePatchTest, ChangedRowsAreWrittenAlone) {
  for (const NativeWriteOptions& options : {NativeWriteOptions{}, zstd_options()}) {
    const TemporaryDirectory folder;
    Model model;
    write_native(model.checkpoint(), folder / "1", options);
    model.train(200);
    const MemoryCheckpoint second = model.checkpoint();
    write_native(second, folder / "2",
                 with_patched_base(second, folder / "1", RowChanges::write_rows, options), 3);
    expect_holds(folder / "2", second);
    EXPECT_THAT(patched(folder / "2"), testing::ElementsAre("table 0", "table 1", "table_state 0"));
    EXPECT_EQ(version_of(folder / "2/index.h5"), 4u);
    EXPECT_EQ(version_of(folder / "2/rank-00001.h5"), 4u);
    EXPECT_THAT(linked_files(folder / "2"), SizeIs(2));
    EXPECT_LT(own_nbytes(folder / "2"), 170'000u);  // 50,000 of them are the layer
  }
}

TEST(NativePatchTest, WithoutTheOptionPiecesAreWrittenWhole) {
  const TemporaryDirectory folder;
  Model model;
  write_native(model.checkpoint(), folder / "1");
  model.train(200);
  const MemoryCheckpoint second = model.checkpoint();
  write_native(second, folder / "2",
               with_patched_base(second, folder / "1", RowChanges::write_piece));
  expect_holds(folder / "2", second);
  EXPECT_THAT(patched(folder / "2"), IsEmpty());
  EXPECT_EQ(version_of(folder / "2/index.h5"), 1u);
}

TEST(NativePatchTest, ASeriesPatchesThePiecesThatAreStoredWhole) {
  const TemporaryDirectory folder;
  Model model;
  write_native(model.checkpoint(), folder / "1");
  std::vector<std::string> files_of_first;
  std::string last = folder / "1";
  for (int step = 2; step <= 6; ++step) {
    model.train(150);
    const MemoryCheckpoint source = model.checkpoint();
    const std::string path = folder / std::to_string(step);
    write_native(source, path, with_patched_base(source, last));
    expect_holds(path, source);
    EXPECT_THAT(patched(path), SizeIs(3));
    // No file of the checkpoints between is needed.
    if (step == 2) files_of_first = linked_files(path);
    EXPECT_EQ(linked_files(path), files_of_first);
    if (step > 2) std::filesystem::remove_all(last);
    last = path;
  }
  std::filesystem::remove_all(folder / "1");
  expect_holds(last, model.checkpoint());
}

TEST(NativePatchTest, AnEqualCheckpointKeepsThePatchOfItsBase) {
  const TemporaryDirectory folder;
  Model model;
  write_native(model.checkpoint(), folder / "1");
  model.train(150);
  const MemoryCheckpoint second = write_step(model, folder, 2);
  write_native(second, folder / "3", with_patched_base(second, folder / "2"));
  expect_holds(folder / "3", second);
  EXPECT_EQ(patched(folder / "3"), patched(folder / "2"));
  // Rows that have their old values again need no patch.
  const MemoryCheckpoint first = Model().checkpoint();
  write_native(first, folder / "4", with_patched_base(first, folder / "3"));
  expect_holds(folder / "4", first);
  EXPECT_THAT(patched(folder / "4"), IsEmpty());
  EXPECT_THAT(linked_files(folder / "4"), SizeIs(2));
}

TEST(NativePatchTest, TablesThatChangeMuchAreWrittenWholeAndThenPatchedAgain) {
  const TemporaryDirectory folder;
  Model model;
  write_native(model.checkpoint(), folder / "1");
  model.train(150);
  const MemoryCheckpoint second = write_step(model, folder, 2);
  model.change_all_rows();
  const MemoryCheckpoint third = write_step(model, folder, 3);
  expect_holds(folder / "3", third);
  EXPECT_THAT(patched(folder / "3"), IsEmpty());
  model.train(150);
  const MemoryCheckpoint fourth = write_step(model, folder, 4);
  expect_holds(folder / "4", fourth);
  EXPECT_THAT(patched(folder / "4"), SizeIs(3));
}

TEST(NativePatchTest, AFileWithPatchesIsLinkedForItsWholePieces) {
  // The second checkpoint has a patch and a large whole piece in one file. The third links that
  // file.
  const TemporaryDirectory folder;
  Random random(5);
  Bytes table = random_bytes(500'000, random);
  Bytes dense = random_bytes(400'000, random);
  const auto checkpoint = [&] {
    MemoryCheckpoint made("model", 1);
    made.add({"dense", DType::uint8, {400'000}}, dense);
    made.add({"table", DType::uint8, {5'000, 100}}, table);
    return made;
  };
  write_native(checkpoint(), folder / "1");
  dense = random_bytes(400'000, random);
  table[1234] ^= std::byte{1};
  const MemoryCheckpoint second = checkpoint();
  write_native(second, folder / "2", with_patched_base(second, folder / "1"));
  EXPECT_THAT(patched(folder / "2"), testing::ElementsAre("table 0"));
  table[1234] ^= std::byte{1};
  const MemoryCheckpoint third = checkpoint();
  write_native(third, folder / "3",
               with_patched_base(third, folder / "2", RowChanges::write_piece));
  expect_holds(folder / "3", third);
  EXPECT_THAT(patched(folder / "3"), IsEmpty());
  EXPECT_THAT(linked_files(folder / "3"), SizeIs(2));
  EXPECT_EQ(version_of(folder / "3/index.h5"), 4u);  // because of the file with a patch
}

TEST(NativePatchTest, APatchOfAFileThatIsMostlyUnusedIsNotWorthALink) {
  const TemporaryDirectory folder;
  Random random(5);
  Bytes table = random_bytes(400'000, random);
  const auto checkpoint = [&] {
    MemoryCheckpoint made("model", 1);
    made.add({"dense", DType::uint8, {500'000}}, random_bytes(500'000, random));
    made.add({"table", DType::uint8, {4'000, 100}}, table);
    return made;
  };
  write_native(checkpoint(), folder / "1");
  table[1234] ^= std::byte{1};
  const MemoryCheckpoint second = checkpoint();
  const NativeWriteOptions options = with_patched_base(second, folder / "1");
  EXPECT_EQ(options.linked, nullptr);
  write_native(second, folder / "2", options);
  expect_holds(folder / "2", second);
  EXPECT_EQ(version_of(folder / "2/index.h5"), 1u);
}

TEST(NativePatchTest, PatchesOfFilesThatAreNotLinkedAreLeftOut) {
  // The first rank's file is worth a link, the second's is not.
  const TemporaryDirectory folder;
  Random random(5);
  Bytes table = random_bytes(400'000, random);
  const auto checkpoint = [&] {
    MemoryCheckpoint made("model", 2);
    made.add({"dense", DType::uint8, {500'000}}, random_bytes(500'000, random),
             {{Box{{0}, {500'000}}, 1}});
    made.add({"table", DType::uint8, {4'000, 100}}, table,
             {{Box{{0, 0}, {2'000, 100}}, 0}, {Box{{2'000, 0}, {2'000, 100}}, 1}});
    return made;
  };
  write_native(checkpoint(), folder / "1");
  table[1234] ^= std::byte{1};
  table[391'234] ^= std::byte{1};
  const MemoryCheckpoint second = checkpoint();
  write_native(second, folder / "2", with_patched_base(second, folder / "1"));
  expect_holds(folder / "2", second);
  EXPECT_THAT(patched(folder / "2"), testing::ElementsAre("table 0"));
  EXPECT_THAT(linked_files(folder / "2"), SizeIs(1));
}

TEST(NativePatchTest, AnyRangeOfAPatchedPieceIsRead) {
  const TemporaryDirectory folder;
  Model model;
  write_native(model.checkpoint(), folder / "1", zstd_options());
  model.train(900);
  const MemoryCheckpoint second = write_step(model, folder, 2);
  const auto reader = open_native(FileSystem::posix(), folder / "2");
  Random random(3);
  const auto& tensors = second.contents().tensors;
  for (int i = 0; i < 400; ++i) {
    const auto t = static_cast<std::size_t>(random.between(1, 3));
    const auto p = static_cast<std::size_t>(
        random.between(0, static_cast<std::int64_t>(tensors[t].pieces.size())));
    const std::int64_t numel = numel_of(tensors[t].pieces[p].region);
    FlatRange range{random.between(0, numel), 0};
    range.end = std::min(
        numel, range.begin + (random.flip() ? random.between(0, 30) : random.between(0, numel)));
    Bytes found(static_cast<std::size_t>(range.numel()) * 4);
    Bytes wanted(found.size());
    reader->read_piece(t, p, range, found);
    second.read_piece(t, p, range, wanted);
    ASSERT_EQ(found, wanted) << tensors[t].meta.fqn << " " << p << " " << range.begin << " "
                             << range.end;
  }
}

TEST(NativePatchTest, PatchesOfManyBlocksOfNumbers) {
  // 30,000 of 400,000 rows: four blocks of numbers, and blocks of rows that several blocks of the
  // piece share.
  const TemporaryDirectory folder;
  Random random(9);
  Bytes table = random_bytes(400'000 * 8, random);
  const auto checkpoint = [&] {
    MemoryCheckpoint made("model", 1);
    made.add({"table", DType::int16, {400'000, 2, 2}}, table);
    return made;
  };
  NativeWriteOptions options;
  options.plain_block_nbytes = 65536;
  write_native(checkpoint(), folder / "1", options);
  for (int i = 0; i < 30'000; ++i) {
    ++reinterpret_cast<unsigned char&>(
        table[static_cast<std::size_t>(random.between(0, 3'200'000))]);
  }
  const MemoryCheckpoint second = checkpoint();
  write_native(second, folder / "2",
               with_patched_base(second, folder / "1", RowChanges::write_rows, options), 4);
  EXPECT_THAT(patched(folder / "2"), SizeIs(1));
  expect_holds(folder / "2", second);
  write_native(second, folder / "alone",
               with_patched_base(second, folder / "1", RowChanges::write_rows, options), 1);
  EXPECT_EQ(files_of(folder / "2"), files_of(folder / "alone"));
}

TEST(NativePatchTest, TheIndexIsRebuiltByteForByte) {
  const TemporaryDirectory folder;
  Model model;
  write_native(model.checkpoint(), folder / "1");
  model.train(150);
  const MemoryCheckpoint second = write_step(model, folder, 2);
  const auto before = files_of(folder / "2");
  std::filesystem::remove(folder / "2/index.h5");
  rebuild_native_index(FileSystem::posix(), folder / "2");
  EXPECT_EQ(files_of(folder / "2"), before);
}

TEST(NativePatchTest, RanksTogetherWriteTheFilesThatOneWriterDoes) {
  const TemporaryDirectory folder;
  FileSystem& fs = FileSystem::posix();
  Model model;
  write_native(model.checkpoint(), folder / "1");
  model.train(150);
  const MemoryCheckpoint second = model.checkpoint();
  const NativeWriteOptions whole = with_patched_base(second, folder / "1");
  write_native(second, folder / "alone", whole);
  fs.make_directory(folder / "together");
  // A rank knows the rows of its own pieces only.
  const auto options_of = [&](int rank) {
    auto linked = std::make_shared<LinkedPieces>(*whole.linked);
    for (auto& [id, rows] : linked->changed_rows) {
      const Piece& piece = second.contents().tensors[id.tensor_index].pieces[id.piece_index];
      if (piece.rank != rank) rows = RowSet(rows.num_rows());
    }
    return PartOptions{.format = Format::native, .native = {.linked = std::move(linked)}};
  };
  for (int rank = 0; rank < 2; ++rank) {
    write_all(second,
              *create_part(fs, folder / "together", second.contents(), {}, rank, options_of(rank)));
  }
  const std::uint64_t token =
      join_parts(fs, folder / "together", second.contents(), {}, options_of(0));
  for (int rank = 0; rank < 2; ++rank) {
    seal_part(fs, folder / "together", rank, token, options_of(rank));
  }
  finish_parts(fs, folder / "together", second.contents(), {}, options_of(0));
  EXPECT_EQ(files_of(folder / "together"), files_of(folder / "alone"));
}

TEST(NativePatchTest, RemovingOlderCheckpointsLeavesTheOthersWhole) {
  const TemporaryDirectory folder;
  Model model;
  std::string last;
  for (int step = 1; step <= 5; ++step) {
    model.train(100);
    const MemoryCheckpoint source = model.checkpoint();
    const std::string path = folder / ("step-" + std::to_string(step));
    write_native(source, path,
                 last.empty() ? NativeWriteOptions{} : with_patched_base(source, last));
    keep_last(FileSystem::posix(), folder.path(), 2, last_component(path));
    last = path;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "step-3"));
  EXPECT_THAT(findings_of(folder / "step-4"), IsEmpty());
  expect_holds(folder / "step-5", model.checkpoint());
}

TEST(NativePatchTest, MissingFilesOfAPatchedPieceAreNamed) {
  const TemporaryDirectory folder;
  Model model;
  write_native(model.checkpoint(), folder / "1");
  model.train(100);
  const MemoryCheckpoint second = write_step(model, folder, 2);
  std::filesystem::remove(folder / "2/rank-00001.h5");
  const auto reader = open_native(FileSystem::posix(), folder / "2");
  const MissingData missing = reader->find_missing_data();
  ASSERT_THAT(missing.pieces, SizeIs(2));  // of table and table_state
  EXPECT_EQ(missing.pieces.at(1), (MissingData::Pieces{{1, "rank-00001.h5"}}));
  EXPECT_THAT([&] { whole_tensor(*reader, 1); },
              ThrowsError(ErrorKind::corruption, "rank-00001.h5: rank file: expected a file"));
}

/// A checkpoint with a patch of the rows 5, 9 and 1000 of a table of 2,000 rows of 64 bytes.
class DamagedPatchTest : public ::testing::Test {
 protected:
  DamagedPatchTest() {
    Random random(1);
    Bytes table = random_bytes(128'000, random);
    write(table, "1", {});
    for (const std::size_t row : {5U, 9U, 1000U}) table[row * 64] ^= std::byte{1};
    MemoryCheckpoint second = checkpoint(table);
    write_native(second, folder_ / "2", with_patched_base(second, folder_ / "1"));
    patch_ = index_of(folder_ / "2").patches.begin()->second;
    sound_ = read_all(path_);
  }

  static MemoryCheckpoint checkpoint(const Bytes& table) {
    MemoryCheckpoint made("model", 1);
    made.add({"table", DType::int32, {2'000, 16}}, table);
    return made;
  }
  void write(const Bytes& table, const std::string& name, const NativeWriteOptions& options) {
    write_native(checkpoint(table), folder_ / name, options);
  }

  /// Changes a byte of the file with the patch.
  void flip(std::uint64_t at) {
    std::string bytes = sound_;
    bytes[at] ^= 1;
    write_file(path_, bytes);
  }
  /// Replaces the row numbers in the patch, and corrects all checksums.
  void set_numbers(const std::vector<std::uint64_t>& numbers) {
    ASSERT_EQ(numbers.size(), 3u);
    const std::string_view new_numbers(reinterpret_cast<const char*>(numbers.data()), 24);
    std::string bytes = sound_;
    bytes.replace(patch_.numbers.begin, 24, new_numbers);
    write_file(path_, bytes);
    // The checksum of the only block is in both indexes. The id of the checkpoint is the checksum
    // of the index.
    native::Index index = index_of(folder_ / "2");
    index.patches.begin()->second.numbers.checksum_or_table =
        xxh3_64(std::as_bytes(std::span(new_numbers)));
    rewrite(index);
  }

  void rewrite(native::Index& index) {
    const std::vector<native::PieceId> pieces = {{0, 0}};
    const native::StoredPatch& patch = index.patches.begin()->second;
    std::vector<ByteRange> data_ranges;
    for (const native::StoredPiece& part : {patch.numbers, patch.rows}) {
      data_ranges.push_back({part.begin, part.begin + part.stored_nbytes});
    }
    replace_index(path_, encode_index(select_pieces(index, pieces)), data_ranges,
                  index.rank_files[0]);
    const std::uint64_t id =
        replace_index(folder_ / "2/index.h5", encode_index(index), {}, index.rank_files[0]);
    for (const char* const name : {"2/index.h5", "2/rank-00000.h5"}) {
      native::FileHeader header = native::read_header(*FileSystem::posix().open(folder_ / name));
      header.checkpoint_id = id;
      native::write_header(FileSystem::posix(), folder_ / name, header);
    }
  }

  /// Puts an index of the same size into a file. Returns its checksum.
  static std::uint64_t replace_index(const std::string& path, const std::vector<std::byte>& index,
                                     const std::vector<ByteRange>& data_ranges,
                                     native::RankFileRecord& record) {
    native::FileHeader header = native::read_header(*FileSystem::posix().open(path));
    EXPECT_EQ(index.size(), header.index_range.nbytes());
    std::string bytes = read_all(path);
    bytes.replace(header.index_range.begin, index.size(),
                  reinterpret_cast<const char*>(index.data()), index.size());
    write_file(path, bytes);
    header.index_checksum = xxh3_64(index);
    header.structure_checksum =
        native::structure_checksum(*FileSystem::posix().open(path), data_ranges);
    if (header.role == native::FileRole::rank) {
      record.index_checksum = header.index_checksum;
      record.structure_checksum = header.structure_checksum;
    }
    if (header.role == native::FileRole::index) header.checkpoint_id = header.index_checksum;
    native::write_header(FileSystem::posix(), path, header);
    return header.index_checksum;
  }

  std::uint64_t open_id() {
    return native::open_native_checkpoint(FileSystem::posix(), folder_ / "2")->checkpoint_id();
  }
  void expect_refused(const std::string& text) {
    EXPECT_THAT([&] { whole_tensor(*open_native(FileSystem::posix(), folder_ / "2"), 0); },
                ThrowsError(ErrorKind::corruption, text));
  }
  void expect_found(const std::string& rule, const std::string& found) {
    const auto findings = findings_of(folder_ / "2");
    ASSERT_FALSE(findings.empty());
    EXPECT_EQ(findings.front().where.path, path_);
    EXPECT_EQ(findings.front().where.fqn, "table");
    EXPECT_EQ(findings.front().rule, rule);
    EXPECT_THAT(findings.front().found, testing::HasSubstr(found));
  }

  const TemporaryDirectory folder_;
  const std::string path_ = folder_ / "2/rank-00000.h5";
  native::StoredPatch patch_;
  std::string sound_;
};

TEST_F(DamagedPatchTest, ChangedBytesAreFound) {
  ASSERT_EQ(patch_.num_rows, 3u);
  EXPECT_THAT(findings_of(folder_ / "2"), IsEmpty());
  flip(patch_.numbers.begin);
  expect_refused("rank-00000.h5: table: bytes");
  expect_found("checksum", "");
  flip(patch_.rows.begin + 100);
  expect_refused("rank-00000.h5: table: bytes");
  expect_found("checksum", "");
}

TEST_F(DamagedPatchTest, NumbersOfRowsThatAreWrongAreRefused) {
  set_numbers({5, 9, 1999});
  EXPECT_NO_THROW(whole_tensor(*open_native(FileSystem::posix(), folder_ / "2"), 0));
  set_numbers({5, 9, 2000});
  expect_refused("row of a patch: expected a number of at least 10 and below 2000, found 2000");
  expect_found("structure", "found 2000");
  set_numbers({9, 5, 1000});
  expect_refused("table: bytes");
  expect_refused("row of a patch: expected a number of at least 10 and below 2000, found 5");
  set_numbers({5, 5, 1000});
  expect_refused("row of a patch: expected a number of at least 6 and below 2000, found 5");
}

TEST_F(DamagedPatchTest, TheIndexIsRebuiltAllTheSame) {
  const auto is_hidden = [&] {
    return read_all(folder_ / "2/index.h5").find("which are damaged") != std::string::npos;
  };
  const std::uint64_t id = open_id();
  flip(patch_.numbers.begin);
  EXPECT_FALSE(is_hidden());
  rebuild_native_index(FileSystem::posix(), folder_ / "2");
  EXPECT_TRUE(is_hidden());
  EXPECT_EQ(open_id(), id);
  expect_found("checksum", "");
}

TEST_F(DamagedPatchTest, MissingBytesAreFound) {
  write_file(path_, sound_.substr(0, patch_.rows.begin + 10));
  expect_refused("rank-00000.h5");
  EXPECT_FALSE(findings_of(folder_ / "2").empty());
}

TEST_F(DamagedPatchTest, AnIndexWithAWrongPatchIsRefused) {
  const native::Index sound = index_of(folder_ / "2");
  const auto refuses = [&](const std::string& text, const auto& change) {
    native::Index index = sound;
    change(index.patches.begin()->second);
    native::FileHeader header;
    header.version = native::kPatchedVersion;
    header.world_size = 1;
    EXPECT_THAT([&] { decode_index(encode_index(index), header, "index.h5"); },
                ThrowsError(ErrorKind::corruption, text));
  };
  refuses("rows of the patch of table: expected 1 to 2000, found 0",
          [](native::StoredPatch& patch) { patch.num_rows = 0; });
  refuses("rows of the patch of table: expected 1 to 2000, found 2001",
          [](native::StoredPatch& patch) { patch.num_rows = 2001; });
  refuses("table: byte range of a patch: expected within",
          [&](native::StoredPatch& patch) { patch.rows.begin = sound.rank_files[0].nbytes - 191; });
  refuses("table: byte range of a patch: expected within",
          [](native::StoredPatch& patch) { patch.numbers.begin = 4095; });
  native::Index flat = sound;
  flat.contents.edit().tensors[0].pieces = {{FlatRange{0, 32'000}, 0}};
  native::FileHeader header;
  header.version = native::kPatchedVersion;
  header.world_size = 1;
  EXPECT_THAT([&] { decode_index(encode_index(flat), header, "index.h5"); },
              ThrowsError(ErrorKind::corruption,
                          "patched piece of table: expected a box of two or more rows"));
  header.version = native::kLinkedVersion;
  EXPECT_THAT([&] { decode_index(encode_index(sound), header, "index.h5"); },
              ThrowsError(ErrorKind::corruption, "encoding: expected 0 to 2, found 4"));
}

}  // namespace
}  // namespace tessera::formats

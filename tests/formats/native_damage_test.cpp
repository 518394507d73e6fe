#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "base/digest.h"
#include "formats/native/byte_stream.h"
#include "formats/native/file_header.h"
#include "formats/native/index.h"
#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/memory_files.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"

namespace tessera::formats {
namespace {

using namespace tessera::test;
using test::kSampleStep;
using testing::HasSubstr;

const std::string kPath = "checkpoint";

std::map<std::string, std::string> written(const CheckpointReader& source,
                                           const NativeWriteOptions& options = {}) {
  TemporaryDirectory directory;
  write_native(source, directory / "c", options);
  return files_of(directory / "c");
}

std::vector<Finding> verify(const FileSystem& fs) {
  std::vector<Finding> findings;
  open_native(fs, kPath)->verify([&](const Finding& finding) { findings.push_back(finding); }, {});
  return findings;
}

/// Reads every piece. Returns the errors of the reads that failed, by name of the tensor.
std::map<std::string, std::string> failing_reads(const FileSystem& fs) {
  std::map<std::string, std::string> failures;
  const auto reader = open_native(fs, kPath);
  for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
    const TensorEntry& tensor = reader->contents().tensors[t];
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      const std::int64_t numel = numel_of(tensor.pieces[p].region);
      Bytes bytes(static_cast<std::size_t>(numel) * itemsize(tensor.meta.dtype));
      try {
        reader->read_piece(t, p, {0, numel}, bytes);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::corruption) << error.what();
        failures[tensor.meta.fqn] = error.what();
      }
    }
  }
  return failures;
}

/// A checkpoint of two ranks. Each has one half of the first tensor.
MemoryCheckpoint halves() {
  MemoryCheckpoint source("halves", 2);
  source.add({"a", DType::float32, {4}}, bytes_of<float>({1, 2, 3, 4}),
             {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}});
  source.add({"b", DType::float32, {1}}, bytes_of<float>({5}));
  source.add_value("step", Value(3));
  return source;
}

TEST(NativeDamageTest, FindsWhatLiesInLostRankFiles) {
  MemoryFiles fs(kPath, written(halves()));
  EXPECT_TRUE(open_native(fs, kPath)->find_missing_data().pieces.empty());
  fs.remove("rank-00001.h5");
  const MissingData missing = open_native(fs, kPath)->find_missing_data();
  EXPECT_EQ(missing.pieces,
            (std::map<std::size_t, MissingData::Pieces>{{0, {{1, "rank-00001.h5"}}}}));
  EXPECT_TRUE(missing.values.empty());
}

MemoryCheckpoint tiny_checkpoint() {
  Random random;
  MemoryCheckpoint source("tiny", 1);
  source.add({"w", DType::bfloat16, {40'000}}, weight_like_bytes(80'000, 2, random));
  source.add({"b", DType::float32, {3}}, bytes_of<float>({1, 2, 3}));
  source.add_value("step", Value(3));
  return source;
}

TEST(NativeDamageTest, EveryFlippedBitOfSmallFilesIsFound) {
  MemoryFiles fs(kPath, written(small_checkpoint()));
  ASSERT_TRUE(verify(fs).empty());
  const auto sound = fs.files();
  for (const std::string name : {"index.h5", "rank-00000.h5", "rank-00002.h5"}) {
    std::string& bytes = fs[name];
    for (std::size_t i = 0; i < bytes.size(); i += kSampleStep) {
      bytes[i] = static_cast<char>(bytes[i] ^ (1 << (i % 8)));
      try {
        ASSERT_FALSE(verify(fs).empty()) << name << " byte " << i;
      } catch (const Error& error) {
        ASSERT_EQ(name, "index.h5") << i;  // only a damaged index makes opening fail
        ASSERT_TRUE(error.kind() == ErrorKind::corruption || error.kind() == ErrorKind::unsupported)
            << error.what();
      }
      bytes[i] = sound.at(name)[i];
    }
  }
}

TEST(NativeDamageTest, AFlippedBitOfDataIsFoundByReadingAndNamed) {
  for (const bool compress : {false, true}) {
    SCOPED_TRACE(compress ? "zstd" : "plain");
    NativeWriteOptions options;
    options.chunk_nbytes = 65536;
    if (compress) options.compression = NativeWriteOptions::Compression::zstd;
    const MemoryCheckpoint source = tiny_checkpoint();
    MemoryFiles fs(kPath, written(source, options));
    const auto reader = open_native(fs, kPath);
    ASSERT_EQ(reader->piece_storage(1, 0).encoding, compress ? "zstd" : "plain");
    const auto b_range = reader->piece_storage(0, 0).byte_range;
    ASSERT_TRUE(b_range);
    std::string& bytes = fs["rank-00000.h5"];
    const std::string sound = bytes;

    bytes[b_range->begin + 5] ^= 4;
    auto failures = failing_reads(fs);
    ASSERT_EQ(failures.size(), 1);
    EXPECT_THAT(failures["b"],
                HasSubstr("checkpoint/rank-00000.h5: b: bytes [" + std::to_string(b_range->begin) +
                          ", " + std::to_string(b_range->end) + "): checksum: expected 0x"));
    bytes = sound;

    // The data of w comes after the structure, which comes first in the file.
    Random random;
    int num_found = 0;
    for (int i = 0; i < 300; ++i) {
      const auto at =
          static_cast<std::size_t>(random.between(4096, static_cast<std::int64_t>(bytes.size())));
      bytes[at] = static_cast<char>(bytes[at] ^ 0x10);
      const auto findings = verify(fs);
      ASSERT_FALSE(findings.empty()) << at;
      const auto failing = failing_reads(fs);
      num_found += failing.contains("w") ? 1 : 0;
      for (const Finding& finding : findings) {
        if (finding.rule != "checksum") continue;
        EXPECT_TRUE(failing.contains(finding.where.fqn)) << finding.where.fqn << " " << at;
        // If a checksum in a chunk table is damaged, verify reports its block and the structure.
        if (findings.back().rule == "structure") continue;
        ASSERT_TRUE(finding.where.byte_range);
        EXPECT_LE(finding.where.byte_range->begin, at);
        EXPECT_GT(finding.where.byte_range->end, at);
      }
      bytes[at] = sound[at];
    }
    EXPECT_GT(num_found, 200);
  }
}

TEST(NativeDamageTest, VerifyGoesOnAfterDamageAndNamesAllOfIt) {
  MemoryFiles fs(kPath, written(small_checkpoint()));
  const auto reader = open_native(fs, kPath);
  const auto flip = [&](std::size_t t, std::size_t p) {
    const PieceStorage storage = reader->piece_storage(t, p);
    fs[storage.file][storage.byte_range->begin] ^= 1;
  };
  flip(2, 1);  // layers.0.weight on rank 1
  flip(3, 0);  // optim.… on rank 0
  flip(4, 1);  // step on rank 0
  fs.remove("rank-00002.h5");
  std::vector<std::string> found;
  for (const Finding& finding : verify(fs)) {
    found.push_back(finding.where.path + "|" + finding.where.fqn + "|" + finding.rule);
  }
  EXPECT_THAT(found, testing::ElementsAre(
                         "checkpoint/rank-00000.h5|optim.state.layers.0.weight.exp_avg|checksum",
                         "checkpoint/rank-00000.h5|step|checksum",
                         "checkpoint/rank-00001.h5|layers.0.weight|checksum",
                         "checkpoint/rank-00002.h5||structure"));
}

TEST(NativeDamageTest, WhatChangedOutsideOfTensorsIsSaidInWords) {
  MemoryFiles fs(kPath, written(small_checkpoint()));
  for (const char* name : {"index.h5", "rank-00001.h5"}) {
    std::string& bytes = fs[name];
    bytes[5000] ^= 1;
    const auto findings = verify(fs);
    bytes[5000] ^= 1;
    ASSERT_EQ(findings.size(), 1U) << name;
    EXPECT_THAT(finding_to_string(findings[0]),
                testing::MatchesRegex(
                    "checkpoint/.*: structure: expected unchanged bytes outside of tensor data, "
                    "with checksum 0x[0-9a-f]+, found changed bytes, with checksum 0x[0-9a-f]+"));
  }
}

TEST(NativeDamageTest, VerifyUsesNoMoreThreadsThanAllowed) {
  const MemoryFiles fs(kPath, written(small_checkpoint()));
  std::mutex mutex;
  std::set<std::thread::id> threads;
  const auto progress = [&](std::uint64_t) {
    {
      const std::scoped_lock lock(mutex);
      threads.insert(std::this_thread::get_id());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // lets other threads begin
  };
  open_native(fs, kPath)->verify([](const Finding&) {}, progress, 1);
  EXPECT_THAT(threads, testing::ElementsAre(std::this_thread::get_id()));
}

TEST(NativeDamageTest, ADamagedHeaderDoesNotHideTheDataBehindIt) {
  MemoryFiles fs(kPath, written(small_checkpoint()));
  const PieceStorage storage = open_native(fs, kPath)->piece_storage(2, 0);
  fs["rank-00000.h5"][24] ^= 1;
  fs["rank-00000.h5"][storage.byte_range->begin] ^= 1;
  std::vector<std::string> found;
  for (const Finding& finding : verify(fs)) found.push_back(finding.rule + finding.where.fqn);
  EXPECT_THAT(found, testing::ElementsAre("structure", "checksumlayers.0.weight"));
}

TEST(NativeDamageTest, TruncationAtAnyBoundaryIsRefusedWithBothSizes) {
  const auto sound = written(small_checkpoint());
  for (const std::string name : {"index.h5", "rank-00000.h5"}) {
    MemoryFiles fs(kPath, sound);
    const std::size_t nbytes = sound.at(name).size();
    for (std::size_t cut :
         {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{71},
          std::size_t{4095}, std::size_t{4096}, std::size_t{4097}, nbytes / 2, nbytes - 1}) {
      SCOPED_TRACE(name + " cut at " + std::to_string(cut));
      fs[name] = sound.at(name).substr(0, cut);
      if (name == "index.h5") {
        EXPECT_THAT([&] { open_native(fs, kPath); },
                    ThrowsError(ErrorKind::corruption, std::to_string(cut) + " bytes"));
      } else {
        EXPECT_FALSE(verify(fs).empty());
        const auto failures = failing_reads(fs);
        EXPECT_TRUE(failures.contains("layers.0.weight"));
        EXPECT_THAT(failures.at("layers.0.weight"), HasSubstr(std::to_string(cut) + " bytes"));
      }
    }
    fs[name] = sound.at(name) + "x";
    if (name == "index.h5") {
      EXPECT_THAT([&] { open_native(fs, kPath); },
                  ThrowsError(ErrorKind::corruption, "appended to?"));
    } else {
      EXPECT_FALSE(verify(fs).empty());
    }
  }
}

TEST(NativeDamageTest, ATruncatedRankFileIsStillCheckedUpToItsEnd) {
  MemoryFiles fs(kPath, written(tiny_checkpoint()));
  const PieceStorage b = open_native(fs, kPath)->piece_storage(0, 0);
  const PieceStorage w = open_native(fs, kPath)->piece_storage(1, 0);
  std::string& bytes = fs["rank-00000.h5"];
  ASSERT_LT(w.byte_range->begin, w.byte_range->end - 10);
  bytes[b.byte_range->begin] ^= 1;
  bytes.resize(std::max(w.byte_range->end - 10, b.byte_range->end));
  std::vector<std::string> fqns;
  for (const Finding& finding : verify(fs)) fqns.push_back(finding.where.fqn);
  EXPECT_THAT(fqns, testing::Contains("b"));
  EXPECT_THAT(fqns, testing::Contains("w"));
}

TEST(NativeDamageTest, FilesOfTwoCheckpointsAreNeverMixed) {
  const auto a = written(small_checkpoint());
  MemoryCheckpoint other = small_checkpoint();
  other.piece_bytes("ids", 0)[0] ^= std::byte{1};  // differs in one bit of data, on rank 1
  const auto b = written(other);
  EXPECT_NE(a.at("index.h5"), b.at("index.h5"));
  for (const std::string name : {"rank-00000.h5", "rank-00001.h5"}) {
    MemoryFiles fs(kPath, a);
    fs[name] = b.at(name);
    EXPECT_THAT(failing_reads(fs)["layers.0.weight"], HasSubstr("from another checkpoint?"));
    const auto findings = verify(fs);
    ASSERT_EQ(findings.size(), 1);
    EXPECT_THAT(findings[0].found, HasSubstr("from another checkpoint?"));
  }
}

TEST(NativeDamageTest, WhatIsNoIndexIsRefusedByWhatItIs) {
  MemoryFiles fs(kPath, written(small_checkpoint()));
  const std::string index = fs["index.h5"];
  const auto refuses = [&](ErrorKind kind, const std::string& text) {
    EXPECT_THAT([&] { open_native(fs, kPath); }, ThrowsError(kind, text));
  };
  fs["index.h5"] = "";
  refuses(ErrorKind::corruption, "expected at least 4096 bytes, found 0 bytes");
  fs["index.h5"] = fs["rank-00000.h5"];
  refuses(ErrorKind::corruption, "role: expected the index, found a rank file (renamed?)");
  fs["index.h5"] = index.substr(4096);
  refuses(ErrorKind::unsupported, "found another HDF5 file");
  fs["index.h5"] = std::string(100, 'x');
  refuses(ErrorKind::unsupported, "found a file of another kind");
  fs.remove("index.h5");
  refuses(ErrorKind::corruption, "`ckpt-reshard rebuild-index` rebuilds it from the rank files");
  fs.remove("rank-00000.h5");
  refuses(ErrorKind::not_found, "is this a native checkpoint?");
  EXPECT_THAT([&] { open_native(fs, "elsewhere"); },
              ThrowsError(ErrorKind::not_found, "elsewhere: no such directory"));
}

TEST(NativeDamageTest, LinksOutOfTheCheckpointAreRefused) {
  TemporaryDirectory directory;
  write_native(small_checkpoint(), directory / "c");
  std::filesystem::rename(directory / "c/rank-00001.h5", directory / "outside.h5");
  std::filesystem::create_symlink("../outside.h5", directory / "c/rank-00001.h5");
  const auto reader = open_native(FileSystem::posix(), directory / "c");
  Bytes bytes(48);
  EXPECT_THAT(
      [&] {
        reader->read_piece(2, 1, {0, 12}, bytes);
      },
      ThrowsError(ErrorKind::corruption, "rank-00001.h5"));
  EXPECT_THAT([&] { rebuild_native_index(FileSystem::posix(), directory / "c"); },
              ThrowsError(ErrorKind::corruption, "rank-00001.h5"));
}

// --- hostile indexes with correct checksums

/// Appends another index to a file, with a header for it whose checksum of the index is right.
std::string with_index(const std::string& file, std::span<const std::byte> index,
                       const std::function<void(native::FileHeader&)>& change_header = {}) {
  using namespace native;
  FileHeader header;
  header.role = static_cast<FileRole>(file[12]);
  header.world_size = static_cast<unsigned char>(file[20]);
  std::string bytes = file;
  header.index_range = {bytes.size(), bytes.size() + index.size()};
  bytes.append(reinterpret_cast<const char*>(index.data()), index.size());
  header.index_checksum = xxh3_64(index);
  header.checkpoint_id = header.index_checksum;
  header.file_nbytes = bytes.size();
  if (change_header) change_header(header);
  const auto encoded = encode_header(header);
  std::memcpy(bytes.data(), encoded.data(), encoded.size());
  return bytes;
}

std::vector<std::byte> index_bytes_of(const std::string& file) {
  ByteRange range;
  std::memcpy(&range, file.data() + 32, sizeof range);
  const auto bytes = std::as_bytes(std::span(file)).subspan(range.begin, range.nbytes());
  return {bytes.begin(), bytes.end()};
}

TEST(NativeDamageTest, HostileHeadersAreRefusedBeforeAnythingIsAllocated) {
  MemoryFiles fs(kPath, written(small_checkpoint()));
  const std::string sound = fs["index.h5"];
  const auto index = index_bytes_of(sound);
  const auto refuses = [&](const std::function<void(native::FileHeader&)>& change, ErrorKind kind,
                           const std::string& text) {
    fs["index.h5"] = with_index(sound, index, change);
    EXPECT_THAT([&] { open_native(fs, kPath); }, ThrowsError(kind, text));
  };
  refuses([](auto& header) { header.index_range.end = UINT64_MAX; }, ErrorKind::corruption,
          "index range");
  refuses([](auto& header) { header.index_range.begin = 0; }, ErrorKind::corruption, "index range");
  refuses([](auto& header) { std::swap(header.index_range.begin, header.index_range.end); },
          ErrorKind::corruption, "index range");
  refuses([](auto& header) { header.world_size = 0; }, ErrorKind::corruption, "world size");
  refuses([](auto& header) { header.world_size = UINT32_MAX; }, ErrorKind::corruption,
          "world size");
  refuses([](auto& header) { header.world_size = 4; }, ErrorKind::corruption,
          "rank files: expected 4, found 3");
  refuses([](auto& header) { header.rank = 3; }, ErrorKind::corruption, "rank: expected less");
  refuses([](auto& header) { header.checkpoint_id ^= 1; }, ErrorKind::corruption, "checkpoint id");
  refuses([](auto& header) { header.file_nbytes += 1; }, ErrorKind::corruption, "truncated?");
  fs["index.h5"] = with_index(sound, index);
  EXPECT_EQ(open_native(fs, kPath)->contents().tensors.size(), 5);

  std::string later = sound;
  later[8] = 5;
  const std::uint64_t checksum = xxh3_64(std::as_bytes(std::span(later)).first(4088));
  std::memcpy(later.data() + 4088, &checksum, sizeof checksum);
  fs["index.h5"] = later;
  EXPECT_THAT([&] { open_native(fs, kPath); },
              ThrowsError(ErrorKind::unsupported, "format version: expected 1 to 4, found 5"));
}

TEST(NativeDamageTest, AnIndexThatChangesInAnyByteIsRefusedOrHarmless) {
  NativeWriteOptions options;
  options.compression = NativeWriteOptions::Compression::zstd;
  options.chunk_nbytes = 65536;
  Random random;
  MemoryCheckpoint source = small_checkpoint();
  source.add({"large", DType::float32, {40'000}}, weight_like_bytes(160'000, 4, random),
             {{Box{{0}, {20'000}}, 0}, {FlatRange{20'000, 40'000}, 1}});
  MemoryFiles fs(kPath, written(source, options));
  const std::string sound = fs["index.h5"];
  const auto index = index_bytes_of(sound);
  for (int round = 0; round < 4000; ++round) {
    auto changed = index;
    const auto num_changes = random.between(1, 4);
    for (int i = 0; i < num_changes; ++i) {
      changed[static_cast<std::size_t>(random.between(
          0, static_cast<std::int64_t>(changed.size())))] = std::byte(random.between(0, 256));
    }
    if (random.between(0, 8) == 0) {
      changed.resize(
          static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(changed.size()))));
    }
    fs["index.h5"] = with_index(sound, changed);
    try {
      const auto reader = open_native(fs, kPath);
      reader->verify([](const Finding&) {}, {});
      // The rank files now belong to another checkpoint, so every read must fail.
      Bytes bytes;
      for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
        const TensorEntry& tensor = reader->contents().tensors[t];
        for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
          (void)reader->piece_storage(t, p);
          if (numel_of(tensor.pieces[p].region) == 0) continue;
          bytes.resize(itemsize(tensor.meta.dtype));
          if (changed == index) continue;
          EXPECT_THAT(
              [&] {
                reader->read_piece(t, p, {0, 1}, bytes);
              },
              ThrowsError(ErrorKind::corruption, "checkpoint"));
        }
      }
    } catch (const Error& error) {
      EXPECT_TRUE(error.kind() == ErrorKind::corruption || error.kind() == ErrorKind::unsupported)
          << error.what();
    }
  }
}

TEST(NativeDamageTest, CountsBeyondTheIndexAreRefusedBeforeAnythingIsAllocated) {
  MemoryFiles fs(kPath, written(small_checkpoint()));
  const std::string sound = fs["index.h5"];
  const auto refuses = [&](const std::function<void(native::ByteWriter&)>& write,
                           const std::string& text) {
    native::ByteWriter out;
    out.uint(std::uint64_t{1} << 20);
    out.u8(1);
    write(out);
    fs["index.h5"] = with_index(sound, out.bytes());
    EXPECT_THAT([&] { open_native(fs, kPath); }, ThrowsError(ErrorKind::corruption, text));
  };
  using W = native::ByteWriter;
  const auto zero = [](W& out) { out.uint(std::uint64_t{0}); };
  refuses([](W& out) { out.uint(std::uint64_t{1} << 60); }, "index: count: expected what fits");
  refuses(
      [](W& out) {
        out.uint(std::uint64_t{1});
        out.str("v");
        out.uint(std::uint64_t{0});
        out.uint(UINT64_MAX);
      },
      "index: length");
  const auto tensor = [&](W& out, std::uint8_t dtype, const std::vector<std::uint64_t>& shape) {
    for (int i = 0; i < 4; ++i) zero(out);
    out.uint(std::uint64_t{1});
    out.str("t");
    out.u8(dtype);
    out.u8(0);
    out.uint(std::uint64_t{shape.size()});
    for (const auto size : shape) out.uint(size);
    out.str("");
    zero(out);
    out.uint(std::uint64_t{1});  // one piece
    zero(out);                   // position
    zero(out);                   // rank
  };
  refuses([&](W& out) { tensor(out, 22, {}); }, "index: dtype");
  refuses([&](W& out) { tensor(out, 5, {std::uint64_t{1} << 62, 4}); }, "t: ");
  refuses([&](W& out) { tensor(out, 5, {UINT64_MAX}); }, "index: number");
  refuses([&](W& out) { tensor(out, 5, std::vector<std::uint64_t>(33, 1)); }, "index: dimensions");
  refuses(
      [&](W& out) {
        tensor(out, 5, {std::uint64_t{1} << 40});
        out.u8(0);
        out.uint(std::uint64_t{1});
        out.uint(std::uint64_t{1} << 40);
      },
      "t: region");
  refuses(
      [&](W& out) {
        tensor(out, 5, {std::uint64_t{1} << 40});
        out.u8(1);
        out.uint(std::uint64_t{0});
        out.uint(std::uint64_t{1} << 40);
        out.u8(1);
        out.uint(std::uint64_t{4096});
        out.uint(std::uint64_t{4096});  // table
        out.uint(std::uint64_t{3});
        for (int i = 0; i < 3; ++i) {
          out.uint(std::uint64_t{1} << 20);
          out.u64(0);
          out.u64(0);
        }
      },
      "t: byte range: expected within [4096, 1048576), found 4398046511104 bytes at 4096");
}

TEST(NativeDamageTest, AChunkTableThatLiesIsRefused) {
  NativeWriteOptions options;
  options.compression = NativeWriteOptions::Compression::zstd;
  options.chunk_nbytes = 65536;
  MemoryFiles fs(kPath, written(tiny_checkpoint(), options));
  const std::string sound = fs["rank-00000.h5"];
  // Finds the chunk table in the file by its first u64, the offset of the first chunk.
  using namespace native;
  const auto file = fs.open("checkpoint/rank-00000.h5");
  const FileHeader header = read_header(*file);
  const Index index = decode_index(read_index_bytes(*file, header), header, "rank");
  const StoredPiece stored = index.stored({1, 0});
  ASSERT_EQ(stored.encoding, Encoding::zstd);
  for (const auto& [at, number] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {0, UINT64_MAX}, {0, 0}, {8, UINT64_MAX}, {8, 65537}, {8, 0}, {8, 65536}, {16, 0}}) {
    fs["rank-00000.h5"] = sound;
    std::memcpy(fs["rank-00000.h5"].data() + stored.checksum_or_table + at, &number, sizeof number);
    const auto failures = failing_reads(fs);
    EXPECT_EQ(failures.size(), 1) << at << " " << number;
    EXPECT_TRUE(failures.contains("w"));
    EXPECT_FALSE(verify(fs).empty());
  }
}

TEST(NativeDamageTest, ASizeOfAllChunksThatNoFileHasIsRefused) {
  NativeWriteOptions options;
  options.compression = NativeWriteOptions::Compression::zstd;
  options.chunk_nbytes = 65536;
  const MemoryFiles fs(kPath, written(tiny_checkpoint(), options));
  using namespace native;
  const auto file = fs.open("checkpoint/rank-00000.h5");
  const FileHeader header = read_header(*file);
  Index index = decode_index(read_index_bytes(*file, header), header, "rank");
  StoredPiece stored = index.stored({1, 0});
  ASSERT_EQ(stored.encoding, Encoding::zstd);
  ASSERT_GT(index.grid({1, 0}).num_blocks(), 1U);
  for (const std::uint64_t nbytes :
       {std::uint64_t{0}, std::uint64_t{1}, header.file_nbytes + 1, UINT64_MAX}) {
    stored.stored_nbytes = nbytes;
    index.storage.set({1, 0}, stored);
    EXPECT_THAT([&] { decode_index(encode_index(index), header, "rank"); },
                ThrowsError(ErrorKind::corruption, ", found " + std::to_string(nbytes)))
        << nbytes;
  }
}

/// A checkpoint of one rank whose index is changed and whose checksums are all right. With
/// `everywhere`, the index in the rank file is changed in the same way.
class ResealedCheckpoint {
 public:
  enum class Where { index_file, everywhere };

  ResealedCheckpoint(std::map<std::string, std::string> files, Where where,
                     const std::function<void(TensorEntry&)>& change_x)
      : fs_(kPath, std::move(files)) {
    using namespace native;
    Index own = index_of(kRankFile);
    Index whole = index_of("index.h5");
    change_x(whole.contents.edit().tensors.back());
    if (where == Where::everywhere) change_x(own.contents.edit().tensors.back());
    const std::string rank_file = fs_[kRankFile];
    const std::vector<std::byte> own_bytes = encode_index(own);
    const FileHeader header = seal(kRankFile, rank_file, own_bytes, data_ranges(own));
    whole.rank_files[0] = {header.file_nbytes, header.index_checksum, header.structure_checksum};
    const FileHeader index_header = seal("index.h5", fs_["index.h5"], encode_index(whole), {});
    seal(kRankFile, rank_file, own_bytes, data_ranges(own), index_header.checkpoint_id);
  }

  const FileSystem& fs() const { return fs_; }

 private:
  static constexpr const char* kRankFile = "rank-00000.h5";

  native::Index index_of(const std::string& name) const {
    const std::string path = join_path(kPath, name);
    const auto file = fs_.open(path);
    const native::FileHeader header = native::read_header(*file);
    return native::decode_index(native::read_index_bytes(*file, header), header, path);
  }

  static std::vector<ByteRange> data_ranges(const native::Index& index) {
    std::vector<ByteRange> ranges;
    for (std::size_t t = 0; t < index.storage.num_tensors(); ++t) {
      for (std::size_t p = 0; p < index.storage.num_pieces(t); ++p) {
        const native::StoredPiece stored = index.stored({t, p});
        ranges.push_back({stored.begin, stored.begin + stored.stored_nbytes});
      }
    }
    std::ranges::sort(ranges, {}, &ByteRange::begin);
    return ranges;
  }

  native::FileHeader seal(const std::string& name, std::string file,
                          std::span<const std::byte> index, std::span<const ByteRange> ranges,
                          std::optional<std::uint64_t> checkpoint_id = {}) {
    fs_[name] = with_index(file, index);
    const std::uint64_t structure =
        native::structure_checksum(*fs_.open(join_path(kPath, name)), ranges);
    fs_[name] = with_index(file, index, [&](native::FileHeader& header) {
      header.structure_checksum = structure;
      if (checkpoint_id) header.checkpoint_id = *checkpoint_id;
    });
    return native::read_header(*fs_.open(join_path(kPath, name)));
  }

  MemoryFiles fs_;
};

TEST(NativeDamageTest, AnIndexThatCallsItsDataSomethingElseIsFound) {
  NativeWriteOptions options;
  options.compression = NativeWriteOptions::Compression::zstd;
  MemoryCheckpoint source = tiny_checkpoint();
  source.add({"x", DType::bfloat16, {40'000}}, Bytes(80'000));
  const auto files = written(source, options);
  using Where = ResealedCheckpoint::Where;
  const auto finding = [&](Where where, DType dtype) -> std::string {
    const ResealedCheckpoint checkpoint(files, where,
                                        [&](TensorEntry& x) { x.meta.dtype = dtype; });
    const std::vector<Finding> findings = verify(checkpoint.fs());
    EXPECT_LE(findings.size(), 1U);
    return findings.empty() ? "" : finding_to_string(findings.front());
  };
  EXPECT_EQ(finding(Where::everywhere, DType::bfloat16), "");
  EXPECT_THAT(
      finding(Where::everywhere, DType::int8),
      testing::AllOf(HasSubstr("rank-00000.h5: x: bytes"),
                     HasSubstr("zstd frame: expected 40000 bytes of content, found 80000")));
  EXPECT_THAT(finding(Where::everywhere, DType::float32), HasSubstr("expected 160000 bytes"));
  // If the index in the rank file is unchanged, even another dtype of the same size is found.
  EXPECT_THAT(finding(Where::index_file, DType::float16),
              HasSubstr("rank-00000.h5: x: structure: expected float16 [40000], as index.h5 says, "
                        "found bfloat16 [40000]"));
}

// --- rebuilding

TEST(NativeRebuildTest, TheIndexComesBackByteForByte) {
  Random random;
  MemoryCheckpoint source = small_checkpoint();
  source.add({"large", DType::float32, {400'000}}, weight_like_bytes(1'600'000, 4, random),
             {{Box{{0}, {200'000}}, 2}, {FlatRange{200'000, 400'000}, 0}});
  source.add({std::string(3000, 'n'), DType::uint8, {2}}, bytes_of<std::uint8_t>({1, 2}));
  CheckpointContents& contents = source.contents_for_change();
  const auto hole =
      std::ranges::find(contents.tensors, "empty", [](auto& t) { return t.meta.fqn; });
  hole->pieces = {{Box{{0, 0}, {0, 7}}, 2}, {Box{{0, 0}, {0, 7}}, 1}};
  for (const bool compress : {false, true}) {
    NativeWriteOptions options;
    if (compress) options.compression = NativeWriteOptions::Compression::zstd;
    TemporaryDirectory directory;
    write_native(source, directory / "c", options);
    const auto before = files_of(directory / "c");
    std::filesystem::remove(directory / "c/index.h5");
    rebuild_native_index(FileSystem::posix(), directory / "c");
    EXPECT_TRUE(files_of(directory / "c") == before);
    // A damaged index is replaced.
    write_file(directory / "c/index.h5", "\x89TSR damaged");
    rebuild_native_index(FileSystem::posix(), directory / "c");
    EXPECT_TRUE(files_of(directory / "c") == before);
  }
}

TEST(NativeRebuildTest, WhatADeadProcessLeftIsReplacedAndAnotherFileStays) {
  TemporaryDirectory directory;
  write_native(small_checkpoint(), directory / "c");
  const auto before = files_of(directory / "c");
  const std::string index = read_all(directory / "c/index.h5");
  const std::string partial = directory / "c/index.h5.partial";
  for (const std::string& left :
       {std::string(), std::string(100, '\0'), std::string(4096, '\0') + index.substr(4096),
        std::string(index).replace(5000, 1, "?"), index.substr(0, 20)}) {
    write_file(partial, left);
    rebuild_native_index(FileSystem::posix(), directory / "c");
    EXPECT_TRUE(files_of(directory / "c") == before);
  }
  for (const std::string& others : {std::string("notes"), std::string(4095, '\0') + "notes"}) {
    write_file(partial, others);
    EXPECT_THAT([&] { rebuild_native_index(FileSystem::posix(), directory / "c"); },
                ThrowsError(ErrorKind::already_exists,
                            "index.h5.partial: staging: expected an unused name, which is needed "
                            "while the checkpoint is written, found a file (remove or rename it)"));
    EXPECT_EQ(read_all(partial), others);
    EXPECT_EQ(read_all(directory / "c/index.h5"), index);
  }
}

TEST(NativeRebuildTest, OptionsOfTheWriterAreKept) {
  NativeWriteOptions options;
  options.virtual_datasets = NativeWriteOptions::VirtualDatasets::omit;
  TemporaryDirectory directory;
  write_native(small_checkpoint(), directory / "c", options);
  const auto before = files_of(directory / "c");
  std::filesystem::remove(directory / "c/index.h5");
  rebuild_native_index(FileSystem::posix(), directory / "c");
  EXPECT_TRUE(files_of(directory / "c") == before);
}

TEST(NativeRebuildTest, MissingAndForeignRankFilesAreNamed) {
  TemporaryDirectory directory;
  write_native(MemoryCheckpoint("other", 3), directory / "other");
  write_native(small_checkpoint(), directory / "c");
  const auto before = read_all(directory / "c/index.h5");
  const auto refuses = [&](const std::string& text) {
    EXPECT_THAT([&] { rebuild_native_index(FileSystem::posix(), directory / "c"); },
                ThrowsError(ErrorKind::corruption, text));
    EXPECT_EQ(read_all(directory / "c/index.h5"), before);
  };
  std::filesystem::rename(directory / "c/rank-00001.h5", directory / "kept");
  refuses("rank files: expected 3 files that belong together, found 2\n");
  refuses("rank-00001.h5: rank file: expected a file, found none (incomplete copy?)");
  std::filesystem::copy(directory / "other/rank-00001.h5", directory / "c/rank-00001.h5");
  refuses("is it from another checkpoint than the rank files before it?");
  std::filesystem::remove(directory / "c/rank-00001.h5");
  std::filesystem::copy(directory / "c/rank-00002.h5", directory / "c/rank-00001.h5");
  refuses("rank: expected 1, found 2 (renamed?)");
  std::filesystem::remove(directory / "c/rank-00001.h5");
  std::filesystem::rename(directory / "kept", directory / "c/rank-00001.h5");
  rebuild_native_index(FileSystem::posix(), directory / "c");
  EXPECT_EQ(read_all(directory / "c/index.h5"), before);
  EXPECT_THAT([&] { rebuild_native_index(FileSystem::posix(), directory.path()); },
              ThrowsError(ErrorKind::corruption, "is this a native checkpoint?"));
}

TEST(NativeRebuildTest, WhatIsLostIsListed) {
  TemporaryDirectory directory;
  write_native(small_checkpoint(), directory / "c");
  std::filesystem::remove(directory / "c/index.h5");
  std::filesystem::remove(directory / "c/rank-00001.h5");
  std::string damaged = read_all(directory / "c/rank-00002.h5");
  damaged[100] ^= 1;
  write_file(directory / "c/rank-00002.h5", damaged);
  try {
    rebuild_native_index(FileSystem::posix(), directory / "c");
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::corruption);
    std::vector<std::string> lines;
    std::istringstream text(error.what());
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    EXPECT_THAT(
        lines,
        testing::ElementsAre(
            (directory / "c") + ": rank files: expected 3 files that belong together, found 1",
            "  " + (directory / "c/rank-00001.h5") +
                ": rank file: expected a file, found none (incomplete copy?)",
            testing::AllOf(HasSubstr("rank-00002.h5: "), HasSubstr("checksum: expected 0x")),
            "  lost: 12 of 24 elements of layers.0.weight",
            "  lost: 8 of 15 elements of optim.state.layers.0.weight.exp_avg",
            "  also lost: tensors and values that are only in the unusable files"));
  }
  EXPECT_FALSE(FileSystem::posix().kind_of(directory / "c/index.h5"));
}

TEST(NativeRebuildTest, AnyReadableHeaderTellsTheNumberOfRanks) {
  TemporaryDirectory directory;
  write_native(small_checkpoint(), directory / "c");
  write_file(directory / "c/rank-00000.h5", "damaged");
  EXPECT_THAT([&] { rebuild_native_index(FileSystem::posix(), directory / "c"); },
              ThrowsError(ErrorKind::corruption, "expected 3 files that belong together, found 2"));
}

// --- what a read costs

TEST(NativeReadCostTest, OpeningTakesTwoReads) {
  MemoryFiles fs(kPath, written(small_checkpoint()));
  open_native(fs, kPath);
  EXPECT_EQ(fs.take_reads().num_reads, 2);
}

TEST(NativeReadCostTest, ARangeCostsItsBlocksAndTheirChecksums) {
  Random random;
  MemoryCheckpoint source("large");
  constexpr std::int64_t kNumel = 8 << 20;  // 16 MiB
  source.add({"w", DType::bfloat16, {kNumel}}, weight_like_bytes(2 * kNumel, 2, random));
  for (const bool compress : {false, true}) {
    SCOPED_TRACE(compress ? "zstd" : "plain");
    NativeWriteOptions options;
    if (compress) options.compression = NativeWriteOptions::Compression::zstd;
    MemoryFiles fs(kPath, written(source, options));
    const auto reader = open_native(fs, kPath);
    Bytes bytes(2);
    reader->read_piece(0, 0, {0, 1}, bytes);  // the rank file's header is read once
    const std::uint64_t block_nbytes = compress ? options.chunk_nbytes : 65536;
    for (int i = 0; i < 100; ++i) {
      const std::int64_t begin = random.between(0, kNumel);
      const std::int64_t end = random.between(begin, kNumel) + 1;
      bytes.resize(static_cast<std::size_t>(end - begin) * 2);
      fs.take_reads();
      reader->read_piece(0, 0, {begin, end}, bytes);
      const auto needed = static_cast<double>(bytes.size());
      EXPECT_LE(static_cast<double>(fs.take_reads().nbytes),
                1.05 * needed + 2.0 * static_cast<double>(block_nbytes))
          << begin << " to " << end;
    }
  }
}

}  // namespace
}  // namespace tessera::formats

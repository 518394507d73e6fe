#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/dtype.h"

namespace tessera::formats {
namespace {

using namespace tessera::test;
using Compression = NativeWriteOptions::Compression;

void expect_equal_contents(const CheckpointContents& a, const CheckpointContents& b) {
  EXPECT_EQ(a.world_size, b.world_size);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (std::size_t t = 0; t < a.tensors.size(); ++t) {
    SCOPED_TRACE(a.tensors[t].meta.fqn);
    EXPECT_EQ(a.tensors[t].meta, b.tensors[t].meta);
    EXPECT_EQ(a.tensors[t].kind, b.tensors[t].kind);
    EXPECT_EQ(a.tensors[t].parameter, b.tensors[t].parameter);
    EXPECT_EQ(a.tensors[t].key_path, b.tensors[t].key_path);
    ASSERT_EQ(a.tensors[t].pieces.size(), b.tensors[t].pieces.size());
    for (std::size_t p = 0; p < a.tensors[t].pieces.size(); ++p) {
      EXPECT_EQ(a.tensors[t].pieces[p].region, b.tensors[t].pieces[p].region);
      EXPECT_EQ(a.tensors[t].pieces[p].rank, b.tensors[t].pieces[p].rank);
    }
  }
  ASSERT_EQ(a.values.size(), b.values.size());
  for (std::size_t v = 0; v < a.values.size(); ++v) {
    EXPECT_EQ(a.values[v].name, b.values[v].name);
    EXPECT_EQ(a.values[v].key_path, b.values[v].key_path);
  }
  ASSERT_EQ(a.aliases.size(), b.aliases.size());
  for (std::size_t i = 0; i < a.aliases.size(); ++i) {
    EXPECT_EQ(a.aliases[i].fqn, b.aliases[i].fqn);
    EXPECT_EQ(a.aliases[i].target, b.aliases[i].target);
    EXPECT_EQ(a.aliases[i].key_path, b.aliases[i].key_path);
  }
  EXPECT_EQ(a.units, b.units);
  EXPECT_EQ(a.annotations, b.annotations);
}

Bytes read_piece(const CheckpointReader& reader, std::size_t t, std::size_t p, FlatRange range) {
  Bytes bytes(static_cast<std::size_t>(range.numel()) *
              itemsize(reader.contents().tensors[t].meta.dtype));
  reader.read_piece(t, p, range, bytes);
  return bytes;
}

void expect_equal_data(const CheckpointReader& a, const CheckpointReader& b) {
  for (std::size_t t = 0; t < a.contents().tensors.size(); ++t) {
    SCOPED_TRACE(a.contents().tensors[t].meta.fqn);
    for (std::size_t p = 0; p < a.contents().tensors[t].pieces.size(); ++p) {
      const FlatRange all{0, numel_of(a.contents().tensors[t].pieces[p].region)};
      EXPECT_EQ(read_piece(a, t, p, all), read_piece(b, t, p, all));
    }
  }
  for (std::size_t v = 0; v < a.contents().values.size(); ++v) {
    EXPECT_EQ(a.read_value(v), b.read_value(v)) << a.contents().values[v].name;
  }
}

std::vector<Finding> verify(const CheckpointReader& reader) {
  std::vector<Finding> findings;
  reader.verify([&](const Finding& finding) { findings.push_back(finding); }, {});
  return findings;
}

void expect_round_trip(const CheckpointReader& source, const NativeWriteOptions& options,
                       int num_threads = 1) {
  TemporaryDirectory directory;
  write_native(source, directory / "checkpoint", options, num_threads);
  const auto reader = open_native(FileSystem::posix(), directory / "checkpoint");
  EXPECT_EQ(reader->format(), Format::native);
  expect_equal_contents(source.contents(), reader->contents());
  expect_equal_data(source, *reader);
  for (const Finding& finding : verify(*reader)) {
    ADD_FAILURE() << finding.rule << " " << finding.where.path << " " << finding.where.fqn << ": "
                  << finding.expected << ", found " << finding.found;
  }
}

TEST(NativeRoundTripTest, EverythingThatContentsCanSayComesBack) {
  expect_round_trip(small_checkpoint(), {});
  expect_round_trip(small_checkpoint(), zstd_options());
}

TEST(NativeRoundTripTest, EveryDTypeComesBackBitForBitPlainAndCompressed) {
  Random random;
  MemoryCheckpoint source("dtypes", 2);
  for (int code = 0; code < kNumDTypes; ++code) {
    const DType dtype = *dtype_from_code(static_cast<std::uint8_t>(code));
    const std::string name(dtype_name(dtype));
    source.add({"random." + name, dtype, {5, 3}}, random_bytes(15 * itemsize(dtype), random),
               {{Box{{0, 0}, {2, 3}}, 0}, {Box{{2, 0}, {3, 3}}, 1}});
    source.add({"large." + name, dtype, {50001}},
               weight_like_bytes(50001 * itemsize(dtype), itemsize(dtype), random),
               {{FlatRange{0, 50001}, 1}});
  }
  expect_round_trip(source, {});
  expect_round_trip(source, zstd_options());
}

TEST(NativeRoundTripTest, DegenerateShapesAndLayoutsAreOrdinary) {
  MemoryCheckpoint source("degenerate", 5);
  source.add({"scalar", DType::float64, {}}, bytes_of<double>({std::nan("1")}));
  source.add({"scalar.flat", DType::int8, {}}, bytes_of<signed char>({-3}), {{FlatRange{0, 1}, 4}});
  source.add({"empty", DType::float32, {0}}, {});
  source.add({"empty.rows", DType::float32, {0, 7, 2}}, {},
             {{Box{{0, 0, 0}, {0, 7, 2}}, 0}, {Box{{0, 0, 0}, {0, 7, 2}}, 3}});
  source.add({"rows", DType::int16, {2, 1}}, bytes_of<std::int16_t>({1, 2}),
             {{Box{{0, 0}, {1, 1}}, 0},
              {Box{{1, 0}, {1, 1}}, 1},
              {Box{{2, 0}, {0, 1}}, 2},
              {Box{{2, 0}, {0, 1}}, 3}});
  source.add({"one", DType::uint8, Shape(32, 1)}, bytes_of<unsigned char>({9}));
  source.add({"replicas", DType::uint8, {3}}, bytes_of<unsigned char>({1, 2, 3}),
             {{Box{{0}, {3}}, 3}, {Box{{0}, {3}}, 1}, {FlatRange{0, 3}, 1}});
  expect_round_trip(source, {});
  expect_round_trip(source, zstd_options());
  expect_round_trip(MemoryCheckpoint("nothing", 4), {});
}

TEST(NativeRoundTripTest, ATensorMayHaveNoPieces) {
  CheckpointContents contents;
  contents.world_size = 2;
  contents.tensors.push_back({.meta = {"hole", DType::float32, {4}}});
  expect_round_trip(MemoryCheckpoint("holes", contents, {{}}, {}), {});
}

TEST(NativeRoundTripTest, NamesMayBeAnything) {
  MemoryCheckpoint source("names", 2);
  const std::vector<std::string> names = {"",
                                          ".",
                                          "..",
                                          "/",
                                          "a",
                                          "a.b",
                                          "a/b",
                                          "../up",
                                          "%d%s%n",
                                          "~tessera",
                                          "~2F",
                                          "~empty",
                                          "a\nb",
                                          std::string("n\0l", 3),
                                          "naïve 模型 🚀",
                                          "\xff\xfe",
                                          "a~[0:1]",
                                          std::string(999, 'x'),
                                          std::string(1001, 'x'),
                                          std::string(1002, '/'),
                                          std::string(65536, 'y'),
                                          std::string(70000, 'y')};
  std::uint8_t number = 0;
  for (const std::string& name : names) {
    source.add({name, DType::uint8, {4}}, bytes_of<std::uint8_t>({number, 1, 2, 3}),
               {{Box{{0}, {1}}, 0}, {Box{{1}, {3}}, 1}});
    ++number;
  }
  source.add_alias("~alias/", "a/b");
  source.add_alias(std::string(2000, 'x'), std::string(1001, 'x'));
  expect_round_trip(source, {});
}

TEST(NativeRoundTripTest, ValuesOfEveryKindComeBack) {
  MemoryCheckpoint source("values");
  source.add_value("none", Value());
  source.add_value("bool", Value(true));
  source.add_value("int", Value(std::numeric_limits<std::int64_t>::min()));
  source.add_value("big", Value(Value::BigInt{"-123456789012345678901234567890"}));
  source.add_value("float", Value(0.1));
  source.add_value("nan", Value(std::numeric_limits<double>::quiet_NaN()));
  source.add_value("inf", Value(-std::numeric_limits<double>::infinity()));
  source.add_value("str", Value("naïve \"quoted\" \n"));
  source.add_value("bytes", Value(Value::Bytes{std::string("\0\xff", 2)}));
  source.add_value("symbol", Value(Value::Symbol{"torch.float32"}));
  source.add_value("dict", Value(Value::Dict{{Value(1), Value(Value::List{Value(2), Value()})},
                                             {Value("$k"), Value(Value::Set{{Value(3)}})}}));
  Value deep(1);
  for (int i = 0; i < 60; ++i) deep = Value(Value::Dict{{Value(i), Value(Value::List{deep})}});
  source.add_value("deep", deep);
  expect_round_trip(source, {});
}

TEST(NativeRoundTripTest, AnyRangeOfAPieceReadsAsItsPartOfTheWhole) {
  Random random;
  for (const bool compress : {false, true}) {
    SCOPED_TRACE(compress ? "zstd" : "plain");
    TemporaryDirectory directory;
    MemoryCheckpoint source("ranges");
    constexpr std::int64_t kNumel = 300'007;
    source.add({"w", DType::bfloat16, {kNumel}}, weight_like_bytes(2 * kNumel, 2, random));
    write_native(source, directory / "c", compress ? zstd_options() : NativeWriteOptions{});
    const auto reader = open_native(FileSystem::posix(), directory / "c");
    EXPECT_EQ(reader->piece_storage(0, 0).encoding, compress ? "zstd" : "plain");
    std::vector<FlatRange> ranges = {
        {0, 0},     {0, 1},           {32767, 32768},       {32767, 32769}, {32768, 65536},
        {1, 65535}, {kNumel, kNumel}, {kNumel - 1, kNumel}, {5, kNumel - 5}};
    for (int i = 0; i < 100; ++i) {
      const std::int64_t begin = random.between(0, kNumel);
      ranges.push_back({begin, random.between(begin, kNumel + 1)});
    }
    for (const FlatRange& range : ranges) {
      ASSERT_EQ(read_piece(*reader, 0, 0, range), read_piece(source, 0, 0, range))
          << range.begin << " to " << range.end;
    }
  }
}

TEST(NativeRoundTripTest, WhatDoesNotShrinkStaysPlain) {
  Random random;
  TemporaryDirectory directory;
  MemoryCheckpoint source("mixed");
  source.add({"noise", DType::uint8, {200'000}}, random_bytes(200'000, random));
  source.add({"small", DType::uint8, {65535}}, Bytes(65535));
  source.add({"zeros", DType::float32, {200'000}}, Bytes(800'000));
  // The second chunk is noise: stored raw within a compressed piece.
  Bytes half(131'072 + 100);
  const Bytes noise = random_bytes(65536, random);
  std::ranges::copy(noise, half.begin() + 65536);
  source.add({"half", DType::uint8, {131'172}}, half);
  write_native(source, directory / "c", zstd_options());
  const auto reader = open_native(FileSystem::posix(), directory / "c");
  std::map<std::string, PieceStorage> storage;
  for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
    storage[reader->contents().tensors[t].meta.fqn] = reader->piece_storage(t, 0);
  }
  EXPECT_EQ(storage["noise"].encoding, "plain");
  EXPECT_EQ(storage["noise"].stored_nbytes, 200'000);
  EXPECT_EQ(storage["small"].encoding, "plain");
  EXPECT_EQ(storage["zeros"].encoding, "zstd");
  EXPECT_LT(storage["zeros"].stored_nbytes, 10'000);
  EXPECT_EQ(storage["half"].encoding, "zstd");
  EXPECT_GT(storage["half"].stored_nbytes, 65536);
  EXPECT_LT(storage["half"].stored_nbytes, 70'000);
  expect_equal_data(source, *reader);
  EXPECT_TRUE(verify(*reader).empty());
}

MemoryCheckpoint many_blocks() {
  Random random;
  MemoryCheckpoint source("many", 3);
  for (int i = 0; i < 6; ++i) {
    const std::int64_t numel = 100'000 + 7 * i;
    const std::string name = "t" + std::to_string(i);
    const std::uint64_t nbytes = static_cast<std::uint64_t>(numel) * 4;
    source.add({name, DType::float32, {numel}},
               i % 3 == 0 ? random_bytes(nbytes, random) : weight_like_bytes(nbytes, 4, random),
               {{FlatRange{0, 60'000}, i % 3}, {FlatRange{60'000, numel}, (i + 1) % 3}});
  }
  source.add({"z.scalar", DType::float32, {}}, bytes_of<float>({1}));
  source.add_value("step", Value(1));
  return source;
}

TEST(NativeWriterTest, EqualContentsGiveEqualFilesWhateverTheNumberOfThreads) {
  const MemoryCheckpoint source = many_blocks();
  NativeWriteOptions plain;
  plain.plain_block_nbytes = 65536;
  for (const NativeWriteOptions& options : {plain, zstd_options()}) {
    TemporaryDirectory directory;
    write_native(source, directory / "one", options, 1);
    const auto expected = files_of(directory / "one");
    for (int round = 0; round < 3; ++round) {
      const std::string path = directory / ("four" + std::to_string(round));
      write_native(source, path, options, 4);
      EXPECT_TRUE(files_of(path) == expected);
    }
  }
}

TEST(NativeWriterTest, EveryRankHasAFileAlsoWhereItHoldsNothing) {
  TemporaryDirectory directory;
  write_native(MemoryCheckpoint("nothing", 3), directory / "c");
  EXPECT_THAT(FileSystem::posix().list_directory(directory / "c"),
              testing::ElementsAre("index.h5", "rank-00000.h5", "rank-00001.h5", "rank-00002.h5"));
}

TEST(NativeWriterTest, DestroyedWithoutCommitLeavesNothing) {
  TemporaryDirectory directory;
  const MemoryCheckpoint source = many_blocks();
  for (const NativeWriteOptions& options : {NativeWriteOptions{}, zstd_options()}) {
    auto writer = create_native(FileSystem::posix(), directory / "c", source.contents(), {Value(1)},
                                OverwritePolicy::refuse, options);
    const auto piece = writer->write_order().front();
    const Bytes bytes =
        read_piece(source, piece.tensor_index, piece.piece_index, {0, writer->block_numel(piece)});
    writer->write_block(piece, 0, bytes);
    writer.reset();
    EXPECT_TRUE(FileSystem::posix().list_directory(directory.path()).empty());
  }
}

/// Waits until a thread of this process sleeps, by what /proc says.
void wait_until_asleep(pid_t thread) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/stat";
  for (;;) {
    std::ifstream file(path);
    std::string stat;
    std::getline(file, stat);
    // The state comes after the name, which is in parentheses.
    const std::size_t name_end = stat.rfind(')');
    ASSERT_LT(name_end, stat.size()) << path;
    if (stat.substr(name_end, 3) == ") S") return;
    std::this_thread::yield();
  }
}

TEST(NativeWriterTest, AbandonWakesWhoeverWaitsForATurn) {
  TemporaryDirectory directory;
  const MemoryCheckpoint source = many_blocks();
  const auto writer = create_native(FileSystem::posix(), directory / "c", source.contents(),
                                    {Value(1)}, OverwritePolicy::refuse, zstd_options());
  const auto piece = writer->write_order().front();
  const std::int64_t block_numel = writer->block_numel(piece);
  const Bytes bytes =
      read_piece(source, piece.tensor_index, piece.piece_index, {block_numel, 2 * block_numel});
  ASSERT_EQ(static_cast<std::int64_t>(bytes.size()), block_numel * 4);
  // The writer of the second block waits for the first block, which nobody writes.
  std::atomic<pid_t> thread = 0;
  std::jthread waits([&] {
    thread = ::gettid();
    thread.notify_one();
    EXPECT_THAT([&] { writer->write_block(piece, block_numel, bytes); },
                ThrowsError(ErrorKind::interrupted, "abandoned"));
  });
  thread.wait(0);
  wait_until_asleep(thread);
  writer->abandon();
}

TEST(NativeWriterTest, AnExistingCheckpointIsReplacedOnlyWhereThatWasAskedFor) {
  TemporaryDirectory directory;
  write_native(small_checkpoint(), directory / "c");
  EXPECT_THAT([&] { write_native(MemoryCheckpoint(), directory / "c"); },
              ThrowsError(ErrorKind::already_exists, "exists"));
  EXPECT_EQ(open_native(FileSystem::posix(), directory / "c")->contents().tensors.size(), 5);
  write_native(many_blocks(), directory / "c", {}, 2, OverwritePolicy::replace);
  EXPECT_EQ(open_native(FileSystem::posix(), directory / "c")->contents().tensors.size(), 7);
  EXPECT_THAT(FileSystem::posix().list_directory(directory.path()), testing::ElementsAre("c"));
}

TEST(NativeWriterTest, ContentsThatContradictThemselvesAreRefusedByName) {
  TemporaryDirectory directory;
  const auto refuses = [&](const CheckpointContents& contents, const std::string& text) {
    EXPECT_THAT([&] { create_native(FileSystem::posix(), directory / "c", contents, {}); },
                ThrowsError(ErrorKind::invalid_argument, text));
    EXPECT_TRUE(FileSystem::posix().list_directory(directory.path()).empty());
  };
  const TensorEntry tensor{.meta = {"w", DType::float32, {4}}, .pieces = {{Box{{0}, {4}}, 0}}};
  CheckpointContents contents;
  contents.tensors = {tensor, tensor};
  refuses(contents, "w: names: expected sorted and unique");
  contents.tensors = {tensor};
  contents.tensors[0].pieces.edit()[0].rank = 1;
  refuses(contents, "w: rank: expected less than 1, found 1");
  contents.tensors = {tensor};
  contents.tensors[0].pieces.edit()[0].region = FlatRange{2, 5};
  refuses(contents, "w: region: ");
  contents.tensors = {tensor};
  contents.tensors[0].pieces.push_back(tensor.pieces[0]);
  refuses(contents, "w: pieces: expected each region once per rank, found [0:4] twice on rank 0");
  contents.tensors = {tensor};
  contents.tensors[0].meta.shape = {-1};
  refuses(contents, "w: shape");
  contents.tensors = {tensor};
  contents.aliases = {{"v", "x", {}}};
  refuses(contents, "v: alias: expected a tensor as target, found 'x', which is no tensor");
  contents.aliases = {{"w", "w", {}}};
  refuses(contents, "w: names: expected one entry of this name, found a tensor and an alias");
  contents.aliases = {};
  contents.values = {{"step", {}}};
  refuses(contents, "values: expected 1, found 0");
}

}  // namespace
}  // namespace tessera::formats

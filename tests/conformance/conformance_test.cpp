#include "conformance/conformance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/random.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/formats/create.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

namespace tessera::test {
namespace {

using test::kSampleStep;

using formats::CheckpointReader;
using formats::CheckpointWriter;
using formats::Finding;
using formats::Piece;

class ConformanceTest : public ::testing::TestWithParam<FormatUnderTest> {
 protected:
  const FormatUnderTest& format() const { return GetParam(); }
  std::string path() const { return tmp_ / format().destination; }

  void write(const MemoryCheckpoint& source, int num_threads = 1) {
    write_checkpoint(format(), fs_, path(), source, num_threads);
  }
  std::unique_ptr<CheckpointReader> open() { return format().open(fs_, path()); }

  void expect_round_trip(const MemoryCheckpoint& source) {
    write(source, 3);
    expect_equal_checkpoints(*open(), as_it_comes_back(source, format()));
  }

  /// Returns every file below the temporary directory with its bytes.
  std::map<std::string, std::string> all_files() const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(tmp_.path())) {
      if (!entry.is_regular_file()) continue;
      files[entry.path().string()] = read_file(fs_, entry.path().string(), std::uint64_t{1} << 30);
    }
    return files;
  }

  void clear() {
    for (const std::string& name : fs_.list_directory(tmp_.path())) fs_.remove_all(tmp_ / name);
  }

  bool is_nothing_left() const { return std::filesystem::is_empty(tmp_.path()); }

  FileSystem& fs_ = FileSystem::posix();
  TemporaryDirectory tmp_;
};

std::string format_name_of(const ::testing::TestParamInfo<FormatUnderTest>& info) {
  return info.param.name;
}

class WriterConformanceTest : public ConformanceTest {
 protected:
  void write_with_extra_file(FileSystem& fs, const std::string& extra_path) {
    const MemoryCheckpoint source = fit_to_format(one_of_everything(), format());
    std::vector<Value> values;
    for (std::size_t v = 0; v < source.contents().values.size(); ++v) {
      values.push_back(source.read_value(v));
    }
    formats::CreateOptions options{.format = format().format};
    options.extra_files = {{.path = extra_path, .name = last_component(extra_path)}};
    const auto writer =
        formats::create_checkpoint(fs, path(), source.contents(), std::move(values), options);
    copy_checkpoint(source, *writer);
  }

  /// Runs `write` again and again; in run i, operation i fails: only it, or also all later ones.
  /// `write` must throw Error(io) that names a file. If only operation i failed, it must leave
  /// nothing. If all later ones failed too, a destination that exists must be complete.
  void fail_each_operation(const std::function<void(FileSystem&)>& write) {
    write(fs_);
    const auto whole = all_files();
    const auto is_whole = [&] {
      fs_.remove_all(path() + ".partial.journal");  // `write` ignores an error when it removes it
      return all_files() == whole;
    };
    clear();
    using Fault = FaultFileSystem::Fault;
    for (const Fault fault : {Fault::short_write, Fault::from_then_on}) {
      FaultFileSystem faulty(fs_, tmp_.path());
      bool succeeded = false;
      for (std::int64_t i = 0; !succeeded; i += kSampleStep) {
        SCOPED_TRACE("operation " + std::to_string(i));
        ASSERT_LT(i, 2000);
        faulty.fail_operation(i, fault);
        try {
          write(faulty);
          succeeded = !faulty.has_failed();
          EXPECT_TRUE(is_whole()) << ::testing::PrintToString(faulty.transcript());
          clear();
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
          EXPECT_TRUE(faulty.has_failed());
          EXPECT_TRUE(error.where().path.starts_with('/')) << error.what();
          EXPECT_TRUE(std::string_view(error.what()).starts_with(error.where().path));
          if (fault != Fault::from_then_on) {
            EXPECT_TRUE(is_nothing_left());
          } else if (fs_.kind_of(path())) {
            EXPECT_TRUE(is_whole());
          }
          clear();
        }
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(AllFormats, WriterConformanceTest,
                         ::testing::ValuesIn(formats_that_write()), format_name_of);

TEST_P(WriterConformanceTest, OneOfEverythingComesBack) {
  expect_round_trip(one_of_everything());
}

TEST_P(WriterConformanceTest, EveryDTypeComesBackBitForBit) {
  MemoryCheckpoint source;
  for (std::uint8_t code = 0; code < kNumDTypes; ++code) {
    const TensorMeta meta{"t" + std::to_string(code), *dtype_from_code(code), {3, 2}};
    Bytes bytes = patterned_bytes(meta.nbytes(), code);
    if (meta.dtype == DType::boolean) {
      for (std::byte& byte : bytes) byte &= std::byte{1};
    }
    source.add(meta, bytes);
  }
  expect_round_trip(source);
}

TEST_P(WriterConformanceTest, WhatTheFormatLacksIsRefusedByNameAndLeavesNothing) {
  for (const DType dtype : format().lacks) {
    const TensorMeta meta{"the.tensor", dtype, {2}};
    formats::CheckpointContents contents;
    contents.tensors.push_back({.meta = meta, .pieces = {{whole_box(meta.shape), 0}}});
    EXPECT_THAT([&] { format().create(fs_, path(), contents, {}, OverwritePolicy::refuse); },
                ThrowsError(ErrorKind::unsupported, "the.tensor"));
    EXPECT_TRUE(is_nothing_left());
  }
}

TEST_P(WriterConformanceTest, NaNPayloadsComeBack) {
  MemoryCheckpoint source;
  source.add({"bf16", DType::bfloat16, {3}}, bytes_of<std::uint16_t>({0x7FC1, 0xFFFF, 0x7F81}));
  source.add({"f16", DType::float16, {2}}, bytes_of<std::uint16_t>({0x7E01, 0xFC55}));
  source.add({"f32", DType::float32, {2}}, bytes_of<std::uint32_t>({0x7F800001, 0xFFC12345}));
  source.add({"f64", DType::float64, {2}},
             bytes_of<std::uint64_t>({0x7FF0000000000001, 0xFFF8000000012345}));
  expect_round_trip(source);
}

TEST_P(WriterConformanceTest, DegenerateShapesComeBack) {
  MemoryCheckpoint source;
  source.add({"scalar", DType::float64, {}}, bytes_of<double>({2.5}));
  source.add({"one", DType::int32, Shape(12, 1)}, bytes_of<std::int32_t>({7}));
  source.add({"empty", DType::float32, {0}}, {});
  source.add({"empty_rows", DType::bfloat16, {0, 7}}, {});
  source.add({"empty_middle", DType::int64, {5, 0, 3}}, {});
  source.add({"empty_and_huge", DType::uint8, {0, std::int64_t{1} << 62}}, {});
  expect_round_trip(source);
}

TEST_P(WriterConformanceTest, ACheckpointWithoutTensorsComesBack) {
  expect_round_trip(MemoryCheckpoint("nothing", 1));
}

TEST_P(WriterConformanceTest, MoreRanksThanRowsComeBack) {
  MemoryCheckpoint source("many_ranks", 9);
  std::vector<Piece> pieces;
  for (int rank = 0; rank < 9; ++rank) {
    const std::int64_t row = std::min(rank, 3);
    pieces.push_back({Box{{row, 0}, {rank < 3 ? 1 : 0, 2}}, rank});
  }
  source.add({"w", DType::int16, {3, 2}}, bytes_of<std::int16_t>({1, 2, 3, 4, 5, 6}), pieces);
  expect_round_trip(source);
}

TEST_P(WriterConformanceTest, NamesMayBeAnyText) {
  MemoryCheckpoint source;
  int number = 0;
  for (const std::string& name :
       {std::string(""), std::string("."), std::string(".."), std::string("a"), std::string("a.b"),
        std::string("../../up"), std::string("/root"), std::string("a/b"), std::string("sp ace\t"),
        std::string("new\nline"), std::string("quote\"back\\slash"), std::string("naïve 模型 🚀"),
        std::string("index"), std::string("data.pkl"), std::string("~tilde~"),
        std::string(5000, 'x')}) {
    source.add({name, DType::int32, {1}}, bytes_of<std::int32_t>({++number}));
  }
  expect_round_trip(source);
}

TEST_P(WriterConformanceTest, ValuesOfEveryKindComeBack) {
  MemoryCheckpoint source;
  source.add({"t", DType::uint8, {1}}, Bytes(1));
  const std::vector<Value> values = values_of_every_kind();
  for (std::size_t i = 0; i < values.size(); ++i) {
    source.add_value("value." + std::to_string(1000 + i), values[i]);
  }
  expect_round_trip(source);
}

TEST_P(WriterConformanceTest, AnyRangeOfAPieceReadsAsItsPart) {
  write(one_of_everything());
  const auto reader = open();
  Random random;
  for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
    const formats::TensorEntry& tensor = reader->contents().tensors[t];
    const std::uint64_t item_nbytes = itemsize(tensor.meta.dtype);
    const Bytes whole = whole_tensor(*reader, t);
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      const Region& region = tensor.pieces[p].region;
      const Bytes piece = gather_region(whole, tensor.meta.shape, region, item_nbytes);
      for (int round = 0; round < 10; ++round) {
        const std::int64_t begin = random.between(0, numel_of(region) + 1);
        const FlatRange range{begin, random.between(begin, numel_of(region) + 1)};
        Bytes out(static_cast<std::size_t>(range.numel()) * item_nbytes);
        reader->read_piece(t, p, range, out);
        EXPECT_TRUE(std::ranges::equal(
            out,
            std::span(piece).subspan(static_cast<std::size_t>(begin) * item_nbytes, out.size())));
      }
    }
  }
}

TEST_P(WriterConformanceTest, VerifyFindsNothingWrongWithWhatWasWritten) {
  write(one_of_everything());
  std::atomic<std::uint64_t> num_read = 0;  // several threads call
  open()->verify(
      [](const Finding& finding) {
        EXPECT_EQ(finding.severity, Finding::Severity::note)
            << finding.rule << ": expected " << finding.expected << ", found " << finding.found;
      },
      [&](std::uint64_t nbytes) { num_read += nbytes; });
  EXPECT_GE(num_read, 30U);
}

TEST_P(WriterConformanceTest, CheckFilesFindsNothingWrongWithWhatWasWritten) {
  write(one_of_everything());
  open()->check_files([](const Finding& finding) { ADD_FAILURE() << finding.found; });
}

TEST_P(WriterConformanceTest, WriteOrderNamesEveryPieceWithElementsOnce) {
  const MemoryCheckpoint source = fit_to_format(one_of_everything(), format());
  const auto writer =
      format().create(fs_, path(), source.contents(), {source.read_value(0), source.read_value(1)},
                      OverwritePolicy::refuse);
  std::set<std::pair<std::size_t, std::size_t>> named;
  for (const auto piece : writer->write_order()) {
    EXPECT_TRUE(named.emplace(piece.tensor_index, piece.piece_index).second);
    EXPECT_GT(writer->block_numel(piece), 0);
  }
  const auto& tensors = writer->contents().tensors;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    for (std::size_t p = 0; p < tensors[t].pieces.size(); ++p) {
      EXPECT_EQ(named.contains({t, p}), numel_of(tensors[t].pieces[p].region) > 0);
    }
  }
}

TEST_P(WriterConformanceTest, EqualInputGivesEqualBytesWhateverTheNumberOfThreads) {
  MemoryCheckpoint source("large", 2);
  const Bytes bytes = patterned_bytes(std::uint64_t{20} << 20, 1);
  source.add({"large", DType::float32, {5, 1 << 20}}, bytes,
             {{Box{{0, 0}, {3, 1 << 20}}, 0}, {Box{{3, 0}, {2, 1 << 20}}, 1}});
  source.add({"zeros", DType::bfloat16, {1 << 20}}, Bytes(std::size_t{2} << 20));
  source.add({"small", DType::int8, {3}}, Bytes(3));
  std::map<std::string, std::string> first;
  for (const int num_threads : {1, 4, 4}) {
    write(source, num_threads);
    const auto files = all_files();
    if (first.empty()) {
      first = files;
    } else {
      EXPECT_TRUE(files == first) << num_threads << " threads";
    }
    clear();
  }
}

TEST_P(WriterConformanceTest, AFailureOfAnyOperationSurfacesAndLeavesNoDestination) {
  const MemoryCheckpoint source = one_of_everything();
  fail_each_operation([&](FileSystem& fs) { write_checkpoint(format(), fs, path(), source, 2); });
  write(source);
  expect_equal_checkpoints(*open(), as_it_comes_back(source, format()));
}

TEST_P(WriterConformanceTest, AFailureOfAnyOperationOfAReshardLeavesNoDestination) {
  const MemoryCheckpoint memory = one_of_everything();
  const FormatUnderTest native = formats_that_write().front();
  const TemporaryDirectory sources;
  write_checkpoint(native, fs_, sources / "source", memory);
  reshard::PlanOptions options{.format = format().format};
  if (format().pieces != FormatUnderTest::Pieces::whole) options.world_size = 3;
  fail_each_operation([&](FileSystem& fs) {
    const auto source = native.open(fs, sources / "source");
    const reshard::Plan plan = reshard::plan_reshard(source->contents(), source->path(), options);
    ASSERT_THAT(plan.problems, ::testing::IsEmpty());
    std::vector<Value> values;
    for (const std::size_t i : plan.value_sources) values.push_back(source->read_value(i));
    const auto writer =
        format().create(fs, path(), plan.destination, std::move(values), OverwritePolicy::refuse);
    reshard::execute(plan, *source, *writer, {.num_threads = 2});
    writer->commit();
  });
}

// Shows E4.
TEST_P(WriterConformanceTest, ExtraFilesAppearWithTheCheckpointOrNotAtAll) {
  const formats::FormatDriver& driver = formats::driver_of(format().format);
  if (driver.destination_kind(path()) != DestinationKind::directory) return;
  const TemporaryDirectory sources;
  std::ofstream(sources / "config.json") << "{}";
  fail_each_operation([&](FileSystem& fs) { write_with_extra_file(fs, sources / "config.json"); });
  write_with_extra_file(fs_, sources / "config.json");
  EXPECT_EQ(read_file(fs_, join_path(path(), "config.json"), 2), "{}");
  expect_equal_checkpoints(*open(), as_it_comes_back(one_of_everything(), format()));
}

TEST_P(WriterConformanceTest, EverythingIsSyncedBeforeItAppears) {
  const TemporaryDirectory sources;
  std::ofstream(sources / "config.json") << "{}";
  FaultFileSystem watched(fs_, tmp_.path());
  if (formats::driver_of(format().format).destination_kind(path()) == DestinationKind::directory) {
    write_with_extra_file(watched, sources / "config.json");
  } else {
    write_checkpoint(format(), watched, path(), one_of_everything(), 2);
  }
  std::set<std::string> unsynced;  // written files, and directories with new names
  bool has_appeared = false;
  std::istringstream transcript(watched.transcript());
  for (std::string line; std::getline(transcript, line);) {
    SCOPED_TRACE(line);
    std::istringstream words(line);
    std::string operation;
    std::string name;
    std::string to;
    words >> operation >> name >> to;
    const std::string directory = directory_of(name);
    if (operation == "create" || operation == "write" || operation == "resize") {
      unsynced.insert(name);
    }
    if (operation == "create" || operation == "make_directory") unsynced.insert(directory);
    if (operation == "sync" || operation == "sync_directory" || operation == "remove_all") {
      unsynced.erase(name);
    }
    if (operation != "rename") continue;
    for (const std::string& left : unsynced) {
      EXPECT_FALSE(left == name || left.starts_with(name + "/")) << left << " is not synced";
    }
    unsynced.insert(directory_of(to));
    has_appeared |= to == format().destination;
  }
  EXPECT_TRUE(has_appeared);
  EXPECT_THAT(unsynced, ::testing::IsEmpty());
}

TEST_P(WriterConformanceTest, AFailureWhileReplacingLeavesTheOldOne) {
  MemoryCheckpoint old;
  old.add({"old", DType::uint8, {3}}, bytes_of<std::uint8_t>({1, 2, 3}));
  old.add_value("v", "old");
  const MemoryCheckpoint source = one_of_everything();
  FaultFileSystem faulty(fs_, tmp_.path());
  bool succeeded = false;
  write(old);
  for (std::int64_t i = 0; !succeeded; i += kSampleStep) {
    SCOPED_TRACE("operation " + std::to_string(i));
    ASSERT_LT(i, 2000);
    faulty.fail_operation(i);
    try {
      write_checkpoint(format(), faulty, path(), source, 2, OverwritePolicy::replace);
      succeeded = true;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
      expect_equal_checkpoints(*open(), as_it_comes_back(old, format()));
    }
  }
  expect_equal_checkpoints(*open(), as_it_comes_back(source, format()));
}

TEST_P(WriterConformanceTest, WithoutCommitNothingIsLeft) {
  const MemoryCheckpoint source = fit_to_format(one_of_everything(), format());
  {
    const auto writer =
        format().create(fs_, path(), source.contents(),
                        {source.read_value(0), source.read_value(1)}, OverwritePolicy::refuse);
    const auto piece = writer->write_order().front();
    const auto& tensor = writer->contents().tensors[piece.tensor_index];
    const Region& region = tensor.pieces[piece.piece_index].region;
    const std::int64_t numel = std::min(writer->block_numel(piece), numel_of(region));
    writer->write_block(piece, 0,
                        Bytes(static_cast<std::size_t>(numel) * itemsize(tensor.meta.dtype)));
    EXPECT_EQ(fs_.kind_of(path()), std::nullopt);
    writer->abandon();
  }
  EXPECT_TRUE(is_nothing_left());
}

TEST_P(WriterConformanceTest, AnExistingDestinationIsReplacedOnlyWhereThatIsAskedFor) {
  MemoryCheckpoint old;
  old.add({"old", DType::uint8, {1}}, Bytes(1));
  write(old);
  const MemoryCheckpoint source = one_of_everything();
  EXPECT_THAT([&] { write(source); }, ThrowsError(ErrorKind::already_exists, format().destination));
  expect_equal_checkpoints(*open(), as_it_comes_back(old, format()));
  write_checkpoint(format(), fs_, path(), source, 1, OverwritePolicy::replace);
  expect_equal_checkpoints(*open(), as_it_comes_back(source, format()));
  write_checkpoint(format(), fs_, path(), old, 1, OverwritePolicy::replace);
  expect_equal_checkpoints(*open(), as_it_comes_back(old, format()));
}

class ReaderConformanceTest : public ConformanceTest {
 protected:
  void SetUp() override {
    if (format().create) {
      write(one_of_everything());
    } else {
      std::filesystem::copy(format().fixture, path(), std::filesystem::copy_options::recursive);
    }
  }

  /// Returns all tensors and values of a checkpoint as one text.
  static std::string told(const CheckpointReader& reader) {
    std::string text;
    for (std::size_t i = 0; i < reader.contents().tensors.size(); ++i) {
      const TensorMeta& meta = reader.contents().tensors[i].meta;
      const Bytes bytes = whole_tensor(reader, i);
      text += meta.fqn + std::string(dtype_name(meta.dtype)) + shape_to_string(meta.shape);
      text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    for (std::size_t i = 0; i < reader.contents().values.size(); ++i) {
      text += reader.contents().values[i].name + value_to_string(reader.read_value(i), 1 << 20);
    }
    return text;
  }

  static bool verify_finds_errors(const CheckpointReader& reader) {
    bool found = false;
    reader.verify(
        [&](const Finding& finding) { found |= finding.severity == Finding::Severity::error; },
        [](std::uint64_t) {});
    return found;
  }

  void put(const std::string& file, std::string_view bytes) {
    fs_.remove_all(file);
    const auto out = fs_.create(file);
    out->write_at(0, std::as_bytes(std::span(bytes)));
    out->close();
  }
};
INSTANTIATE_TEST_SUITE_P(AllFormats, ReaderConformanceTest,
                         ::testing::ValuesIn(formats_that_read()), format_name_of);

TEST_P(ReaderConformanceTest, ATruncatedFileIsRefusedOrFoundByVerifyAndNeverReadWrongly) {
  const std::string whole = told(*open());
  Random random;
  for (const auto& [file, bytes] : all_files()) {
    // Lengths to cut the file to: all near both ends and near pieces, and some in between.
    std::set<std::size_t> lengths;
    const auto add_around = [&, &size = bytes](std::uint64_t at) {
      for (std::uint64_t nbytes = at < 3 ? 0 : at - 3; nbytes < at + 3; ++nbytes) {
        if (nbytes < size.size()) lengths.insert(nbytes);
      }
    };
    for (std::size_t nbytes = 0; nbytes < std::min<std::size_t>(bytes.size(), 300);
         nbytes += kSampleStep) {
      lengths.insert(nbytes);
      lengths.insert(bytes.size() - 1 - nbytes);
    }
    for (int i = 0; i < 100; i += kSampleStep) {
      lengths.insert(static_cast<std::size_t>(
          random.between(0, static_cast<std::int64_t>(std::max<std::size_t>(bytes.size(), 1)))));
    }
    {
      const auto reader = open();
      for (std::size_t t = 0; t < reader->contents().tensors.size(); ++t) {
        for (std::size_t p = 0; p < reader->contents().tensors[t].pieces.size(); ++p) {
          const auto storage = reader->piece_storage(t, p);
          if (!storage.byte_range || !file.ends_with(storage.file)) continue;
          add_around(storage.byte_range->begin);
          add_around(storage.byte_range->end);
        }
      }
    }
    for (const std::size_t nbytes : lengths) {
      if (nbytes >= bytes.size()) continue;
      SCOPED_TRACE(file + " cut to " + std::to_string(nbytes));
      put(file, std::string_view(bytes).substr(0, nbytes));
      try {
        const auto reader = open();
        EXPECT_EQ(told(*reader), whole);
        const bool is_only_space_lost = bytes.find_first_not_of("\n ", nbytes) == std::string::npos;
        EXPECT_TRUE(is_only_space_lost || verify_finds_errors(*reader));
      } catch (const Error& error) {
        EXPECT_NE(error.kind(), ErrorKind::io) << error.what();
      }
    }
    put(file, bytes);
  }
  EXPECT_EQ(told(*open()), whole);
}

TEST_P(ReaderConformanceTest, AMissingFileIsRefusedOrFoundByVerify) {
  for (const auto& [file, bytes] : all_files()) {
    SCOPED_TRACE(file);
    fs_.remove_all(file);
    try {
      const auto reader = open();
      EXPECT_TRUE(verify_finds_errors(*reader));
      told(*reader);
    } catch (const Error& error) {
      EXPECT_NE(error.kind(), ErrorKind::io) << error.what();
    }
    put(file, bytes);
  }
}

TEST_P(ReaderConformanceTest, DamagedFilesAreRefusedOrReadButNeverCrash) {
  Random random;
  for (const auto& [file, bytes] : all_files()) {
    if (bytes.empty()) continue;
    for (int round = 0; round < 300; round += kSampleStep) {
      std::string damaged = bytes;
      for (auto flips = random.between(1, 4); flips > 0; --flips) {
        damaged[static_cast<std::size_t>(
            random.between(0, static_cast<std::int64_t>(bytes.size())))] ^=
            static_cast<char>(1 << random.between(0, 8));
      }
      put(file, damaged);
      try {
        const auto reader = open();
        verify_finds_errors(*reader);
        told(*reader);
      } catch (const Error& error) {
        EXPECT_NE(error.kind(), ErrorKind::io) << error.what();
        EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
      }
    }
    put(file, bytes);
  }
}

TEST_P(ReaderConformanceTest, AFailureOfAnyReadSurfacesAsIo) {
  FaultFileSystem faulty(fs_, tmp_.path());
  bool succeeded = false;
  for (std::int64_t i = 0; !succeeded; i += kSampleStep) {
    SCOPED_TRACE("operation " + std::to_string(i));
    ASSERT_LT(i, 2000);
    faulty.fail_operation(i);
    try {
      told(*format().open(faulty, path()));
      succeeded = true;
      EXPECT_FALSE(faulty.has_failed());
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
    }
  }
}

TEST_P(ReaderConformanceTest, WhatIsNotThereIsNotFound) {
  EXPECT_THAT([&] { format().open(fs_, tmp_ / "absent"); },
              ThrowsError(ErrorKind::not_found, "absent"));
}

}  // namespace
}  // namespace tessera::test

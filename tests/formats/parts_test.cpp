#include "tessera/formats/parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "formats/dcp.h"
#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/reading.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {
namespace {

using test::kSampleStep;
using test::values_of;

using namespace tessera::test;
using Compression = NativeWriteOptions::Compression;
using Fault = FaultFileSystem::Fault;

PartOptions options_of(Format format, Compression compression = Compression::none) {
  PartOptions options;
  options.format = format;
  options.native.compression = compression;
  options.native.chunk_nbytes = 65536;
  return options;
}

const std::vector<PartOptions>& all_options() {
  static const std::vector<PartOptions> options = {options_of(Format::native),
                                                   options_of(Format::native, Compression::zstd),
                                                   options_of(Format::dcp)};
  return options;
}

/// Rows of `shape` for all ranks but the last, which holds nothing if there are others.
std::vector<Piece> rows(const Shape& shape, int world_size) {
  const int num_holders = std::max(world_size - 1, 1);
  std::vector<Piece> pieces;
  std::int64_t begin = 0;
  for (int rank = 0; rank < num_holders; ++rank) {
    const std::int64_t end = shape[0] * (rank + 1) / num_holders;
    pieces.push_back({Box{{begin, 0}, {end - begin, shape[1]}}, rank});
    begin = end;
  }
  return pieces;
}

/// Everything that the format can hold: large and small pieces, by rows, replicated, 0-d, empty.
MemoryCheckpoint make_source(int world_size, Format format) {
  Random random;
  MemoryCheckpoint source("source", world_size);
  const Shape shape = {700, 1000};
  source.add({"weight", DType::bfloat16, shape}, weight_like_bytes(1'400'000, 2, random),
             rows(shape, world_size));
  source.add({"noise", DType::float32, {1500, 1000}}, random_bytes(6'000'000, random));
  std::vector<Piece> replicas;
  for (int rank = 0; rank < std::max(world_size - 1, 1); ++rank) replicas.push_back({Box{}, rank});
  source.add({"step", DType::float32, {}}, bytes_of<float>({3}), replicas);
  for (Piece& replica : replicas) replica.region = Box{{0}, {5}};
  source.add({"bias", DType::int64, {5}}, bytes_of<std::int64_t>({1, 2, 3, -4, 5}), replicas);
  source.add({"empty", DType::int64, {0, 7}}, {});
  source.add({"empty.nowhere", DType::float32, {3, 0}}, {}).pieces.clear();
  source.add_value("epoch", Value(7));
  source.add_value("betas", Value(Value::Tuple{{Value(0.9), Value(0.999)}}));
  if (format == Format::native) {
    source.add({"flat", DType::uint8, {100'000}}, random_bytes(100'000, random),
               {{FlatRange{0, 70'000}, 0}, {FlatRange{70'000, 100'000}, world_size / 2}});
    source.add_alias("tied.weight", "weight");
    source.contents_for_change().annotations["made_by"] = "a test";
    source.contents_for_change().units = {
        make_flat_unit("all", DType::bfloat16, {{"weight", shape}})};
  }
  return source;
}

void write_alone(const CheckpointReader& source, const std::string& path,
                 const PartOptions& options) {
  FileSystem& fs = FileSystem::posix();
  const auto writer = options.format == Format::native
                          ? create_native(fs, path, source.contents(), values_of(source),
                                          OverwritePolicy::refuse, options.native)
                          : create_dcp(fs, path, source.contents(), values_of(source));
  write_all(source, *writer);
}

/// The actions of [Note: Rank parts] for one checkpoint.
class Parts {
 public:
  Parts(FileSystem& fs, const CheckpointReader& source, std::string directory, PartOptions options)
      : fs_(fs), source_(source), directory_(std::move(directory)), options_(std::move(options)) {}

  std::unique_ptr<CheckpointWriter> create(int rank) {
    return create_part(fs_, directory_, source_.contents(), values_of(source_), rank, options_);
  }
  void write(int rank) { write_all(source_, *create(rank)); }
  std::uint64_t join() {
    return join_parts(fs_, directory_, source_.contents(), values_of(source_), options_);
  }
  void seal(int rank, std::uint64_t token) { seal_part(fs_, directory_, rank, token, options_); }
  void finish() { finish_parts(fs_, directory_, source_.contents(), values_of(source_), options_); }

  /// Does all actions, for one rank after the other.
  void do_all() {
    const int world_size = source_.contents().world_size;
    for (int rank = 0; rank < world_size; ++rank) write(rank);
    const std::uint64_t token = join();
    for (int rank = 0; rank < world_size; ++rank) seal(rank, token);
    finish();
  }

 private:
  FileSystem& fs_;
  const CheckpointReader& source_;
  const std::string directory_;
  const PartOptions options_;
};

/// Runs one action on all ranks at once.
void on_all_ranks(int world_size, const std::function<void(int rank)>& action) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        action(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

std::string new_directory(const TemporaryDirectory& parent, const std::string& name) {
  FileSystem::posix().make_directory(parent / name);
  return parent / name;
}

void expect_no_checkpoint(const std::string& directory) {
  EXPECT_THROW(open_checkpoint(FileSystem::posix(), directory), Error);
  EXPECT_THROW(open_native(FileSystem::posix(), directory), Error);
  EXPECT_THROW(open_dcp(FileSystem::posix(), directory), Error);
}

void expect_equal_files(const std::string& found, const std::string& expected) {
  const auto found_files = files_of(found);
  const auto expected_files = files_of(expected);
  std::vector<std::string> names;
  for (const auto& [name, bytes] : found_files) {
    names.push_back(name);
    EXPECT_TRUE(expected_files.contains(name) && bytes == expected_files.at(name)) << name;
  }
  EXPECT_EQ(names.size(), expected_files.size()) << testing::PrintToString(names);
}

TEST(PartsTest, RanksTogetherWriteTheFilesThatOneWriterDoes) {
  for (const PartOptions& options : all_options()) {
    for (const int world_size : {1, 2, 3, 5}) {
      SCOPED_TRACE(std::string(options.format.name()) + ", ranks: " + std::to_string(world_size));
      const MemoryCheckpoint source = make_source(world_size, options.format);
      TemporaryDirectory directory;
      write_alone(source, directory / "alone", options);
      const std::string path = new_directory(directory, "together");
      Parts parts(FileSystem::posix(), source, path, options);
      on_all_ranks(world_size, [&](int rank) { parts.write(rank); });
      const std::uint64_t token = parts.join();
      on_all_ranks(world_size, [&](int rank) { parts.seal(rank, token); });
      parts.finish();
      expect_equal_files(path, directory / "alone");
      const auto reader = open_checkpoint(FileSystem::posix(), path);
      reader->verify(
          [](const Finding& finding) {
            if (finding.severity == Finding::Severity::error) ADD_FAILURE() << finding.rule;
          },
          [](std::uint64_t) {});
    }
  }
}

TEST(PartsTest, AFileThatIsWrittenPastThePageCacheIsTheSame) {
  Random random;
  MemoryCheckpoint source("source", 2);
  source.add({"large", DType::uint8, {17 << 20}}, random_bytes(17 << 20, random),
             {{Box{{0}, {17 << 20}}, 1}});
  for (const PartOptions& options : all_options()) {
    TemporaryDirectory directory;
    write_alone(source, directory / "alone", options);
    const std::string path = new_directory(directory, "together");
    Parts(FileSystem::posix(), source, path, options).do_all();
    expect_equal_files(path, directory / "alone");
  }
}

TEST(PartsTest, ACheckpointWithoutAnythingIsWritten) {
  const MemoryCheckpoint source("nothing", 2);
  for (const PartOptions& options : all_options()) {
    TemporaryDirectory directory;
    write_alone(source, directory / "alone", options);
    const std::string path = new_directory(directory, "together");
    Parts(FileSystem::posix(), source, path, options).do_all();
    expect_equal_files(path, directory / "alone");
  }
}

TEST(PartsTest, APartHasItsRanksPiecesAloneAndAllContents) {
  for (const PartOptions& options : all_options()) {
    const MemoryCheckpoint source = make_source(3, options.format);
    TemporaryDirectory directory;
    Parts parts(FileSystem::posix(), source, directory.path(), options);
    std::size_t num_pieces = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const auto writer = parts.create(rank);
      EXPECT_EQ(writer->contents().tensors.size(), source.contents().tensors.size());
      for (const auto& id : writer->write_order()) {
        EXPECT_EQ(writer->contents().tensors[id.tensor_index].pieces[id.piece_index].rank, rank);
        ++num_pieces;
      }
    }
    EXPECT_EQ(num_pieces, options.format == Format::native ? 9u : 5u);
  }
}

TEST(PartsTest, NoReaderTakesTheDirectoryForACheckpointBeforeItIsFinished) {
  for (const PartOptions& options : all_options()) {
    SCOPED_TRACE(options.format.name());
    const bool is_native = options.format == Format::native;
    const MemoryCheckpoint source = make_source(2, options.format);
    TemporaryDirectory directory;
    const std::string path = directory.path();
    FileSystem& fs = FileSystem::posix();
    Parts parts(fs, source, path, options);
    const auto expect_unfinished = [&](ErrorKind of_detection) {
      const auto open_any = [&] { open_checkpoint(fs, path); };
      const auto open = [&] { is_native ? open_native(fs, path) : open_dcp(fs, path); };
      const ErrorKind of_format = is_native && of_detection == ErrorKind::corruption
                                      ? ErrorKind::corruption
                                      : ErrorKind::not_found;
      EXPECT_THAT(open_any, ThrowsError(of_detection, "expected"));
      EXPECT_THAT(open, ThrowsError(of_format, is_native ? "index.h5" : ".metadata"));
    };

    const auto uncommitted = parts.create(0);
    const auto id = uncommitted->write_order().front();
    const auto& tensor = uncommitted->contents().tensors[id.tensor_index];
    const std::int64_t numel =
        std::min(uncommitted->block_numel(id), numel_of(tensor.pieces[id.piece_index].region));
    const Bytes block(static_cast<std::size_t>(numel) * itemsize(tensor.meta.dtype));
    uncommitted->write_block(id, 0, block);
    ASSERT_FALSE(fs.list_directory(path).empty());
    expect_unfinished(ErrorKind::unsupported);
    for (const std::string& name : fs.list_directory(path)) fs.remove_all(join_path(path, name));

    parts.write(0);
    expect_unfinished(ErrorKind::corruption);
    parts.write(1);
    const std::uint64_t token = parts.join();
    expect_unfinished(ErrorKind::corruption);
    parts.seal(1, token);
    expect_unfinished(ErrorKind::corruption);
    if (is_native) {
      const std::string expected = "rank-00000.h5: checkpoint id: expected an id, found none";
      EXPECT_THAT([&] { rebuild_native_index(fs, path); },
                  ThrowsError(ErrorKind::corruption, expected));
      EXPECT_THAT([&] { parts.finish(); }, ThrowsError(ErrorKind::corruption, expected));
      expect_unfinished(ErrorKind::corruption);
    }
    parts.seal(0, token);
    expect_unfinished(ErrorKind::corruption);
    parts.finish();
    EXPECT_NO_THROW(open_checkpoint(fs, path));
  }
}

TEST(PartsTest, APartThatIsMissingOrWasNotCommittedIsNamed) {
  for (const PartOptions& options : all_options()) {
    SCOPED_TRACE(options.format.name());
    const MemoryCheckpoint source = make_source(3, options.format);
    TemporaryDirectory directory;
    Parts parts(FileSystem::posix(), source, directory.path(), options);
    parts.write(0);
    const std::string missing =
        options.format == Format::native
            ? "rank files: expected 3 files, found none for rank 1 (did one rank not finish its "
              "part?)"
            : "__1_0.distcp: part: expected a file, found none (did one rank not finish its part?)";
    if (options.format == Format::native) parts.write(2);
    const auto join = [&] { parts.join(); };
    EXPECT_THAT(join, ThrowsError(ErrorKind::corruption, missing));

    const auto writer = parts.create(1);  // every block is written, but nothing committed
    for (const auto& id : writer->write_order()) {
      const auto& tensor = writer->contents().tensors[id.tensor_index];
      const std::int64_t numel = numel_of(tensor.pieces[id.piece_index].region);
      for (std::int64_t begin = 0; begin < numel; begin += writer->block_numel(id)) {
        const FlatRange range{begin, std::min(begin + writer->block_numel(id), numel)};
        Bytes bytes(static_cast<std::size_t>(range.numel()) * itemsize(tensor.meta.dtype));
        writer->write_block(id, begin, bytes);
      }
    }
    EXPECT_THAT(join, ThrowsError(ErrorKind::corruption, missing));
    writer->commit();
    EXPECT_NO_THROW(join());
  }
}

TEST(PartsTest, AFileThatEndsEarlyIsNamed) {
  for (const PartOptions& options : all_options()) {
    const MemoryCheckpoint source = make_source(2, options.format);
    TemporaryDirectory directory;
    Parts parts(FileSystem::posix(), source, directory.path(), options);
    parts.write(0);
    parts.write(1);
    const std::string name = options.format == Format::native ? "rank-00000.h5" : "__0_0.distcp";
    const std::string bytes = read_all(directory / name);
    write_file(directory / name, bytes.substr(0, bytes.size() - 1));
    EXPECT_THAT([&] { parts.join(); },
                ThrowsError(ErrorKind::corruption,
                            name + ": file size: expected " + std::to_string(bytes.size()) +
                                " bytes, found " + std::to_string(bytes.size() - 1) + " bytes"));
  }
}

TEST(PartsTest, RanksThatDoNotAgreeOnWhatTheyWriteAreNamed) {
  using Change = std::function<void(MemoryCheckpoint&, PartOptions&)>;
  const std::map<std::string, Change> changes = {
      {"value", [](auto& source, auto&) { source.add_value("more", Value(1)); }},
      {"tensor",
       [](auto& source, auto&) { source.contents_for_change().tensors[0].meta.fqn += "x"; }},
      {"chunks", [](auto&, auto& options) { options.native.chunk_nbytes = 131072; }},
      {"ranks", [](auto& source, auto&) { source.contents_for_change().world_size = 4; }},
  };
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    PartOptions options = options_of(Format::native);
    const MemoryCheckpoint source = make_source(3, options.format);
    TemporaryDirectory directory;
    Parts parts(FileSystem::posix(), source, directory.path(), options);
    parts.write(0);
    parts.write(2);
    MemoryCheckpoint other_source = make_source(3, options.format);
    change(other_source, options);
    Parts(FileSystem::posix(), other_source, directory.path(), options).write(1);
    EXPECT_THAT([&] { parts.join(); }, ThrowsError(ErrorKind::corruption, "rank-00001.h5: "));
  }

  const MemoryCheckpoint source = make_source(2, Format::dcp);
  MemoryCheckpoint other_source = make_source(2, Format::dcp);
  other_source.add({"more", DType::uint8, {8192}}, Bytes(8192));
  TemporaryDirectory directory;
  Parts(FileSystem::posix(), other_source, directory.path(), options_of(Format::dcp)).write(0);
  Parts parts(FileSystem::posix(), source, directory.path(), options_of(Format::dcp));
  EXPECT_THAT([&] { parts.join(); },
              ThrowsError(ErrorKind::corruption, "__0_0.distcp: file size: expected"));
}

TEST(PartsTest, APartIsSealedOnce) {
  const MemoryCheckpoint source = make_source(1, Format::native);
  TemporaryDirectory directory;
  Parts parts(FileSystem::posix(), source, directory.path(), options_of(Format::native));
  parts.write(0);
  const std::uint64_t token = parts.join();
  parts.seal(0, token);
  EXPECT_THAT([&] { parts.seal(0, token); },
              ThrowsError(ErrorKind::corruption, "rank-00000.h5: checkpoint id: expected none"));
}

TEST(PartsTest, OtherFormatsAndRanksAreRefused) {
  TemporaryDirectory directory;
  const MemoryCheckpoint source = make_source(2, Format::dcp);
  for (const auto& [format, name] :
       {std::pair(Format::safetensors, "safetensors"), std::pair(Format::torch_zip, "torch")}) {
    Parts parts(FileSystem::posix(), source, directory.path(), options_of(format));
    const auto refused =
        ThrowsError(ErrorKind::unsupported, std::string("expected native or dcp, found ") + name);
    EXPECT_THAT([&] { parts.create(0); }, refused);
    EXPECT_THAT([&] { parts.join(); }, refused);
    EXPECT_THAT([&] { parts.seal(0, 0); }, refused);
    EXPECT_THAT([&] { parts.finish(); }, refused);
  }
  for (const PartOptions& options : all_options()) {
    Parts parts(FileSystem::posix(), source, directory.path(), options);
    EXPECT_THAT([&] { parts.create(2); },
                ThrowsError(ErrorKind::invalid_argument, "expected less than 2, found 2"));
    EXPECT_THAT([&] { parts.create(-1); },
                ThrowsError(ErrorKind::invalid_argument, "expected less than 2, found -1"));
  }
}

TEST(PartsTest, AFailureAtAnyOperationLeavesNothingThatOpens) {
  for (const PartOptions& options : all_options()) {
    Random random;
    MemoryCheckpoint source("two", 2);
    source.add({"weight", DType::bfloat16, {80, 1000}}, weight_like_bytes(160'000, 2, random),
               {{Box{{0, 0}, {70, 1000}}, 0}, {Box{{70, 0}, {10, 1000}}, 1}});
    source.add_value("epoch", Value(7));
    TemporaryDirectory directory;
    write_alone(source, directory / "alone", options);
    const std::string path = directory / "together";
    FaultFileSystem fs(FileSystem::posix(), directory.path());
    for (const Fault fault : {Fault::once, Fault::from_then_on}) {
      bool is_done = false;
      std::int64_t index = 0;
      for (; !is_done; index += kSampleStep) {
        SCOPED_TRACE(std::string(options.format.name()) + " " + std::to_string(index));
        FileSystem::posix().remove_all(path);
        FileSystem::posix().make_directory(path);
        fs.fail_operation(index, fault);
        try {
          Parts(fs, source, path, options).do_all();
          is_done = true;
          continue;
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
        }
        ASSERT_TRUE(fs.has_failed());
        // If all later operations fail too, not even the last rename can be undone.
        if (fault == Fault::from_then_on && files_of(path) == files_of(directory / "alone")) {
          continue;
        }
        expect_no_checkpoint(path);
      }
      EXPECT_GT(index, 20);
      expect_equal_files(path, directory / "alone");
    }
  }
}

TEST(PartsTest, WhatMakesThePartsDurableComesInThisOrder) {
  const auto transcript_of = [](Format format) {
    MemoryCheckpoint source("one", 1);
    source.add({"b", DType::float32, {3}}, bytes_of<float>({1, 2, 3}));
    TemporaryDirectory directory;
    const std::string path = new_directory(directory, "c");
    FaultFileSystem fs(FileSystem::posix(), directory.path());
    Parts(fs, source, path, options_of(format)).do_all();
    std::istringstream transcript(fs.transcript());
    std::vector<std::string> lines;
    for (std::string line; std::getline(transcript, line);) {
      const bool is_content = line.starts_with("write ") || line.starts_with("resize ");
      const bool is_header = line.find("[0, 4096)") != std::string::npos;
      if (!is_content || is_header) lines.push_back(line);
    }
    return lines;
  };
  EXPECT_THAT(transcript_of(Format::native),
              testing::ElementsAre("create c/rank-00000.h5.partial",           //
                                   "sync c/rank-00000.h5.partial",             //
                                   "close c/rank-00000.h5.partial",            //
                                   "open_for_update c/rank-00000.h5.partial",  //
                                   "write c/rank-00000.h5.partial [0, 4096)",  //
                                   "sync c/rank-00000.h5.partial",             //
                                   "close c/rank-00000.h5.partial",            //
                                   "rename c/rank-00000.h5.partial c/rank-00000.h5",
                                   "open_for_update c/rank-00000.h5",     //
                                   "write c/rank-00000.h5 [0, 4096)",     //
                                   "sync c/rank-00000.h5",                //
                                   "close c/rank-00000.h5",               //
                                   "create c/index.h5.partial",           //
                                   "close c/index.h5.partial",            //
                                   "open_for_update c/index.h5.partial",  //
                                   "close c/index.h5.partial",            //
                                   "open_for_update c/index.h5.partial",  //
                                   "write c/index.h5.partial [0, 4096)",  //
                                   "sync c/index.h5.partial",             //
                                   "close c/index.h5.partial",            //
                                   "rename c/index.h5.partial c/index.h5", "sync_directory c"));
  EXPECT_THAT(transcript_of(Format::dcp),
              testing::ElementsAre("create c/__0_0.distcp.partial",  //
                                   "sync c/__0_0.distcp.partial",    //
                                   "close c/__0_0.distcp.partial",   //
                                   "rename c/__0_0.distcp.partial c/__0_0.distcp",
                                   "create c/.metadata.partial",           //
                                   "close c/.metadata.partial",            //
                                   "open_for_update c/.metadata.partial",  //
                                   "sync c/.metadata.partial",             //
                                   "close c/.metadata.partial",            //
                                   "rename c/.metadata.partial c/.metadata", "sync_directory c"));
}

}  // namespace
}  // namespace tessera::formats

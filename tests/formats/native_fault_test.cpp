#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "formats/native_checkpoint.h"
#include "support/error_matchers.h"
#include "support/fault_file_system.h"
#include "support/sampling.h"
#include "support/temporary_directory.h"

namespace tessera::formats {
namespace {

using test::kSampleStep;

using namespace tessera::test;
using Fault = FaultFileSystem::Fault;

/// Small pieces, a plain one of several blocks, and a compressed one.
MemoryCheckpoint two_ranks() {
  Random random;
  MemoryCheckpoint source("two", 2);
  source.add({"b", DType::float32, {3}}, bytes_of<float>({1, 2, 3}));
  source.add({"noise", DType::uint8, {100'000}}, random_bytes(100'000, random),
             {{Box{{0}, {100'000}}, 1}});
  source.add({"w", DType::bfloat16, {80'000}}, weight_like_bytes(160'000, 2, random),
             {{FlatRange{0, 70'000}, 0}, {FlatRange{70'000, 80'000}, 1}});
  return source;
}

NativeWriteOptions options_of(NativeWriteOptions::Compression compression) {
  NativeWriteOptions options;
  options.compression = compression;
  options.chunk_nbytes = 65536;
  return options;
}

void write(FileSystem& fs, const CheckpointReader& source, const std::string& path,
           const NativeWriteOptions& options, OverwritePolicy overwrite) {
  const auto writer = create_native(fs, path, source.contents(), {}, overwrite, options);
  write_all(source, *writer);
}

TEST(NativeFaultTest, AFailureAtAnyOperationLeavesTheDestinationAsItWas) {
  const MemoryCheckpoint old_source = small_checkpoint();
  const MemoryCheckpoint source = two_ranks();
  for (const auto compression :
       {NativeWriteOptions::Compression::none, NativeWriteOptions::Compression::zstd}) {
    const NativeWriteOptions options = options_of(compression);
    for (const Fault fault : {Fault::short_write, Fault::from_then_on}) {
      for (const OverwritePolicy overwrite : {OverwritePolicy::refuse, OverwritePolicy::replace}) {
        TemporaryDirectory directory;
        const std::string path = directory / "c";
        write_native(source, directory / "whole", options);
        const auto whole = files_of(directory / "whole");
        std::map<std::string, std::string> before;
        if (overwrite == OverwritePolicy::replace) {
          write_native(old_source, path);
          before = files_of(path);
        }
        FaultFileSystem fs(FileSystem::posix(), directory.path());
        bool committed = false;
        std::int64_t index = 0;
        for (; !committed; index += kSampleStep) {
          SCOPED_TRACE(index);
          fs.fail_operation(index, fault);
          try {
            write(fs, source, path, options, overwrite);
            committed = true;
            continue;
          } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
          }
          ASSERT_TRUE(fs.has_failed());
          std::map<std::string, std::string> after;
          if (FileSystem::posix().kind_of(path)) after = files_of(path);
          // If all later operations fail too, not even the rename can be undone.
          if (fault == Fault::from_then_on && after == whole) {
            fs.fail_operation(-1);
            if (overwrite == OverwritePolicy::refuse) fs.remove_all(path);
            continue;
          }
          ASSERT_TRUE(after == before);
        }
        EXPECT_GT(index, 30);
        const auto reader = open_native(FileSystem::posix(), path);
        reader->verify([](const Finding& finding) { ADD_FAILURE() << finding.rule; }, {});
      }
    }
  }
}

TEST(NativeFaultTest, AFailureAtAnyOperationOfRebuildingLeavesTheIndexAsItWas) {
  TemporaryDirectory directory;
  write_native(two_ranks(), directory / "c");
  const std::string sound = read_all(directory / "c/index.h5");
  for (const std::string& before : {std::string("\x89TSR damaged"), sound.substr(0, 5000), sound}) {
    write_file(directory / "c/index.h5", before);
    FaultFileSystem fs(FileSystem::posix(), directory.path());
    for (std::int64_t index = 0;; ++index) {
      SCOPED_TRACE(index);
      fs.fail_operation(index, Fault::from_then_on);
      try {
        rebuild_native_index(fs, directory / "c");
        break;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
      }
      const std::string after = read_all(directory / "c/index.h5");
      ASSERT_TRUE(after == before || after == sound);
    }
    EXPECT_EQ(read_all(directory / "c/index.h5"), sound);
  }
}

TEST(NativeFaultTest, WhatMakesTheCheckpointDurableComesInThisOrder) {
  TemporaryDirectory directory;
  FaultFileSystem fs(FileSystem::posix(), directory.path());
  write(fs, two_ranks(), directory / "c", {}, OverwritePolicy::refuse);
  std::istringstream transcript(fs.transcript());
  std::vector<std::string> lines;
  for (std::string line; std::getline(transcript, line);) {
    const bool is_content = line.starts_with("write ") || line.starts_with("resize ");
    const bool is_header = line.find("[0, 4096)") != std::string::npos;
    if (!is_content || is_header) lines.push_back(line);
  }
  EXPECT_THAT(lines, testing::ElementsAreArray({
                         "make_directory c.partial",
                         "create c.partial.journal",
                         "close c.partial.journal",
                         "create c.partial/rank-00000.h5",
                         "sync c.partial/rank-00000.h5",
                         "close c.partial/rank-00000.h5",
                         "create c.partial/rank-00001.h5",
                         "sync c.partial/rank-00001.h5",
                         "close c.partial/rank-00001.h5",
                         "create c.partial/index.h5",
                         "close c.partial/index.h5",
                         "open_for_update c.partial/index.h5",
                         "write c.partial/index.h5 [0, 4096)",
                         "sync c.partial/index.h5",
                         "close c.partial/index.h5",
                         "open_for_update c.partial/rank-00000.h5",
                         "write c.partial/rank-00000.h5 [0, 4096)",
                         "sync c.partial/rank-00000.h5",
                         "close c.partial/rank-00000.h5",
                         "open_for_update c.partial/rank-00001.h5",
                         "write c.partial/rank-00001.h5 [0, 4096)",
                         "sync c.partial/rank-00001.h5",
                         "close c.partial/rank-00001.h5",
                         "sync_directory c.partial",
                         "rename c.partial c",
                         "sync_directory .",
                         "remove_all c.partial.journal",
                     }));
}

}  // namespace
}  // namespace tessera::formats

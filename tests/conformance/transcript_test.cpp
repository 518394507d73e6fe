#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "conformance/conformance.h"
#include "support/fault_file_system.h"
#include "support/fixtures.h"
#include "support/temporary_directory.h"

namespace tessera::test {
namespace {

/// Compares each writer's file operations with fixtures/transcripts: which files it creates, and
/// the order in which it syncs, closes, renames and removes them. Leaves out the offsets and sizes
/// of writes, which depend on HDF5 and zstd.
/// If TESSERA_UPDATE_TRANSCRIPTS is set, first overwrites the transcripts with the new operations;
/// review the difference before you commit it.
class TranscriptTest : public ::testing::TestWithParam<FormatUnderTest> {
 protected:
  /// Writes one checkpoint and returns the operations. Consecutive writes to a file count as one
  /// operation.
  std::string operations(const MemoryCheckpoint& source, OverwritePolicy overwrite) {
    FaultFileSystem watched(FileSystem::posix(), tmp_.path());
    write_checkpoint(GetParam(), watched, tmp_ / GetParam().destination, source, 1, overwrite);
    std::istringstream transcript(watched.transcript());
    std::string operations;
    std::string previous;
    for (std::string line; std::getline(transcript, line); previous = line) {
      if (line.starts_with("write ")) line.erase(line.find(" ["));
      if (line.starts_with("resize ")) line.erase(line.rfind(' '));
      if (line != previous || !line.starts_with("write ")) operations += line + '\n';
    }
    return operations;
  }

  TemporaryDirectory tmp_;
};

TEST_P(TranscriptTest, TheOperationsAreThoseOfTheGoldenFile) {
  MemoryCheckpoint source;
  source.add({"model.weight", DType::float32, {2, 2}}, bytes_of<float>({1, 2, 3, 4}));
  source.add({"optim.step", DType::int64, {}}, bytes_of<std::int64_t>({5}));
  source.add_value("epoch", 6);
  std::string found = "# A new checkpoint\n" + operations(source, OverwritePolicy::refuse);
  found += "\n# In the place of another\n" + operations(source, OverwritePolicy::replace);
  const std::string path = fixture("transcripts/" + GetParam().name + ".txt");
  if (std::getenv("TESSERA_UPDATE_TRANSCRIPTS") != nullptr) std::ofstream(path) << found;
  std::ostringstream expected;
  expected << std::ifstream(path).rdbuf();
  EXPECT_EQ(found, expected.str()) << path;
}

INSTANTIATE_TEST_SUITE_P(Formats, TranscriptTest, ::testing::ValuesIn(formats_that_write()),
                         [](const auto& format) { return format.param.name; });

}  // namespace
}  // namespace tessera::test

#include "tessera/formats/detect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/temporary_directory.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using test::TemporaryDirectory;
using testing::HasSubstr;

const std::string kFixtures = TESSERA_FIXTURES;

Format detect(const std::string& path) {
  return detect_format(FileSystem::posix(), path);
}

std::string refusal(const std::string& path) {
  try {
    detect(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

void write(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

TEST(DetectTest, FindsEveryFormatByWhatItIs) {
  EXPECT_EQ(detect(kFixtures + "/dcp/valid/world1"), Format::dcp);
  EXPECT_EQ(detect(kFixtures + "/dcp/valid/hf_consolidated"), Format::safetensors);
  EXPECT_EQ(detect(kFixtures + "/safetensors/valid/sharded"), Format::safetensors);
  EXPECT_EQ(detect(kFixtures + "/safetensors/valid/single.safetensors"), Format::safetensors);
  EXPECT_EQ(detect(kFixtures + "/torch_zip/valid/views.pt"), Format::torch_zip);
}

TEST(DetectTest, FilesAreKnownByContentWhereTheNameDoesNotSay) {
  const TemporaryDirectory directory;
  std::filesystem::copy(kFixtures + "/safetensors/valid/single.safetensors", directory / "model");
  EXPECT_EQ(detect(directory / "model"), Format::safetensors);
  std::filesystem::copy(kFixtures + "/torch_zip/valid/views.pt", directory / "model.bin");
  EXPECT_EQ(detect(directory / "model.bin"), Format::torch_zip);
}

TEST(DetectTest, SaysWhatIsWrong) {
  const TemporaryDirectory directory;
  EXPECT_THAT(refusal(directory / "absent"),
              HasSubstr("absent: expected a checkpoint, found nothing"));
  EXPECT_THAT(refusal(directory.path()), HasSubstr("found an empty directory"));
  write(directory / "nothing", "");
  EXPECT_THAT(refusal(directory / "nothing"), HasSubstr("found an empty file"));
  EXPECT_THAT(refusal(directory.path()), HasSubstr("found a directory with none of them"));
  write(directory / "table.h5", "\x89HDF\r\n\x1a\n and more");
  EXPECT_THAT(refusal(directory / "table.h5"), HasSubstr("an HDF5 file"));
  EXPECT_THAT(refusal("/dev/null"), HasSubstr("found a device"));
}

TEST(DetectTest, PointsAtTheCheckpointWithin) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "step-100");
  write(directory / "step-100/.metadata", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr("did you mean " + (directory / "step-100") + "?"));
}

TEST(DetectTest, IncompleteCheckpointsAreToldFromOthers) {
  const TemporaryDirectory directory;
  write(directory / "rank-00000.h5", "x");
  EXPECT_THAT(refusal(directory.path()), HasSubstr("rebuild-index"));
  std::filesystem::remove(directory / "rank-00000.h5");
  write(directory / "__0_0.distcp", "x");
  EXPECT_THAT(refusal(directory.path()),
              HasSubstr(".metadata: expected it beside the .distcp files"));
  EXPECT_THAT(refusal(directory / "__0_0.distcp"), HasSubstr("name its directory"));
  write(directory / "__0.metadata", "x");
  EXPECT_THAT(refusal(directory.path()), HasSubstr("use_collectives=False"));
}

TEST(DetectTest, EveryFixtureMayBeReplaced) {
  int num_passed = 0;
  for (const char* folder : {"dcp/valid", "dcp/v2.2", "dcp/v2.5", "dcp/v2.11", "native/v1",
                             "safetensors/valid", "torch_zip/valid"}) {
    for (const auto& entry : std::filesystem::directory_iterator(kFixtures + "/" + folder)) {
      const bool has_folder_within = entry.path().filename() == "hf_consolidated";
      if (entry.path().extension() == ".json" || has_folder_within) continue;
      EXPECT_NO_THROW(check_replaceable(FileSystem::posix(), entry.path(), "replace"));
      ++num_passed;
    }
  }
  EXPECT_GT(num_passed, 40);
}

TEST(DetectTest, FlatLayoutIsApplied) {
  const std::string flat = kFixtures + "/dcp/valid/fsdp1_flat";
  const auto reader =
      open_checkpoint(FileSystem::posix(), flat, {.flat_layout_path = flat + ".flat-layout.json"});
  EXPECT_NE(reader->contents().find_tensor("model.layers.0.up.weight"), nullptr);
  EXPECT_EQ(reader->contents().find_tensor("model.layers.0._flat_param"), nullptr);
}

}  // namespace
}  // namespace tessera::formats

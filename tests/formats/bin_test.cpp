#include "formats/bin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "formats/torch_zip.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

using test::expect_holds;
using test::open;
using test::ThrowsError;
using testing::HasSubstr;
namespace stdfs = std::filesystem;

const std::string kValidBin = test::fixture("bin/valid/");
const std::string kFirst = "pytorch_model-00001-of-00002.bin";
const std::string kSecond = "pytorch_model-00002-of-00002.bin";
const std::string kIndex = "pytorch_model.bin.index.json";

/// A copy of a fixture, to damage it.
class BinTest : public testing::Test {
 protected:
  explicit BinTest(const std::string& name = "sharded") {
    for (const auto& entry : stdfs::directory_iterator(kValidBin + name)) {
      const std::string copy = directory_ / entry.path().filename().string();
      stdfs::copy(entry.path(), copy);
      stdfs::permissions(copy, stdfs::perms::owner_write, stdfs::perm_options::add);
    }
  }

  void remove(const std::string& name) { stdfs::remove(directory_ / name); }
  void write(const std::string& name, const std::string& content) {
    std::ofstream(directory_ / name, std::ios::binary) << content;
  }
  void copy(const std::string& from, const std::string& to) {
    stdfs::copy_file(directory_ / from, directory_ / to, stdfs::copy_options::overwrite_existing);
  }

  test::TemporaryDirectory directory_;
};

TEST_F(BinTest, ReadsWhatTorchSaved) {
  for (const char* name : {"sharded", "without_index", "single"}) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidBin + name);
    EXPECT_EQ(reader->format(), Format("bin"));
    expect_holds(*reader, kValidBin + name + ".expect.json");
    EXPECT_FALSE(reader->contents().part);
  }
  expect_holds(*open(kValidBin + "sharded/" + kIndex), kValidBin + "sharded.expect.json");
}

TEST_F(BinTest, APieceIsInItsFile) {
  const auto reader = open(directory_.path());
  const auto& tensors = reader->contents().tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const bool is_first = tensors[i].meta.fqn == "model.embed.weight" ||
                          tensors[i].meta.fqn == "model.layers.0.weight";
    EXPECT_EQ(reader->piece_storage(i, 0).file, is_first ? kFirst : kSecond);
  }
  EXPECT_EQ(reader->data_files().size(), 2u);
}

TEST_F(BinTest, WhatTheFilesReadersMadeSimplerIsListedOnce) {
  const std::string saved = test::fixture("torch_zip/valid/shared.pt");
  const std::vector<Simplification> expected = open(saved)->contents().simplifications;
  ASSERT_FALSE(expected.empty());
  test::TemporaryDirectory directory;
  std::ofstream(directory / "config.json") << "{}";
  stdfs::copy(saved, directory / "pytorch_model.bin");
  const auto reader = open(directory.path());
  ASSERT_EQ(reader->format(), Format("bin"));
  EXPECT_THAT(reader->contents().simplifications, testing::UnorderedElementsAreArray(expected));
}

TEST_F(BinTest, TextsOfAnIndexAreThoseOfTheCheckpoint) {
  EXPECT_TRUE(open(directory_.path())->contents().annotations.empty());
  std::string index = read_file(FileSystem::posix(), directory_ / kIndex, 1 << 20);
  index.insert(index.find("\"total_size\""), R"("note": "mine", )");
  write(kIndex, index);
  EXPECT_THAT(open(directory_.path())->contents().annotations,
              testing::ElementsAre(testing::Pair("note", "mine")));
}

TEST_F(BinTest, AModelInOneFileBesideAnIndexIsRefused) {
  write("pytorch_model.bin",
        read_file(FileSystem::posix(), test::fixture("torch_zip/valid/shared.pt"), 1 << 20));
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::invalid_argument, "found 'pytorch_model.bin' and '"));
}

TEST_F(BinTest, WhatAnIndexSaysWronglyOrBesideTheFilesIsTold) {
  EXPECT_THAT(open(directory_.path())->contents().opening_findings, testing::IsEmpty());
  std::string index = read_file(FileSystem::posix(), directory_ / kIndex, 1 << 20);
  index.replace(index.find("344"), 3, "345");
  index.insert(index.find("\"weight_map\""), R"("by": "me", )");
  write(kIndex, index);
  std::vector<std::string> found;
  const auto reader = open(directory_.path());
  for (const Finding& finding : reader->contents().opening_findings) {
    found.push_back(finding.found);
  }
  EXPECT_THAT(found, testing::ElementsAre(testing::StartsWith("'by'"), "345"));
}

TEST_F(BinTest, AMissingFileIsNamed) {
  remove(kSecond);
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::corruption, "a file '" + kSecond + "', found none"));
  remove(kIndex);
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::corruption, "2 files, as the name says, found 1"));
}

TEST_F(BinTest, ATensorThatItsFileLacksIsAnError) {
  write(kIndex, R"({"weight_map": {"model.embed.weight": ")" + kFirst + R"(", "model.steps": ")" +
                    kFirst + R"(", "model.layers.0.bias": ")" + kSecond + R"("}})");
  EXPECT_THAT(
      [&] { open(directory_.path()); },
      ThrowsError(ErrorKind::corruption, "model.steps: weight_map: expected the tensor in"));
}

TEST_F(BinTest, ATensorInTwoFilesIsAnError) {
  copy(kFirst, kSecond);
  remove(kIndex);
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::corruption, "found this name also in '" + kFirst + "'"));
}

void put(const std::string& path, const test::MemoryCheckpoint& source) {
  const auto writer =
      create_torch_zip(FileSystem::posix(), path, source.contents(), test::values_of(source));
  test::copy_checkpoint(source, *writer);
}

TEST_F(BinTest, FilesThatMakeNoStateDictAreCorrupt) {
  const test::TemporaryDirectory two;
  test::MemoryCheckpoint first;
  first.add({"a", DType::uint8, {1}}, test::Bytes(1));
  put(two / "x-00001-of-00002.bin", first);
  test::MemoryCheckpoint second;
  second.add({"a.b", DType::uint8, {1}}, test::Bytes(1)).key_path = {"a", "b"};
  put(two / "x-00002-of-00002.bin", second);
  EXPECT_THAT([&] { open(two.path()); },
              ThrowsError(ErrorKind::corruption, "are these files of different checkpoints?"));
}

TEST_F(BinTest, EqualValuesInTwoFilesAreOne) {
  const test::TemporaryDirectory two;
  for (const int number : {1, 2}) {
    test::MemoryCheckpoint source;
    source.add({"a" + std::to_string(number), DType::uint8, {1}}, test::Bytes(1));
    source.add_value("e", Value::Dict{});
    put(two / ("x-0000" + std::to_string(number) + "-of-00002.bin"), source);
  }
  EXPECT_EQ(open(two.path())->contents().values.size(), 1u);
  stdfs::remove(two / "x-00002-of-00002.bin");
  test::MemoryCheckpoint other;
  other.add_value("e", 2);
  put(two / "x-00002-of-00002.bin", other);
  EXPECT_THAT([&] { open(two.path()); }, ThrowsError(ErrorKind::corruption, "e: names: expected"));
}

TEST_F(BinTest, FilesWithOtherNumbersOrCountsDoNotHideAMissingFile) {
  remove(kIndex);
  copy(kFirst, "pytorch_model-00001-of-00003.bin");
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::corruption, "expected 3 files, as the name says, found 1"));
  remove("pytorch_model-00001-of-00003.bin");
  copy(kSecond, "pytorch_model-00005-of-00002.bin");
  remove(kSecond);
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::corruption,
                          "expected 2 files, as the name says, found 2, with numbers from 1 to 5"));
}

TEST_F(BinTest, AnIndexStaysInItsDirectory) {
  write(kIndex, R"({"weight_map": {"a": "../a.bin"}})");
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::corruption, "a file inside the checkpoint"));
}

TEST_F(BinTest, SeveralModelsInOneDirectoryNeedAName) {
  remove(kIndex);
  copy(kFirst, "adapter-00001-of-00001.bin");
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::invalid_argument, "'adapter-' and of 'pytorch_model-'"));
}

TEST_F(BinTest, VerifyNotesWhatTheIndexLacks) {
  write(kIndex, R"({"weight_map": {"model.embed.weight": ")" + kFirst + R"(", "model.steps": ")" +
                    kSecond + R"("}})");
  std::string notes;
  open(directory_.path())->check_files([&](const Finding& finding) {
    notes += finding_to_string(finding) + "\n";
  });
  EXPECT_THAT(notes, HasSubstr("model.layers.0.bias"));
  EXPECT_THAT(notes, HasSubstr("a tensor that the index does not name"));
}

// accelerate writes no config.json, and its other files hold no tensors of the model.
TEST_F(BinTest, AModelInOneFileNeedsNoConfig) {
  const test::TemporaryDirectory folder;
  stdfs::copy(kValidBin + "single/pytorch_model.bin", folder / "pytorch_model.bin");
  expect_holds(*open(folder.path()), kValidBin + "single.expect.json");
  for (const char* name : {"optimizer.bin", "scheduler.bin", "random_states_0.pkl"}) {
    std::ofstream(folder / name) << "not read";
  }
  const auto reader = open(folder.path());
  EXPECT_EQ(reader->format(), Format("bin"));
  expect_holds(*reader, kValidBin + "single.expect.json");
}

TEST_F(BinTest, ASecondModelOfAccelerateNeedsAName) {
  const test::TemporaryDirectory folder;
  for (const char* name : {"pytorch_model.bin", "pytorch_model_1.bin"}) {
    stdfs::copy(kValidBin + "single/pytorch_model.bin", folder / name);
  }
  EXPECT_THAT([&] { open(folder.path()); },
              ThrowsError(ErrorKind::invalid_argument,
                          "found 'pytorch_model.bin' and 'pytorch_model_1.bin', as accelerate"));
}

TEST_F(BinTest, AnAdapterBesideAModelIsRefused) {
  const test::TemporaryDirectory folder;
  for (const char* name : {"pytorch_model.bin", "adapter_model.bin"}) {
    stdfs::copy(kValidBin + "single/pytorch_model.bin", folder / name);
  }
  EXPECT_THAT([&] { open(folder.path()); },
              ThrowsError(ErrorKind::invalid_argument,
                          "found 'pytorch_model.bin' and 'adapter_model.bin', a model and an"));
}

TEST_F(BinTest, OneFileAloneIsOnePart) {
  const auto reader = open(directory_ / kSecond);
  EXPECT_EQ(reader->format(), Format::torch_zip);
  ASSERT_TRUE(reader->contents().part);
  EXPECT_EQ(part_in_words(*reader->contents().part), "one file of 2: file 2 of a model");
}

TEST_F(BinTest, AFileOfOneRankIsOnePart) {
  stdfs::create_directory(directory_ / "single");
  stdfs::copy(test::fixture("rank_files/valid/fsdp2/model_world_size_3_rank_0.pt"),
              directory_ / "single/pytorch_model.bin");
  std::ofstream(directory_ / "single/config.json") << "{}";
  const auto reader = open(directory_ / "single");
  EXPECT_EQ(reader->format(), Format("bin"));
  ASSERT_TRUE(reader->contents().part);
  EXPECT_THAT(part_in_words(*reader->contents().part), HasSubstr("one rank of several"));
}

TEST_F(BinTest, SafetensorsBesideAreTakenInstead) {
  stdfs::copy(test::fixture("safetensors/valid/single.safetensors"),
              directory_ / "model.safetensors");
  EXPECT_EQ(detect_format(FileSystem::posix(), directory_.path()), Format::safetensors);
}

TEST_F(BinTest, ItsFilesAreNotExtraFiles) {
  const FileSystem& fs = FileSystem::posix();
  const std::vector<std::string> names = fs.list_directory(directory_.path());
  EXPECT_THAT(driver_of(Format("bin")).own_files(fs, directory_.path(), names, {}),
              testing::ElementsAre(kFirst, kSecond, kIndex));
}

}  // namespace
}  // namespace tessera::formats

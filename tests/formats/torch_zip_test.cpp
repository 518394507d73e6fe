#include "tessera/formats/torch_zip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "support/error_matchers.h"
#include "support/expectation.h"
#include "tessera/base/json.h"

// Requirements E2 (torch.save reading), E3 (nothing is executed), E9 (aliases).
namespace tessera::formats {
namespace {

using test::expect_holds;

const std::string kFixtures = std::string(TESSERA_FIXTURES) + "/torch_zip/";

std::unique_ptr<CheckpointReader> open(const std::string& path) {
  return open_torch_zip(FileSystem::posix(), path);
}

std::vector<std::string> files_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const std::string& name : FileSystem::posix().list_directory(directory)) {
    if (name.ends_with(".pt")) names.push_back(name);
  }
  return names;
}

TEST(TorchZipTest, ReadsWhatTorchSaved) {
  const std::vector<std::string> names = files_in(kFixtures + "valid");
  ASSERT_GE(names.size(), 16u);
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const std::string path = kFixtures + "valid/" + name;
    expect_holds(*open(path), path + ".expect.json");
  }
}

void read_all(const CheckpointReader& reader) {
  for (std::size_t i = 0; i < reader.contents().tensors.size(); ++i) test::read_tensor(reader, i);
  for (std::size_t i = 0; i < reader.contents().values.size(); ++i) reader.read_value(i);
}

TEST(TorchZipTest, RefusesEveryInvalidFile) {
  const std::string directory = kFixtures + "invalid/";
  const Value table = parse_json(
      read_file(FileSystem::posix(), directory + "expect.json", std::uint64_t{1} << 24), "expect");
  for (const auto& [name, row] : *table.get_if<Value::Dict>()) {
    const std::string path = directory + *name.get_if<std::string>();
    SCOPED_TRACE(path);
    try {
      read_all(*open(path));
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.kind(), testing::AnyOf(ErrorKind::corruption, ErrorKind::unsupported));
      EXPECT_THAT(error.what(), testing::HasSubstr(path));
      for (const Value& word : *row.find("contains")->get_if<Value::List>()) {
        EXPECT_THAT(error.what(), testing::HasSubstr(*word.get_if<std::string>()));
      }
    }
  }
}

}  // namespace
}  // namespace tessera::formats

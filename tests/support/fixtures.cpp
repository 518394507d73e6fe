#include "support/fixtures.h"

#include <gmock/gmock.h>

#include <utility>

#include "base/json.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::test {

std::string fixture(const std::string& name) {
  return std::string(TESSERA_FIXTURES) + "/" + name;
}

std::vector<InvalidFixture> invalid_fixtures(const std::string& format_name) {
  const std::string folder = fixture(format_name + "/invalid");
  const std::string table_path = folder + "/expect.json";
  const Value table =
      parse_json(read_file(FileSystem::posix(), table_path, std::uint64_t{1} << 24), table_path);
  const auto text_of = [](const Value& value) { return *value.get_if<std::string>(); };
  std::vector<InvalidFixture> fixtures;
  for (const auto& [name, row] : *table.get_if<Value::Dict>()) {
    InvalidFixture invalid{
        .path = folder + "/" + text_of(name), .rule = text_of(*row.find("rule")), .contains = {}};
    for (const Value& words : *row.find("contains")->get_if<Value::List>()) {
      invalid.contains.push_back(text_of(words));
    }
    fixtures.push_back(std::move(invalid));
  }
  return fixtures;
}

void expect_invalid_fixtures_refused(
    const std::string& format_name,
    const std::function<std::unique_ptr<formats::CheckpointReader>(const std::string& path)>&
        open) {
  for (const InvalidFixture& bad : invalid_fixtures(format_name)) {
    SCOPED_TRACE(bad.path + ": " + bad.rule);
    try {
      const auto reader = open(bad.path);
      for (std::size_t i = 0; i < reader->contents().values.size(); ++i) reader->read_value(i);
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_THAT(error.kind(), testing::AnyOf(ErrorKind::corruption, ErrorKind::unsupported));
      EXPECT_THAT(error.what(), testing::HasSubstr(bad.path));
      for (const std::string& word : bad.contains) {
        EXPECT_THAT(error.what(), testing::HasSubstr(word));
      }
    }
  }
}

}  // namespace tessera::test

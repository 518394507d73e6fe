#include "support/fixtures.h"

#include <utility>

#include "base/json.h"
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

}  // namespace tessera::test

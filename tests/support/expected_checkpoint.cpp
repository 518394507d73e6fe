#include "support/expected_checkpoint.h"

#include <gtest/gtest.h>

#include <map>

#include "support/memory_checkpoint.h"
#include "tessera/base/digest.h"
#include "tessera/base/json.h"

namespace tessera::test {
namespace {

Value read_json_file(const std::string& path) {
  return parse_json(read_file(FileSystem::posix(), path, std::uint64_t{1} << 28), path);
}

const std::string& text_of(const Value& value) {
  return *value.get_if<std::string>();
}

/// Returns one line per tensor, so that a difference reads well.
std::map<std::string, std::string> described_tensors(const formats::CheckpointReader& reader) {
  std::map<std::string, std::string> lines;
  const formats::CheckpointContents& contents = reader.contents();
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const TensorMeta& meta = contents.tensors[i].meta;
    Sha256 sha;
    sha.update(whole_tensor(reader, i));
    lines[meta.fqn] = std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape) +
                      " " + std::to_string(meta.nbytes()) + " bytes " + sha.hex_digest();
  }
  for (const formats::Alias& alias : contents.aliases) lines[alias.fqn] = lines.at(alias.target);
  return lines;
}

}  // namespace

void expect_holds(const formats::CheckpointReader& reader, const std::string& expectation_path) {
  SCOPED_TRACE(expectation_path);
  const Value expectation = read_json_file(expectation_path);
  std::map<std::string, std::string> expected;
  for (const Value& tensor : *expectation.find("tensors")->get_if<Value::List>()) {
    Shape shape;
    for (const Value& size : *tensor.find("shape")->get_if<Value::List>()) {
      shape.push_back(*size.get_if<std::int64_t>());
    }
    expected[text_of(*tensor.find("name"))] =
        text_of(*tensor.find("dtype")) + " " + shape_to_string(shape) + " " +
        value_to_string(*tensor.find("nbytes")) + " bytes " + text_of(*tensor.find("sha256"));
  }
  EXPECT_EQ(described_tensors(reader), expected);

  if (const Value* values = expectation.find("values")) {
    std::map<std::string, std::string> expected_values;
    for (const auto& [name, value] : *values->get_if<Value::Dict>()) {
      expected_values[text_of(name)] = value_to_string(value, 10'000);
    }
    std::map<std::string, std::string> found_values;
    for (std::size_t i = 0; i < reader.contents().values.size(); ++i) {
      // The expectation is JSON, so that the comparison is between JSON and JSON.
      found_values[reader.contents().values[i].name] = value_to_string(
          parse_json(value_to_json(reader.read_value(i)), expectation_path), 10'000);
    }
    EXPECT_EQ(found_values, expected_values);
  }
}

std::vector<InvalidFixture> invalid_fixtures(const std::string& format_name) {
  const std::string folder = fixture(format_name + "/invalid");
  const Value table = read_json_file(folder + "/expect.json");
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

std::string fixture(const std::string& name) {
  return std::string(TESSERA_FIXTURES) + "/" + name;
}

}  // namespace tessera::test

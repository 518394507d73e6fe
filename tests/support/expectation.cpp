#include "support/expectation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/digest.h"
#include "base/json.h"
#include "support/memory_checkpoint.h"
#include "tessera/base/file_system.h"

namespace tessera::test {
namespace {

std::string sha256(const Bytes& bytes) {
  Sha256 digest;
  digest.update(bytes);
  return digest.hex_digest();
}

/// Checks that exactly the values listed under `refused` were refused, each with the words listed
/// for it.
void expect_refusals(const Value& expectation, const std::map<std::string, std::string>& found) {
  std::set<std::string> found_names;
  for (const auto& [name, reason] : found) found_names.insert(name);
  std::set<std::string> expected_names;
  if (const Value* refused = expectation.find("refused")) {
    for (const auto& [name_value, words] : *refused->get_if<Value::Dict>()) {
      const std::string& name = *name_value.get_if<std::string>();
      expected_names.insert(name);
      if (!found.contains(name)) continue;
      for (const Value& word : *words.get_if<Value::List>()) {
        EXPECT_THAT(found.at(name), testing::HasSubstr(*word.get_if<std::string>()));
      }
    }
  }
  EXPECT_EQ(found_names, expected_names);
}

}  // namespace

void expect_holds(const formats::CheckpointReader& reader, const std::string& expectation_path) {
  const Value expectation = parse_json(
      read_file(FileSystem::posix(), expectation_path, std::uint64_t{1} << 24), expectation_path);
  const formats::CheckpointContents& contents = reader.contents();

  std::map<std::string, std::string> found;  // name -> dtype, shape, digest
  const auto describe = [&](std::size_t index) {
    const TensorMeta& meta = contents.tensors[index].meta;
    return std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape) + " " +
           sha256(whole_tensor(reader, index));
  };
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    found[contents.tensors[i].meta.fqn] = describe(i);
  }
  for (const formats::Alias& alias : contents.aliases) {
    const auto target = found.find(alias.target);
    ASSERT_NE(target, found.end()) << alias.fqn << " -> " << alias.target;
    found[alias.fqn] = target->second;
  }
  std::map<std::string, std::string> expected;
  for (const Value& row : *expectation.find("tensors")->get_if<Value::List>()) {
    Shape shape;
    for (const Value& size : *row.find("shape")->get_if<Value::List>()) {
      shape.push_back(*size.get_if<std::int64_t>());
    }
    expected[*row.find("name")->get_if<std::string>()] = *row.find("dtype")->get_if<std::string>() +
                                                         " " + shape_to_string(shape) + " " +
                                                         *row.find("sha256")->get_if<std::string>();
  }
  EXPECT_EQ(found, expected);

  const Value* values = expectation.find("values");
  if (values == nullptr) return;
  std::map<std::string, std::string> found_values;
  std::map<std::string, std::string> found_refusals;
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    const std::string& name = contents.values[i].name;
    try {
      found_values[name] = value_to_json(reader.read_value(i));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::unsupported);
      EXPECT_EQ(error.where().fqn, name);
      found_refusals[name] = error.what();
    }
  }
  expect_refusals(expectation, found_refusals);
  std::map<std::string, std::string> expected_values;
  for (const auto& [name, value] : *values->get_if<Value::Dict>()) {
    expected_values[*name.get_if<std::string>()] =
        value_to_json(value_from_json(value, expectation_path));
  }
  EXPECT_EQ(found_values, expected_values);
}

}  // namespace tessera::test

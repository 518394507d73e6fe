#pragma once

#include <string>
#include <vector>

namespace tessera::test {

/// Returns the path of a fixture, e.g. `fixture("safetensors/valid/single.safetensors")`.
std::string fixture(const std::string& name);

/// A file in `fixtures/<format>/invalid`, which readers must refuse.
struct InvalidFixture {
  std::string path;
  std::string rule;                   // the rule that the file breaks, in words
  std::vector<std::string> contains;  // texts that the error message must contain
};

std::vector<InvalidFixture> invalid_fixtures(const std::string& format_name);

}  // namespace tessera::test

#pragma once

#include <string>
#include <vector>

namespace tessera::test {

/// Returns the path of a fixture, e.g. `fixture("safetensors/valid/single.safetensors")`.
std::string fixture(const std::string& name);

/// A file that must be refused, out of `fixtures/<format>/invalid`.
struct InvalidFixture {
  std::string path;
  std::string rule;                   // that it breaks, in words
  std::vector<std::string> contains;  // what the message must say
};

std::vector<InvalidFixture> invalid_fixtures(const std::string& format_name);

}  // namespace tessera::test

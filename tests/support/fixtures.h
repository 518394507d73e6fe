#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// Returns the path of a fixture, e.g. `fixture("safetensors/valid/single.safetensors")`.
std::string fixture(const std::string& name);

/// A file or folder in `fixtures/<format>/invalid`, which readers must refuse.
struct InvalidFixture {
  std::string path;
  std::string rule;                   // the rule that the file breaks, in words
  std::vector<std::string> contains;  // texts that the error message must contain
};

std::vector<InvalidFixture> invalid_fixtures(const std::string& format_name);

/// Expects that each invalid fixture of a format is refused, by `open` or when its values are read,
/// with an error that names the path and has the fixture's texts.
void expect_invalid_fixtures_refused(
    const std::string& format_name,
    const std::function<std::unique_ptr<formats::CheckpointReader>(const std::string& path)>& open);

}  // namespace tessera::test

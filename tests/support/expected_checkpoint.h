#pragma once

#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// Expects that a checkpoint holds exactly what a fixture's `.expect.json` says: names (second
/// names of tied tensors included), dtypes, shapes, digests of whole tensors, and values where they
/// are given.
void expect_holds(const formats::CheckpointReader& reader, const std::string& expectation_path);

/// A file that must be refused, out of `fixtures/<format>/invalid`.
struct InvalidFixture {
  std::string path;
  std::string rule;                   // that it breaks, in words
  std::vector<std::string> contains;  // what the message must say
};

std::vector<InvalidFixture> invalid_fixtures(const std::string& format_name);

/// Returns the path of a fixture, e.g. `fixture("safetensors/valid/single.safetensors")`.
std::string fixture(const std::string& name);

}  // namespace tessera::test

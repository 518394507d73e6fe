#pragma once

#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// Returns the pieces of a tensor as text: `[0:4, 0:6] on 0, [4:8, 0:6] on 1`, or `none` if there
/// is no tensor of that name.
std::string pieces_of(const formats::CheckpointReader& reader, const std::string& fqn);

/// Returns the reader's opening findings, each as `rule: found`. Fails the test if a finding is an
/// error.
std::vector<std::string> notes_of(const formats::CheckpointReader& reader);

}  // namespace tessera::test

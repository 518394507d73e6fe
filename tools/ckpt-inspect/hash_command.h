#pragma once

#include <string>
#include <vector>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct HashOptions {
  SourceOptions source;
  WorkOptions work;
  std::string manifest_path;  // manifest of --check; empty: print the digests
  std::string part;           // `I/N`: which part of the names; empty: all names
  /// Manifests of all parts, to join; empty: compute the digests.
  std::vector<std::string> joined_paths;
  bool json = false;
};

void add_hash_command(CommandLine& line, HashOptions& options, Terminal& terminal);

/// Prints the digests of the selected names, or compares them with a manifest. Returns
/// ExitCode::findings if they differ.
ExitCode run_hash(const HashOptions& options, Terminal& terminal);

}  // namespace tessera::cli

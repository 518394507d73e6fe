#pragma once

#include <string>
#include <vector>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct HashOptions {
  SourceOptions source;
  WorkOptions work;
  std::string manifest_path;              // to check against; empty: print
  std::string part;                       // `I/N`: of the names; empty: all
  std::vector<std::string> joined_paths;  // of the manifests of all parts; empty: compute
  bool json = false;
};

void add_hash_command(CommandLine& line, HashOptions& options, Terminal& terminal);

/// Prints the digests of the selected names, or compares them with a manifest. Returns
/// ExitCode::findings if they differ.
ExitCode run_hash(const HashOptions& options, Terminal& terminal);

}  // namespace tessera::cli

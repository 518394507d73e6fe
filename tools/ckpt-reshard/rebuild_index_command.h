#pragma once

#include <string>

#include "cli/command_line.h"

namespace tessera::cli {

struct RebuildIndexOptions {
  std::string path;
};

void add_rebuild_index_command(CommandLine& line, RebuildIndexOptions& options, Terminal& terminal);

/// Writes the index of a native checkpoint, from its rank files. Replaces an index that exists.
ExitCode run_rebuild_index(const RebuildIndexOptions& options, Terminal& terminal);

}  // namespace tessera::cli

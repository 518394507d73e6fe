#pragma once

#include <string>

#include "cli/command_line.h"

namespace tessera::cli {

struct RebuildIndexOptions {
  std::string path;
};

void add_rebuild_index_command(CommandLine& line, RebuildIndexOptions& options, Terminal& terminal);

/// Writes the lost index of a native checkpoint anew, from its rank files.
ExitCode run_rebuild_index(const RebuildIndexOptions& options, Terminal& terminal);

}  // namespace tessera::cli

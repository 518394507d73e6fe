#pragma once

#include <string>

#include "cli/command_line.h"

namespace tessera::cli {

struct RebuildIndexOptions {
  std::string path;
};

void add_rebuild_index_command(CommandLine& line, RebuildIndexOptions& options, Terminal& terminal);

/// Makes the index of a native checkpoint from the rank files. Replaces an index that is there.
ExitCode run_rebuild_index(const RebuildIndexOptions& options, Terminal& terminal);

}  // namespace tessera::cli

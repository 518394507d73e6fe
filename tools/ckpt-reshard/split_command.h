#pragma once

#include <string>
#include <vector>

#include "ckpt-reshard/move.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct SplitOptions {
  std::string source;
  std::vector<std::string> prefixes;  // with or without a dot at the end
  bool keep_prefix = false;           // keep the prefixes in the new names
  MoveOptions move;
};

void add_split_command(CommandLine& line, SplitOptions& options, Terminal& terminal);

/// Writes a part of a checkpoint: names under prefixes, names of --only, or all but optimizers.
ExitCode run_split(const SplitOptions& options, Terminal& terminal);

}  // namespace tessera::cli

#pragma once

#include <string>

#include "ckpt-reshard/move.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct ReshardOptions {
  std::string source;
  MoveOptions move;
};

void add_reshard_command(CommandLine& line, ReshardOptions& options, Terminal& terminal);

/// Writes SRC to DST in another layout or format; with --dry-run, only prints the plan.
ExitCode run_reshard(const ReshardOptions& options, Terminal& terminal);

}  // namespace tessera::cli

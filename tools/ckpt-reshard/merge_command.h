#pragma once

#include <string>
#include <vector>

#include "ckpt-reshard/move.h"
#include "cli/command_line.h"
#include "tessera/formats/merge.h"

namespace tessera::cli {

struct MergeOptions {
  std::string first_source;  // `PATH` or `PREFIX=PATH`
  std::string second_source;
  std::vector<std::string> more_sources;
  formats::MergePreference preference = formats::MergePreference::none;
  MoveOptions move;
};

void add_merge_command(CommandLine& line, MergeOptions& options, Terminal& terminal);

/// Writes several checkpoints as one new checkpoint.
ExitCode run_merge(const MergeOptions& options, Terminal& terminal);

}  // namespace tessera::cli

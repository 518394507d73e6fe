#pragma once

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct StatsOptions {
  SourceOptions source;
  WorkOptions work;
  int depth = 0;  // 0: per tensor
  bool json = false;
};

void add_stats_command(CommandLine& line, StatsOptions& options, Terminal& terminal);

/// Prints statistics of tensors' elements, per tensor or per prefix of names.
ExitCode run_stats(const StatsOptions& options, Terminal& terminal);

}  // namespace tessera::cli

#pragma once

#include <string>
#include <vector>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct StatsOptions {
  SourceOptions source;
  WorkOptions work;
  int depth = 0;                            // 0: one line per tensor
  std::string part{};                       // I/N; empty: all tensors
  std::vector<std::string> joined_paths{};  // outputs of all parts, to join; empty: compute
  bool json = false;
};

void add_stats_command(CommandLine& line, StatsOptions& options, Terminal& terminal);

/// Prints statistics of tensors' elements, per tensor or per prefix of names.
ExitCode run_stats(const StatsOptions& options, Terminal& terminal);

}  // namespace tessera::cli

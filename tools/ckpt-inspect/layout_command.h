#pragma once

#include <string>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct LayoutOptions {
  SourceOptions source;
  std::string table_plan_path;  // empty: not given
  bool all = false;             // print equal layers one by one
  bool mesh = false;            // also print the mesh and placements of DTensors
  bool json = false;
};

void add_layout_command(CommandLine& line, LayoutOptions& options, Terminal& terminal);

/// Prints a map of how much of each tensor each rank holds.
ExitCode run_layout(const LayoutOptions& options, Terminal& terminal);

}  // namespace tessera::cli

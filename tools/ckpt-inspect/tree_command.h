#pragma once

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct TreeOptions {
  SourceOptions source;
  int depth = 0;        // 0: all levels
  bool values = false;  // print values one by one, not only their number
  bool all = false;     // print equal layers one by one
  bool json = false;
};

void add_tree_command(CommandLine& line, TreeOptions& options, Terminal& terminal);

/// Prints names as a tree, with totals at every branch.
ExitCode run_tree(const TreeOptions& options, Terminal& terminal);

}  // namespace tessera::cli

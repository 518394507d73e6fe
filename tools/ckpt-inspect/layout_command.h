#pragma once

#include <string>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct LayoutOptions {
  SourceOptions source;
  std::string table_plan_path;  // empty: not given
  bool all = false;
  bool json = false;
};

void add_layout_command(CommandLine& line, LayoutOptions& options, Terminal& terminal);

/// Maps which rank holds how much of which tensor.
ExitCode run_layout(const LayoutOptions& options, Terminal& terminal);

}  // namespace tessera::cli

#pragma once

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct LayoutOptions {
  SourceOptions source;
  bool all = false;
  bool json = false;
};

void add_layout_command(CommandLine& line, LayoutOptions& options, Terminal& terminal);

/// Maps which rank holds how much of which tensor.
ExitCode run_layout(const LayoutOptions& options, Terminal& terminal);

}  // namespace tessera::cli

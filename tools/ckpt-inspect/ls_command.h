#pragma once

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct LsOptions {
  SourceOptions source;
  WorkOptions work;
  bool values = false;
  bool sha256 = false;
  bool json = false;
};

void add_ls_command(CommandLine& line, LsOptions& options, Terminal& terminal);

/// Lists names, one per line.
ExitCode run_ls(const LsOptions& options, Terminal& terminal);

}  // namespace tessera::cli

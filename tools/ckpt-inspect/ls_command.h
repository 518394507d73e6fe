#pragma once

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct LsOptions {
  SourceOptions source;
  WorkOptions work;
  bool values = false;  // also list values: all that is no tensor
  bool sha256 = false;  // also print the SHA-256 of each tensor's bytes
  bool json = false;
};

void add_ls_command(CommandLine& line, LsOptions& options, Terminal& terminal);

/// Lists names, one per line.
ExitCode run_ls(const LsOptions& options, Terminal& terminal);

}  // namespace tessera::cli

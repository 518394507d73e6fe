#pragma once

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct VerifyCommandOptions {
  SourceOptions source;
  WorkOptions work;
  bool values = false;
  bool json = false;
};

void add_verify_command(CommandLine& line, VerifyCommandOptions& options, Terminal& terminal);

/// Checks every byte. Returns ExitCode::findings if it finds an error.
ExitCode run_verify(const VerifyCommandOptions& options, Terminal& terminal);

}  // namespace tessera::cli

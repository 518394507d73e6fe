#pragma once

#include <string>
#include <vector>

#include "ckpt-inspect/source.h"
#include "cli/command_line.h"

namespace tessera::cli {

struct VerifyCommandOptions {
  SourceOptions source;
  WorkOptions work;
  bool values = false;                      // also report NaN and infinite elements
  std::string part{};                       // I/N; empty: the whole check
  std::vector<std::string> joined_paths{};  // outputs of all parts, to join; empty: check
  bool json = false;
};

void add_verify_command(CommandLine& line, VerifyCommandOptions& options, Terminal& terminal);

/// Checks a checkpoint or a part of it, or joins parts. Returns ExitCode::findings for an error.
ExitCode run_verify(const VerifyCommandOptions& options, Terminal& terminal);

}  // namespace tessera::cli

#pragma once

#include <string>

#include "cli/command_line.h"
#include "cli/exit_code.h"
#include "cli/terminal.h"

namespace tessera::cli {

struct FinishOptions {
  std::string destination;  // DST of the workers
  bool discard = false;     // remove the workers' shares instead
};

void add_finish_command(CommandLine& line, FinishOptions& options, Terminal& terminal);
ExitCode run_finish(const FinishOptions& options, Terminal& terminal);

}  // namespace tessera::cli

#pragma once

#include <string>
#include <vector>

#include "cli/exit_code.h"
#include "cli/terminal.h"

namespace tessera::cli {

/// Parses the arguments of ckpt-reshard and runs the verb. If `finished_folder` is not empty, the
/// verb writes nothing new, but finishes the work of several workers in this folder
/// (WorkerOptions::finished_folder).
ExitCode run_command_line(std::vector<std::string> arguments, const std::string& finished_folder,
                          Terminal& terminal);

}  // namespace tessera::cli

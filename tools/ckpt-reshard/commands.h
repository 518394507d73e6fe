#pragma once

#include <string>
#include <vector>

#include "cli/exit_code.h"
#include "cli/terminal.h"

namespace tessera::cli {

/// Parses the arguments of ckpt-reshard and runs the verb. If `finished_folder` is not empty, the
/// verb, which writes a checkpoint with several workers, finishes this folder of shared work
/// instead (WorkerOptions::finished_folder).
ExitCode run_command_line(std::vector<std::string> arguments, const std::string& finished_folder,
                          Terminal& terminal);

}  // namespace tessera::cli

#pragma once

#include <string>
#include <vector>

#include "cli/command_line.h"

namespace tessera::cli {

struct ScanCommandOptions {
  std::string path;
  std::vector<std::string> more_paths;
  bool json = false;
};

void add_scan_command(CommandLine& line, ScanCommandOptions& options, Terminal& terminal);

/// Prints the names that the pickles in files and folders would import and call. Returns
/// ExitCode::findings if a name is dangerous, or if the scan has a problem (ScanProblem).
ExitCode run_scan(const ScanCommandOptions& options, Terminal& terminal);

}  // namespace tessera::cli

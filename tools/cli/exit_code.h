#pragma once

#include <functional>
#include <span>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera::cli {

class Terminal;

/// The exit status of a tool. Any other status also means failure. Scripts rely on the numbers
/// (docs/cli/exit-codes.md); never renumber.
enum class ExitCode : int {
  done = 0,
  findings = 1,        // differences, damage, danger, or a recipe that does not fit
  usage = 2,           // wrong command line, or the destination exists
  bad_input = 3,       // unreadable, corrupt or mismatching input
  io = 4,              // a read, a write or an allocation failed
  internal = 70,       // a bug in Tessera
  interrupted = 130,   // stopped by SIGINT or SIGTERM
  output_closed = 141  // the reader closed standard output
};

ExitCode exit_code_of(ErrorKind kind);

struct ExitCodeMeaning {
  ExitCode code;
  std::string_view meaning;
};
/// Returns the meanings that every help text prints.
std::span<const ExitCodeMeaning> exit_code_meanings();

/// Runs a tool's body, then flushes standard output. Returns the first code of the two that is not
/// `done`. If one throws, prints `<tool>: <message>` to standard error (not for OutputClosed).
int run_tool(std::string_view tool, Terminal& terminal, const std::function<ExitCode()>& body);

}  // namespace tessera::cli

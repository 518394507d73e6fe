#include "cli/exit_code.h"

#include <array>
#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "cli/command_line.h"
#include "cli/command_line_remedies.h"
#include "cli/terminal.h"

namespace tessera::cli {
namespace {

// Prints the exception that is being handled, and returns its code.
ExitCode report_current_exception(std::string_view tool, Terminal& terminal) {
  const auto say = [&](std::string_view text) {
    terminal.print_error(std::string(tool) + ": " + std::string(text));
  };
  const auto report_bug = [&](const std::exception& error) {
    say("internal error: " + printable(error.what(), 1000) + " (please report this)");
    return ExitCode::internal;
  };
  try {
    throw;
  } catch (const OutputClosed&) {
    return ExitCode::output_closed;  // nobody would read a message
  } catch (const UsageError& error) {
    say(error.what());
    say("try '" + error.help_command() + "'");
    return ExitCode::usage;
  } catch (const Error& error) {
    say(error.line_with(command_line_remedy(error.remedy())));
    return exit_code_of(error.kind());
  } catch (const std::bad_alloc&) {
    say("out of memory (" + command_line_remedy({Remedy::Action::use_less_memory}) + ")");
    return ExitCode::io;
  } catch (const std::system_error& error) {
    // std::thread throws this if the system allows no more threads or processes.
    if (error.code() != std::errc::resource_unavailable_try_again) return report_bug(error);
    say(std::string("cannot start a thread: ") + error.code().message() +
        " (raise the limit of processes)");
    return ExitCode::io;
  } catch (const std::exception& error) {
    return report_bug(error);
  }
}

}  // namespace

std::span<const ExitCodeMeaning> exit_code_meanings() {
  static constexpr std::array kMeanings = {
      ExitCodeMeaning{ExitCode::done, "Done"},
      ExitCodeMeaning{ExitCode::findings,
                      "Differences (diff, hash --check), damage (verify), danger (scan) or "
                      "problems (recipe check)"},
      ExitCodeMeaning{ExitCode::usage, "Wrong usage, or the destination exists"},
      ExitCodeMeaning{ExitCode::bad_input, "Input is unreadable, corrupt or does not fit"},
      ExitCodeMeaning{ExitCode::io, "A read, a write or an allocation failed"},
      ExitCodeMeaning{ExitCode::internal, "A bug in the tool"},
      ExitCodeMeaning{ExitCode::interrupted, "Interrupted"},
      ExitCodeMeaning{ExitCode::output_closed, "Standard output was closed by its reader"},
  };
  return kMeanings;
}

ExitCode exit_code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument:
    case ErrorKind::already_exists:
      return ExitCode::usage;
    case ErrorKind::not_found:
    case ErrorKind::corruption:
    case ErrorKind::unsupported:
    case ErrorKind::mismatch:
      return ExitCode::bad_input;
    case ErrorKind::io:
      return ExitCode::io;
    case ErrorKind::interrupted:
      return ExitCode::interrupted;
  }
  return ExitCode::internal;
}

int run_tool(std::string_view tool, Terminal& terminal, const std::function<ExitCode()>& body) {
  ExitCode code = ExitCode::done;
  try {
    code = body();
  } catch (...) {
    code = report_current_exception(tool, terminal);
  }
  try {
    terminal.flush();
  } catch (...) {
    const ExitCode flush_code = report_current_exception(tool, terminal);
    if (code == ExitCode::done) code = flush_code;
  }
  return static_cast<int>(code);
}

}  // namespace tessera::cli

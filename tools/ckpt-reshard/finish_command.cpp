#include "ckpt-reshard/finish_command.h"

#include <filesystem>
#include <optional>

#include "ckpt-reshard/commands.h"
#include "ckpt-reshard/incomplete_parts.h"
#include "ckpt-reshard/worker_options.h"
#include "formats/staging/shared_work.h"
#include "object_store/files.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::cli {

void add_finish_command(CommandLine& line, FinishOptions& options, Terminal& terminal) {
  line.add_command("finish", "Completes a move that several workers share",
                   [&] { return run_finish(options, terminal); })
      .describe(
          "If all parts are written, DST appears. The worker that ends last does this by itself. "
          "Use this verb if that worker died before it could, or to see which parts are missing. "
          "It repeats the command of the worker that began, so the source must still be there.")
      .argument("DST", options.destination, "The destination of the workers")
      .flag("--discard", options.discard, "Remove the work of all workers instead")
      .example("finish step-1000.8",
               "Finish what ckpt-reshard --part 0/4 … --part 3/4 have written");
}

ExitCode run_finish(const FinishOptions& options, Terminal& terminal) {
  object_store::require_local(options.destination);
  FileSystem& fs = FileSystem::posix();
  formats::SharedWork work(fs, options.destination);
  if (!fs.kind_of(work.path())) {
    throw Error::expected(ErrorKind::not_found, {.path = options.destination}, "shared move",
                          "the workers' folder " + printable(work.path()), "none",
                          fs.kind_of(options.destination) ? "is the move finished already?" : "");
  }
  if (options.discard) {
    work.discard();
    terminal.print(options.destination + ": the work of all workers is removed\n");
    return ExitCode::done;
  }
  if (!work.is_begun()) {
    const auto lock = work.lock();
    if (!work.is_begun()) {
      work.refuse_while_compared();
      work.clean_up();
    }
    terminal.print(options.destination + ": nothing to finish\n");
    return ExitCode::done;
  }
  const std::optional<RecordedCommand> command = command_from_text(work.command(), work.path());
  if (!command) {
    if (const auto missing = work.incomplete_shares(); !missing.empty()) {
      refuse_incomplete(options.destination, work.num_shares(), missing);
    }
    throw Error::expected(ErrorKind::unsupported, {.path = work.path()}, "workers",
                          "workers that ran ckpt-reshard", "workers of a Python or C++ program",
                          "run any worker again with resume set, or the same move with "
                          "ckpt-reshard --part 0/" +
                              std::to_string(work.num_shares()) +
                              " --resume; either completes DST");
  }
  const std::string folder = fs.resolve_links(work.path());
  std::error_code error;
  std::filesystem::current_path(command->directory, error);
  if (error) {
    throw Error::expected(ErrorKind::not_found, {.path = work.path()}, "workers",
                          "the folder in which the workers ran, " + printable(command->directory),
                          "none", "run any worker again with --resume; it completes DST");
  }
  return run_command_line(command->arguments, folder, terminal);
}

}  // namespace tessera::cli

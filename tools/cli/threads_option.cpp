#include "cli/threads_option.h"

#include "cli/command_line.h"
#include "object_store/files.h"

namespace tessera::cli {

void add_threads_option(Command& command, int& num_threads) {
  command.option("--threads", "N", num_threads,
                 "Number of threads (default: one per core, at most 16; always 16 with URLs)");
}

int checked_num_threads(int num_threads, const std::string& help_command) {
  // One per core, at most 16: src/base/parallel.cpp. 16 with URLs: src/object_store/files.cpp.
  if (num_threads == kDefaultThreads) return object_store::default_num_threads();
  if (num_threads >= 1) return num_threads;
  throw UsageError(
      "--threads: expected a number of 1 or more, found '" + std::to_string(num_threads) + "'",
      help_command);
}

}  // namespace tessera::cli

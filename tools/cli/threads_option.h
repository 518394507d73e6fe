#pragma once

#include <limits>
#include <string>

namespace tessera::cli {

class Command;

constexpr int kDefaultThreads = std::numeric_limits<int>::min();  // `--threads` is not given

/// Adds `--threads N`.
void add_threads_option(Command& command, int& num_threads);

/// Returns `num_threads`; for kDefaultThreads the number of cores, at most 16, or 16 if a URL was
/// opened before. Throws: UsageError if it is below 1.
int checked_num_threads(int num_threads, const std::string& help_command);

}  // namespace tessera::cli

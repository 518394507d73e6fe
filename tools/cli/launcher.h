#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::cli {

/// The place of this process among the processes that a launcher has started.
struct LaunchedProcess {
  int index = 0;                 // from 0
  int num_processes = 0;         // 0: the launcher does not say
  std::string index_variable{};  // the environment variable with the index
};

/// Returns the place of this process as its launcher's environment variables say it: Slurm (tasks,
/// job arrays), Open MPI, PMI (MPICH, Intel MPI), torchrun, or an indexed Kubernetes job. Returns
/// nothing without a launcher. Throws: UsageError naming a variable that is no number, or that
/// contradicts another one.
std::optional<LaunchedProcess> find_launched_process();

/// Returns the names of the variables, for messages.
std::string launcher_variables_in_words();

}  // namespace tessera::cli

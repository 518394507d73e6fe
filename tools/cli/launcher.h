#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::cli {

/// The index of this process among the processes that a launcher has started, and their number.
struct LaunchedProcess {
  int index = 0;                 // from 0
  int num_processes = 0;         // 0: the launcher does not say
  std::string index_variable{};  // the environment variable with the index
};

/// Reads the environment variables of the launcher that started this process: Slurm (tasks, job
/// arrays), Open MPI, PMI (MPICH, Intel MPI), torchrun, or an indexed Kubernetes job. Returns
/// nothing if there is no launcher. Throws: UsageError naming a variable that is no number, or that
/// contradicts another one.
std::optional<LaunchedProcess> find_launched_process();

/// Returns the names of all launchers' variables, for messages.
std::string launcher_variables_in_words();

}  // namespace tessera::cli

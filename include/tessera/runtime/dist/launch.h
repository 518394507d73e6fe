#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::dist {

/// The place of a process in its job, as its launcher reports it.
struct LaunchEnvironment {
  std::string launcher;  // torchrun, mpirun, srun
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // on this host
  std::string master_address;
  int master_port = 0;
  friend bool operator==(const LaunchEnvironment&, const LaunchEnvironment&) = default;
};

/// Returns the value of an environment variable, or nothing if it is not set.
using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;
/// Returns the value of an environment variable of this process, or nothing.
std::optional<std::string> process_environment(const std::string& name);

/// Reads the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK), else of Open MPI's mpirun
/// (OMPI_COMM_WORLD_*), else of Slurm's srun (SLURM_PROCID, …). Returns nothing if none are set.
/// MASTER_PORT is 29500 if not set. MASTER_ADDR must be set under torchrun, and under mpirun on
/// several hosts; else its default is this host (mpirun) or the step's first host (srun). Throws:
/// Error(invalid_argument) naming a variable that is missing or not a valid number.
std::optional<LaunchEnvironment> launch_environment(const EnvironmentLookup& lookup);

/// Connects the ranks of this job according to the launcher's variables. Without a launcher,
/// returns a mesh of this process alone. Collective. Throws as `connect` and `launch_environment`.
Mesh init_from_env(const MeshOptions& options = {});

}  // namespace tessera::dist

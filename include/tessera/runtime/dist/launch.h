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

/// Reads the variables of the first launcher that has set its own: torchrun (RANK, WORLD_SIZE,
/// LOCAL_RANK), Open MPI's mpirun (OMPI_COMM_WORLD_*), Slurm's srun (SLURM_PROCID, …). Returns
/// nothing if none has. MASTER_PORT defaults to 29500. MASTER_ADDR defaults to this host (mpirun on
/// one host) or to the job step's first host (srun); otherwise it must be set. Throws:
/// Error(invalid_argument) naming a variable that is missing or not a valid number.
std::optional<LaunchEnvironment> launch_environment(const EnvironmentLookup& lookup);

/// Connects the ranks of this job as the launcher's variables say. Without a launcher, returns a
/// mesh of this process alone. Collective. Throws: as `connect` and `launch_environment`.
Mesh init_from_env(const MeshOptions& options = {});

}  // namespace tessera::dist

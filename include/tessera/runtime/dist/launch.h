#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::dist {

/// What a launcher tells a process about its place among the others.
struct LaunchEnvironment {
  std::string launcher;  // torchrun, mpirun, srun
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // on this host
  std::string master_address;
  int master_port = 0;
  friend bool operator==(const LaunchEnvironment&, const LaunchEnvironment&) = default;
};

/// Returns a variable's value, or nothing.
using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;
/// The variables of this process.
std::optional<std::string> process_environment(const std::string& name);

/// Reads the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), of
/// Open MPI's mpirun (OMPI_COMM_WORLD_*) or of Slurm's srun (SLURM_PROCID, …), in this order.
/// Nothing where no launcher is at work. MASTER_ADDR and MASTER_PORT go before what the others
/// imply: this host or the job's first one, and 29500. Throws: Error(invalid_argument) naming a
/// variable that is missing or is no sensible number.
std::optional<LaunchEnvironment> launch_environment(const EnvironmentLookup& lookup);

/// Connects the ranks of this job as their launcher's variables say; without a launcher, a mesh of
/// this process alone. Collective. Throws as `connect` and `launch_environment` do.
Mesh init_from_env(const MeshOptions& options = {});

}  // namespace tessera::dist

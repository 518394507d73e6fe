#include "tessera/runtime/dist/launch.h"

#include <charconv>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/base/error.h"

namespace tessera::dist {
namespace {

constexpr int kDefaultPort = 29500;  // torchrun's

/// Reads the environment variables of one launcher.
class Variables {
 public:
  Variables(std::string launcher, const EnvironmentLookup& lookup)
      : launcher_(std::move(launcher)), lookup_(lookup) {}

  std::string text(const std::string& name) const {
    if (const auto value = lookup_(name)) return *value;
    throw Error::expected(ErrorKind::invalid_argument, {}, launcher_,
                          "the environment variable " + name, "none");
  }
  int number(const std::string& name, int begin, int end) const {
    return parse(name, text(name), begin, end);
  }
  int number_or(const std::string& name, int begin, int end, int otherwise) const {
    const auto value = lookup_(name);
    return value ? parse(name, *value, begin, end) : otherwise;
  }

 private:
  int parse(const std::string& name, const std::string& value, int begin, int end) const {
    int number = 0;
    const char* const last = value.data() + value.size();
    const auto [at, error] = std::from_chars(value.data(), last, number);
    if (error != std::errc() || at != last || number < begin || number >= end) {
      throw Error::expected(
          ErrorKind::invalid_argument, {}, launcher_ + ": " + name,
          "a number from " + std::to_string(begin) + " to " + std::to_string(end - 1),
          "'" + value + "'");
    }
    return number;
  }

  std::string launcher_;
  const EnvironmentLookup& lookup_;
};

constexpr int kMaxRanks = 1 << 20;
constexpr int kMaxPort = 65536;

/// Returns the first host of a Slurm host list: `node7` of `node[7-9,12]`, `a` of `a,b`.
std::string first_host(const std::string& list) {
  const std::size_t end = list.find_first_of(",[");
  std::string host = list.substr(0, end);
  if (end != std::string::npos && list[end] == '[') {
    host += list.substr(end + 1, list.find_first_of(",-]", end) - end - 1);
  }
  return host;
}

LaunchEnvironment read(const Variables& variables, const std::string& launcher,
                       const std::string& rank, const std::string& world_size,
                       const std::string& local_rank) {
  LaunchEnvironment found;
  found.launcher = launcher;
  found.world_size = variables.number(world_size, 1, kMaxRanks);
  found.rank = variables.number(rank, 0, found.world_size);
  found.local_rank = variables.number_or(local_rank, 0, found.world_size, 0);
  found.master_port = variables.number_or("MASTER_PORT", 1, kMaxPort, kDefaultPort);
  return found;
}

}  // namespace

std::optional<std::string> process_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

std::optional<LaunchEnvironment> launch_environment(const EnvironmentLookup& lookup) {
  if (lookup("RANK") || lookup("WORLD_SIZE")) {
    const Variables variables("torchrun", lookup);
    LaunchEnvironment found = read(variables, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK");
    found.master_address = variables.text("MASTER_ADDR");
    return found;
  }
  if (lookup("OMPI_COMM_WORLD_RANK")) {
    const Variables variables("mpirun", lookup);
    LaunchEnvironment found = read(variables, "mpirun", "OMPI_COMM_WORLD_RANK",
                                   "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK");
    const int local_size = variables.number_or("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMaxRanks, 1);
    found.master_address = local_size == found.world_size
                               ? lookup("MASTER_ADDR").value_or("127.0.0.1")
                               : variables.text("MASTER_ADDR");  // mpirun does not give the address
    return found;
  }
  // Requires three variables, because Slurm sets SLURM_PROCID also in an interactive shell, which
  // is not a job step with several tasks.
  if (lookup("SLURM_PROCID") && lookup("SLURM_NTASKS") && lookup("SLURM_STEP_ID")) {
    const Variables variables("srun", lookup);
    LaunchEnvironment found =
        read(variables, "srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID");
    found.master_address = lookup("MASTER_ADDR").value_or("");
    if (found.master_address.empty()) {
      found.master_address = first_host(variables.text("SLURM_STEP_NODELIST"));
    }
    return found;
  }
  return std::nullopt;
}

Mesh init_from_env(const MeshOptions& options) {
  const auto found = launch_environment(process_environment);
  if (!found) return connect(nullptr, 0, 1, options);
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<std::uint16_t>(found->master_port);
  // True if torchrun's agent runs the store already.
  const bool is_agents = process_environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  store_options.isServer = found->rank == 0 && !is_agents;
  store_options.numWorkers = found->world_size;
  store_options.waitWorkers = false;
  store_options.timeout = options.timeout;
  try {
    const auto store = c10::make_intrusive<c10d::TCPStore>(found->master_address, store_options);
    return connect(store, found->rank, found->world_size, options);
  } catch (const c10::Error& error) {
    throw Error(ErrorKind::io, {},
                "rank " + std::to_string(found->rank) + ": cannot connect to " +
                    found->master_address + ":" + std::to_string(found->master_port) + ": " +
                    error.what_without_backtrace() +
                    " (does rank 0 run, and can this host reach it?)");
  }
}

}  // namespace tessera::dist

#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::test {

/// Where the c10d store of the ranks is. `file`: in a file, so it still exists if rank 0 dies (like
/// the store of torchrun's agent). `rank0`: in the process of rank 0, so it is lost if rank 0
/// dies.
enum class StorePlace { file, rank0 };

struct ProcessOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(10);  // of the mesh
  std::map<std::string, std::string> environment{};              // variables to add to our own
  std::optional<int> doomed{};                                   // a rank that must die by SIGKILL
  StorePlace store = StorePlace::file;
};

/// Runs a disabled test of this program in `world_size` processes. The test must call `as_process`.
/// Returns the text that each process returned there, by rank. Use it where ranks cannot be
/// threads: threads share state, and a rank that dies would end the others. Starts the program
/// anew, because a forked process has only one of its parent's threads. Thread-safe.
std::vector<std::string> run_processes(int world_size, const std::string& disabled_test,
                                       const ProcessOptions& options = {});

/// Call it in a test that `run_processes` runs. Calls `body` with the mesh of all processes, and
/// passes the text that `body` returns to `run_processes`.
void as_process(const std::function<std::string(const dist::Mesh&)>& body);

}  // namespace tessera::test

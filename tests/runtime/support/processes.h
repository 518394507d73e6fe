#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::test {

/// Where the store lies that ranks meet at: in a file that outlives them, as an agent's does, or in
/// rank 0, with which it dies.
enum class StorePlace { file, rank0 };

struct ProcessOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(10);  // of the mesh
  std::map<std::string, std::string> environment{};              // beside this process's own
  std::optional<int> doomed{};                                   // a rank that is to be killed
  StorePlace store = StorePlace::file;
};

/// Runs a disabled test of this program in `world_size` processes, and returns what each said: what
/// the test gave to `as_process`. For what ranks that are threads would share, or one would take
/// with it. New programs, as threads do not outlive a fork. Thread-safe.
std::vector<std::string> run_processes(int world_size, const std::string& disabled_test,
                                       const ProcessOptions& options = {});

/// What such a test does: `body` returns what its process says.
void as_process(const std::function<std::string(const dist::Mesh&)>& body);

}  // namespace tessera::test

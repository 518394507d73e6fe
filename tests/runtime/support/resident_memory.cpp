#include "runtime/support/resident_memory.h"

#include <malloc.h>

#include <fstream>
#include <stdexcept>
#include <string>

namespace tessera::test {
namespace {

/// Returns a line of /proc/self/status. Units: bytes.
std::int64_t status(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  throw std::runtime_error("/proc/self/status has no " + name);
}

}  // namespace

std::int64_t peak_growth(const std::function<void()>& body) {
  ::malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // sets the peak (VmHWM) to the present size
  const std::int64_t before = status("VmRSS");
  body();
  return status("VmHWM") - before;
}

void give_back_freed_memory() {
  ::mallopt(M_MMAP_THRESHOLD, 128 << 10);
}

}  // namespace tessera::test

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "inspect/manifest.h"
#include "tessera/base/error.h"

/// If the input is a valid manifest, writing and reading it again must give an equal one.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  const std::string_view text(reinterpret_cast<const char*>(data), nbytes);
  try {
    const inspect::Manifest manifest = inspect::parse_manifest(text, "input");
    const inspect::Manifest again = inspect::parse_manifest(manifest.to_text(), "again");
    if (again != manifest || !inspect::compare(manifest, again).empty()) std::abort();
  } catch (const Error&) {
  }
  return 0;
}

#include <cstdint>
#include <vector>

#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "tessera/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  using namespace tessera::formats;
  static const pickle::AllowList allowed{pickle::value_globals()};
  try {
    const pickle::ObjectGraph graph = pickle::unpickle(
        std::vector<char>(data, data + nbytes), pickle::PickleSource{.path = "input"}, allowed);
    pickle::WalkBudget budget(graph);
    static_cast<void>(pickle::to_value(graph.root(), budget));
  } catch (const Error&) {
  }
  return 0;
}

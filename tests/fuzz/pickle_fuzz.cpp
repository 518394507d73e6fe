#include <cstdint>
#include <string>
#include <vector>

#include "formats/pickle/foreign_object.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "tessera/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  using namespace tessera::formats;
  static const pickle::AllowList allowed{pickle::value_globals()};
  static const std::string as_dict[] = {"argparse.Namespace", "trainer.config.Config"};
  using Policy = pickle::ForeignGlobals::Policy;
  for (const pickle::ForeignGlobals foreign : {pickle::ForeignGlobals{.policy = Policy::refuse},
                                               pickle::ForeignGlobals{.policy = Policy::record},
                                               pickle::ForeignGlobals{Policy::record, as_dict}}) {
    try {
      const pickle::ObjectGraph graph =
          pickle::unpickle(std::vector<char>(data, data + nbytes),
                           pickle::PickleSource{.path = "input"}, allowed, foreign);
      pickle::HeldObjects(graph).count(graph.root(), &pickle::is_foreign);
      static_cast<void>(pickle::foreign_names(graph, 100));
      pickle::WalkBudget budget(graph);
      static_cast<void>(pickle::to_value(graph.root(), budget));
    } catch (const Error&) {
    }
  }
  return 0;
}

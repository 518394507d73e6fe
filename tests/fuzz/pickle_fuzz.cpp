#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/pickle/foreign_object.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "tessera/base/error.h"

namespace {

using namespace tessera;
using namespace tessera::formats;

/// Takes the entries of every dict that the reader offers, and converts each key and value.
class WalkingTaker final : public pickle::EntryTaker {
 public:
  explicit WalkingTaker(std::size_t pickle_nbytes) : budget_(pickle_nbytes) {}

  bool wants(pickle::Object root, std::string_view /*name*/, pickle::Object dict) override {
    static_cast<void>(root.describe() + dict.describe());
    return true;
  }
  void take(pickle::Object key, pickle::Object value) override {
    for (const pickle::Object object : {key, value}) {
      try {
        static_cast<void>(pickle::to_value(object, budget_));
      } catch (const Error&) {
      }
    }
  }

 private:
  pickle::WalkBudget budget_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
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
      pickle::HeldObjects held(graph, &pickle::is_foreign);
      held.count(graph.root());
      static_cast<void>(held.is_or_holds(graph.root()));
      static_cast<void>(pickle::foreign_names(graph, 100));
      pickle::WalkBudget budget(graph);
      static_cast<void>(pickle::to_value(graph.root(), budget));
    } catch (const Error&) {
    }
  }
  WalkingTaker taker(nbytes);
  try {
    const pickle::ObjectGraph graph =
        pickle::unpickle(std::vector<char>(data, data + nbytes),
                         pickle::PickleSource{.path = "input"}, allowed, {}, {}, &taker);
    pickle::HeldObjects(graph, &pickle::is_foreign).count(graph.root());
    pickle::WalkBudget budget(graph);
    static_cast<void>(pickle::to_value(graph.root(), budget));
  } catch (const Error&) {
  }
  return 0;
}

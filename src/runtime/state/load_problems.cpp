#include "runtime/state/load_problems.h"

#include "tessera/base/error.h"
#include "tessera/reshard/load_planner.h"

namespace tessera::state {

void refuse_problems(const std::string& what, const std::vector<formats::Finding>& problems) {
  if (problems.empty()) return;
  constexpr std::size_t kMaxLines = 1000;
  throw Error::listing(ErrorKind::mismatch, {},
                       what + ": " + std::to_string(problems.size()) +
                           (problems.size() == 1 ? " problem" : " problems"),
                       reshard::problems_to_string(problems, kMaxLines));
}

}  // namespace tessera::state

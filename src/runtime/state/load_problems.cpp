#include "runtime/state/load_problems.h"

#include <algorithm>

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

void rethrow_text(ErrorKind kind, std::string_view text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  throw Error::listing(kind, {}, text.substr(0, end), text.substr(std::min(end + 1, text.size())));
}

}  // namespace tessera::state

#include "runtime/state/load_problems.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/reshard/load_planner.h"

namespace tessera::state {

void refuse_problems(const std::string& what, const std::vector<formats::Finding>& problems,
                     const std::vector<std::string>& hints) {
  if (problems.empty()) return;
  constexpr std::size_t kMaxLines = 1000;
  std::string lines = reshard::problems_to_string(problems, kMaxLines);
  for (const std::string& hint : hints) lines += "\nhint: " + hint;
  throw Error::listing(ErrorKind::mismatch, {},
                       what + ": " + std::to_string(problems.size()) +
                           (problems.size() == 1 ? " problem" : " problems"),
                       lines);
}

void rethrow_text(ErrorKind kind, std::string_view text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  throw Error::listing(kind, {}, text.substr(0, end), text.substr(std::min(end + 1, text.size())));
}

}  // namespace tessera::state

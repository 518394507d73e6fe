#include "runtime/state/load_problems.h"

#include "tessera/base/error.h"

namespace tessera::state {

void refuse_problems(const std::string& what, const std::vector<formats::Finding>& problems) {
  if (problems.empty()) return;
  std::string text = what + ": " + std::to_string(problems.size()) +
                     (problems.size() == 1 ? " problem" : " problems");
  for (const formats::Finding& problem : problems) {
    text += "\n  " + problem.where.fqn + (problem.where.fqn.empty() ? "" : ": ") + problem.rule +
            ": expected " + problem.expected + ", found " + problem.found;
  }
  throw Error(ErrorKind::mismatch, {}, text);
}

}  // namespace tessera::state

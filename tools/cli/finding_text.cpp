#include "cli/finding_text.h"

#include "tessera/base/error.h"

namespace tessera::cli {

std::string finding_to_string(const formats::Finding& finding) {
  return Error::expected(ErrorKind::mismatch, finding.where, finding.rule, finding.expected,
                         finding.found)
      .what();
}

}  // namespace tessera::cli

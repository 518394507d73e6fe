#include "ckpt-reshard/incomplete_parts.h"

#include "tessera/base/error.h"

namespace tessera::cli {

void refuse_incomplete(const std::string& destination, int num_parts,
                       const std::vector<formats::SharedWork::Incomplete>& parts) {
  std::string list;
  for (const auto& part : parts) {
    list += (list.empty() ? "" : "\n") + std::string("part ") + std::to_string(part.share) + " " +
            part.state;
  }
  throw Error::listing(ErrorKind::mismatch, {.path = destination},
                       "parts: expected " + std::to_string(num_parts) + " complete parts, found " +
                           std::to_string(num_parts - static_cast<int>(parts.size())),
                       list);
}

}  // namespace tessera::cli

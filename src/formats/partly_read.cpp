#include "formats/partly_read.h"

namespace tessera::formats {

void check_rest(const TensorSource& source, const RestOptions& options) {
  if (const auto* const partly = dynamic_cast<const PartlyRead*>(&source)) {
    partly->check_rest(options);
  }
}

}  // namespace tessera::formats

#include "formats/partly_read.h"

namespace tessera::formats {

void check_rest(const TensorSource& source, const RestOptions& options) {
  const auto* const partly = dynamic_cast<const PartlyRead*>(&source);
  if (partly == nullptr) return;
  try {
    partly->check_rest(options);
  } catch (const DamagedStorage&) {
    throw;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::corruption) throw;
    throw DamagedStorage(error);
  }
}

}  // namespace tessera::formats

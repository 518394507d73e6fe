#include "tessera/formats/create.h"

#include <utility>

#include "tessera/base/error.h"
#include "tessera/formats/dcp.h"
#include "tessera/formats/torch_zip.h"

namespace tessera::formats {

std::unique_ptr<CheckpointWriter> create_checkpoint(FileSystem& fs, const std::string& destination,
                                                    CheckpointContents contents,
                                                    std::vector<Value> values,
                                                    const CreateOptions& options) {
  switch (options.format) {
    case Format::native:
      return create_native(fs, destination, std::move(contents), std::move(values),
                           options.overwrite, options.native);
    case Format::safetensors:
      return create_safetensors(fs, destination, std::move(contents), std::move(values),
                                options.overwrite, options.safetensors);
    case Format::dcp:
      return create_dcp(fs, destination, std::move(contents), std::move(values), options.overwrite);
    case Format::torch_zip:
      return create_torch_zip(fs, destination, std::move(contents), std::move(values),
                              options.overwrite);
  }
  TESSERA_CHECK(false && "unnamed Format");
}

}  // namespace tessera::formats

#include "tessera/formats/format_writer.h"

#include <algorithm>

#include "formats/drivers.h"

namespace tessera::formats {
namespace {

std::vector<const FormatWriter*>& registered_writers() {
  static std::vector<const FormatWriter*> writers{
      &native_writer(),    &dcp_writer(),        &safetensors_writer(), &torch_zip_writer(),
      &deepspeed_writer(), &rank_files_writer(), &megatron_writer()};
  return writers;
}

const FormatWriter* find_writer(Format format) {
  const auto& writers = registered_writers();
  const auto found = std::ranges::find(writers, format, &FormatWriter::format);
  return found == writers.end() ? nullptr : *found;
}

}  // namespace

void register_format_writer(const FormatWriter& writer) {
  if (find_writer(writer.format()) != nullptr) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "writer of a format",
                          "a format without a writer", writer.format().name());
  }
  registered_writers().push_back(&writer);
}

const FormatWriter& writer_of(Format format) {
  if (const FormatWriter* writer = find_writer(format)) return *writer;
  throw Error::expected(ErrorKind::unsupported, {}, "format of the destination",
                        writable_formats_in_words(),
                        std::string(format.name()) + ", which can only be read");
}

}  // namespace tessera::formats

#include "ckpt-inspect/quantized.h"

#include "base/size_text.h"
#include "object_store/files.h"
#include "tessera/formats/detect.h"

namespace tessera::cli {

formats::QuantizedTensors quantized_tensors_of(const formats::CheckpointReader& reader) {
  std::string method;
  try {
    method = formats::read_quantization_method(object_store::files(), reader.path());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::interrupted) throw;
    // Ignored: here the method only adds words. A cast reads it again, and fails.
  }
  return formats::QuantizedTensors(reader.contents(), method);
}

void write_quantized(JsonOutput& json, const formats::QuantizedTensors& quantized,
                     const formats::QuantizedPart& part) {
  json.key("quantized").begin_object().member("part", part.role);
  json.member("scheme", part.scheme).member("partner", quantized.partner_name(part)).end_object();
}

void CodesNote::add(const std::string& fqn, const std::string& scheme) {
  Codes& codes = by_scheme_[scheme];
  if (codes.num_tensors++ == 0) codes.first = fqn;
}

void CodesNote::print(Terminal& terminal) const {
  for (const auto& [scheme, codes] : by_scheme_) {
    const std::uint64_t num_others = codes.num_tensors - 1;
    const std::string holders =
        num_others == 0 ? " holds" : " and " + counted(num_others, "other tensor") + " hold";
    terminal.print_error("note: " + printable(codes.first) + holders + " codes of " + scheme +
                         ", not numbers");
  }
}

}  // namespace tessera::cli

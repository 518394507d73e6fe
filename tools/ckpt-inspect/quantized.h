#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>

#include "cli/json_output.h"
#include "cli/terminal.h"
#include "formats/quantized_tensors.h"

// What commands print about tensors that are parts of quantized weights.
namespace tessera::cli {

/// Returns the quantized weights of an open checkpoint. `reader` must outlive them.
formats::QuantizedTensors quantized_tensors_of(const formats::CheckpointReader& reader);

/// Writes the member `quantized` into the open JSON object.
void write_quantized(JsonOutput& json, const formats::QuantizedTensors& quantized,
                     const formats::QuantizedPart& part);

/// Counts tensors whose elements are codes, not numbers. `print` prints the counts to standard
/// error, in one line for each scheme of quantization.
class CodesNote {
 public:
  void add(const std::string& fqn, const std::string& scheme);
  void print(Terminal& terminal) const;

 private:
  struct Codes {
    std::uint64_t num_tensors = 0;
    std::string first;  // the name of the tensor that was added first
  };
  std::map<std::string, Codes> by_scheme_;
};

}  // namespace tessera::cli

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "base/json.h"
#include "tessera/base/error.h"

/// If the input is valid JSON, writing and parsing it again must give the same text.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  try {
    const Value json =
        parse_json(std::string_view(reinterpret_cast<const char*>(data), nbytes), "input");
    const std::string text = value_to_json(value_from_json(json, "input"));
    if (value_to_json(value_from_json(parse_json(text, "again"), "again")) != text) {
      std::abort();
    }
  } catch (const Error&) {
  }
  return 0;
}

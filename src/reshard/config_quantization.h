#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::reshard {

/// The text of a `config.json` of Hugging Face without its description of a quantization.
struct UnquantizedConfig {
  std::string text{};                  // all other bytes are unchanged
  std::vector<std::string> removed{};  // paths of members: `text_config.quantization_config`
};

/// Removes the members `quantization_config` and `compression_config` of the outermost object, and
/// of objects `…_config` directly inside it. Returns nothing if the text is not a JSON object.
std::optional<UnquantizedConfig> remove_quantization(std::string_view config);

}  // namespace tessera::reshard

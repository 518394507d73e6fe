#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::reshard {

/// A configuration of Hugging Face without its description of codes.
struct UnquantizedConfig {
  std::string text{};                  // every other byte is as it was
  std::vector<std::string> removed{};  // paths of members: `text_config.quantization_config`
};

/// Removes the members `quantization_config` and `compression_config` of the outermost object, and
/// of objects `…_config` directly inside it. Returns nothing if the text is no JSON object.
std::optional<UnquantizedConfig> remove_quantization(std::string_view config);

}  // namespace tessera::reshard

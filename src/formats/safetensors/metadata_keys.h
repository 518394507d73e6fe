#pragma once

#include <string_view>

namespace tessera::formats::detail {

/// Keys of `__metadata__` that Tessera uses; values_file.h has two more. Others are annotations.
inline constexpr std::string_view kFormatKey = "format";  // `pt`, which transformers requires
inline constexpr std::string_view kAliasesKey = "tessera.aliases";  // JSON: second name to tensor
inline constexpr std::string_view kTextsKey = "tessera.texts";      // JSON: annotations that other
                                                                    // readers would misread
inline constexpr std::string_view kDcpShardingInfoKey = "DCP_SHARDING_INFO";
inline constexpr std::string_view kDcpVersionKey = "DCP_VERSION";

/// Whether a key of `__metadata__` begins with `tessera.`, or is one of PyTorch's DCP.
inline bool is_reserved_key(std::string_view key) {
  return key.starts_with("tessera.") || key == kDcpShardingInfoKey || key == kDcpVersionKey;
}

}  // namespace tessera::formats::detail

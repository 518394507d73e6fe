#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tessera/base/size_text.h"

namespace tessera::cli {

/// Returns the bytes that a user's `256MiB`, `1.5G`, `5GB` or `4096` stand for, or nothing where
/// it is not a size. As in GNU tools, `K`, `KiB` are 1024 and `kB`, `KB` are 1000; case of the
/// letters aside.
std::optional<std::uint64_t> parse_size(std::string_view text);

}  // namespace tessera::cli

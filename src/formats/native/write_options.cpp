#include "formats/native/write_options.h"

#include <charconv>
#include <string>

#include "formats/native/index.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace native {
namespace {

constexpr int kMinLevel = -100;
constexpr int kMaxLevel = 19;

}  // namespace

void validate_options(const NativeWriteOptions& options) {
  const auto require_multiple = [](std::string_view name, std::uint64_t nbytes,
                                   std::uint64_t greatest) {
    if (nbytes == 0 || nbytes % kPlainBlockNbytes != 0 || nbytes > greatest) {
      throw Error::expected(ErrorKind::invalid_argument, {}, name,
                            "a multiple of " + std::to_string(kPlainBlockNbytes) + " up to " +
                                std::to_string(greatest),
                            std::to_string(nbytes));
    }
  };
  require_multiple("chunk_nbytes", options.chunk_nbytes, kMaxChunkNbytes);
  require_multiple("plain_block_nbytes", options.plain_block_nbytes, std::uint64_t{1} << 30);
  if (options.zstd_level.value_or(0) < kMinLevel || options.zstd_level.value_or(0) > kMaxLevel) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "zstd_level",
                          std::to_string(kMinLevel) + " to " + std::to_string(kMaxLevel),
                          std::to_string(*options.zstd_level));
  }
}

}  // namespace native

std::optional<NativeWriteOptions> parse_compression(std::string_view text) {
  NativeWriteOptions options;
  if (text == "none") return options;
  options.compression = NativeWriteOptions::Compression::zstd;
  if (text == "zstd") return options;
  constexpr std::string_view kWithLevel = "zstd:";
  if (!text.starts_with(kWithLevel)) return std::nullopt;
  const char* const end = text.data() + text.size();
  int level = 0;
  const auto [at, error] = std::from_chars(text.data() + kWithLevel.size(), end, level);
  if (error != std::errc() || at != end || level < native::kMinLevel || level > native::kMaxLevel) {
    return std::nullopt;
  }
  options.zstd_level = level;
  return options;
}

}  // namespace tessera::formats

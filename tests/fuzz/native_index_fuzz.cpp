#include <cstdint>
#include <cstdlib>

#include "formats/native/index.h"
#include "tessera/base/error.h"

/// The input is `{ role | world size | rank | version | index }`: four bytes, then a binary index
/// without checksums. An index that decodes must be equal after it is encoded and decoded again.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  using namespace tessera::formats::native;
  constexpr std::size_t kNumHeaderBytes = 4;
  if (nbytes < kNumHeaderBytes || data[1] <= data[2]) return 0;
  if (data[3] < kFirstVersion || data[3] > kNewestVersion) return 0;
  FileHeader header;
  header.role =
      data[0] == static_cast<std::uint8_t>(FileRole::index) ? FileRole::index : FileRole::rank;
  header.world_size = data[1];
  header.rank = data[2];
  header.version = data[3];
  header.file_nbytes = std::uint64_t{1} << 20;
  try {
    const auto bytes = std::as_bytes(std::span(data, nbytes)).subspan(kNumHeaderBytes);
    const std::vector<std::byte> encoded = encode_index(decode_index(bytes, header, "input"));
    if (encode_index(decode_index(encoded, header, "again")) != encoded) std::abort();
  } catch (const Error&) {
  }
  return 0;
}

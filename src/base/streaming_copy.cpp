#include "base/streaming_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tessera {

// glibc's memcpy bypasses the caches only above 3/4 of the last-level cache. Parameters of tens of
// megabytes are smaller; copying them with memcpy took 1.3 times as long.
void streaming_copy(void* to, const void* from, std::size_t nbytes) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  auto* destination = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const std::size_t past_line = reinterpret_cast<std::uintptr_t>(destination) % kLine;
  const std::size_t head = past_line == 0 ? 0 : kLine - past_line;
  if (nbytes >= head + kLine) {
    std::memcpy(destination, source, head);
    destination += head;
    source += head;
    nbytes -= head;
    for (; nbytes >= kLine; nbytes -= kLine, source += kLine, destination += kLine) {
      const auto* const in = reinterpret_cast<const __m128i*>(source);
      auto* const out = reinterpret_cast<__m128i*>(destination);
      const __m128i a = _mm_loadu_si128(in);
      const __m128i b = _mm_loadu_si128(in + 1);
      const __m128i c = _mm_loadu_si128(in + 2);
      const __m128i d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    _mm_sfence();  // make the copy visible to other threads
  }
  std::memcpy(destination, source, nbytes);
#else
  std::memcpy(to, from, nbytes);
#endif
}

}  // namespace tessera

#include "formats/native/byte_planes.h"

#include <array>
#include <bit>
#include <climits>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

static_assert(std::endian::native == std::endian::little);

// Elements are shuffled in steps: each step splits words into two halves, until the words are
// bytes. Unshuffling joins the halves again. Each step is a loop of constant length, which the
// compiler turns into vector code.
constexpr std::uint64_t kBatch = 64;

__extension__ using Uint128 = unsigned __int128;

template <std::size_t kNbytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = std::uint8_t;
};
template <>
struct WordOf<2> {
  using Type = std::uint16_t;
};
template <>
struct WordOf<4> {
  using Type = std::uint32_t;
};
template <>
struct WordOf<8> {
  using Type = std::uint64_t;
};
template <>
struct WordOf<16> {
  using Type = Uint128;
};
template <std::size_t kNbytes>
using Batch = std::array<typename WordOf<kNbytes>::Type, kBatch>;

template <std::size_t kNbytes>
void split_batch(const Batch<kNbytes>& words, std::byte* planes, std::uint64_t plane_nbytes) {
  if constexpr (kNbytes == 1) {
    std::memcpy(planes, words.data(), kBatch);
  } else {
    constexpr std::size_t kHalf = kNbytes / 2;
    using Half = typename WordOf<kHalf>::Type;
    Batch<kHalf> low;
    Batch<kHalf> high;
    for (std::size_t i = 0; i < kBatch; ++i) {
      low[i] = static_cast<Half>(words[i]);
      high[i] = static_cast<Half>(words[i] >> (kHalf * CHAR_BIT));
    }
    split_batch<kHalf>(low, planes, plane_nbytes);
    split_batch<kHalf>(high, planes + kHalf * plane_nbytes, plane_nbytes);
  }
}

template <std::size_t kNbytes>
void join_batch(const std::byte* planes, std::uint64_t plane_nbytes, Batch<kNbytes>& words) {
  if constexpr (kNbytes == 1) {
    std::memcpy(words.data(), planes, kBatch);
  } else {
    constexpr std::size_t kHalf = kNbytes / 2;
    using Word = typename WordOf<kNbytes>::Type;
    Batch<kHalf> low;
    Batch<kHalf> high;
    join_batch<kHalf>(planes, plane_nbytes, low);
    join_batch<kHalf>(planes + kHalf * plane_nbytes, plane_nbytes, high);
    for (std::size_t i = 0; i < kBatch; ++i) {
      words[i] = static_cast<Word>(low[i] | static_cast<Word>(high[i]) << (kHalf * CHAR_BIT));
    }
  }
}

template <std::size_t kItemsize>
void shuffle(const std::byte* elements, std::byte* planes, std::uint64_t num_elements) {
  std::uint64_t i = 0;
  for (; i + kBatch <= num_elements; i += kBatch) {
    Batch<kItemsize> words;
    std::memcpy(words.data(), elements + i * kItemsize, sizeof words);
    split_batch<kItemsize>(words, planes + i, num_elements);
  }
  for (; i < num_elements; ++i) {
    for (std::size_t plane = 0; plane < kItemsize; ++plane) {
      planes[plane * num_elements + i] = elements[i * kItemsize + plane];
    }
  }
}

template <std::size_t kItemsize>
void unshuffle(const std::byte* planes, std::uint64_t plane_nbytes, std::byte* elements,
               std::uint64_t num_elements) {
  std::uint64_t i = 0;
  for (; i + kBatch <= num_elements; i += kBatch) {
    Batch<kItemsize> words;
    join_batch<kItemsize>(planes + i, plane_nbytes, words);
    std::memcpy(elements + i * kItemsize, words.data(), sizeof words);
  }
  for (; i < num_elements; ++i) {
    for (std::size_t plane = 0; plane < kItemsize; ++plane) {
      elements[i * kItemsize + plane] = planes[plane * plane_nbytes + i];
    }
  }
}

}  // namespace

void shuffle_bytes(std::span<const std::byte> elements, std::uint64_t itemsize,
                   std::span<std::byte> planes) {
  TESSERA_CHECK(elements.size() == planes.size() && elements.size() % itemsize == 0);
  if (elements.empty()) return;
  const std::uint64_t num_elements = elements.size() / itemsize;
  switch (itemsize) {
    case 1:
      std::memcpy(planes.data(), elements.data(), elements.size());
      return;
    case 2:
      return shuffle<2>(elements.data(), planes.data(), num_elements);
    case 4:
      return shuffle<4>(elements.data(), planes.data(), num_elements);
    case 8:
      return shuffle<8>(elements.data(), planes.data(), num_elements);
    case 16:
      return shuffle<16>(elements.data(), planes.data(), num_elements);
    default:
      TESSERA_CHECK(false);
  }
}

void unshuffle_bytes(std::span<const std::byte> planes, std::uint64_t itemsize, std::uint64_t begin,
                     std::uint64_t end, std::span<std::byte> elements) {
  TESSERA_CHECK(begin <= end && end * itemsize <= planes.size() &&
                elements.size() == (end - begin) * itemsize);
  if (begin == end) return;
  const std::uint64_t plane_nbytes = planes.size() / itemsize;
  const std::byte* const first = planes.data() + begin;
  switch (itemsize) {
    case 1:
      std::memcpy(elements.data(), first, elements.size());
      return;
    case 2:
      return unshuffle<2>(first, plane_nbytes, elements.data(), end - begin);
    case 4:
      return unshuffle<4>(first, plane_nbytes, elements.data(), end - begin);
    case 8:
      return unshuffle<8>(first, plane_nbytes, elements.data(), end - begin);
    case 16:
      return unshuffle<16>(first, plane_nbytes, elements.data(), end - begin);
    default:
      TESSERA_CHECK(false);
  }
}

}  // namespace tessera::formats::native

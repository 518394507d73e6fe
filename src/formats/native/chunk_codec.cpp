#include "formats/native/chunk_codec.h"

// For ZSTD_c_literalCompressionMode: an encoder's parameter, the frames are ordinary ones.
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

/// Moves elements `[begin, end)` between their own order and planes that are `plane_nbytes` apart.
/// The inner loops have constant lengths, so that the compiler turns them into vector code.
template <std::size_t kItemsize>
void shuffle_fixed(const std::byte* elements, std::byte* planes, std::uint64_t num_elements) {
  constexpr std::uint64_t kBatch = 32;
  std::uint64_t i = 0;
  for (; i + kBatch <= num_elements; i += kBatch) {
    for (std::size_t plane = 0; plane < kItemsize; ++plane) {
      std::array<std::byte, kBatch> batch;
      for (std::uint64_t k = 0; k < kBatch; ++k) {
        batch[k] = elements[(i + k) * kItemsize + plane];
      }
      std::memcpy(planes + plane * num_elements + i, batch.data(), kBatch);
    }
  }
  for (; i < num_elements; ++i) {
    for (std::size_t plane = 0; plane < kItemsize; ++plane) {
      planes[plane * num_elements + i] = elements[i * kItemsize + plane];
    }
  }
}

template <std::size_t kItemsize>
void unshuffle_fixed(const std::byte* planes, std::uint64_t plane_nbytes, std::byte* elements,
                     std::uint64_t num_elements) {
  constexpr std::uint64_t kBatch = 32;
  std::uint64_t i = 0;
  for (; i + kBatch <= num_elements; i += kBatch) {
    std::array<std::byte, kBatch * kItemsize> batch;
    for (std::uint64_t k = 0; k < kBatch; ++k) {
      for (std::size_t plane = 0; plane < kItemsize; ++plane) {
        batch[k * kItemsize + plane] = planes[plane * plane_nbytes + i + k];
      }
    }
    std::memcpy(elements + i * kItemsize, batch.data(), batch.size());
  }
  for (; i < num_elements; ++i) {
    for (std::size_t plane = 0; plane < kItemsize; ++plane) {
      elements[i * kItemsize + plane] = planes[plane * plane_nbytes + i];
    }
  }
}

/// A chunk is compressed where that saves at least this part of it.
constexpr std::uint64_t kSavedPart = 16;

ZSTD_CCtx* as_encoder(void* context) {
  return static_cast<ZSTD_CCtx*>(context);
}
ZSTD_DCtx* as_decoder(void* context) {
  return static_cast<ZSTD_DCtx*>(context);
}

void check_zstd(std::size_t code) {
  if (ZSTD_isError(code) != 0) {
    throw Error(ErrorKind::corruption, {}, std::string("zstd: ") + ZSTD_getErrorName(code));
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
      shuffle_fixed<2>(elements.data(), planes.data(), num_elements);
      return;
    case 4:
      shuffle_fixed<4>(elements.data(), planes.data(), num_elements);
      return;
    case 8:
      shuffle_fixed<8>(elements.data(), planes.data(), num_elements);
      return;
    case 16:
      shuffle_fixed<16>(elements.data(), planes.data(), num_elements);
      return;
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
  const std::byte* first = planes.data() + begin;
  switch (itemsize) {
    case 1:
      std::memcpy(elements.data(), first, elements.size());
      return;
    case 2:
      unshuffle_fixed<2>(first, plane_nbytes, elements.data(), end - begin);
      return;
    case 4:
      unshuffle_fixed<4>(first, plane_nbytes, elements.data(), end - begin);
      return;
    case 8:
      unshuffle_fixed<8>(first, plane_nbytes, elements.data(), end - begin);
      return;
    case 16:
      unshuffle_fixed<16>(first, plane_nbytes, elements.data(), end - begin);
      return;
    default:
      TESSERA_CHECK(false);
  }
}

ChunkEncoder::ChunkEncoder() : context_(ZSTD_createCCtx()) {
  if (context_ == nullptr) throw std::bad_alloc();
}

ChunkEncoder::~ChunkEncoder() {
  ZSTD_freeCCtx(as_encoder(context_));
}

EncodedChunk ChunkEncoder::encode(std::span<const std::byte> elements, std::uint64_t itemsize,
                                  std::uint64_t chunk_nbytes, int zstd_level) {
  TESSERA_CHECK(elements.size() <= chunk_nbytes);
  if (elements.size() < chunk_nbytes) {
    padded_.assign(static_cast<std::size_t>(chunk_nbytes), std::byte{0});
    std::ranges::copy(elements, padded_.begin());
    elements = padded_;
  }
  std::span<const std::byte> planes = elements;
  if (itemsize > 1) {
    planes_.resize(elements.size());
    shuffle_bytes(elements, itemsize, planes_);
    planes = planes_;
  }
  ZSTD_CCtx* const context = as_encoder(context_);
  ZSTD_CCtx_reset(context, ZSTD_reset_session_and_parameters);
  check_zstd(ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, zstd_level));
  // Negative levels leave literals as they are unless told otherwise; in weights there is nothing
  // but literals.
  check_zstd(ZSTD_CCtx_setParameter(context, ZSTD_c_literalCompressionMode, ZSTD_lcm_huffman));
  check_zstd(ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 1));
  frame_.resize(ZSTD_compressBound(planes.size()));
  const std::size_t frame_nbytes =
      ZSTD_compress2(context, frame_.data(), frame_.size(), planes.data(), planes.size());
  check_zstd(frame_nbytes);
  if (frame_nbytes > chunk_nbytes - chunk_nbytes / kSavedPart) {
    return {h5::ChunkForm::raw, elements};
  }
  return {h5::ChunkForm::filtered, std::span(frame_).first(frame_nbytes)};
}

ChunkDecoder::ChunkDecoder() : context_(ZSTD_createDCtx()) {
  if (context_ == nullptr) throw std::bad_alloc();
}

ChunkDecoder::~ChunkDecoder() {
  ZSTD_freeDCtx(as_decoder(context_));
}

void ChunkDecoder::decode(std::span<const std::byte> stored, std::uint64_t itemsize,
                          std::uint64_t chunk_nbytes, std::uint64_t begin, std::uint64_t end,
                          std::span<std::byte> out) {
  TESSERA_CHECK(begin <= end && end * itemsize <= chunk_nbytes &&
                out.size() == (end - begin) * itemsize);
  if (stored.size() == chunk_nbytes) {
    std::ranges::copy(stored.subspan(begin * itemsize, out.size()), out.begin());
    return;
  }
  const unsigned long long content_nbytes = ZSTD_getFrameContentSize(stored.data(), stored.size());
  if (content_nbytes != chunk_nbytes) {
    throw Error::expected(
        ErrorKind::corruption, {}, "zstd frame", std::to_string(chunk_nbytes) + " bytes of content",
        content_nbytes >= ZSTD_CONTENTSIZE_ERROR ? std::string("none stated")
                                                 : std::to_string(content_nbytes) + " bytes");
  }
  const bool takes_all = itemsize == 1 && out.size() == chunk_nbytes;
  if (!takes_all) planes_.resize(static_cast<std::size_t>(chunk_nbytes));
  const auto content = takes_all ? out : std::span(planes_);
  const std::size_t nbytes = ZSTD_decompressDCtx(as_decoder(context_), content.data(),
                                                 content.size(), stored.data(), stored.size());
  check_zstd(nbytes);
  if (nbytes != chunk_nbytes) {
    throw Error::expected(ErrorKind::corruption, {}, "zstd frame",
                          std::to_string(chunk_nbytes) + " bytes", std::to_string(nbytes));
  }
  if (!takes_all) unshuffle_bytes(planes_, itemsize, begin, end, out);
}

}  // namespace tessera::formats::native

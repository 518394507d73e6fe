#include "formats/native/chunk_codec.h"

// Needed for ZSTD_compressSequences and ZSTD_c_literalCompressionMode. Frames made with these are
// ordinary zstd frames.
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>

#include <algorithm>
#include <new>

#include "formats/native/byte_planes.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

/// A chunk is stored compressed if this saves at least 1/16 of its size.
constexpr std::uint64_t kMinSavingDivisor = 16;

/// If Huffman codes alone make a chunk smaller than half, zstd also searches for repetitions.
/// Trained weights do not get so small: they are mostly noise, which has no repetitions.
constexpr std::uint64_t kRegularDivisor = 2;
/// The zstd level of that search.
constexpr int kMatchingLevel = 1;

constexpr std::size_t kBlockHeaderNbytes = 3;

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

ChunkEncoder::ChunkEncoder() : context_(ZSTD_createCCtx()) {
  if (context_ == nullptr) throw std::bad_alloc();
}

ChunkEncoder::~ChunkEncoder() {
  ZSTD_freeCCtx(as_encoder(context_));
}

EncodedChunk ChunkEncoder::encode(std::span<const std::byte> elements, std::uint64_t itemsize,
                                  std::uint64_t chunk_nbytes, std::optional<int> zstd_level) {
  TESSERA_CHECK(elements.size() <= chunk_nbytes);
  if (elements.size() < chunk_nbytes) {
    padded_.assign(static_cast<std::size_t>(chunk_nbytes), std::byte{0});
    std::ranges::copy(elements, padded_.begin());
    elements = padded_;
  }
  std::span<const std::byte> planes = elements;
  if (itemsize > 1) {
    const auto shuffled = planes_.take(elements.size());
    shuffle_bytes(elements, itemsize, shuffled);
    planes = shuffled;
  }
  const auto frame = zstd_level ? compress_at_level(planes, *zstd_level)
                                : compress_as_it_suits(planes, chunk_nbytes / itemsize);
  if (frame.size() > chunk_nbytes - chunk_nbytes / kMinSavingDivisor) {
    return {h5::ChunkForm::raw, elements};
  }
  return {h5::ChunkForm::filtered, frame};
}

std::span<const std::byte> ChunkEncoder::compress_as_it_suits(std::span<const std::byte> planes,
                                                              std::uint64_t plane_nbytes) {
  const auto coded = compress_without_matching(planes, plane_nbytes);
  if (coded.size() >= planes.size() / kRegularDivisor) return coded;
  const auto matched = compress_at_level(planes, kMatchingLevel);
  return matched.size() < coded.size() ? matched : coded;
}

std::span<const std::byte> ChunkEncoder::compress_at_level(std::span<const std::byte> planes,
                                                           int level) {
  ZSTD_CCtx* const context = as_encoder(context_);
  ZSTD_CCtx_reset(context, ZSTD_reset_session_and_parameters);
  check_zstd(ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, level));
  // By default, zstd's negative levels do not compress literals, but weights consist of literals
  // only.
  check_zstd(ZSTD_CCtx_setParameter(context, ZSTD_c_literalCompressionMode, ZSTD_lcm_huffman));
  const auto frame = matched_frame_.take(ZSTD_compressBound(planes.size()));
  const std::size_t nbytes =
      ZSTD_compress2(context, frame.data(), frame.size(), planes.data(), planes.size());
  check_zstd(nbytes);
  return frame.first(nbytes);
}

std::span<const std::byte> ChunkEncoder::compress_without_matching(
    std::span<const std::byte> planes, std::uint64_t plane_nbytes) {
  std::vector<ZSTD_Sequence> blocks;
  for (std::uint64_t plane = 0; plane < planes.size(); plane += plane_nbytes) {
    for (std::uint64_t begin = 0; begin < plane_nbytes; begin += ZSTD_BLOCKSIZE_MAX) {
      const auto nbytes = std::min<std::uint64_t>(ZSTD_BLOCKSIZE_MAX, plane_nbytes - begin);
      blocks.push_back(
          {.offset = 0, .litLength = static_cast<unsigned>(nbytes), .matchLength = 0, .rep = 0});
    }
  }
  ZSTD_CCtx* const context = as_encoder(context_);
  ZSTD_CCtx_reset(context, ZSTD_reset_session_and_parameters);
  check_zstd(
      ZSTD_CCtx_setParameter(context, ZSTD_c_blockDelimiters, ZSTD_sf_explicitBlockDelimiters));
  const auto frame =
      coded_frame_.take(ZSTD_compressBound(planes.size()) + blocks.size() * kBlockHeaderNbytes);
  const std::size_t nbytes =
      ZSTD_compressSequences(context, frame.data(), frame.size(), blocks.data(), blocks.size(),
                             planes.data(), planes.size());
  check_zstd(nbytes);
  return frame.first(nbytes);
}

void require_chunk_nbytes(std::span<const std::byte> stored, std::uint64_t chunk_nbytes) {
  if (stored.size() == chunk_nbytes) return;
  const unsigned long long content_nbytes = ZSTD_getFrameContentSize(stored.data(), stored.size());
  if (content_nbytes == chunk_nbytes) return;
  throw Error::expected(
      ErrorKind::corruption, {}, "zstd frame", std::to_string(chunk_nbytes) + " bytes of content",
      content_nbytes >= ZSTD_CONTENTSIZE_ERROR ? std::string("no size in its header")
                                               : std::to_string(content_nbytes) + " bytes");
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
  require_chunk_nbytes(stored, chunk_nbytes);
  if (stored.size() == chunk_nbytes) {
    std::ranges::copy(stored.subspan(begin * itemsize, out.size()), out.begin());
    return;
  }
  const bool takes_all = itemsize == 1 && out.size() == chunk_nbytes;
  const auto content = takes_all ? out : planes_.take(static_cast<std::size_t>(chunk_nbytes));
  const std::size_t nbytes = ZSTD_decompressDCtx(as_decoder(context_), content.data(),
                                                 content.size(), stored.data(), stored.size());
  check_zstd(nbytes);
  if (nbytes != chunk_nbytes) {
    throw Error::expected(ErrorKind::corruption, {}, "zstd frame",
                          std::to_string(chunk_nbytes) + " bytes", std::to_string(nbytes));
  }
  if (!takes_all) unshuffle_bytes(content, itemsize, begin, end, out);
}

}  // namespace tessera::formats::native

#include "formats/native/chunk_codec.h"

#include <gmock/gmock.h>
#include <zstd.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "formats/native/byte_planes.h"

namespace tessera::formats::native {
namespace {

constexpr std::uint64_t kChunkNbytes = std::uint64_t{1} << 20;

template <class T>
std::vector<std::byte> as_byte_vector(const std::vector<T>& elements) {
  const auto bytes = std::as_bytes(std::span(elements));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> noise(std::uint64_t nbytes) {
  std::mt19937_64 generator(7);
  std::vector<std::uint64_t> words((nbytes + 7) / 8);
  for (std::uint64_t& word : words) word = generator();
  std::vector<std::byte> bytes = as_byte_vector(words);
  bytes.resize(nbytes);
  return bytes;
}

std::vector<float> gaussian(std::uint64_t numel) {
  std::mt19937_64 generator(7);
  std::normal_distribution<float> weight(0.0F, 0.02F);
  std::vector<float> weights(numel);
  for (float& value : weights) value = weight(generator);
  return weights;
}

std::vector<std::byte> encoded(std::span<const std::byte> elements, std::uint64_t itemsize,
                               std::optional<int> level = {}) {
  ChunkEncoder encoder;
  const EncodedChunk chunk = encoder.encode(elements, itemsize, elements.size(), level);
  return {chunk.stored.begin(), chunk.stored.end()};
}

TEST(BytePlanes, HoldTheFirstBytesOfAllElementsThenTheSecondOnes) {
  for (const std::uint64_t itemsize : {1U, 2U, 4U, 8U, 16U}) {
    for (const std::uint64_t numel : {0U, 1U, 63U, 64U, 65U, 1000U}) {
      SCOPED_TRACE(testing::Message() << numel << " elements of " << itemsize << " bytes");
      const std::vector<std::byte> elements = noise(numel * itemsize);
      std::vector<std::byte> planes(elements.size());
      shuffle_bytes(elements, itemsize, planes);
      for (std::uint64_t i = 0; i < elements.size(); ++i) {
        ASSERT_EQ(planes[i % itemsize * numel + i / itemsize], elements[i]);
      }
      for (const std::uint64_t begin : {std::uint64_t{0}, numel / 3}) {
        std::vector<std::byte> decoded((numel - begin) * itemsize);
        unshuffle_bytes(planes, itemsize, begin, numel, decoded);
        EXPECT_EQ(decoded,
                  std::vector(elements.begin() + static_cast<std::ptrdiff_t>(begin * itemsize),
                              elements.end()));
      }
    }
  }
}

TEST(ChunkCodec, GivesBackWhatItTook) {
  const std::vector<std::int64_t> counted = [] {
    std::vector<std::int64_t> numbers(20000);
    std::iota(numbers.begin(), numbers.end(), 5);
    return numbers;
  }();
  const std::vector<std::vector<std::byte>> contents = {
      as_byte_vector(gaussian(100000)), as_byte_vector(counted), noise(160000),
      std::vector<std::byte>(400000), as_byte_vector(gaussian(16))};
  ChunkEncoder encoder;
  ChunkDecoder decoder;
  for (const auto& elements : contents) {
    for (const std::uint64_t itemsize : {1U, 2U, 4U, 8U, 16U}) {
      for (const std::optional<int> level :
           {std::optional<int>{}, std::optional(-50), std::optional(3)}) {
        for (const std::uint64_t padding : {0U, 4096U}) {
          const std::uint64_t chunk_nbytes = elements.size() + padding;
          const auto chunk = encoder.encode(elements, itemsize, chunk_nbytes, level);
          const std::uint64_t numel = elements.size() / itemsize;
          std::vector<std::byte> decoded((numel - numel / 4) * itemsize);
          decoder.decode(chunk.stored, itemsize, chunk_nbytes, numel / 4, numel, decoded);
          ASSERT_TRUE(std::ranges::equal(decoded, std::span(elements).last(decoded.size())));
        }
      }
    }
  }
}

TEST(ChunkCodec, WritesOneOrdinaryFrameWithItsSize) {
  const std::vector<std::byte> elements = as_byte_vector(gaussian(kChunkNbytes / 4));
  const std::vector<std::byte> frame = encoded(elements, 4);
  EXPECT_EQ(ZSTD_getFrameContentSize(frame.data(), frame.size()), elements.size());
  EXPECT_EQ(ZSTD_findFrameCompressedSize(frame.data(), frame.size()), frame.size());
  std::vector<std::byte> planes(elements.size());
  EXPECT_EQ(ZSTD_decompress(planes.data(), planes.size(), frame.data(), frame.size()),
            planes.size());
}

TEST(ChunkCodec, IsNoLargerThanLevelOneForWeightsNorForRuns) {
  std::vector<float> weights = gaussian(kChunkNbytes / 4);
  std::vector<float> squares = weights;
  for (float& value : squares) value *= value;
  std::vector<float> mostly_zeros = weights;
  for (std::size_t i = 0; i < mostly_zeros.size(); ++i) {
    if (i / 64 % 16 != 0) mostly_zeros[i] = 0.0F;
  }
  std::vector<std::int64_t> counted(kChunkNbytes / 8);
  std::iota(counted.begin(), counted.end(), 1);
  const auto expect_no_larger = [](const std::vector<std::byte>& elements, std::uint64_t itemsize) {
    EXPECT_LE(encoded(elements, itemsize).size(), encoded(elements, itemsize, 1).size());
  };
  expect_no_larger(as_byte_vector(weights), 4);
  expect_no_larger(as_byte_vector(squares), 4);
  expect_no_larger(as_byte_vector(mostly_zeros), 4);
  expect_no_larger(as_byte_vector(counted), 8);
}

TEST(ChunkCodec, StoresNoiseAsItIs) {
  const std::vector<std::byte> elements = noise(kChunkNbytes);
  ChunkEncoder encoder;
  const EncodedChunk chunk = encoder.encode(elements, 4, kChunkNbytes, {});
  EXPECT_EQ(chunk.form, h5::ChunkForm::raw);
  EXPECT_TRUE(std::ranges::equal(chunk.stored, elements));
}

TEST(ChunkCodec, DoesNotDependOnWhatCameBefore) {
  const std::vector<std::byte> weights = as_byte_vector(gaussian(kChunkNbytes / 4));
  ChunkEncoder encoder;
  encoder.encode(std::vector<std::byte>(kChunkNbytes), 8, kChunkNbytes, {});
  encoder.encode(noise(kChunkNbytes), 2, kChunkNbytes, 5);
  EXPECT_TRUE(
      std::ranges::equal(encoder.encode(weights, 4, kChunkNbytes, {}).stored, encoded(weights, 4)));
}

}  // namespace
}  // namespace tessera::formats::native

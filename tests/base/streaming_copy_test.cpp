#include "base/streaming_copy.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

TEST(StreamingCopyTest, CopiesWhatItIsToldAndNothingBeside) {
  constexpr std::size_t kSize = 400;
  constexpr char kUntouched = 127;
  std::vector<char> from(kSize);
  for (std::size_t i = 0; i < kSize; ++i) from[i] = static_cast<char>(i % 113);
  for (const std::size_t source : {0U, 1U, 15U, 64U}) {
    for (std::size_t destination = 0; destination < 70; ++destination) {
      for (const std::size_t nbytes : {0U, 1U, 63U, 64U, 65U, 127U, 128U, 200U, 256U}) {
        std::vector<char> to(kSize, kUntouched);
        streaming_copy(to.data() + destination, from.data() + source, nbytes);
        for (std::size_t i = 0; i < kSize; ++i) {
          const bool is_copied = i >= destination && i < destination + nbytes;
          ASSERT_EQ(to[i], is_copied ? from[source + i - destination] : kUntouched)
              << nbytes << " bytes from " << source << " to " << destination << ": at " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera

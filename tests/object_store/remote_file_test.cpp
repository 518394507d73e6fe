#include "object_store/remote_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "object_store/announced_reads.h"
#include "object_store/http_server.h"
#include "object_store/web_server.h"

namespace tessera::object_store {
namespace {

using test::http_answer;
using test::WebServer;

constexpr std::uint64_t kKib = std::uint64_t{1} << 10;

std::vector<std::byte> numbered_bytes(std::size_t nbytes) {
  std::vector<std::byte> bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i)
    bytes[i] = static_cast<std::byte>((i * 2654435761U) >> 16);
  return bytes;
}

/// Returns the answer to a request for a range of a file.
std::string range_of(const std::vector<std::byte>& file, const std::string& header) {
  unsigned long first = 0;
  unsigned long last = 0;
  const std::size_t range = header.find("bytes=");
  if (range == std::string::npos ||
      std::sscanf(header.c_str() + range, "bytes=%lu-%lu", &first, &last) != 2) {
    return http_answer("400 Bad Request", "", "");
  }
  return http_answer("206 Partial Content",
                     "Content-Range: bytes " + std::to_string(first) + "-" + std::to_string(last) +
                         "/" + std::to_string(file.size()) + "\r\n",
                     {reinterpret_cast<const char*>(file.data()) + first, last + 1 - first});
}

// Several threads read the same blocks, so that one thread's window can be read to its end, and
// forgotten, by the others before that thread has taken its own bytes.
TEST(RemoteFileTest, ThreadsThatReadTheSameBlocksAllGetTheirBytes) {
  constexpr std::uint64_t kBlock = 64 * kKib;
  constexpr int kNumThreads = 8;
  const std::vector<std::byte> bytes = numbered_bytes(16 * kBlock);
  const WebServer site([&](const std::string& header) { return range_of(bytes, header); });
  HttpServer server;
  for (int round = 0; round < 30; ++round) {
    const RemoteFile file(server, site.url(), {.nbytes = bytes.size()},
                          {bytes.begin(), bytes.begin() + std::ptrdiff_t{kBlock}});
    std::barrier begin(kNumThreads);
    std::vector<int> num_wrong(kNumThreads);
    {
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < kNumThreads; ++thread) {
        threads.emplace_back([&, thread] {
          std::vector<std::byte> block(kBlock);
          begin.arrive_and_wait();
          for (std::uint64_t i = 0; i < 2 * bytes.size() / kBlock; ++i) {
            const std::uint64_t offset = i * kBlock % bytes.size();
            std::ranges::fill(block, std::byte{});
            file.read_at(offset, block);
            const bool is_right = std::memcmp(block.data(), bytes.data() + offset, kBlock) == 0;
            num_wrong[static_cast<std::size_t>(thread)] += is_right ? 0 : 1;
          }
        });
      }
    }
    ASSERT_EQ(num_wrong, std::vector<int>(kNumThreads)) << "round " << round;
  }
}

// A move to several ranks reads a part of each small tensor for the first rank, then for the next.
TEST(RemoteFileTest, BytesThatAreNeededAgainAfterTheirWindowIsForgottenAreReadAheadAgain) {
  constexpr std::uint64_t kTensor = 16 * kKib;
  constexpr std::uint64_t kPart = kTensor / 4;
  constexpr std::uint64_t kNumTensors = 512;
  const std::vector<std::byte> bytes = numbered_bytes(kNumTensors * kTensor);
  std::atomic<int> num_requests = 0;
  const WebServer site([&](const std::string& header) {
    ++num_requests;
    return range_of(bytes, header);
  });
  std::vector<ByteRange> reads;
  for (std::uint64_t rank = 0; rank < 4; ++rank) {
    for (std::uint64_t i = 0; i < kNumTensors; ++i) {
      const std::uint64_t begin = i * kTensor + rank * kPart;
      reads.push_back({begin, begin + kPart});
    }
  }
  const AnnouncedReads announced({{site.url(), reads}});
  HttpServer server;
  const RemoteFile file(server, site.url(), {.nbytes = bytes.size()}, {},
                        {.whole_nbytes = 0,
                         .first_nbytes = kPart,
                         .window_nbytes = 64 * kKib,
                         .ahead_nbytes = 1024 * kKib});
  std::vector<std::byte> part(kPart);
  for (const ByteRange read : reads) {
    file.read_at(read.begin, part);
    ASSERT_EQ(std::memcmp(part.data(), bytes.data() + read.begin, kPart), 0) << read.begin;
  }
  // The file remembers 64 windows of the 128, so each rank needs new ones.
  constexpr int kNumWindows = static_cast<int>(kNumTensors * kTensor / (64 * kKib));
  EXPECT_LE(num_requests, 4 * (kNumWindows + 2));
}

}  // namespace
}  // namespace tessera::object_store

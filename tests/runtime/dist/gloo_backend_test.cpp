#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "runtime/support/counting_allocator.h"
#include "runtime/support/ranks.h"

namespace tessera::dist {
namespace {

/// The input of rank `rank`: `[numel]`, whole numbers, so that sums are exact.
at::Tensor given_by(int rank, std::int64_t numel, at::ScalarType dtype) {
  return (torch::arange(numel) % 7 + rank).to(dtype);
}

// Shows B10.
TEST(GlooTest, GathersAndReducesAnyDtype) {
  for (const int num_ranks : {2, 3, 5}) {
    test::on_ranks(num_ranks, [&](const Mesh& mesh) {
      for (const at::ScalarType dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte}) {
        for (const std::int64_t numel : {0, 1, 5, 1000}) {
          SCOPED_TRACE(std::string(c10::toString(dtype)) + ", " + std::to_string(numel));
          at::Tensor whole = torch::empty({num_ranks * numel}, dtype);
          mesh.world()->all_gather(whole, given_by(mesh.rank(), numel, dtype), "x").wait();
          at::Tensor sum = torch::zeros({numel}, at::kDouble);
          for (int rank = 0; rank < num_ranks; ++rank) {
            const at::Tensor expected = given_by(rank, numel, dtype);
            EXPECT_TRUE(whole.narrow(0, rank * numel, numel).equal(expected));
            sum += given_by(rank, num_ranks * numel, at::kDouble)
                       .narrow(0, mesh.rank() * numel, numel);
          }
          at::Tensor shard = torch::empty({numel}, dtype);
          const at::Tensor given = given_by(mesh.rank(), num_ranks * numel, dtype);
          mesh.world()->reduce_scatter(shard, given, "x").wait();
          EXPECT_TRUE(shard.to(at::kDouble).equal(sum));
          EXPECT_TRUE(given.equal(given_by(mesh.rank(), num_ranks * numel, dtype)));
        }
      }
    });
  }
}

// Shows B10.
TEST(GlooTest, PartsMayLieApartOnSomeRanks) {
  test::on_ranks(2, [](const Mesh& mesh) {
    const auto matrix = [&] {
      return mesh.rank() == 0 ? torch::empty({2, 3}) : torch::empty({3, 2}).t();
    };
    const at::Tensor expected = torch::arange(6, at::kFloat).view({2, 3});
    at::Tensor whole = torch::empty({12});
    mesh.world()->all_gather(whole, matrix().copy_(expected), "x").wait();
    EXPECT_TRUE(whole.equal(torch::cat({expected.flatten(), expected.flatten()})));
    at::Tensor shard = matrix();
    mesh.world()->reduce_scatter(shard, whole, "x").wait();
    EXPECT_TRUE(shard.equal(2 * expected));
  });
}

// Shows B10.
TEST(GlooTest, CollectivesMayBeWaitedForInAnyOrder) {
  constexpr std::int64_t kNumel = 100'000;
  test::on_ranks(3, [](const Mesh& mesh) {
    std::vector<at::Tensor> wholes;
    std::vector<at::Tensor> outputs;
    std::vector<Pending> pending;
    for (int i = 0; i < 4; ++i) {
      wholes.push_back(torch::empty({3 * kNumel}));
      pending.push_back(mesh.world()->all_gather(
          wholes.back(), given_by(mesh.rank() + i, kNumel, at::kFloat), "x"));
      outputs.push_back(torch::empty({kNumel}));
      pending.push_back(
          mesh.world()->reduce_scatter(outputs.back(), given_by(i, 3 * kNumel, at::kFloat), "x"));
    }
    for (auto it = pending.rbegin(); it != pending.rend(); ++it) it->wait();
    for (int i = 0; i < 4; ++i) {
      const auto index = static_cast<std::size_t>(i);
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(wholes[index]
                        .narrow(0, rank * kNumel, kNumel)
                        .equal(given_by(rank + i, kNumel, at::kFloat)));
      }
      EXPECT_TRUE(outputs[index].equal(
          given_by(i, 3 * kNumel, at::kFloat).narrow(0, mesh.rank() * kNumel, kNumel) * 3));
    }
  });
}

// Shows B22.
TEST(GlooTest, WhatNobodyWaitsForHoldsNobodyUp) {
  MeshOptions options;
  options.timeout = std::chrono::seconds(10);
  test::on_ranks(
      2,
      [](const Mesh& mesh) {
        constexpr std::int64_t kNumel = 1'000'000;
        const auto gather = [&](at::Tensor& whole) {
          return mesh.world()->all_gather(whole, given_by(mesh.rank(), kNumel, at::kFloat), "x");
        };
        at::Tensor first = torch::empty({2 * kNumel});
        if (mesh.rank() == 0) {
          gather(first);  // its tensors and its result are dropped before the other rank gathers
          first = at::Tensor();
        } else {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          gather(first).wait();
        }
        at::Tensor second = torch::empty({2 * kNumel});
        gather(second).wait();
        EXPECT_TRUE(second.equal(
            torch::cat({given_by(0, kNumel, at::kFloat), given_by(1, kNumel, at::kFloat)})));
        if (mesh.rank() == 1) {
          EXPECT_TRUE(first.equal(second));
        }
      },
      options);
}

// Shows B14.
TEST(GlooTest, NothingIsCopiedOnTheWay) {
  static constexpr std::int64_t kNumel = 1'000'000;
  static constexpr std::int64_t kSmall = 100'000;  // bytes
  test::on_ranks(4, [](const Mesh& mesh) {
    const at::Tensor whole = torch::ones({4 * kNumel});
    const at::Tensor shard = torch::ones({kNumel});
    const auto allocated_by = [](const auto& collective) {
      const std::int64_t before = test::allocated_memory().now;
      test::reset_peak();
      collective();
      return test::allocated_memory().peak - before;
    };
    EXPECT_LT(allocated_by([&] { mesh.world()->all_gather(whole, shard, "x").wait(); }), kSmall);
    EXPECT_LT(allocated_by([&] { mesh.world()->reduce_scatter(shard, whole, "x").wait(); }),
              3 * kNumel * std::int64_t{sizeof(float)} + kSmall);
  });
}

}  // namespace
}  // namespace tessera::dist

#include "runtime/embedding/initial_weight.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "base/checked_math.h"
#include "base/digest.h"
#include "tessera/base/parallel.h"

namespace tessera::embedding {
namespace {

/// Returns b for default initial values, which are uniform in [-b, b), as in torchrec.
double bound_of(const EmbeddingBagConfig& config) {
  return 1 / std::sqrt(static_cast<double>(config.num_embeddings));
}

/// Returns 64 pseudorandom bits, different for each number. Source: SplitMix64, Steele, Lea and
/// Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
std::uint64_t scrambled(std::uint64_t number) {
  number += 0x9E3779B97F4A7C15U;
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9U;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EBU;
  return number ^ (number >> 31);
}

std::uint64_t seed_of(const EmbeddingBagConfig& config, std::uint64_t seed) {
  return scrambled(seed ^ xxh3_64(std::as_bytes(std::span(config.name))));
}

void fill_uniform(const Box& region, std::int64_t num_columns, std::uint64_t seed, double bound,
                  float* first, std::int64_t begin_row, std::int64_t end_row) {
  for (std::int64_t row = begin_row; row < end_row; ++row) {
    const std::int64_t place = (region.offsets[0] + row) * num_columns + region.offsets[1];
    for (std::int64_t column = 0; column < region.sizes[1]; ++column) {
      const std::uint64_t bits = scrambled(seed + static_cast<std::uint64_t>(place + column));
      const double unit = static_cast<double>(bits >> 40) * 0x1p-23 - 1;  // in [-1, 1)
      *first++ = static_cast<float>(unit * bound);
    }
  }
}

void initialize_uniform(const EmbeddingBagConfig& config, const Box& region, std::uint64_t seed,
                        at::Tensor weight) {
  constexpr std::int64_t kRows = 1024;  // rows per task
  const std::int64_t rows = region.sizes[0];
  const bool is_plain =
      weight.is_cpu() && weight.scalar_type() == at::kFloat && weight.is_contiguous();
  parallel_for(ceil_div(rows, kRows), at::get_num_threads(), {}, [&](std::int64_t task) {
    const std::int64_t begin = task * kRows;
    const std::int64_t end = std::min(begin + kRows, rows);
    const auto fill = [&](float* first) {
      fill_uniform(region, config.embedding_dim, seed, bound_of(config), first, begin, end);
    };
    if (is_plain) {
      fill(weight.data_ptr<float>() + begin * region.sizes[1]);
      return;
    }
    at::Tensor values = torch::empty({end - begin, region.sizes[1]}, at::kFloat);
    fill(values.mutable_data_ptr<float>());
    const at::NoGradGuard no_grad;  // here too, because grad mode is thread-local
    weight.narrow(0, begin, end - begin).copy_(values);
  });
}

}  // namespace

void initialize(const EmbeddingBagConfig& config, at::Tensor weight) {
  const at::NoGradGuard no_grad;
  if (config.init_fn) {
    config.init_fn(weight);
  } else if (config.num_embeddings > 0) {
    weight.uniform_(-bound_of(config), bound_of(config));
  }
}

void initialize_shard(const EmbeddingBagConfig& config, const Box& region, std::uint64_t seed,
                      at::Tensor weight) {
  const at::NoGradGuard no_grad;
  seed = seed_of(config, seed);
  if (!config.init_fn) {
    if (weight.numel() > 0) initialize_uniform(config, region, seed, weight);
    return;
  }
  struct DefaultGenerator {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    at::Tensor before = generator.get_state();
    ~DefaultGenerator() { generator.set_state(before); }  // also if `init_fn` throws
  } restored;
  for (const std::int64_t offset : region.offsets) {
    seed = scrambled(seed ^ static_cast<std::uint64_t>(offset));
  }
  restored.generator.set_current_seed(seed);
  config.init_fn(weight);
}

std::uint64_t draw_seed(dist::Group& group) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::uint64_t drawn = 0;
  {
    const std::scoped_lock lock(generator.mutex());
    drawn = generator.get<at::CPUGeneratorImpl>()->random64();
  }
  at::Tensor seed =
      torch::full({1}, static_cast<std::int64_t>(drawn), at::kLong).to(group.device());
  group.broadcast(seed, 0, "seed of embedding tables").wait();
  return static_cast<std::uint64_t>(seed.item<std::int64_t>());
}

}  // namespace tessera::embedding

#include "runtime/embedding/pooled_blocks.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>

#include "base/checked_math.h"
#include "tessera/base/parallel.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

/// Calls `body(sample)` for all samples of a batch, in parallel.
template <class Body>
void for_samples(std::int64_t batch_size, const Body& body) {
  constexpr std::int64_t kSamples = 256;  // samples per task
  parallel_for(ceil_div(batch_size, kSamples), at::get_num_threads(), {}, [&](std::int64_t task) {
    const std::int64_t end = std::min((task + 1) * kSamples, batch_size);
    for (std::int64_t sample = task * kSamples; sample < end; ++sample) body(sample);
  });
}

void sum_pooled_on_host(std::span<const RankBlocks> ranks, const Tensor& pooled, Tensor& output) {
  auto* const to = output.mutable_data_ptr<float>();
  const std::int64_t batch_size = output.size(0);
  const std::int64_t output_width = output.size(1);
  for_samples(batch_size, [&](std::int64_t sample) {
    float* const row = to + sample * output_width;
    const auto* from = pooled.const_data_ptr<float>();
    for (const RankBlocks& rank : ranks) {
      for (const Block& block : rank.blocks) {
        const float* const source = from + sample * rank.width + block.from;
        float* const sum = row + block.to;
        if (block.is_first) {
          std::copy_n(source, block.width, sum);
        } else {
          for (std::int64_t k = 0; k < block.width; ++k) sum[k] += source[k];
        }
      }
      from += batch_size * rank.width;
    }
  });
}

void cut_gradient_on_host(std::span<const RankBlocks> ranks, const Tensor& gradient, Tensor& cut) {
  const auto* const from = gradient.const_data_ptr<float>();
  auto* const to = cut.mutable_data_ptr<float>();
  const std::int64_t batch_size = gradient.size(0);
  const std::int64_t output_width = gradient.size(1);
  for_samples(batch_size, [&](std::int64_t sample) {
    const float* const row = from + sample * output_width;
    float* first = to;
    for (const RankBlocks& rank : ranks) {
      for (const Block& block : rank.blocks) {
        std::copy_n(row + block.to, block.width, first + sample * rank.width + block.from);
      }
      first += batch_size * rank.width;
    }
  });
}

/// Calls `body(rows, rank)` for the `[batch_size, width]` of each rank.
template <class Body>
void for_ranks(std::span<const RankBlocks> ranks, const Tensor& pooled, std::int64_t batch_size,
               const Body& body) {
  std::int64_t begin = 0;
  for (const RankBlocks& rank : ranks) {
    body(pooled.narrow(0, begin, batch_size * rank.width).view({batch_size, rank.width}), rank);
    begin += batch_size * rank.width;
  }
}

}  // namespace

void sum_pooled(std::span<const RankBlocks> ranks, const Tensor& pooled, Tensor& output) {
  if (output.is_cpu()) return sum_pooled_on_host(ranks, pooled, output);
  for_ranks(ranks, pooled, output.size(0), [&](const Tensor& rows, const RankBlocks& rank) {
    for (const Block& block : rank.blocks) {
      Tensor sum = output.narrow(1, block.to, block.width);
      const Tensor from = rows.narrow(1, block.from, block.width);
      if (block.is_first) {
        sum.copy_(from);
      } else {
        sum.add_(from);
      }
    }
  });
}

Tensor cut_gradient(std::span<const RankBlocks> ranks, const Tensor& gradient) {
  std::int64_t numel = 0;
  for (const RankBlocks& rank : ranks) numel += gradient.size(0) * rank.width;
  Tensor cut = torch::empty({numel}, gradient.options());
  if (gradient.is_cpu()) {
    cut_gradient_on_host(ranks, gradient, cut);
    return cut;
  }
  for_ranks(ranks, cut, gradient.size(0), [&](const Tensor& rows, const RankBlocks& rank) {
    for (const Block& block : rank.blocks) {
      Tensor to = rows.narrow(1, block.from, block.width);
      to.copy_(gradient.narrow(1, block.to, block.width));
    }
  });
  return cut;
}

}  // namespace tessera::embedding

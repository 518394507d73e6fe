#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/tessera.h"

namespace example {

/// Synthetic clicks with a hidden pattern that a model can learn. A sample depends only on the step
/// and its number in the step, so every rank can compute the same sample.
class Clicks {
 public:
  static constexpr std::int64_t kNumDense = 8;

  struct Batch {
    std::int64_t step = 0;
    at::Tensor dense;                   // [samples, kNumDense]
    tessera::KeyedJaggedTensor sparse;  // ids by feature
    at::Tensor clicked;                 // [samples], 0 or 1
  };

  struct Feature {
    std::string name;
    std::int64_t num_ids;
    std::int64_t max_length;  // of a bag
  };
  static const std::vector<Feature>& features() {
    static const std::vector<Feature> all = {
        {"user", 40'000, 1},  {"item", 20'000, 1}, {"history", 20'000, 8}, {"query", 8'000, 4},
        {"category", 300, 2}, {"city", 1'000, 1},  {"hour", 24, 1},        {"device", 7, 1}};
    return all;
  }

  /// Returns samples `[first, first + num_samples)` of a step.
  static Batch batch(std::int64_t step, std::int64_t first, std::int64_t num_samples) {
    at::Tensor dense = torch::empty({num_samples, kNumDense});
    std::vector<float> scores(static_cast<std::size_t>(num_samples));
    auto rows = dense.accessor<float, 2>();
    for (std::int64_t i = 0; i < num_samples; ++i) {
      Numbers numbers(step, first + i, 0);
      for (std::int64_t k = 0; k < kNumDense; ++k) {
        rows[i][k] = static_cast<float>(2 * numbers.next() - 1);
        if (k < 4) scores[static_cast<std::size_t>(i)] += rows[i][k];
      }
    }
    std::vector<std::string> keys;
    std::vector<std::int64_t> lengths, ids;
    for (std::size_t f = 0; f < features().size(); ++f) {
      const Feature& feature = features()[f];
      keys.push_back(feature.name);
      for (std::int64_t i = 0; i < num_samples; ++i) {
        Numbers numbers(step, first + i, f + 1);
        lengths.push_back(1 + static_cast<std::int64_t>(numbers.next() *
                                                        static_cast<double>(feature.max_length)));
        for (std::int64_t n = 0; n < lengths.back(); ++n) {
          // A few ids appear often, and most ids rarely.
          const double popular = std::pow(numbers.next(), 4);
          ids.push_back(static_cast<std::int64_t>(popular * static_cast<double>(feature.num_ids)));
          scores[static_cast<std::size_t>(i)] +=
              hidden_score(f, ids.back()) / static_cast<float>(lengths.back());
        }
      }
    }
    at::Tensor clicked = torch::empty({num_samples});
    for (std::int64_t i = 0; i < num_samples; ++i) {
      const double chance = 1 / (1 + std::exp(-2 * scores[static_cast<std::size_t>(i)]));
      clicked[i] = Numbers(step, first + i, 99).next() < chance ? 1.0F : 0.0F;
    }
    return {step, std::move(dense),
            tessera::KeyedJaggedTensor::from_lengths(std::move(keys), torch::tensor(ids, at::kLong),
                                                     torch::tensor(lengths, at::kLong)),
            std::move(clicked)};
  }

 private:
  /// Pseudorandom numbers between 0 and 1 that depend only on step, sample and feature
  /// (SplitMix64).
  class Numbers {
   public:
    Numbers(std::int64_t step, std::int64_t sample, std::size_t feature)
        : state_((static_cast<std::uint64_t>(step) << 40) ^
                 (static_cast<std::uint64_t>(sample) << 8) ^ feature) {}
    double next() {
      std::uint64_t bits = state_ += 0x9e3779b97f4a7c15;
      bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
      bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
      return static_cast<double>((bits ^ (bits >> 31)) >> 11) * 0x1p-53;
    }

   private:
    std::uint64_t state_;
  };

  /// The hidden pattern: what an id adds to the score of a sample. The score decides the
  /// probability of a click.
  static float hidden_score(std::size_t feature, std::int64_t id) {
    Numbers numbers(0, id, 1000 + feature);
    numbers.next();
    return static_cast<float>(2 * numbers.next() - 1);
  }
};

}  // namespace example

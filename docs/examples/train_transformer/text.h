#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace example {

/// Characters (bytes) of text files, as numbers from 0 on.
class Text {
 public:
  /// Throws: std::runtime_error naming a file that cannot be read, or text shorter than `sequence`.
  Text(const std::vector<std::string>& files, std::int64_t sequence);

  std::int64_t vocabulary() const { return static_cast<std::int64_t>(characters_.size()); }
  std::int64_t size() const { return ids_.size(0); }

  struct Batch {
    at::Tensor ids;      // [rows, sequence], int64
    at::Tensor targets;  // [rows, sequence]: the character after each
  };
  /// Returns `num_rows` pieces at places that depend on `step` alone: the same on every rank.
  Batch batch(std::int64_t step, std::int64_t num_rows) const;

 private:
  std::int64_t sequence_;
  std::string characters_;  // that occur, in order
  at::Tensor ids_;          // [characters], int64
};

}  // namespace example

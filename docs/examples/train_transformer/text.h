#pragma once

#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace example {

/// The text of files as numbers: the characters (bytes) that occur in it are numbered from 0 in the
/// order of their codes.
class Text {
 public:
  /// Throws: std::runtime_error naming a file that cannot be read, or if the text does not have
  /// more than `sequence` characters.
  Text(const std::vector<std::string>& files, std::int64_t sequence);

  std::int64_t vocabulary() const { return vocabulary_; }
  std::int64_t size() const { return ids_.size(0); }

  struct Batch {
    at::Tensor ids;      // [rows, sequence], int64
    at::Tensor targets;  // [rows, sequence]: the next character of each
  };
  /// Returns `num_rows` pieces of the text. Their places depend only on the arguments and the size
  /// of the text, so the batch is equal on all ranks. go_on_fsdp2.py uses the same formula.
  Batch batch(std::int64_t step, std::int64_t num_rows) const;

 private:
  std::int64_t sequence_;
  std::int64_t vocabulary_ = 0;
  at::Tensor ids_;  // [characters], int64
};

inline Text::Text(const std::vector<std::string>& files, std::int64_t sequence)
    : sequence_(sequence) {
  std::string text;
  for (const std::string& path : files) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + ": cannot be read");
    text.append(std::istreambuf_iterator<char>(file), {});
  }
  if (text.size() <= static_cast<std::size_t>(sequence)) {
    throw std::runtime_error("text: expected more than " + std::to_string(sequence) +
                             " characters, found " + std::to_string(text.size()));
  }
  std::array<std::int64_t, 256> number_of{};
  for (const unsigned char character : std::set<unsigned char>(text.begin(), text.end())) {
    number_of[character] = vocabulary_++;
  }
  ids_ = torch::empty({static_cast<std::int64_t>(text.size())}, torch::kLong);
  std::int64_t* const ids = ids_.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < text.size(); ++i) {
    ids[i] = number_of[static_cast<unsigned char>(text[i])];
  }
}

inline Text::Batch Text::batch(std::int64_t step, std::int64_t num_rows) const {
  constexpr std::int64_t kStride = 2'654'435'761;  // 2^32 / golden ratio: spreads places evenly
  const std::int64_t num_places = size() - sequence_;
  std::vector<at::Tensor> ids;
  std::vector<at::Tensor> targets;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t number = (step * num_rows + row) % num_places;
    const std::int64_t begin = number * (kStride % num_places) % num_places;
    ids.push_back(ids_.narrow(0, begin, sequence_));
    targets.push_back(ids_.narrow(0, begin + 1, sequence_));
  }
  return {torch::stack(ids), torch::stack(targets)};
}

}  // namespace example

#include "text.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <stdexcept>

namespace example {

Text::Text(const std::vector<std::string>& files, std::int64_t sequence) : sequence_(sequence) {
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
  const std::set<char> distinct(text.begin(), text.end());
  characters_.assign(distinct.begin(), distinct.end());
  ids_ = torch::empty({static_cast<std::int64_t>(text.size())}, torch::kLong);
  std::int64_t* const ids = ids_.data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < text.size(); ++i) {
    ids[i] = std::ranges::lower_bound(characters_, text[i]) - characters_.begin();
  }
}

Text::Batch Text::batch(std::int64_t step, std::int64_t num_rows) const {
  std::mt19937_64 random(static_cast<std::uint64_t>(step));
  std::uniform_int_distribution<std::int64_t> begins(0, size() - sequence_ - 1);
  std::vector<at::Tensor> ids;
  std::vector<at::Tensor> targets;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t begin = begins(random);
    ids.push_back(ids_.narrow(0, begin, sequence_));
    targets.push_back(ids_.narrow(0, begin + 1, sequence_));
  }
  return {torch::stack(ids), torch::stack(targets)};
}

}  // namespace example

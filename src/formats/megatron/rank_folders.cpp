#include "formats/megatron/rank_folders.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "base/size_text.h"
#include "formats/file_names.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::megatron {
namespace {

constexpr std::string_view kBegin = "mp_rank_";
constexpr std::size_t kMaxOfOneKind = 1 << 14;

/// Returns the numbers in the name of a rank's folder; a number that is too large becomes
/// `kMaxOfOneKind`.
std::vector<std::size_t> numbers_in(std::string_view name) {
  std::vector<std::size_t> numbers;
  name.remove_prefix(kBegin.size());
  while (!name.empty()) {
    std::size_t number = kMaxOfOneKind;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    numbers.push_back(error == std::errc{} ? std::min(number, kMaxOfOneKind) : kMaxOfOneKind);
    name.remove_prefix(static_cast<std::size_t>(end - name.data()));
    if (!name.empty()) name.remove_prefix(1);
  }
  return numbers;
}

Place place_in(const std::vector<std::size_t>& numbers, SecondNumber second) {
  Place place{.tensor = numbers[0]};
  if (numbers.size() == 3) {
    place.stage = numbers[1];
    place.expert = numbers[2];
  } else if (numbers.size() == 2) {
    (second == SecondNumber::stage ? place.stage : place.expert) = numbers[1];
  }
  return place;
}

std::string in_words(const Place& place, std::size_t num_numbers, SecondNumber second) {
  std::string words = "tensor rank " + std::to_string(place.tensor);
  if (num_numbers == 3 || (num_numbers == 2 && second == SecondNumber::stage)) {
    words += ", pipeline stage " + std::to_string(place.stage);
  }
  if (num_numbers == 3 || (num_numbers == 2 && second == SecondNumber::expert)) {
    words += ", expert rank " + std::to_string(place.expert);
  }
  return words;
}

std::vector<std::size_t> checked_numbers(const std::string& name, const std::string& directory) {
  std::vector<std::size_t> numbers = numbers_in(name);
  if (std::ranges::find(numbers, kMaxOfOneKind) == numbers.end()) return numbers;
  throw Error::expected(ErrorKind::corruption, {.path = join_path(directory, name)}, "rank",
                        "numbers below " + std::to_string(kMaxOfOneKind), "a larger number");
}

/// Returns the first rank without a folder. Throws if a rank has two folders. Makes no list of all
/// ranks, because a hostile folder name can make their number very large.
std::optional<std::size_t> first_missing(
    const std::vector<std::pair<std::size_t, std::string>>& by_rank, const RankFolders& folders,
    const std::string& directory) {
  for (std::size_t i = 0; i < by_rank.size(); ++i) {
    if (i > 0 && by_rank[i].first == by_rank[i - 1].first) {
      throw Error::expected(ErrorKind::unsupported, {.path = directory}, "folders of ranks",
                            "one folder of each rank",
                            "'" + by_rank[i - 1].second + "' and '" + by_rank[i].second + "'");
    }
    if (by_rank[i].first != i) return i;
  }
  const std::size_t num_ranks = folders.sizes.tensor * folders.sizes.stage * folders.sizes.expert;
  return by_rank.size() < num_ranks ? std::optional(by_rank.size()) : std::nullopt;
}

}  // namespace

Place RankFolders::place_of(std::size_t index) const {
  return {.tensor = index % sizes.tensor,
          .stage = index / sizes.tensor / sizes.expert,
          .expert = index / sizes.tensor % sizes.expert};
}

bool is_rank_folder(std::string_view name) {
  return is_name_like(name, "mp_rank_#") || is_name_like(name, "mp_rank_#_#") ||
         is_name_like(name, "mp_rank_#_#_#");
}

bool is_iteration(std::string_view name) {
  return is_name_like(name, "iter_#") || name == "release";
}

std::size_t count_numbers(std::string_view name) {
  return numbers_in(name).size();
}

RankFolders find_rank_folders(const std::vector<std::string>& names, const std::string& directory,
                              SecondNumber second) {
  RankFolders folders;
  std::vector<std::pair<Place, std::string>> found;
  std::size_t num_numbers = 0;
  for (const std::string& name : names) {
    if (!is_rank_folder(name)) continue;
    const std::vector<std::size_t> numbers = checked_numbers(name, directory);
    if (num_numbers != 0 && numbers.size() != num_numbers) {
      throw Error::expected(
          ErrorKind::unsupported, {.path = directory}, "folders of ranks",
          "names with " + counted(num_numbers, "number") + ", as '" + found.front().second + "'",
          "'" + name + "'", "two saves in one folder?");
    }
    num_numbers = numbers.size();
    const Place place = place_in(numbers, second);
    folders.sizes.tensor = std::max(folders.sizes.tensor, place.tensor + 1);
    folders.sizes.stage = std::max(folders.sizes.stage, place.stage + 1);
    folders.sizes.expert = std::max(folders.sizes.expert, place.expert + 1);
    found.emplace_back(place, name);
  }
  std::vector<std::pair<std::size_t, std::string>> by_rank;
  for (auto& [place, name] : found) by_rank.emplace_back(folders.index_of(place), std::move(name));
  std::ranges::sort(by_rank);
  if (const auto missing = first_missing(by_rank, folders, directory)) {
    throw Error::expected(ErrorKind::corruption, {.path = directory}, "folders of ranks",
                          "one folder of each rank",
                          "none of " + in_words(folders.place_of(*missing), num_numbers, second),
                          "not copied from its host?");
  }
  for (auto& [rank, name] : by_rank) folders.names.push_back(std::move(name));
  return folders;
}

}  // namespace tessera::formats::megatron

#include "formats/rank_files/file_names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::rank_files {
namespace {

constexpr std::array<std::string_view, 4> kSuffixes{".pt", ".pth", ".bin", ".ckpt"};
constexpr std::string_view kRank = "rank";
constexpr std::string_view kNumRanks = "world_size";
constexpr std::string_view kSeparators = "_-.";
constexpr std::string_view kDigits = "0123456789";
constexpr std::uint64_t kMaxRanks = 1 << 20;

void remove_separators(std::string_view& text) {
  while (!text.empty() && kSeparators.find(text.back()) != std::string_view::npos) {
    text.remove_suffix(1);
  }
}

/// Removes `<word>_<number>`, and separators before it, from the end of `text`. Returns the number.
/// The `_` may be `-`, `.` or missing. If there is no such end, returns nothing and keeps `text`.
std::optional<std::uint64_t> take_number(std::string_view& text, std::string_view word) {
  const std::size_t last = text.find_last_not_of(kDigits);
  const std::string_view digits = text.substr(last == std::string_view::npos ? 0 : last + 1);
  std::string_view before = text.substr(0, text.size() - digits.size());
  if (!before.empty() && kSeparators.find(before.back()) != std::string_view::npos) {
    before.remove_suffix(1);
  }
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc{} || number >= kMaxRanks || !before.ends_with(word)) return std::nullopt;
  before.remove_suffix(word.size());
  const bool begins_a_word = before.empty() || kSeparators.find(before.back()) != before.npos;
  if (!begins_a_word) return std::nullopt;
  text = before;
  remove_separators(text);
  return number;
}

[[noreturn]] void refuse(ErrorKind kind, const std::string& path, const std::string& expected,
                         const std::string& found, std::string_view cause = {}) {
  throw Error::expected(kind, {.path = path}, "files of ranks", expected, found, cause);
}

/// Returns the number of ranks that saved an item: the `world_size` in its file names; without it,
/// the largest rank plus one.
std::uint64_t num_ranks_of(const Item& item, const std::string& path) {
  std::set<std::uint64_t> stated;
  std::uint64_t num_ranks = 0;
  for (const FileName& file : item.files) {
    if (file.num_ranks) stated.insert(*file.num_ranks);
    num_ranks = std::max(num_ranks, file.rank + 1);
  }
  if (stated.size() > 1) {
    refuse(ErrorKind::unsupported, path, "files of one save, with one number of ranks",
           "files of " + std::to_string(*stated.begin()) + " and of " +
               std::to_string(*stated.rbegin()) + " ranks",
           "move the files of one save to a folder of their own");
  }
  if (!stated.empty() && *stated.begin() < num_ranks) {
    refuse(ErrorKind::corruption, path,
           "ranks below " + std::to_string(*stated.begin()) + ", as the names say",
           "a file of rank " + std::to_string(num_ranks - 1));
  }
  return stated.empty() ? num_ranks : *stated.begin();
}

std::string item_in_words(const Item& item) {
  return item.name.empty() ? std::string() : " for '" + printable(item.name) + "'";
}

void check_ranks(const Item& item, std::uint64_t num_ranks, const std::string& path) {
  std::vector<const FileName*> by_rank(num_ranks);
  for (const FileName& file : item.files) {
    const FileName*& place = by_rank[file.rank];
    if (place != nullptr) {
      refuse(ErrorKind::unsupported, path,
             "one file of rank " + std::to_string(file.rank) + item_in_words(item),
             "'" + printable(place->name) + "' and '" + printable(file.name) + "'");
    }
    place = &file;
  }
  for (std::uint64_t rank = 0; rank < num_ranks; ++rank) {
    if (by_rank[rank] != nullptr) continue;
    refuse(ErrorKind::corruption, path,
           "files of ranks 0 to " + std::to_string(num_ranks - 1) + item_in_words(item),
           "none of rank " + std::to_string(rank), "not copied from its host?");
  }
}

}  // namespace

std::optional<FileName> parse_file_name(std::string_view name) {
  const auto suffix =
      std::ranges::find_if(kSuffixes, [&](std::string_view end) { return name.ends_with(end); });
  if (suffix == kSuffixes.end()) return std::nullopt;
  FileName parsed{std::string(name), {}, {}, 0};
  std::string_view rest = name.substr(0, name.size() - suffix->size());
  const auto rank = take_number(rest, kRank);
  if (!rank) return std::nullopt;
  parsed.rank = *rank;
  parsed.num_ranks = take_number(rest, kNumRanks);
  if (parsed.num_ranks == 0) return std::nullopt;
  parsed.item = std::string(rest);
  return parsed;
}

bool is_written_item(std::string_view item) {
  return std::ranges::find(kWrittenItems, item) != kWrittenItems.end();
}

std::string written_file_name(std::string_view item, int world_size, int rank) {
  return std::string(item) + (item.empty() ? "" : "_") + "world_size_" +
         std::to_string(world_size) + "_rank_" + std::to_string(rank) + ".pt";
}

std::vector<Item> items_among(const std::vector<std::string>& names) {
  std::map<std::string, Item> items;
  for (const std::string& name : names) {
    auto parsed = parse_file_name(name);
    if (!parsed) continue;
    Item& item = items[parsed->item];
    item.name = parsed->item;
    item.files.push_back(std::move(*parsed));
  }
  std::vector<Item> found;
  for (auto& [name, item] : items) {
    std::ranges::stable_sort(item.files, {}, &FileName::rank);
    found.push_back(std::move(item));
  }
  return found;
}

bool are_of_a_checkpoint(const std::vector<Item>& items) {
  return std::ranges::any_of(items, [](const Item& item) {
    return item.files.front().num_ranks || item.files.front().rank != item.files.back().rank;
  });
}

int check_items(const std::vector<Item>& items, const std::string& path) {
  const auto has_digit = [](const Item& item) {
    return item.name.find_first_of(kDigits) != std::string::npos;
  };
  if (items.size() > 1 && std::ranges::any_of(items, has_digit)) {
    refuse(ErrorKind::unsupported, path, "the files of one save",
           "'" + printable(items.front().name) + "' and '" + printable(items.back().name) + "'",
           "move the files of one save to a folder of their own");
  }
  if (items.empty()) {
    refuse(ErrorKind::corruption, path, "files such as 'model_world_size_2_rank_0.pt'", "none");
  }
  const std::uint64_t num_ranks = num_ranks_of(items.front(), path);
  for (const Item& item : items) {
    const std::uint64_t found = num_ranks_of(item, path);
    if (found != num_ranks) {
      refuse(ErrorKind::corruption, path,
             std::to_string(num_ranks) + " ranks" + item_in_words(item) + ", as for '" +
                 printable(items.front().name) + "'",
             std::to_string(found));
    }
    check_ranks(item, num_ranks, path);
  }
  return static_cast<int>(num_ranks);
}

}  // namespace tessera::formats::rank_files

#include "formats/torch_checkpointing/files.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::formats::torch_checkpointing {
namespace {

constexpr std::string_view kSuffix = ".pt";
constexpr std::string_view kDefaultForm = "TorchSerialization";
constexpr std::string_view kDigits = "0123456789";
constexpr std::uint64_t kMaxNamedRanks = 1 << 20;

using RanksOfItems = std::map<std::string, std::set<std::uint64_t>>;

[[noreturn]] void refuse(ErrorKind kind, const std::string& path, const std::string& expected,
                         const std::string& found, std::string_view cause = {}) {
  throw Error::expected(kind, {.path = path}, "files of ranks", expected, found, cause);
}

RanksOfItems ranks_among(const std::vector<std::string>& names) {
  RanksOfItems ranks;
  for (const std::string& name : names) {
    if (auto parsed = parse_default_name(name)) {
      ranks[std::move(parsed->item)].insert(parsed->rank);
    }
  }
  return ranks;
}

/// Finds the files of one checkpoint.
class Finder {
 public:
  Finder(const FileSystem& fs, const std::string& directory, const std::vector<std::string>& names,
         const Metadata* metadata)
      : fs_(fs), directory_(directory), names_(names.begin(), names.end()), metadata_(metadata) {
    by_default_ = ranks_among(names);
    found_.world_size = metadata != nullptr ? metadata->world_size : world_size_of_names();
  }

  Sources find() {
    std::set<std::string> items;
    for (const auto& [item, ranks] : by_default_) items.insert(item);
    if (metadata_ != nullptr) {
      for (const auto& [name, item] : metadata_->items) items.insert(name);
    }
    for (const std::string& item : items) {
      const bool is_listed = metadata_ != nullptr && metadata_->items.contains(item);
      if (is_listed) {
        add_listed(item, metadata_->items.at(item));
      } else {
        add_by_default(item, by_default_.at(item));
      }
    }
    return std::move(found_);
  }

 private:
  int world_size_of_names() const {
    std::uint64_t largest = 0;
    for (const auto& [item, ranks] : by_default_) {
      if (ranks.contains(0)) largest = std::max(largest, *ranks.rbegin());
    }
    return static_cast<int>(largest + 1);
  }

  std::string ranks_in_words() const {
    return "ranks 0 to " + std::to_string(found_.world_size - 1);
  }

  bool has_file(const std::string& name) const {
    if (name.find('/') == std::string::npos) return names_.contains(name);
    return fs_.kind_of(join_path(directory_, name)) == FileKind::regular;
  }

  void add(const std::string& item, int rank, std::string name, std::string form) {
    found_.files.push_back({std::move(name), item, rank, std::move(form)});
  }

  /// Adds the ranks' files of an item in the metadata. Throws if a rank with tensors has no file.
  void add_listed(const std::string& name, const Item& item) {
    std::set<int> holders;
    std::set<const void*> seen;
    for (const auto& [tensor, entry] : item.tensors) {
      for (const Group& group : entry.groups) {
        if (seen.insert(group.ranks.get()).second) {
          holders.insert(group.ranks->begin(), group.ranks->end());
        }
      }
    }
    std::set<std::string> listed;
    for (int rank = 0; rank < found_.world_size; ++rank) {
      const ItemFile& file = item.files[static_cast<std::size_t>(rank)];
      const std::string path = file.path.empty() ? default_name(name, rank) : file.path;
      listed.insert(path);
      if (has_file(path)) {
        add(name, rank, path, file.form.empty() ? std::string(kDefaultForm) : file.form);
      } else if (holders.contains(rank)) {
        refuse(ErrorKind::corruption, directory_,
               "'" + printable(path) + "' of rank " + std::to_string(rank) + ", as " +
                   std::string(kMetadataName) + " says",
               "no such file", "not copied from its host, or an interrupted save?");
      }
    }
    require_no_other_rank(name, listed);
  }

  /// Throws if there is a file of a rank that did not exist in this save: another save has left it
  /// there.
  void require_no_other_rank(const std::string& item, const std::set<std::string>& listed) {
    const auto found = by_default_.find(item);
    if (found == by_default_.end()) return;
    for (const std::uint64_t rank : found->second) {
      const std::string name = default_name(item, static_cast<int>(rank));
      if (rank < static_cast<std::uint64_t>(found_.world_size) || listed.contains(name)) continue;
      refuse(ErrorKind::corruption, directory_,
             "files of " + ranks_in_words() + ", as " + std::string(kMetadataName) + " says",
             "'" + printable(name) + "'", "left by another save?");
    }
  }

  /// Adds the files of an item that the metadata does not list, by their names. Sometimes only rank
  /// 0 has saved the item. Ignores files whose numbers cannot be ranks, such as step numbers.
  void add_by_default(const std::string& item, const std::set<std::uint64_t>& ranks) {
    const auto world_size = static_cast<std::uint64_t>(found_.world_size);
    if (!ranks.contains(0) && *ranks.rbegin() >= world_size) return;
    if (*ranks.rbegin() >= world_size) {
      refuse(ErrorKind::corruption, directory_, "files of " + ranks_in_words(),
             "'" + printable(default_name(item, static_cast<int>(*ranks.rbegin()))) + "'",
             "left by another save?");
    }
    if (ranks.size() == 1 && ranks.contains(0) && world_size > 1) {
      found_.notes.push_back(
          {.severity = Finding::Severity::note,
           .rule = "ranks",
           .where = {.path = directory_},
           .expected = "files of " + ranks_in_words() + " for '" + printable(item) + "'",
           .found = "only the file of rank 0 (its content is used for all ranks)"});
    } else {
      for (std::uint64_t rank = 0; rank < world_size; ++rank) {
        if (ranks.contains(rank)) continue;
        refuse(ErrorKind::corruption, directory_,
               "files of " + ranks_in_words() + " for '" + printable(item) + "'",
               "none of rank " + std::to_string(rank), "not copied from its host?");
      }
    }
    for (const std::uint64_t rank : ranks) {
      const int number = static_cast<int>(rank);
      add(item, number, default_name(item, number), std::string(kDefaultForm));
    }
  }

  const FileSystem& fs_;
  const std::string& directory_;
  std::set<std::string> names_;
  const Metadata* metadata_;
  RanksOfItems by_default_;
  Sources found_;
};

}  // namespace

std::optional<DefaultName> parse_default_name(std::string_view name) {
  if (!name.ends_with(kSuffix)) return std::nullopt;
  name.remove_suffix(kSuffix.size());
  const std::size_t last = name.find_last_not_of(kDigits);
  if (last == std::string_view::npos || last == 0 || name[last] != '_') return std::nullopt;
  const std::string_view digits = name.substr(last + 1);
  const bool has_zeros_before = digits.size() > 1 && digits[0] == '0';
  std::uint64_t rank = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc{} || has_zeros_before || rank >= kMaxNamedRanks) return std::nullopt;
  const std::string_view item = name.substr(0, last);
  if (item == "rank" || item.ends_with("_rank") || item.ends_with("-rank")) return std::nullopt;
  return DefaultName{std::string(item), rank};
}

std::string default_name(const std::string& item, int rank) {
  return item + "_" + std::to_string(rank) + std::string(kSuffix);
}

bool are_with_metadata(const std::vector<std::string>& names) {
  const auto is_of_rank_0 = [](std::string_view name) {
    name = name.substr(0, name.find('.'));
    if (!name.ends_with('0')) return false;
    name.remove_suffix(1);
    return !name.empty() && kDigits.find(name.back()) == std::string_view::npos;
  };
  return std::ranges::find(names, kMetadataName) != names.end() &&
         std::ranges::any_of(names, is_of_rank_0);
}

bool are_without_metadata(const std::vector<std::string>& names) {
  return std::ranges::any_of(ranks_among(names), [](const auto& item) {
    return item.second.contains(0) && item.second.contains(1);
  });
}

Sources find_sources(const FileSystem& fs, const std::string& directory,
                     const std::vector<std::string>& names, const Metadata* metadata) {
  return Finder(fs, directory, names, metadata).find();
}

}  // namespace tessera::formats::torch_checkpointing

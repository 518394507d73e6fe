#include "formats/numbered_names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <limits>
#include <set>
#include <vector>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using Unit = PartOfWhole::Unit;

constexpr std::string_view kDigits = "0123456789";
constexpr std::string_view kSeparators = "_-.";
constexpr std::string_view kAsOwnNameSays = ", as its name says";

struct Mark {
  std::string_view word;
  Unit unit;
  bool is_parallel_rank = false;
};
// InternLM, CoLLiE and others name files `model_tp0_pp1.pt`, `model_wp0_pp0.pt`, or
// `optimizer_tp0_pp0_zo1.pt`. `ep` is no such word, because it may mean an epoch.
constexpr std::array kMarks{
    Mark{"rank", Unit::rank},     Mark{"consolidated", Unit::rank}, Mark{"shard", Unit::file},
    Mark{"part", Unit::file},     Mark{"tp", Unit::rank, true},     Mark{"pp", Unit::rank, true},
    Mark{"dp", Unit::rank, true}, Mark{"wp", Unit::rank, true},     Mark{"zo", Unit::rank, true}};

/// Only Meta's models and the metadata of single ranks (`__1.metadata` of DCP) have such names. So
/// a file of a rank other than 0 is a part, even if no other file is beside it.
bool is_series_of_ranks(std::string_view series) {
  return series == "consolidated.#.pth" || series.starts_with("__#.");
}

bool is_separator(char c) {
  return kSeparators.find(c) != std::string_view::npos;
}

std::optional<std::uint64_t> number_in(std::string_view digits) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  return number;
}

/// Returns the mark that is the word before a number, in lower or upper case: `rank` in `rank_3`.
/// Nothing for any other word.
std::optional<Mark> mark_before(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if ('A' <= c && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  std::string_view before = lower;
  if (!before.empty() && is_separator(before.back())) before.remove_suffix(1);
  for (const Mark& mark : kMarks) {
    if (!before.ends_with(mark.word)) continue;
    const std::string_view rest = before.substr(0, before.size() - mark.word.size());
    if (rest.empty() || is_separator(rest.back())) return mark;
  }
  return std::nullopt;
}

/// Returns whether a number says how far a run is (`epoch-3-of-10.pt`), and not which part it is.
bool is_of_progress(std::string_view before) {
  constexpr std::array<std::string_view, 4> kWords = {"epoch", "step", "iter", "iteration"};
  if (!before.empty() && is_separator(before.back())) before.remove_suffix(1);
  return std::ranges::any_of(kWords, [&](std::string_view word) { return before.ends_with(word); });
}

/// Returns 3 if the text after a number begins with `-of-3`, `_of_3`, or as DeepSeek's converter
/// writes it, `-mp3`; nothing for any other text.
std::optional<std::uint64_t> count_behind(std::string_view after) {
  for (const std::string_view of : {"-of-", "_of_", "-mp"}) {
    if (!after.starts_with(of)) continue;
    after.remove_prefix(of.size());
    return number_in(after.substr(0, after.find_first_not_of(kDigits)));
  }
  return std::nullopt;
}

/// The range of a number's digits in a name.
struct Run {
  std::size_t begin;
  std::size_t end;
};

/// Returns the digits of the last number before position `end`.
std::optional<Run> run_before(std::string_view name, std::size_t end) {
  const std::string_view left = name.substr(0, end);
  const std::size_t last = left.find_last_of(kDigits);
  if (last == std::string_view::npos) return std::nullopt;
  const std::size_t before = left.find_last_not_of(kDigits, last);
  return Run{before == std::string_view::npos ? 0 : before + 1, last + 1};
}

NumberedName name_around(std::string_view name, const Run& run, Unit unit, std::uint64_t number) {
  const bool is_padded = name[run.begin] == '0' && run.end > run.begin + 1;
  return {
      .unit = unit,
      .number = number,
      .is_padded = is_padded,
      .series = std::string(name.substr(0, run.begin)) + "#" + std::string(name.substr(run.end)),
      .count = count_behind(name.substr(run.end))};
}

/// Returns the number of parts, if `numbers` can be numbers of ranks or parts (part_by_names_beside
/// gives the rule); else nothing.
std::optional<std::uint64_t> num_parts_of(const std::set<std::uint64_t>& numbers,
                                          bool may_have_gap) {
  const std::uint64_t first = std::min<std::uint64_t>(*numbers.begin(), 1);
  const std::uint64_t last = *numbers.rbegin();
  if (last == std::numeric_limits<std::uint64_t>::max()) return std::nullopt;  // would overflow
  const std::uint64_t num_parts = last - first + 1;
  if (numbers.size() < 2 || (numbers.size() != num_parts && !may_have_gap)) return std::nullopt;
  return num_parts;
}

/// Returns which part of a checkpoint an entry of a directory is, as far as `own`, one of the
/// numbers in its name, tells. `names`: the numbers in the names of all entries.
std::optional<PartOfWhole> part_of_series(const std::string& directory, const NumberedName& own,
                                          const std::vector<std::vector<NumberedName>>& names,
                                          std::string_view beside) {
  std::set<std::uint64_t> numbers{own.number};
  bool is_padded = own.is_padded;
  for (const std::vector<NumberedName>& name : names) {
    for (const NumberedName& sibling : name) {
      if (sibling.series != own.series) continue;
      numbers.insert(sibling.number);
      is_padded = is_padded || sibling.is_padded;
    }
  }
  const bool is_of_ranks = is_series_of_ranks(own.series);
  if (is_of_ranks && numbers.size() > 1) numbers.insert(0);  // these numbers begin with 0
  const bool is_counted = own.count.value_or(0) > 1 && own.number <= *own.count;
  if (own.is_parallel_rank && !numbers.contains(0) && !is_counted) return std::nullopt;
  const auto num_parts = num_parts_of(numbers, is_padded || own.count || is_of_ranks);
  const std::string unit = own.unit == Unit::rank ? "rank " : "file ";
  if (!num_parts && (is_counted || (own.number > 0 && is_of_ranks))) {
    return PartOfWhole{.unit = own.unit,
                       .form = unit + std::to_string(own.number) + std::string(kAsOwnNameSays),
                       .num_parts = own.count,
                       .series = join_path(directory, own.series),
                       .number = own.number};
  }
  if (!num_parts) return std::nullopt;
  return PartOfWhole{.unit = own.unit,
                     .form = unit + std::to_string(own.number) + ", as the names of the " +
                             std::string(beside) + " say",
                     .num_parts = own.count.value_or(*num_parts),
                     .series = join_path(directory, own.series),
                     .number = own.number};
}

/// Returns `name` with one `#` in the place of each of `numbers`.
std::string without_numbers(std::string name, const std::vector<NumberedName>& numbers) {
  std::string marked = name;
  for (const NumberedName& number : numbers) {
    const auto begin = std::ranges::mismatch(name, number.series).in1 - name.begin();
    std::fill_n(marked.begin() + begin, name.size() + 1 - number.series.size(), '#');
  }
  const auto are_marks = [](char a, char b) { return a == '#' && b == '#'; };
  marked.erase(std::unique(marked.begin(), marked.end(), are_marks), marked.end());
  return marked;
}

/// Returns which part of a checkpoint the entry `name` of a directory is, as the names of the other
/// entries show. `beside`: what a message calls these other entries.
std::optional<PartOfWhole> part_among(const FileSystem& fs, const std::string& directory,
                                      const std::string& name, std::string_view beside) {
  const std::vector<NumberedName> own = numbered_names(name);
  if (own.empty()) return std::nullopt;
  std::vector<std::vector<NumberedName>> names;
  for (const std::string& other : fs.list_directory(directory)) {
    names.push_back(numbered_names(other));
  }
  std::vector<PartOfWhole> parts;
  std::vector<NumberedName> of_parts;
  for (const NumberedName& number : own) {
    auto part = part_of_series(directory, number, names, beside);
    if (!part) continue;
    parts.push_back(*part);
    of_parts.push_back(number);
  }
  if (parts.empty()) return std::nullopt;
  PartOfWhole part = parts.front();
  if (parts.size() == 1) return part;
  std::string numbers;
  for (const PartOfWhole& one : parts) {
    numbers = std::to_string(one.number) + (numbers.empty() ? "" : " and ") + numbers;
    if (one.unit == Unit::rank) part.unit = Unit::rank;
    if (&one == &parts.front()) continue;
    part.num_parts = part.num_parts && one.num_parts ? checked_mul(*part.num_parts, *one.num_parts)
                                                     : std::nullopt;
  }
  const bool is_alone = std::ranges::all_of(
      parts, [](const PartOfWhole& one) { return one.form.ends_with(kAsOwnNameSays); });
  part.form = "numbers " + numbers;
  part.form += is_alone ? kAsOwnNameSays : ", as the names of the " + std::string(beside) + " say";
  part.series = part.num_parts ? join_path(directory, without_numbers(name, of_parts)) : "";
  part.number = 0;  // below: another one for each file of the series
  for (const PartOfWhole& one : parts) {
    part.number = part.number * (one.num_parts.value_or(0) + 1) + one.number;
  }
  return part;
}

}  // namespace

std::vector<NumberedName> numbered_names(std::string_view name) {
  std::vector<NumberedName> found;
  std::vector<NumberedName> of_count;
  for (auto run = run_before(name, name.size()); run; run = run_before(name, run->begin)) {
    const auto number = number_in(name.substr(run->begin, run->end - run->begin));
    if (!number) continue;
    NumberedName of_rank = name_around(name, *run, Unit::rank, *number);
    if (is_series_of_ranks(of_rank.series)) {
      found.push_back(std::move(of_rank));
    } else if (const auto mark = mark_before(name.substr(0, run->begin))) {
      found.push_back(name_around(name, *run, mark->unit, *number));
      found.back().is_parallel_rank = mark->is_parallel_rank;
    } else if (count_behind(name.substr(run->end)) && !is_of_progress(name.substr(0, run->begin))) {
      of_count.push_back(name_around(name, *run, Unit::file, *number));
    }
  }
  found.insert(found.end(), of_count.begin(), of_count.end());
  return found;
}

std::optional<NumberedName> numbered_name(std::string_view name) {
  const std::vector<NumberedName> found = numbered_names(name);
  return found.empty() ? std::nullopt : std::optional(found.front());
}

std::optional<PartOfWhole> part_by_names_beside(const FileSystem& fs, const std::string& path) {
  const std::string directory = directory_of(path);
  const std::string folder = last_component(directory);
  try {
    if (auto part = part_among(fs, directory, last_component(path), "files beside it")) return part;
    if (folder.empty() || folder.starts_with(".")) return std::nullopt;
    const auto of_folder = numbered_name(folder);
    if (!of_folder || of_folder->unit != Unit::rank) return std::nullopt;
    return part_among(fs, directory_of(directory), folder, "folders beside its own");
  } catch (const Error& error) {
    // If the directory cannot be listed, nothing is known about other files.
    if (error.kind() != ErrorKind::io && error.kind() != ErrorKind::not_found) throw;
    return std::nullopt;
  }
}

}  // namespace tessera::formats

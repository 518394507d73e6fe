#include "inspect/statistics_parts.h"

#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <utility>

#include "inspect/selection_part.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

std::string hexadecimal(long double number) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%La", number);
  return text.data();
}

Value to_value(const std::optional<Number>& number) {
  if (!number) return Value();
  if (const auto* large = std::get_if<std::uint64_t>(&*number)) {
    if (*large > static_cast<std::uint64_t>(INT64_MAX)) {
      return Value(Value::BigInt{std::to_string(*large)});
    }
    return Value(static_cast<std::int64_t>(*large));
  }
  if (const auto* integer = std::get_if<std::int64_t>(&*number)) return Value(*integer);
  return Value(std::get<double>(*number));
}

/// Reads the statistics of one tensor from its JSON object.
class Entry {
 public:
  Entry(const std::string& path, const Value& object) : path_(path), object_(object) {}

  const std::string& name() const {
    const auto* text =
        object_.find("name") == nullptr ? nullptr : object_.find("name")->get_if<std::string>();
    if (text == nullptr) refuse("name", "a string");
    return *text;
  }

  Statistics statistics(const TensorMeta& meta) const {
    Statistics result;
    result.numel = count("numel");
    if (result.numel != meta.numel() * numbers_per_element(meta.dtype)) {
      throw Error::expected(
          ErrorKind::mismatch, {.path = path_, .fqn = meta.fqn}, "numel",
          std::to_string(meta.numel() * numbers_per_element(meta.dtype)) + " of the checkpoint",
          std::to_string(result.numel), "is this part from another checkpoint?");
    }
    result.num_zeros = count("zeros");
    result.num_nan = count("nan");
    result.num_positive_inf = count("positive_inf");
    result.num_negative_inf = count("negative_inf");
    require_fewer_than_all(result);
    result.min = number("min", meta.dtype);
    result.max = number("max", meta.dtype);
    result.sum = long_double("sum");
    result.squared_deviations_sum = long_double("squared_deviations_sum");
    return result;
  }

 private:
  /// Throws if the counts add up to more than numel. They count different elements: a zero is
  /// neither NaN nor infinite.
  void require_fewer_than_all(const Statistics& statistics) const {
    std::int64_t num_left = statistics.numel;
    for (const auto& [key, number] : {std::pair{"zeros", statistics.num_zeros},
                                      {"nan", statistics.num_nan},
                                      {"positive_inf", statistics.num_positive_inf},
                                      {"negative_inf", statistics.num_negative_inf}}) {
      if (number > num_left) refuse(key, "counts that are at most numel together");
      num_left -= number;
    }
  }

  const Value& member(const char* key) const {
    const Value* const value = object_.find(key);
    if (value == nullptr) refuse(key, "a member of this name");
    return *value;
  }

  std::int64_t count(const char* key) const {
    const auto* const number = member(key).get_if<std::int64_t>();
    if (number == nullptr || *number < 0) refuse(key, "a count");
    return *number;
  }

  std::optional<Number> number(const char* key, DType dtype) const {
    const Value& value = member(key);
    if (value.is<Value::None>()) return std::nullopt;
    if (const auto* const integer = value.get_if<std::int64_t>()) {
      if (is_floating_point(dtype) || is_complex(dtype)) return static_cast<double>(*integer);
      if (dtype == DType::uint64) return static_cast<std::uint64_t>(*integer);
      return *integer;
    }
    if (const auto* const real = value.get_if<double>()) return *real;
    if (const auto* const large = value.get_if<Value::BigInt>()) {
      std::uint64_t integer = 0;
      const char* const end = large->decimal.data() + large->decimal.size();
      const auto parsed = std::from_chars(large->decimal.data(), end, integer);
      if (parsed.ec == std::errc() && parsed.ptr == end) return integer;
    }
    refuse(key, "a number");
  }

  long double long_double(const char* key) const {
    const auto* const text = member(key).get_if<std::string>();
    if (text == nullptr || text->empty()) refuse(key, "a hexadecimal number as text");
    char* end = nullptr;
    const long double number = std::strtold(text->c_str(), &end);
    if (end != text->c_str() + text->size()) refuse(key, "a hexadecimal number as text");
    return number;
  }

  [[noreturn]] void refuse(const char* key, std::string_view expected) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, key, expected,
                          "none, or another value", "is this what stats prints for one part?");
  }

  const std::string& path_;
  const Value& object_;
};

const Value::List& entries_of(const PartOfStatistics& part) {
  const Value* const list = part.document.find("stats");
  const auto* const entries = list == nullptr ? nullptr : list->get_if<Value::List>();
  if (entries == nullptr) {
    throw Error::expected(ErrorKind::corruption, {.path = part.path}, "stats", "a list", "no list",
                          "is this what stats prints for one part?");
  }
  return *entries;
}

}  // namespace

Value::Dict exact_statistics(const Statistics& statistics) {
  return {{"numel", statistics.numel},
          {"zeros", statistics.num_zeros},
          {"nan", statistics.num_nan},
          {"positive_inf", statistics.num_positive_inf},
          {"negative_inf", statistics.num_negative_inf},
          {"min", to_value(statistics.min)},
          {"max", to_value(statistics.max)},
          {"sum", hexadecimal(statistics.sum)},
          {"squared_deviations_sum", hexadecimal(statistics.squared_deviations_sum)}};
}

std::vector<Statistics> join_statistics(const std::vector<PartOfStatistics>& parts,
                                        const formats::CheckpointContents& contents,
                                        const Selection& selection) {
  NamesOfParts names("parts of statistics");
  std::map<std::string_view, std::size_t> place_of;  // index in the selection
  for (std::size_t i = 0; i < selection.tensors.size(); ++i) {
    const std::string& fqn = contents.tensors[selection.tensors[i]].meta.fqn;
    names.expect(fqn);
    place_of[fqn] = i;
  }
  std::vector<Statistics> joined(selection.tensors.size());
  for (const PartOfStatistics& part : parts) {
    for (const Value& object : entries_of(part)) {
      const Entry entry(part.path, object);
      names.note(entry.name(), part.path);
      const std::size_t place = place_of.at(entry.name());
      joined[place] = entry.statistics(contents.tensors[selection.tensors[place]].meta);
    }
  }
  names.require_all();
  return joined;
}

}  // namespace tessera::inspect

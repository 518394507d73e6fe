#include "inspect/diff.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "base/byte_buffer.h"
#include "base/value_bits.h"
#include "formats/per_rank.h"
#include "formats/per_rank_rules.h"
#include "inspect/element.h"
#include "inspect/scan.h"
#include "inspect/value_difference.h"
#include "tessera/formats/format_driver.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::inspect {
namespace {

constexpr std::int64_t kWindowNumel = std::int64_t{1} << 21;
constexpr std::int64_t kBlockNumel = 8192;

// A tensor, alias or value of a checkpoint.
struct Entry {
  enum class Kind { tensor, alias, value } kind;
  std::size_t index;  // index of the tensor (for an alias, of its target) or of the value
  const formats::SharedKeyPath* keys;  // of the entry; null if it is renamed or of a single rank
};

using Entries = std::map<std::string, Entry>;

void add_entry(Entries& entries, const std::string& name, Entry entry,
               const formats::EntrySelection& selection, const std::vector<Rename>& renames) {
  std::string new_name = formats::name_after_renames(name, renames);
  if (new_name != name || formats::name_without_rank(name) != name) entry.keys = nullptr;
  if (!selection.selects(new_name)) return;
  const auto [known, is_new] = entries.emplace(std::move(new_name), entry);
  if (is_new) return;
  throw Error::expected(ErrorKind::invalid_argument, {.fqn = known->first}, "rename",
                        "one entry of A with this name after the renames", "two entries");
}

Entries entries_of(const formats::CheckpointContents& contents, const DiffOptions& options,
                   const std::vector<Rename>& renames) {
  const formats::EntrySelection selection(options.names);
  Entries entries;
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    add_entry(entries, contents.tensors[t].meta.fqn,
              {Entry::Kind::tensor, t, &contents.tensors[t].key_path}, selection, renames);
  }
  for (const formats::Alias& alias : contents.aliases) {
    const formats::TensorEntry* target = contents.find_tensor(alias.target);
    if (target == nullptr) continue;
    const auto index = static_cast<std::size_t>(target - contents.tensors.data());
    add_entry(entries, alias.fqn, {Entry::Kind::alias, index, &alias.key_path}, selection, renames);
  }
  for (std::size_t v = 0; v < contents.values.size(); ++v) {
    add_entry(entries, contents.values[v].name,
              {Entry::Kind::value, v, &contents.values[v].key_path}, selection, renames);
  }
  return entries;
}

/// Throws if a rename matches no name, because the rename is probably a typing error.
void check_renames(const formats::CheckpointContents& contents,
                   const std::vector<Rename>& renames) {
  for (const Rename& rename : renames) {
    const auto fits = [&](const std::string& name) { return formats::fits_entry(rename, name); };
    if (std::ranges::any_of(contents.tensors, fits,
                            [](const auto& tensor) { return tensor.meta.fqn; }) ||
        std::ranges::any_of(contents.aliases, fits, &formats::Alias::fqn) ||
        std::ranges::any_of(contents.values, fits, &formats::ValueEntry::name)) {
      continue;
    }
    throw Error::expected(ErrorKind::invalid_argument, {}, "rename", "a rule that fits a name in A",
                          "'" + printable(rename.from) + "'");
  }
}

/// A value, or the reason why Tessera did not read it: it contains objects of classes, which
/// Tessera never loads.
struct ReadValue {
  std::optional<Value> value;
  std::string why_not;
};

/// Returns a value, or the reason why Tessera never reads it. Throws: as `read_value`, except
/// Error(unsupported).
ReadValue read_if_supported(const formats::CheckpointReader& reader, std::size_t index) {
  try {
    return {reader.read_value(index), {}};
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unsupported) throw;
    return {std::nullopt, "not read: " + std::string(error.reason())};
  }
}

std::string in_words(const ReadValue& read) {
  return read.value ? value_to_string(*read.value) : read.why_not;
}

std::string in_words(const formats::CheckpointReader& reader, const Entry& entry) {
  if (entry.kind == Entry::Kind::value) return in_words(read_if_supported(reader, entry.index));
  const TensorMeta& meta = reader.contents().tensors[entry.index].meta;
  return std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape);
}

/// The tensors of a checkpoint by all their names, and the targets of its aliases.
class Ties {
 public:
  Ties(const formats::CheckpointContents& contents, const std::vector<Rename>& renames) {
    if (contents.aliases.empty()) return;
    for (const formats::TensorEntry& tensor : contents.tensors) {
      const std::string name = formats::name_after_renames(tensor.meta.fqn, renames);
      target_of_.emplace(name, name);
    }
    for (const formats::Alias& alias : contents.aliases) {
      if (contents.find_tensor(alias.target) == nullptr) continue;
      target_of_.emplace(formats::name_after_renames(alias.fqn, renames),
                         formats::name_after_renames(alias.target, renames));
    }
  }

  /// Returns the name of the tensor that `name` is an alias of; empty if it is no alias.
  std::string target_of(const std::string& name) const {
    const auto found = target_of_.find(name);
    return found == target_of_.end() || found->second == name ? std::string() : found->second;
  }

  /// Returns whether two different names are those of one tensor.
  bool are_tied(const std::string& a, const std::string& b) const {
    const auto found_a = target_of_.find(a);
    const auto found_b = target_of_.find(b);
    return found_a != target_of_.end() && found_b != target_of_.end() &&
           found_a->second == found_b->second;
  }

 private:
  std::map<std::string, std::string> target_of_;  // empty without aliases
};

/// Notes a name that is tied in one checkpoint to a tensor to which it is not tied in the other.
void note_untied(const std::string& name, const Ties& a, const Ties& b, DiffReport& report) {
  std::string target_a = a.target_of(name);
  std::string target_b = b.target_of(name);
  if ((target_a.empty() || b.are_tied(name, target_a)) &&
      (target_b.empty() || a.are_tied(name, target_b))) {
    return;
  }
  report.untied.push_back({name, std::move(target_a), std::move(target_b)});
}

/// How much of the keys that lead to an entry a checkpoint has.
enum class KeyForms { none, texts, keys };

KeyForms key_forms_of(const formats::CheckpointReader& reader) {
  const auto has_keys = [](const auto& entry) { return !entry.key_path.empty(); };
  const formats::CheckpointContents& contents = reader.contents();
  const formats::FormatTraits traits = formats::traits_of(reader.format());
  // A format without an order of keys (safetensors) has names, and may have keys beside them.
  if (!traits.holds_key_order && std::ranges::none_of(contents.tensors, has_keys) &&
      std::ranges::none_of(contents.values, has_keys)) {
    return KeyForms::none;
  }
  return traits.holds_key_types ? KeyForms::keys : KeyForms::texts;
}

std::string keys_in_words(const formats::KeyPath& path, KeyForms forms) {
  std::string words;
  for (const formats::Key& key : path) {
    const bool is_text = std::holds_alternative<std::string>(key) || forms == KeyForms::texts;
    const bool is_item = !is_text && std::holds_alternative<std::int64_t>(key);
    const std::string text = printable(formats::spell({key}));
    words += is_text ? "[\"" + text + "\"]" : (is_item ? "[item " : "[") + text + "]";
  }
  return words;
}

/// Notes a name whose keys in A are others than in B.
void note_other_keys(const std::string& name, const Entry& a, const Entry& b, KeyForms forms,
                     DiffReport& report) {
  if (forms == KeyForms::none || a.keys == nullptr || b.keys == nullptr) return;
  if (*a.keys == *b.keys) return;  // the usual case, without making text
  const auto in_words = [&](const formats::SharedKeyPath& keys) {
    return keys_in_words(
        keys.empty() ? formats::KeyPath{name} : formats::KeyPath(keys.begin(), keys.end()), forms);
  };
  std::string keys_a = in_words(*a.keys);
  std::string keys_b = in_words(*b.keys);
  if (keys_a == keys_b) return;
  report.other_keys.push_back({name, std::move(keys_a), std::move(keys_b)});
}

// Two tensors to compare, and their name.
struct Pair {
  std::string name;
  std::size_t a;
  std::size_t b;
};

// The result of comparing names, before any element is read.
struct Comparison {
  DiffReport report;
  std::vector<Pair> pairs;
};

enum class ReadValues { yes, no };

/// Returns whether two values count as equal. Without tolerances, they must be equal bit for bit.
/// With a tolerance, 0.0 also equals -0.0, and NaNs equal each other. Other numbers must still be
/// equal, because tolerances apply only to elements of tensors.
bool are_equal(const Value& a, const Value& b, const DiffOptions& options) {
  const bool is_bitwise = !options.rtol && !options.atol;
  return is_bitwise ? tessera::detail::have_equal_bits(a, b) : a == b;
}

/// Returns how two values differ; nothing if they are equal.
std::optional<Difference> compare_values(const std::string& name, const ReadValue& a,
                                         const ReadValue& b, const DiffOptions& options) {
  if (!a.value || !b.value) {
    return Difference{Difference::Kind::refused, name, in_words(a), in_words(b), std::nullopt};
  }
  if (are_equal(*a.value, *b.value, options)) return std::nullopt;
  auto [words_a, words_b] = detail::differing_words(
      *a.value, *b.value, [&](const Value& x, const Value& y) { return are_equal(x, y, options); });
  return Difference{Difference::Kind::value, name, std::move(words_a), std::move(words_b),
                    std::nullopt};
}

Comparison compare_names(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                         const DiffOptions& options, ReadValues read_values) {
  using Kind = Difference::Kind;
  Comparison result;
  auto& differences = result.report.differences;
  check_renames(a.contents(), options.renames);
  const Entries entries_a = entries_of(a.contents(), options, options.renames);
  const Entries entries_b = entries_of(b.contents(), options, {});
  const KeyForms forms = std::min(key_forms_of(a), key_forms_of(b));
  const Ties ties_a(a.contents(), options.renames);
  const Ties ties_b(b.contents(), {});
  const auto add = [&](Kind kind, std::string_view name, const Entry* in_a, const Entry* in_b) {
    if (read_values == ReadValues::no) return;
    differences.push_back({kind, std::string(name), in_a ? in_words(a, *in_a) : std::string(),
                           in_b ? in_words(b, *in_b) : std::string(), std::nullopt});
  };
  std::set<std::pair<std::size_t, std::size_t>> paired;
  for (const auto& [name, in_a] : entries_a) {
    const auto found = entries_b.find(name);
    if (found == entries_b.end()) {
      add(Kind::missing, name, &in_a, nullptr);
      continue;
    }
    const Entry& in_b = found->second;
    note_other_keys(name, in_a, in_b, forms, result.report);
    const bool a_is_value = in_a.kind == Entry::Kind::value;
    const bool b_is_value = in_b.kind == Entry::Kind::value;
    if (a_is_value != b_is_value) {
      add(Kind::type, name, &in_a, &in_b);
      continue;
    }
    if (a_is_value) {
      if (read_values == ReadValues::no) continue;
      auto difference = compare_values(name, read_if_supported(a, in_a.index),
                                       read_if_supported(b, in_b.index), options);
      const bool is_compared = !difference || difference->kind != Kind::refused;
      result.report.num_values_compared += is_compared ? 1 : 0;
      if (difference) differences.push_back(*std::move(difference));
      continue;
    }
    ++result.report.num_tensors_compared;
    note_untied(name, ties_a, ties_b, result.report);
    const TensorMeta& meta_a = a.contents().tensors[in_a.index].meta;
    const TensorMeta& meta_b = b.contents().tensors[in_b.index].meta;
    // An element of float4 is two numbers, so it is comparable only to another one.
    const bool is_dtype_wrong =
        meta_a.dtype != meta_b.dtype &&
        (options.dtypes == DiffOptions::DTypes::must_agree ||
         meta_a.dtype == DType::float4_e2m1fn_x2 || meta_b.dtype == DType::float4_e2m1fn_x2);
    if (meta_a.shape != meta_b.shape) add(Kind::shape, name, &in_a, &in_b);
    if (is_dtype_wrong) add(Kind::dtype, name, &in_a, &in_b);
    if (meta_a.shape != meta_b.shape || is_dtype_wrong) continue;
    // If tied tensors have several names in both checkpoints, compares each pair only once.
    if (!paired.emplace(in_a.index, in_b.index).second) continue;
    result.pairs.push_back({name, in_a.index, in_b.index});
    result.report.nbytes_compared += meta_a.nbytes();
  }
  for (const auto& [name, in_b] : entries_b) {
    if (!entries_a.contains(name)) add(Kind::extra, name, nullptr, &in_b);
  }
  return result;
}

// The differences in one window (range of elements) of a tensor.
struct WindowDifferences {
  std::int64_t num_different = 0;
  std::int64_t first = -1;  // index of the first differing element in the tensor; -1: none
  std::string first_a;
  std::string first_b;
  std::int64_t num_nan_on_one_side = 0;
  double max_abs_difference = -1;  // no difference yet

  void add(std::int64_t index, double difference, bool is_nan_on_one_side) {
    if (first < 0) first = index;
    ++num_different;
    if (is_nan_on_one_side) ++num_nan_on_one_side;
    if (difference > max_abs_difference) max_abs_difference = difference;
  }
};

template <class Real>
double abs_difference(Real a, Real b) {
  // Equal infinities do not differ.
  return a == b ? 0.0 : static_cast<double>(std::fabs(a - b));
}

// Returns |a - b|. Subtracts before the conversion to float64, because float64 would round 64-bit
// integers.
template <class Integer>
double integer_difference(Integer a, Integer b) {
  const auto larger = static_cast<std::uint64_t>(std::max(a, b));
  const auto smaller = static_cast<std::uint64_t>(std::min(a, b));
  return static_cast<double>(larger - smaller);
}

template <class T>
T load(std::span<const std::byte> bytes, std::size_t index) {
  T value{};
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

bool is_64_bit_integer(DType dtype) {
  return dtype == DType::int64 || dtype == DType::uint64;
}

// Returns an element without rounding: a 64-bit integer from its bytes, another one as `number`.
long double exact(DType dtype, std::span<const std::byte> bytes, std::size_t index, double number) {
  static_assert(std::numeric_limits<long double>::digits >= 64);
  if (dtype == DType::int64) return static_cast<long double>(load<std::int64_t>(bytes, index));
  if (dtype == DType::uint64) return static_cast<long double>(load<std::uint64_t>(bytes, index));
  return number;
}

std::string_view as_chars(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Compares blocks of two tensors. Owns the memory for converted elements.
class BlockComparison {
 public:
  BlockComparison(DType dtype_a, DType dtype_b, const DiffOptions& options)
      : dtype_a_(dtype_a),
        dtype_b_(dtype_b),
        is_bitwise_(!options.rtol && !options.atol && dtype_a == dtype_b),
        rtol_(options.rtol.value_or(0)),
        atol_(options.atol.value_or(0)) {}

  void compare(std::int64_t begin, std::span<const std::byte> a, std::span<const std::byte> b,
               WindowDifferences& out) {
    if (dtype_a_ == dtype_b_ && std::memcmp(a.data(), b.data(), a.size()) == 0) return;
    const std::int64_t first_before = out.first;
    const std::size_t count = a.size() / itemsize(dtype_a_);
    if (dtype_a_ == dtype_b_ && dtype_a_ == DType::int64) {
      compare_integers<std::int64_t>(begin, a, b, count, out);
    } else if (dtype_a_ == dtype_b_ && dtype_a_ == DType::uint64) {
      compare_integers<std::uint64_t>(begin, a, b, count, out);
    } else {
      compare_numbers(begin, a, b, count, out);
    }
    if (first_before < 0 && out.first >= 0) {
      const auto at = static_cast<std::size_t>(out.first - begin);
      describe(a.subspan(at * itemsize(dtype_a_), itemsize(dtype_a_)),
               b.subspan(at * itemsize(dtype_b_), itemsize(dtype_b_)), out);
    }
  }

 private:
  /// Describes the first difference. Elements that print alike (NaNs with other bits, a bool whose
  /// byte is 2) are shown with their bytes.
  void describe(std::span<const std::byte> a, std::span<const std::byte> b,
                WindowDifferences& out) const {
    out.first_a = element_to_string(dtype_a_, a);
    out.first_b = element_to_string(dtype_b_, b);
    if (dtype_a_ != dtype_b_ || out.first_a != out.first_b) return;
    out.first_a += " (" + detail::bits_in_words(as_chars(a)) + ")";
    out.first_b += " (" + detail::bits_in_words(as_chars(b)) + ")";
  }

  template <class Integer>
  void compare_integers(std::int64_t begin, std::span<const std::byte> a,
                        std::span<const std::byte> b, std::size_t count, WindowDifferences& out) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto x = load<Integer>(a, i);
      const auto y = load<Integer>(b, i);
      if (x == y) continue;
      const double difference = integer_difference(x, y);
      if (!is_bitwise_ && difference <= atol_ + rtol_ * std::fabs(static_cast<double>(y))) continue;
      out.add(begin + static_cast<std::int64_t>(i), difference, false);
    }
  }

  // How two numbers differ.
  struct NumberDifference {
    double difference = 0;
    bool is_nan_on_one_side = false;
    bool is_near = true;  // equal within the tolerances
  };

  NumberDifference compare_reals(double x, double y, long double difference) const {
    if (std::isnan(x) || std::isnan(y)) {
      const bool is_on_one_side = std::isnan(x) != std::isnan(y);
      return {0, is_on_one_side, !is_on_one_side};
    }
    const auto rounded = static_cast<double>(difference);
    // A tolerance does not apply to infinities: an infinity equals only itself.
    const bool is_near =
        std::isinf(x) || std::isinf(y) ? x == y : rounded <= atol_ + rtol_ * std::fabs(y);
    return {rounded, false, is_near};
  }

  // Rounds to float64, as torch does, unless the result is beyond its range.
  static long double magnitude_of(long double real, long double imaginary) {
    const double rounded = std::hypot(static_cast<double>(real), static_cast<double>(imaginary));
    return std::isinf(rounded) ? std::hypot(real, imaginary) : rounded;
  }

  // Compares complex numbers by their magnitudes, as torch.allclose does. A number is NaN if one of
  // its parts is. `differences` are those of the parts.
  NumberDifference compare_complex(const double* x, const double* y,
                                   std::array<long double, 2> differences) const {
    const bool x_is_nan = std::isnan(x[0]) || std::isnan(x[1]);
    const bool y_is_nan = std::isnan(y[0]) || std::isnan(y[1]);
    if (x_is_nan || y_is_nan) return {0, x_is_nan != y_is_nan, x_is_nan && y_is_nan};
    const long double difference = magnitude_of(differences[0], differences[1]);
    const bool is_infinite =
        std::isinf(x[0]) || std::isinf(x[1]) || std::isinf(y[0]) || std::isinf(y[1]);
    return {static_cast<double>(difference), false,
            is_infinite ? difference == 0 : difference <= atol_ + rtol_ * magnitude_of(y[0], y[1])};
  }

  // Compares elements as numbers. A byte of float4 is two numbers.
  void compare_numbers(std::int64_t begin, std::span<const std::byte> a,
                       std::span<const std::byte> b, std::size_t count, WindowDifferences& out) {
    const std::size_t per_element = decode(dtype_a_, a, count, numbers_a_);
    const std::size_t per_element_b = decode(dtype_b_, b, count, numbers_b_);
    // One tensor is complex, the other is real: compare both as complex.
    if (per_element != per_element_b) {
      widen(per_element < per_element_b ? numbers_a_ : numbers_b_, count);
    }
    const std::size_t num_per_element = std::max(per_element, per_element_b);
    const std::size_t size = itemsize(dtype_a_);
    const bool has_64_bit_integers = is_64_bit_integer(dtype_a_) || is_64_bit_integer(dtype_b_);
    const bool is_complex_pair = is_complex(dtype_a_) || is_complex(dtype_b_);
    std::array<long double, 2> differences{};
    for (std::size_t i = 0; i < count; ++i) {
      if (is_bitwise_ && std::memcmp(a.data() + i * size, b.data() + i * size, size) == 0) continue;
      const double* x = &numbers_a_[i * num_per_element];
      const double* y = &numbers_b_[i * num_per_element];
      double difference = 0;
      bool is_nan_on_one_side = false;
      bool is_different = is_bitwise_;
      const auto add = [&](const NumberDifference& found) {
        difference = std::max(difference, found.difference);
        is_nan_on_one_side |= found.is_nan_on_one_side;
        is_different |= !found.is_near;
      };
      for (std::size_t k = 0; k < num_per_element; ++k) {
        const bool is_rounded = k == 0 && has_64_bit_integers;
        differences[k] =
            is_rounded ? abs_difference(exact(dtype_a_, a, i, x[k]), exact(dtype_b_, b, i, y[k]))
                       : abs_difference(x[k], y[k]);
        if (!is_complex_pair) add(compare_reals(x[k], y[k], differences[k]));
      }
      if (is_complex_pair) add(compare_complex(x, y, differences));
      if (!is_different) continue;
      if (is_nan_on_one_side) difference = std::numeric_limits<double>::quiet_NaN();
      out.add(begin + static_cast<std::int64_t>(i), difference, is_nan_on_one_side);
    }
  }

  // Decodes elements into `out`. Returns how many numbers an element has.
  static std::size_t decode(DType dtype, std::span<const std::byte> bytes, std::size_t count,
                            std::vector<double>& out) {
    if (is_complex(dtype)) {
      out.resize(2 * count);
      const DType real_dtype = dtype == DType::complex32   ? DType::float16
                               : dtype == DType::complex64 ? DType::float32
                                                           : DType::float64;
      to_doubles(real_dtype, bytes, out);
      return 2;
    }
    const auto per_element = static_cast<std::size_t>(numbers_per_element(dtype));
    out.resize(per_element * count);
    to_doubles(dtype, bytes, out);
    return per_element;
  }

  static void widen(std::vector<double>& numbers, std::size_t count) {
    std::vector<double> wide(2 * count, 0.0);
    for (std::size_t i = 0; i < count; ++i) wide[2 * i] = numbers[i];
    numbers = std::move(wide);
  }

  DType dtype_a_;
  DType dtype_b_;
  bool is_bitwise_;
  double rtol_;
  double atol_;
  std::vector<double> numbers_a_;
  std::vector<double> numbers_b_;
};

struct OpenPair {
  TensorReader a;
  TensorReader b;
};

void compare_window(const OpenPair& pair, FlatRange window, const DiffOptions& options,
                    WindowDifferences& out) {
  const std::uint64_t size_a = itemsize(pair.a.meta().dtype);
  const std::uint64_t size_b = itemsize(pair.b.meta().dtype);
  const std::int64_t read_numel =
      detail::numel_per_read(options.scan, 4, std::max(size_a, size_b), kBlockNumel, kWindowNumel);
  BlockComparison comparison(pair.a.meta().dtype, pair.b.meta().dtype, options);
  tessera::detail::ByteBuffer buffer_a;
  tessera::detail::ByteBuffer buffer_b;
  for (std::int64_t begin = window.begin; begin < window.end; begin += read_numel) {
    const std::int64_t end = std::min(window.end, begin + read_numel);
    const auto bytes_a = buffer_a.take(static_cast<std::size_t>(end - begin) * size_a);
    const auto bytes_b = buffer_b.take(static_cast<std::size_t>(end - begin) * size_b);
    pair.a.read({begin, end}, bytes_a);
    if (options.scan.progress) options.scan.progress(bytes_a.size());
    pair.b.read({begin, end}, bytes_b);
    if (options.scan.progress) options.scan.progress(bytes_b.size());
    for (std::int64_t at = begin; at < end; at += kBlockNumel) {
      const auto offset = static_cast<std::size_t>(at - begin);
      const auto count = static_cast<std::size_t>(std::min(end, at + kBlockNumel) - at);
      comparison.compare(at, bytes_a.subspan(offset * size_a, count * size_a),
                         bytes_b.subspan(offset * size_b, count * size_b), out);
    }
    detail::throw_if_stopped(options.scan);
  }
}

Shape unravel(std::int64_t index, std::span<const std::int64_t> shape) {
  Shape coordinates(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    coordinates[d] = index % shape[d];
    index /= shape[d];
  }
  return coordinates;
}

// Adds a window's differences to those of earlier windows.
void add_window(const WindowDifferences& window, const TensorMeta& meta,
                ElementDifferences& total) {
  if (window.num_different == 0) return;
  if (total.num_different == 0) {
    total.first_index = unravel(window.first, meta.shape);
    total.first_a = window.first_a;
    total.first_b = window.first_b;
  }
  total.num_different += window.num_different;
  total.num_nan_on_one_side += window.num_nan_on_one_side;
  if (window.max_abs_difference >= 0) {
    total.max_abs_difference =
        std::max(window.max_abs_difference, total.max_abs_difference.value_or(0));
  }
}

}  // namespace

DiffReport diff(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                const DiffOptions& options) {
  auto [report, pairs] = compare_names(a, b, options, ReadValues::yes);
  std::vector<std::int64_t> numels;
  for (const Pair& pair : pairs) numels.push_back(a.contents().tensors[pair.a].meta.numel());
  std::vector<ElementDifferences> elements(pairs.size());
  detail::scan<WindowDifferences>(
      numels, kWindowNumel, options.scan,
      [&](std::size_t i) {
        return std::make_unique<OpenPair>(
            OpenPair{TensorReader(a, pairs[i].a), TensorReader(b, pairs[i].b)});
      },
      [&](const OpenPair& pair, FlatRange window, WindowDifferences& out) {
        compare_window(pair, window, options, out);
      },
      [&](std::size_t i, const WindowDifferences& window) {
        add_window(window, a.contents().tensors[pairs[i].a].meta, elements[i]);
      });
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (elements[i].num_different == 0) continue;
    elements[i].numel = numels[i];
    report.differences.push_back(
        {Difference::Kind::elements, pairs[i].name, {}, {}, std::move(elements[i])});
  }
  std::stable_sort(report.differences.begin(), report.differences.end(),
                   [](const Difference& x, const Difference& y) { return x.name < y.name; });
  return std::move(report);
}

std::uint64_t diff_nbytes(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                          const DiffOptions& options) {
  std::uint64_t nbytes = 0;
  for (const Pair& pair : compare_names(a, b, options, ReadValues::no).pairs) {
    nbytes += a.contents().tensors[pair.a].meta.nbytes();
    nbytes += b.contents().tensors[pair.b].meta.nbytes();
  }
  return nbytes;
}

}  // namespace tessera::inspect

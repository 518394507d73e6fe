#include "inspect/pickle_scan/walk_values.h"

#include <algorithm>
#include <charconv>

#include "formats/pickle/python_text.h"
#include "inspect/pickle_scan/byte_window.h"

namespace tessera::inspect {

Memo::Code Memo::code_at(std::uint64_t key) const {
  if (key < dense_.size() && dense_[key] != kUnset) return dense_[key];
  const auto found = sparse_.find(key);
  return found == sparse_.end() ? kUnset : found->second;
}

std::optional<Memo::Code> Memo::short_code(const Slot& slot) {
  constexpr std::uint64_t kNumGlobals = (kFirstSlot - kFirstGlobal) / 2;
  if (slot.kind == Slot::Kind::other) return kOther;
  if (slot.kind == Slot::Kind::tuple) return kFirstTuple + static_cast<Code>(slot.number);
  const bool is_result = slot.kind == Slot::Kind::result;
  if ((!is_result && slot.kind != Slot::Kind::global) || slot.number >= kNumGlobals) return {};
  return kFirstGlobal + 2 * static_cast<Code>(slot.number) + (is_result ? 1 : 0);
}

std::optional<Memo::Code> Memo::take_slot(const Slot& slot, Code old) {
  if (old < kFirstSlot && !free_slots_.empty()) {
    old = free_slots_.back();
    free_slots_.pop_back();
  }
  if (old >= kFirstSlot) {
    slots_[old - kFirstSlot] = slot;
    return old;
  }
  if (slots_.size() >= limits_.max_memo_slots) return std::nullopt;
  slots_.push_back(slot);
  return kFirstSlot + static_cast<Code>(slots_.size() - 1);
}

bool Memo::put(std::uint64_t key, const Slot& slot) {
  const bool is_dense = key < dense_.size() + kMaxGap;
  const Code old = code_at(key);
  if (is_dense ? key >= limits_.max_memo_keys : old == kUnset && sparse_.size() >= kMaxSparse) {
    return false;
  }
  auto code = short_code(slot);
  if (code && old >= kFirstSlot) free_slots_.push_back(old);
  if (!code) code = take_slot(slot, old);
  if (!code) return false;
  if (old == kUnset) ++num_set_;
  if (is_dense) {
    if (key >= dense_.size()) dense_.resize(key + 1, kUnset);
    dense_[key] = *code;
    sparse_.erase(key);
  } else {
    sparse_[key] = *code;
  }
  return true;
}

std::optional<Slot> Memo::get(std::uint64_t key) const {
  const Code code = code_at(key);
  if (code == kUnset) return std::nullopt;
  if (code >= kFirstSlot) return slots_[code - kFirstSlot];
  if (code == kOther) return Slot{};
  if (code < kFirstGlobal) return Slot{.kind = Slot::Kind::tuple, .number = code - kFirstTuple};
  const auto kind = (code - kFirstGlobal) % 2 == 0 ? Slot::Kind::global : Slot::Kind::result;
  return Slot{.kind = kind, .number = (code - kFirstGlobal) / 2};
}

namespace {

std::optional<std::string> unquoted(std::string_view line) {
  const bool is_quoted = line.size() >= 2 && line.front() == line.back() &&
                         (line.front() == '\'' || line.front() == '"');
  if (!is_quoted) return std::nullopt;
  return formats::pickle::unescape_python_string(line.substr(1, line.size() - 2));
}

}  // namespace

std::optional<std::string> text_of(const ReadableFile& file, const Slot& slot,
                                   std::size_t max_nbytes) {
  if (!slot.is_text() || slot.nbytes > max_nbytes) return std::nullopt;
  std::string text = read_some(file, slot.number, slot.nbytes);
  if (slot.kind == Slot::Kind::quoted_text) return unquoted(text);
  if (slot.kind == Slot::Kind::escaped_text) return formats::pickle::unescape_raw_unicode(text);
  return text;
}

namespace {

/// Returns whether a tuple is the state of a NumPy dtype without fields and without objects: `(3,
/// '<', None, None, None, itemsize, alignment, flags)`, perhaps followed by a unit of time.
bool is_dtype_state(std::span<const Slot> items) {
  if (items.size() != 8 && items.size() != 9) return false;
  const auto is_none = [](const Slot& item) { return item.kind == Slot::Kind::none; };
  return std::ranges::all_of(items.subspan(2, 3), is_none) &&
         items[5].kind == Slot::Kind::integer && items[7].kind == Slot::Kind::integer &&
         items[7].number == 0;
}

bool is_name_or_constant(const Slot& slot) {
  return slot.is_text() || slot.kind == Slot::Kind::global || slot.kind == Slot::Kind::none ||
         slot.kind == Slot::Kind::integer;
}

/// Says whether the value is one that can be no function, or a global, which is judged by its name.
bool is_known(const Slot& slot) {
  return is_name_or_constant(slot) || slot.kind == Slot::Kind::integers ||
         slot.kind == Slot::Kind::pair || slot.kind == Slot::Kind::tuple ||
         slot.kind == Slot::Kind::dtype || slot.kind == Slot::Kind::dtype_state;
}

}  // namespace

std::uint64_t unknown_items(std::span<const Slot> items) {
  std::uint64_t unknown = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(items.size(), 2); ++i) {
    if (!is_known(items[i])) unknown |= std::uint64_t{1} << i;
  }
  return unknown;
}

Slot tuple_slot(std::span<const Slot> items, std::vector<SlotPair>& pairs) {
  constexpr std::size_t kMaxPairs = std::size_t{1} << 20;
  std::uint64_t product = 1;
  bool are_integers = true;
  for (const Slot& item : items) {
    are_integers = are_integers && item.kind == Slot::Kind::integer &&
                   !__builtin_mul_overflow(product, item.number, &product);
  }
  if (are_integers) return {.kind = Slot::Kind::integers, .number = product};
  if (is_dtype_state(items)) return {.kind = Slot::Kind::dtype_state, .number = items[5].number};
  const bool has_name =
      !items.empty() && (items[0].is_text() || items[0].kind == Slot::Kind::global);
  const bool has_size = items.size() == 2 || items.size() == 3 ||
                        (items.size() == 4 && items[0].kind == Slot::Kind::global);
  if (!has_name || !has_size) return {.kind = Slot::Kind::tuple, .number = unknown_items(items)};
  if (pairs.size() >= kMaxPairs) return {.kind = Slot::Kind::tuple, .number = 1 | 2};
  pairs.push_back({items[0], is_name_or_constant(items[1]) ? items[1] : Slot{}});
  return {.kind = Slot::Kind::pair,
          .nbytes = static_cast<std::uint32_t>(items.size()),
          .number = pairs.size() - 1};
}

void ArrayDType::build(const Slot& state) {
  if (has_objects) return;
  if (state.kind != Slot::Kind::dtype_state) {
    itemsize.reset();
  } else if (is_flexible && state.number != kSameItemsize) {
    itemsize = state.number;
  }
}

ArrayDType dtype_of(std::string_view code) {
  constexpr std::string_view kFixed = "biufcMm";
  constexpr std::string_view kFlexible = "SU";
  if (!code.empty() && std::string_view("<>=|").find(code[0]) != std::string_view::npos) {
    code.remove_prefix(1);
  }
  if (code.empty()) return {};
  if (code[0] == 'O') return {.has_objects = true};
  const bool is_flexible = kFlexible.find(code[0]) != std::string_view::npos;
  if (!is_flexible && kFixed.find(code[0]) == std::string_view::npos) return {};
  std::uint32_t number = 0;
  const auto [end, error] = std::from_chars(code.data() + 1, code.data() + code.size(), number);
  if (error != std::errc() || end != code.data() + code.size()) return {};
  return {.itemsize = std::uint64_t{number} * (code[0] == 'U' ? 4 : 1), .is_flexible = is_flexible};
}

void RawArray::note(std::string_view key, const Slot& value) {
  if (key == "shape") {
    numel = value.kind == Slot::Kind::integers ? std::optional(value.number) : std::nullopt;
  } else if (key == "dtype") {
    dtype = value.kind == Slot::Kind::dtype ? std::optional(value.number) : std::nullopt;
  } else if (key == "numpy_array_alignment_bytes") {
    is_aligned = value.kind != Slot::Kind::none;
  }
}

}  // namespace tessera::inspect

#include "inspect/value_difference.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tessera::inspect::detail {
namespace {

using AreEqual = std::function<bool(const Value& a, const Value& b)>;

/// Two values inside the compared values, and the path that leads to them: `['lr'][0]`; `(key 0)`
/// is the first key of a dict, `(item 0)` the first item of a set.
struct Place {
  std::string path;
  const Value* a;
  const Value* b;
};

const std::vector<Value>* items_of(const Value& value) {
  if (const auto* list = value.get_if<Value::List>()) return list;
  if (const auto* tuple = value.get_if<Value::Tuple>()) return &tuple->items;
  if (const auto* set = value.get_if<Value::Set>()) return &set->items;
  return nullptr;
}

/// Moves `place` one level down, to the first two items that differ. Returns false if there are no
/// such items, because the values themselves differ.
bool step_down(Place& place, const AreEqual& are_equal) {
  if (place.a->storage().index() != place.b->storage().index()) return false;
  if (const auto* items = items_of(*place.a)) {
    const auto& others = *items_of(*place.b);
    for (std::size_t i = 0; i < std::min(items->size(), others.size()); ++i) {
      if (are_equal((*items)[i], others[i])) continue;
      const bool is_set = place.a->is<Value::Set>();
      const std::string step = (is_set ? "(item " : "[") + std::to_string(i) + (is_set ? ")" : "]");
      place = {place.path + step, &(*items)[i], &others[i]};
      return true;
    }
    return false;
  }
  const auto* dict = place.a->get_if<Value::Dict>();
  if (dict == nullptr) return false;
  const auto& other = *place.b->get_if<Value::Dict>();
  for (std::size_t i = 0; i < std::min(dict->size(), other.size()); ++i) {
    const auto& [key, item] = (*dict)[i];
    if (!are_equal(key, other[i].first)) {
      place = {place.path + "(key " + std::to_string(i) + ")", &key, &other[i].first};
      return true;
    }
    if (are_equal(item, other[i].second)) continue;
    place = {place.path + "[" + value_to_string(key) + "]", &item, &other[i].second};
    return true;
  }
  return false;
}

/// Returns the bytes of a text or of bytes; null for any other value.
const std::string* bytes_of(const Value& value) {
  if (const auto* text = value.get_if<std::string>()) return text;
  const auto* bytes = value.get_if<Value::Bytes>();
  return bytes == nullptr ? nullptr : &bytes->data;
}

std::size_t size_of(const Value& value) {
  if (const auto* items = items_of(value)) return items->size();
  const auto* dict = value.get_if<Value::Dict>();
  return dict == nullptr ? 0 : dict->size();
}

/// For two values that print alike, returns a text for each that shows the difference, such as the
/// bits of a NaN.
std::pair<std::string, std::string> detail_in_words(const Value& a, const Value& b) {
  if (const auto* number = a.get_if<double>(); number != nullptr && b.is<double>()) {
    const auto bits = [](double value) {
      std::string bytes(sizeof value, '\0');
      std::memcpy(bytes.data(), &value, sizeof value);
      return " (" + bits_in_words(bytes) + ")";
    };
    return {bits(*number), bits(*b.get_if<double>())};
  }
  const std::string* const text_a = bytes_of(a);
  const std::string* const text_b = bytes_of(b);
  if (text_a != nullptr && text_b != nullptr) {
    const auto at = std::ranges::mismatch(*text_a, *text_b).in1 - text_a->begin();
    const auto rest = [&](const std::string& text) {
      constexpr std::size_t kShownNbytes = 40;
      const auto begin = static_cast<std::size_t>(at);
      return " (" + std::to_string(text.size()) + " bytes, from byte " + std::to_string(at) + ": " +
             value_to_string(Value(Value::Bytes{text.substr(begin, kShownNbytes)})) + ")";
    };
    return {rest(*text_a), rest(*text_b)};
  }
  const auto count = [](const Value& value) {
    return " (" + std::string(type_name(value)) + " of " + std::to_string(size_of(value)) + ")";
  };
  return {count(a), count(b)};
}

}  // namespace

std::pair<std::string, std::string> differing_words(const Value& a, const Value& b,
                                                    const AreEqual& are_equal) {
  std::pair words{value_to_string(a), value_to_string(b)};
  if (words.first != words.second) return words;
  Place place{{}, &a, &b};
  while (step_down(place, are_equal)) {
  }
  const std::string where = place.path.empty() ? "" : "at " + place.path + ": ";
  words = {where + value_to_string(*place.a), where + value_to_string(*place.b)};
  if (words.first != words.second) return words;
  const auto [more_a, more_b] = detail_in_words(*place.a, *place.b);
  return {words.first + more_a, words.second + more_b};
}

std::string bits_in_words(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string words = "0x";
  for (std::size_t i = bytes.size(); i-- > 0;) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    words += kDigits[byte >> 4];
    words += kDigits[byte & 15U];
  }
  return words;
}

}  // namespace tessera::inspect::detail

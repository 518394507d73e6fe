#include "inspect/pickle_scan/data_end.h"

#include <algorithm>
#include <charconv>

#include "base/checked_math.h"
#include "base/outside_failure.h"
#include "formats/torch_zip/torch_stream.h"
#include "inspect/pickle_scan/byte_window.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

bool take(std::string_view& text, std::string_view expected) {
  if (!text.starts_with(expected)) return false;
  text.remove_prefix(expected.size());
  return true;
}

std::optional<std::uint64_t> take_number(std::string_view& text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

/// Takes a code such as `'<f8'`, `'|b1'`, `'<U5'` or `'<M8[ns]'`. Returns the bytes of one element.
std::optional<std::uint64_t> take_code(std::string_view& text) {
  constexpr std::uint64_t kTextNbytes = 4;  // of one character
  if (!take(text, "'") || text.size() < 2 ||
      std::string_view("<>|").find(text[0]) == std::string_view::npos ||
      std::string_view("biufcmMSUV").find(text[1]) == std::string_view::npos) {
    return std::nullopt;
  }
  const bool is_text = text[1] == 'U';
  const bool is_time = text[1] == 'm' || text[1] == 'M';
  text.remove_prefix(2);
  const auto number = take_number(text);
  if (is_time) text.remove_prefix(std::min(text.find('\''), text.size()));  // the unit
  if (!number || !take(text, "'")) return std::nullopt;
  return is_text ? checked_mul(*number, kTextNbytes) : number;
}

/// Takes a shape such as `(2, 3)`. Returns the number of elements.
std::optional<std::uint64_t> take_shape(std::string_view& text) {
  if (!take(text, "(")) return std::nullopt;
  std::optional<std::uint64_t> numel = 1;
  while (numel && !take(text, ")")) {
    const auto size = take_number(text);
    numel = size ? checked_mul(*numel, *size) : std::nullopt;
    take(text, ",");
    take(text, " ");
  }
  return numel;
}

/// Takes a dtype with fields: `[('x', '<f4'), ('y', '<f4', (3,))]`. Returns the bytes of one
/// element.
std::optional<std::uint64_t> take_fields(std::string_view& text) {
  std::optional<std::uint64_t> nbytes = 0;
  if (!take(text, "[")) return std::nullopt;
  while (nbytes && !take(text, "]")) {
    if (!take(text, "('")) return std::nullopt;
    text.remove_prefix(std::min(text.find('\''), text.size()));
    if (!take(text, "', ")) return std::nullopt;
    std::optional<std::uint64_t> field = take_code(text);
    if (field && take(text, ", ")) {
      const auto numel = take_shape(text);
      field = numel ? checked_mul(*field, *numel) : std::nullopt;
    }
    if (!field || !take(text, ")")) return std::nullopt;
    nbytes = checked_add(*nbytes, *field);
    take(text, ", ");
  }
  return nbytes;
}

}  // namespace

std::optional<std::uint64_t> numpy_data_nbytes(std::string_view header) {
  if (!take(header, "{'descr': ")) return std::nullopt;
  const auto itemsize = header.starts_with('[') ? take_fields(header) : take_code(header);
  if (!itemsize || !take(header, ", 'fortran_order': ") ||
      !(take(header, "False") || take(header, "True")) || !take(header, ", 'shape': ")) {
    return std::nullopt;
  }
  const auto numel = take_shape(header);
  if (!numel || !take(header, ", }") || header.find_first_not_of(" \n") != std::string_view::npos) {
    return std::nullopt;
  }
  return checked_mul(*itemsize, *numel);
}

std::optional<std::uint64_t> stream_end(const ReadableFile& file, std::uint64_t begin) {
  const FileSlice rest(file, {begin, file.nbytes()});
  try {
    return begin + formats::torch_zip::end_of_stream(rest);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return std::nullopt;
  }
}

}  // namespace tessera::inspect

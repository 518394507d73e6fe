#include "tessera/base/error.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/utf8.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxPathNbytes = 1024;
constexpr std::size_t kMaxFqnNbytes = 200;
constexpr std::size_t kMaxWhatNbytes = 2000;

std::string place_of(const ErrorWhere& where) {
  std::string line;
  if (!where.path.empty()) line += printable(where.path, kMaxPathNbytes) + ": ";
  if (!where.fqn.empty()) line += printable(where.fqn, kMaxFqnNbytes) + ": ";
  if (where.byte_range) {
    line += "bytes [" + std::to_string(where.byte_range->begin) + ", " +
            std::to_string(where.byte_range->end) + "): ";
  }
  return line;
}

std::string comparison(std::string_view rule, std::string_view expected, std::string_view found) {
  return std::string(rule).append(": expected ").append(expected).append(", found ").append(found);
}

std::string in_parentheses(std::string_view text) {
  // A remedy may hold a name from a file, which must be escaped.
  return text.empty() ? std::string() : " (" + printable(text, kMaxWhatNbytes) + ")";
}

}  // namespace

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::not_found:
      return "not_found";
    case ErrorKind::corruption:
      return "corruption";
    case ErrorKind::unsupported:
      return "unsupported";
    case ErrorKind::invalid_argument:
      return "invalid_argument";
    case ErrorKind::mismatch:
      return "mismatch";
    case ErrorKind::already_exists:
      return "already_exists";
    case ErrorKind::io:
      return "io";
    case ErrorKind::interrupted:
      return "interrupted";
  }
  return "unknown";
}

Error::Error(ErrorKind kind, ErrorWhere where, std::string_view what, Remedy remedy)
    : Error(kind, where, place_of(where), printable(what, kMaxWhatNbytes), std::move(remedy)) {}

Error::Error(ErrorKind kind, ErrorWhere where, const std::string& place, const std::string& reason,
             Remedy remedy)
    : std::runtime_error(place + reason + in_parentheses(remedy_to_string(remedy))),
      kind_(kind),
      where_(std::move(where)),
      remedy_(std::move(remedy)),
      place_nbytes_(place.size()),
      reason_nbytes_(reason.size()) {}

Error Error::listing(ErrorKind kind, ErrorWhere where, std::string_view what, std::string_view list,
                     Remedy remedy) {
  std::string reason = printable(what, kMaxWhatNbytes);
  while (!list.empty()) {
    const std::string_view line = list.substr(0, list.find('\n'));
    const std::size_t indent = std::min(line.find_first_not_of(' '), line.size());
    reason += "\n  " + printable(line.substr(indent), kMaxWhatNbytes);
    list.remove_prefix(std::min(line.size() + 1, list.size()));
  }
  std::string place = place_of(where);
  return Error(kind, std::move(where), place, reason, std::move(remedy));
}

std::string_view Error::reason() const noexcept {
  return std::string_view(what()).substr(place_nbytes_, reason_nbytes_);
}

std::string Error::line_with(std::string_view spelled) const {
  std::string line(what(), place_nbytes_ + reason_nbytes_);
  return line + in_parentheses(spelled);
}

Error Error::at_tensor(std::string fqn) const {
  ErrorWhere where = where_;
  where.fqn = std::move(fqn);
  const std::string place = place_of(where);
  return Error(kind_, std::move(where), place, std::string(reason()), remedy_);
}

Error Error::expected(ErrorKind kind, ErrorWhere where, std::string_view rule,
                      std::string_view expected, std::string_view found,
                      std::string_view likely_cause) {
  std::string what = comparison(rule, expected, found);
  if (!likely_cause.empty()) what.append(" (").append(likely_cause).append(")");
  return Error(kind, std::move(where), what);
}

Error Error::expected(ErrorKind kind, ErrorWhere where, std::string_view rule,
                      std::string_view expected, std::string_view found, Remedy remedy) {
  return Error(kind, std::move(where), comparison(rule, expected, found), std::move(remedy));
}

std::string printable(std::string_view text, std::size_t max_nbytes) {
  const auto is_plain = [](char c) { return c >= 0x20 && c < 0x7F; };
  if (text.size() <= max_nbytes && std::all_of(text.begin(), text.end(), is_plain))
    return std::string(text);

  static constexpr std::string_view kEllipsis = "…";
  static constexpr char kHex[] = "0123456789abcdef";
  // Calls `emit` for each unit that must not be cut: a whole character or a whole escape. Of a long
  // text, only the bytes at both ends are escaped, because the rest is not shown.
  const auto escape = [](std::string_view section, auto&& emit) {
    for (std::size_t i = 0; i < section.size();) {
      const std::size_t nbytes = detail::utf8_sequence_nbytes(section, i);
      const auto byte = static_cast<unsigned char>(section[i]);
      const bool is_control = detail::is_control_character(section.substr(i, nbytes));
      if (nbytes > 0 && !is_control) {
        emit(std::string(section.substr(i, nbytes)));
        i += nbytes;
      } else {
        emit(std::string{'\\', 'x', kHex[byte >> 4], kHex[byte & 0xF]});
        ++i;
      }
    }
  };

  std::string shown;
  if (text.size() <= max_nbytes) {
    escape(text, [&](const std::string& unit) { shown += unit; });
    if (shown.size() <= max_nbytes) return shown;
  }
  const std::size_t room = max_nbytes > kEllipsis.size() ? max_nbytes - kEllipsis.size() : 0;
  std::string head;
  bool head_full = false;
  escape(text.substr(0, room), [&](const std::string& unit) {
    if (head_full || head.size() + unit.size() > (room + 1) / 2) {
      head_full = true;
    } else {
      head += unit;
    }
  });
  // The tail starts at a character's first byte.
  std::size_t tail_begin = text.size() - std::min(text.size(), room);
  while (tail_begin < text.size() && (static_cast<unsigned char>(text[tail_begin]) & 0xC0) == 0x80)
    ++tail_begin;
  std::vector<std::string> tail_units;
  escape(text.substr(tail_begin), [&](const std::string& unit) { tail_units.push_back(unit); });
  std::size_t tail_nbytes = 0;
  std::size_t first_shown = tail_units.size();
  while (first_shown > 0 && tail_nbytes + tail_units[first_shown - 1].size() <= room / 2) {
    --first_shown;
    tail_nbytes += tail_units[first_shown].size();
  }
  shown = head + std::string(kEllipsis);
  for (std::size_t i = first_shown; i < tail_units.size(); ++i) shown += tail_units[i];
  return shown;
}

namespace detail {

void check_failed(const char* condition, std::source_location where) {
  throw InternalError(std::string(where.file_name()) + ":" + std::to_string(where.line()) +
                      ": broken invariant: " + condition);
}

}  // namespace detail
}  // namespace tessera

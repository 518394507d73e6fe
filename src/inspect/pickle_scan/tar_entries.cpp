#include "inspect/pickle_scan/tar_entries.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "inspect/pickle_scan/byte_window.h"

namespace tessera::inspect {
namespace {

constexpr std::size_t kBlockNbytes = 512;
constexpr std::size_t kMaxTarEntries = 1'000'000;
constexpr std::uint64_t kMaxPaxNbytes = std::uint64_t{1} << 20;
// Larger sizes do not fit a size field of 11 octal digits, so that a pax header states them.
constexpr std::uint64_t kMaxOctalNbytes = (std::uint64_t{1} << 33) - 1;

/// Returns the number in octal text, as Python reads it: the text ends at the first zero byte,
/// "0o17" is 15, and blanks are 0. Returns nothing for other text.
std::optional<std::int64_t> octal(std::string_view field) {
  constexpr std::string_view kBlanks = " \t\n\v\f\r";
  field = field.substr(0, field.find('\0'));
  field.remove_prefix(std::min(field.find_first_not_of(kBlanks), field.size()));
  if (field.empty()) return 0;
  const bool is_negative = field.starts_with('-');
  if (is_negative || field.starts_with('+')) field.remove_prefix(1);
  if (field.starts_with("0o") || field.starts_with("0O")) field.remove_prefix(2);
  std::string digits(field.substr(0, field.find_first_of(kBlanks)));
  std::erase(digits, '_');
  std::uint64_t number = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), number, 8);
  if (error != std::errc() || number >> 63 != 0) return std::nullopt;
  return is_negative ? -static_cast<std::int64_t>(number) : static_cast<std::int64_t>(number);
}

/// Returns the number in a field, usually octal text. GNU tar writes a number that does not fit in
/// big-endian bytes, with the highest bit of the field set.
std::optional<std::int64_t> number_field(std::string_view field) {
  const auto first = static_cast<unsigned char>(field[0]);
  if ((first & 0x80) == 0) return octal(field);
  std::int64_t number = (first & 0x40) != 0 ? first - 256 : first - 128;
  for (const char byte : field.substr(1)) {
    if (number >= std::int64_t{1} << 55 || number < -(std::int64_t{1} << 55)) return std::nullopt;
    number = number * 256 + static_cast<unsigned char>(byte);
  }
  return number;
}

std::optional<std::uint64_t> size_field(std::string_view field) {
  const std::optional<std::int64_t> number = number_field(field);
  if (!number || *number < 0) return std::nullopt;
  return static_cast<std::uint64_t>(*number);
}

std::string name_field(std::string_view field) {
  return std::string(field.substr(0, field.find('\0')));
}

/// What special headers before an entry state about it. The name and size replace those in the
/// entry's own header.
struct Overrides {
  std::optional<std::string> name{};
  std::optional<std::uint64_t> nbytes{};
  bool is_sparse = false;
};

/// Takes the records of a pax header, each `<length> <key>=<value>` and a line end. Returns false
/// if they are not all of this form. Zero bytes end them.
bool apply_pax(std::string_view records, Overrides& overrides) {
  while (!records.empty() && records.front() != '\0') {
    std::size_t nbytes = 0;
    std::from_chars(records.data(), records.data() + records.size(), nbytes);
    const std::string_view record = records.substr(0, nbytes);
    const std::size_t space = record.find(' ');
    const std::size_t sign = record.find('=');
    if (nbytes != record.size() || !record.ends_with('\n')) return false;
    if (space > sign || sign == std::string_view::npos) return false;
    const std::string_view key = record.substr(space + 1, sign - space - 1);
    const std::string_view value = record.substr(sign + 1, nbytes - sign - 2);
    if (key == "path") overrides.name = std::string(value);
    if (key.starts_with("GNU.sparse.")) overrides.is_sparse = true;
    if (key == "size") {
      std::uint64_t size = 0;
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), size);
      if (error != std::errc() || end != value.data() + value.size()) return false;
      overrides.nbytes = size;
    }
    records.remove_prefix(nbytes);
  }
  return true;
}

/// Returns whether Python finds no bytes after a header of this type, whatever size it states.
bool is_without_data(char type, std::string_view name) {
  return (type >= '1' && type <= '6') || (type == '\0' && name.ends_with('/'));
}

/// Lists the entries of one archive, header by header.
class TarWalk {
 public:
  explicit TarWalk(const ReadableFile& file) : file_(file) {}

  TarListing run() {
    while (!is_stopped_ && file_.nbytes() - at_ >= kBlockNbytes) {
      const std::string header = read_some(file_, at_, kBlockNbytes);
      if (header.find_first_not_of('\0') == std::string::npos) {
        at_ += kBlockNbytes;
      } else if (is_tar(header)) {
        take(header);
      } else {
        stop("", "the header of a member, or the end", "other bytes");
      }
    }
    return std::move(listing_);
  }

 private:
  void fault(const std::string& member, std::string expected, std::string found) {
    listing_.faults.push_back({.member = member,
                               .offset = at_,
                               .expected = std::move(expected),
                               .found = std::move(found),
                               .is_looked_at = false});
  }

  void stop(const std::string& member, std::string expected, std::string found) {
    fault(member, std::move(expected), std::move(found));
    is_stopped_ = true;
  }

  void take(std::string_view header) {
    const char type = header[156];
    const std::string own_name = name_field(header.substr(0, 100));
    const std::string name = overrides_.name.value_or(own_name);
    const std::optional<std::uint64_t> own_nbytes = size_field(header.substr(124, 12));
    const std::uint64_t begin = type == 'S' ? after_map(header) : at_ + kBlockNbytes;
    const std::uint64_t room = file_.nbytes() - begin;
    std::uint64_t nbytes = overrides_.nbytes.value_or(own_nbytes.value_or(0));
    if (is_without_data(type, own_name) && nbytes != 0) {
      fault(name, "a link, folder or device without bytes", "a size of " + std::to_string(nbytes));
      nbytes = 0;
    }
    if (nbytes > room || !own_nbytes || listing_.entries.size() >= kMaxTarEntries) {
      stop(name,
           "at most " + std::to_string(room) + " bytes and " + std::to_string(kMaxTarEntries) +
               " members",
           "more");
    }
    if (overrides_.nbytes && *overrides_.nbytes <= kMaxOctalNbytes &&
        overrides_.nbytes != own_nbytes) {
      fault(name, "the size in its header", "another in a pax header");
    }
    nbytes = std::min(nbytes, room);
    const std::uint64_t padded =
        std::min((nbytes + kBlockNbytes - 1) / kBlockNbytes * kBlockNbytes, room);
    // Of these headers Python reads the last block to its end.
    const auto text = [&] { return read_some(file_, begin, std::min(padded, kMaxPaxNbytes)); };
    if (type == 'x' || type == 'X' || type == 'g') {
      take_pax(text(), type, nbytes);
    } else if (type == 'L') {
      overrides_.name = name_field(text());
    } else if (type != 'K') {  // K: the name that a link leads to
      if (type == 'S' || overrides_.is_sparse) fault(name, "a plain file", "a sparse file");
      listing_.entries.push_back({.name = name, .data = {begin, begin + nbytes}});
      overrides_ = {};
    }
    at_ = begin + padded;
  }

  /// Returns where the bytes of a sparse member begin: after the blocks that continue its map.
  std::uint64_t after_map(std::string_view header) const {
    std::uint64_t begin = at_ + kBlockNbytes;
    bool is_continued = header[482] != '\0';
    while (is_continued && file_.nbytes() - begin >= kBlockNbytes) {
      is_continued = read_some(file_, begin + 504, 1) != std::string(1, '\0');
      begin += kBlockNbytes;
    }
    return begin;
  }

  /// A record of type `g` counts for all members after it; writers use it for comments.
  void take_pax(std::string_view records, char type, std::uint64_t nbytes) {
    Overrides stated = type == 'g' ? Overrides{} : overrides_;
    if (!apply_pax(records, stated) || nbytes > kMaxPaxNbytes) {
      fault("", "pax records of at most 1 MiB", "others");
    }
    if (type == 'g' && (stated.name || stated.nbytes || stated.is_sparse)) {
      fault("", "no name or size for all members", "one in a pax header");
    } else if (type != 'g') {
      overrides_ = std::move(stated);
    }
  }

  const ReadableFile& file_;
  TarListing listing_{};
  Overrides overrides_{};
  std::uint64_t at_ = 0;
  bool is_stopped_ = false;
};

}  // namespace

bool is_tar(std::string_view head) {
  if (head.size() < kBlockNbytes) return false;
  const auto stated = number_field(head.substr(148, 8));
  // Some old writers add the bytes up as signed numbers.
  std::int64_t sum = std::int64_t{' '} * 8;
  std::int64_t num_high = 0;
  for (std::size_t i = 0; i < kBlockNbytes; ++i) {
    if (i >= 148 && i < 156) continue;
    sum += static_cast<unsigned char>(head[i]);
    num_high += static_cast<unsigned char>(head[i]) >> 7;
  }
  return stated == sum || stated == sum - 256 * num_high;
}

TarListing list_tar_entries(const ReadableFile& file) {
  return TarWalk(file).run();
}

}  // namespace tessera::inspect

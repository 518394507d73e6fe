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

std::optional<std::uint64_t> octal(std::string_view field) {
  field.remove_prefix(std::min(field.find_first_not_of(" \0"), field.size()));
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), number, 8);
  if (error != std::errc()) return std::nullopt;
  return number;
}

/// Returns the number in a size field, usually octal text. GNU tar writes a size that does not fit
/// as a big-endian number, with the highest bit of the field set.
std::optional<std::uint64_t> size_field(std::string_view field) {
  if ((static_cast<unsigned char>(field[0]) & 0x80) == 0) return octal(field);
  std::uint64_t number = 0;
  for (const char byte : field.substr(4)) number = number << 8 | static_cast<unsigned char>(byte);
  return number;
}

std::string name_field(std::string_view field) {
  return std::string(field.substr(0, field.find('\0')));
}

/// Returns the value of the last record `<key>=<value>` of a pax header. This value replaces a
/// field of the tar header.
std::optional<std::string> pax_record(std::string_view records, std::string_view key) {
  std::optional<std::string> value;
  while (!records.empty()) {
    std::size_t nbytes = 0;
    std::from_chars(records.data(), records.data() + records.size(), nbytes);
    const std::string_view record = records.substr(0, nbytes);
    const std::size_t space = record.find(' ');
    if (nbytes == 0 || space == std::string_view::npos) break;
    const std::string_view text = record.substr(space + 1);
    if (text.starts_with(key) && text.substr(key.size()).starts_with('=')) {
      value = text.substr(key.size() + 1, text.find('\n') - key.size() - 1);
    }
    records.remove_prefix(record.size());
  }
  return value;
}

/// The name and size that special headers before an entry state. They replace those in the entry's
/// own header.
struct Overrides {
  std::optional<std::string> name{};
  std::optional<std::uint64_t> nbytes{};
};

void apply_pax(std::string_view records, Overrides& overrides) {
  if (auto name = pax_record(records, "path")) overrides.name = std::move(name);
  if (const auto text = pax_record(records, "size")) {
    std::uint64_t nbytes = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), nbytes);
    if (error == std::errc()) overrides.nbytes = nbytes;
  }
}

}  // namespace

bool is_tar(std::string_view head) {
  if (head.size() < kBlockNbytes || head[0] == '\0') return false;
  const auto stated = octal(head.substr(148, 8));
  std::uint64_t sum = std::uint64_t{' '} * 8;
  for (std::size_t i = 0; i < kBlockNbytes; ++i) {
    if (i < 148 || i >= 156) sum += static_cast<unsigned char>(head[i]);
  }
  return stated == sum;
}

TarListing list_tar_entries(const ReadableFile& file) {
  TarListing listing;
  Overrides overrides;
  std::uint64_t at = 0;
  while (file.nbytes() - at >= kBlockNbytes) {
    const std::string header = read_some(file, at, kBlockNbytes);
    if (!is_tar(header)) break;
    const auto stated = size_field(std::string_view(header).substr(124, 12));
    const std::uint64_t begin = at + kBlockNbytes;
    const std::uint64_t nbytes = overrides.nbytes.value_or(stated.value_or(0));
    const std::string name =
        overrides.name.value_or(name_field(std::string_view(header).substr(0, 100)));
    const bool is_damaged = nbytes > file.nbytes() - begin || !stated;
    if (is_damaged || listing.entries.size() >= kMaxTarEntries) {
      listing.faults.push_back({.member = name,
                                .offset = at,
                                .expected = "at most " + std::to_string(file.nbytes() - begin) +
                                            " bytes and " + std::to_string(kMaxTarEntries) +
                                            " members",
                                .found = "more",
                                .is_looked_at = false});
    }
    const std::uint64_t clipped = std::min(nbytes, file.nbytes() - begin);
    const char type = header[156];
    if (type == 'x' || type == 'g') {
      apply_pax(read_some(file, begin, std::min(clipped, kMaxPaxNbytes)), overrides);
    } else if (type == 'L') {
      overrides.name = name_field(read_some(file, begin, std::min(clipped, kMaxPaxNbytes)));
    } else {
      listing.entries.push_back({.name = name, .data = {begin, begin + clipped}});
      overrides = {};
    }
    if (is_damaged || listing.entries.size() > kMaxTarEntries) break;
    const std::uint64_t padded = (clipped + kBlockNbytes - 1) / kBlockNbytes * kBlockNbytes;
    at = begin + std::min(padded, file.nbytes() - begin);
  }
  return listing;
}

}  // namespace tessera::inspect

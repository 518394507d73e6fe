#include "inspect/pickle_scan/zip_entries.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "formats/signatures.h"
#include "formats/zip/zip_reader.h"
#include "inspect/pickle_scan/byte_window.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

constexpr std::string_view kLocalSignature = formats::detail::kZipSignature;
constexpr std::string_view kCentralSignature("PK\x01\x02", 4);
constexpr std::string_view kTrailerSignature("PK\x05\x06", 4);
constexpr std::string_view kZip64LocatorSignature("PK\x06\x07", 4);
constexpr std::string_view kZip64TrailerSignature("PK\x06\x06", 4);

constexpr std::size_t kLocalNbytes = 30;
constexpr std::size_t kCentralNbytes = 46;
constexpr std::size_t kTrailerNbytes = 22;
constexpr std::size_t kZip64LocatorNbytes = 20;
constexpr std::size_t kZip64TrailerNbytes = 56;
constexpr std::size_t kMaxCommentNbytes = 0xffff;
constexpr std::uint64_t kMaxZipEntries = 1'000'000;
constexpr std::size_t kMaxArchives = 1'000'000;
constexpr std::size_t kMaxFaults = 1'000;
constexpr std::uint64_t kInZip64 = 0xffffffff;
constexpr std::uint64_t kEncryptedFlags = 1U << 0 | 1U << 6 | 1U << 13;

/// Returns a little-endian number. Bytes after the end of `bytes` count as 0.
std::uint64_t number_at(std::string_view bytes, std::size_t offset, std::size_t num_bytes) {
  std::uint64_t number = 0;
  for (std::size_t i = num_bytes; i-- > 0;) {
    const bool is_there = offset + i < bytes.size();
    number = number << 8 | (is_there ? static_cast<unsigned char>(bytes[offset + i]) : 0U);
  }
  return number;
}

/// A header of the central directory.
struct Central {
  std::string name;
  std::uint64_t flags = 0;
  std::uint64_t method = 0;
  std::uint64_t crc = 0;
  std::uint64_t stored_nbytes = 0;
  std::uint64_t nbytes = 0;
  std::uint64_t local_offset = 0;
};

void apply_zip64(std::string_view extra, Central& central) {
  constexpr std::uint64_t kZip64Id = 1;
  while (extra.size() >= 4) {
    const std::uint64_t nbytes = number_at(extra, 2, 2);
    if (number_at(extra, 0, 2) == kZip64Id) {
      std::string_view field = extra.substr(4, nbytes);
      for (std::uint64_t* wide : {&central.nbytes, &central.stored_nbytes, &central.local_offset}) {
        if (*wide != kInZip64 || field.size() < 8) continue;
        *wide = number_at(field, 0, 8);
        field.remove_prefix(8);
      }
    }
    extra.remove_prefix(std::min<std::size_t>(extra.size(), 4 + nbytes));
  }
}

class Lister {
 public:
  explicit Lister(const ReadableFile& file) : file_(file) {}

  ZipListing run() {
    std::vector<std::uint64_t> ends{file_.nbytes()};
    while (!ends.empty() && trailers_.size() < kMaxArchives) {
      const std::uint64_t end = ends.back();
      ends.pop_back();
      for (const std::uint64_t begin : archives_ending_at(end)) {
        begins_.insert(begin);
        if (begin > 0 && ends_.insert(begin).second) ends.push_back(begin);
      }
    }
    const bool claims_archive = read_some(file_, 0, 4) == kLocalSignature;
    if (claims_archive && !begins_.contains(0)) {
      fault({}, 0, "a list of members of the archive that begins at byte 0", "none");
      listing_.faults.back().is_looked_at = false;
    }
    return std::move(listing_);
  }

 private:
  /// Lists the members of each archive whose trailer (the end record of a zip archive) is near
  /// `end`, with at most a comment between. Returns the positions where these archives begin.
  std::vector<std::uint64_t> archives_ending_at(std::uint64_t end) {
    const bool is_last = end == file_.nbytes();
    const std::uint64_t tail_nbytes = std::min<std::uint64_t>(
        end, kTrailerNbytes + (is_last || !has_trailer_at(end) ? kMaxCommentNbytes : 0));
    const std::string tail = read_some(file_, end - tail_nbytes, tail_nbytes);
    std::vector<std::uint64_t> begins;
    for (std::size_t at = tail.find(kTrailerSignature); at != std::string::npos;
         at = tail.find(kTrailerSignature, at + 1)) {
      if (tail.size() - at < kTrailerNbytes) break;
      const std::uint64_t offset = end - tail_nbytes + at;
      if (!trailers_.insert(offset).second) continue;
      const std::size_t num_before = begins.size();
      const std::string_view trailer = std::string_view(tail).substr(at);
      read_trailer(offset, trailer, begins);
      const std::uint64_t comment_nbytes = number_at(trailer, 20, 2);
      if (begins.size() > num_before) {
        listing_.end = std::max(listing_.end, offset + kTrailerNbytes + comment_nbytes);
      }
    }
    return begins;
  }

  bool has_trailer_at(std::uint64_t end) const {
    return end >= kTrailerNbytes && read_some(file_, end - kTrailerNbytes, 4) == kTrailerSignature;
  }

  void read_trailer(std::uint64_t offset, std::string_view trailer,
                    std::vector<std::uint64_t>& begins) {
    read_directory_of(offset, number_at(trailer, 12, 4), number_at(trailer, 16, 4), begins);
    if (offset < kZip64LocatorNbytes) return;
    const std::uint64_t locator_at = offset - kZip64LocatorNbytes;
    const std::string locator = read_some(file_, locator_at, kZip64LocatorNbytes);
    if (!locator.starts_with(kZip64LocatorSignature)) return;
    std::set<std::uint64_t> wide_at{number_at(locator, 8, 8)};
    if (locator_at >= kZip64TrailerNbytes) wide_at.insert(locator_at - kZip64TrailerNbytes);
    for (const std::uint64_t at : wide_at) {
      const std::string wide = read_some(file_, at, kZip64TrailerNbytes);
      if (!wide.starts_with(kZip64TrailerSignature)) continue;
      read_directory_of(at, number_at(wide, 40, 8), number_at(wide, 48, 8), begins);
    }
  }

  /// Lists the members of both directories that readers could use: the one at the offset that the
  /// trailer states, and the one right before the trailer. In the second case the archive may begin
  /// later in the file, and its offsets count from there.
  void read_directory_of(std::uint64_t trailer_at, std::uint64_t nbytes,
                         std::uint64_t stated_offset, std::vector<std::uint64_t>& begins) {
    if (nbytes <= trailer_at && trailer_at - nbytes >= stated_offset) {
      const std::uint64_t base = trailer_at - nbytes - stated_offset;
      if (read_directory(trailer_at - nbytes, base) || nbytes == 0) begins.push_back(base);
    }
    if (read_directory(stated_offset, 0)) begins.push_back(0);
  }

  /// Lists the members of the directory at `offset`. Returns whether there is a directory.
  bool read_directory(std::uint64_t offset, std::uint64_t base) {
    if (read_some(file_, offset, 4) != kCentralSignature) return false;
    if (!directories_.insert({offset, base}).second) return true;
    std::map<std::string, std::string> names;  // by the name without case
    for (;;) {
      const std::string header = read_some(file_, offset, kCentralNbytes);
      if (!header.starts_with(kCentralSignature) || header.size() < kCentralNbytes) return true;
      if (num_entries_++ >= kMaxZipEntries) {
        fault({}, offset, "at most " + std::to_string(kMaxZipEntries) + " members", "more");
        listing_.faults.back().is_looked_at = false;
        return true;
      }
      const std::uint64_t name_nbytes = number_at(header, 28, 2);
      const std::uint64_t extra_nbytes = number_at(header, 30, 2);
      Central central{.name = read_some(file_, offset + kCentralNbytes, name_nbytes),
                      .flags = number_at(header, 8, 2),
                      .method = number_at(header, 10, 2),
                      .crc = number_at(header, 16, 4),
                      .stored_nbytes = number_at(header, 20, 4),
                      .nbytes = number_at(header, 24, 4),
                      .local_offset = number_at(header, 42, 4)};
      apply_zip64(read_some(file_, offset + kCentralNbytes + name_nbytes, extra_nbytes), central);
      const auto [same, is_new] =
          names.emplace(formats::zip::without_case(central.name), central.name);
      if (!is_new && same->second == central.name) {
        fault(central.name, offset, "each name once", "this name twice");
      } else if (!is_new) {
        fault(central.name, offset, "each name once, whatever the case of its letters",
              "also '" + printable(same->second, 80) + "'");
      }
      add(central, base);
      offset += kCentralNbytes + name_nbytes + extra_nbytes + number_at(header, 32, 2);
    }
  }

  void add(const Central& central, std::uint64_t base) {
    const std::uint64_t at = base + central.local_offset;
    const std::string local = at < base ? "" : read_some(file_, at, kLocalNbytes);
    if (!local.starts_with(kLocalSignature) || local.size() < kLocalNbytes) {
      fault(central.name, at, "a local header", "none");
      listing_.faults.back().is_looked_at = false;
      return;
    }
    const std::uint64_t name_nbytes = number_at(local, 26, 2);
    const std::string name = read_some(file_, at + kLocalNbytes, name_nbytes);
    compare(central, at, local, name);
    const std::uint64_t begin = at + kLocalNbytes + name_nbytes + number_at(local, 28, 2);
    const std::uint64_t room = file_.nbytes() - std::min(begin, file_.nbytes());
    const bool is_deflated = central.method == 8;
    const std::uint64_t nbytes =
        is_deflated ? central.stored_nbytes : std::max(central.stored_nbytes, central.nbytes);
    if (nbytes > room) {
      fault(central.name, at, std::to_string(nbytes) + " bytes", std::to_string(room));
    }
    if (central.method != 0 && !is_deflated) {
      fault(central.name, at, "stored or deflated bytes",
            "compression method " + std::to_string(central.method));
      listing_.faults.back().is_looked_at = false;
      return;
    }
    const std::uint64_t clipped = std::min(nbytes, room);
    listing_.entries.push_back(
        {.name = central.name,
         .data = {std::min(begin, file_.nbytes()), std::min(begin, file_.nbytes()) + clipped},
         .is_deflated = is_deflated,
         .crc = static_cast<std::uint32_t>(central.crc)});
  }

  /// Adds a fault for each field in which the local header contradicts the directory.
  void compare(const Central& central, std::uint64_t at, std::string_view local,
               const std::string& local_name) {
    if (local_name != central.name) {
      fault(central.name, at, "the directory's name in the local header",
            "'" + printable(local_name, 80) + "'");
    }
    const std::uint64_t flags = number_at(local, 6, 2);
    if (((central.flags | flags) & kEncryptedFlags) != 0) {
      fault(central.name, at, "no encrypted member",
            "a flag for encryption, which some readers ignore");
    }
    const std::uint64_t method = number_at(local, 8, 2);
    if (method != central.method) {
      fault(central.name, at, "compression method " + std::to_string(central.method),
            std::to_string(method) + " in the local header");
    }
    if (central.method == 0 && central.nbytes != central.stored_nbytes) {
      fault(central.name, at, std::to_string(central.nbytes) + " bytes",
            std::to_string(central.stored_nbytes) + " stored without compression");
    }
  }

  void fault(std::string member, std::uint64_t offset, std::string expected, std::string found) {
    if (listing_.faults.size() >= kMaxFaults) return;
    listing_.faults.push_back({.member = std::move(member),
                               .offset = offset,
                               .expected = std::move(expected),
                               .found = std::move(found)});
  }

  const ReadableFile& file_;
  ZipListing listing_;
  std::uint64_t num_entries_ = 0;
  std::set<std::uint64_t> trailers_;
  std::set<std::uint64_t> begins_;  // positions where archives begin
  std::set<std::uint64_t> ends_;    // positions before which archives were searched
  std::set<std::pair<std::uint64_t, std::uint64_t>> directories_;
};

}  // namespace

ZipListing list_zip_entries(const ReadableFile& file) {
  return Lister(file).run();
}

}  // namespace tessera::inspect

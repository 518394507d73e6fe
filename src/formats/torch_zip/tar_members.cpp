#include "formats/torch_zip/tar_members.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace tessera::formats::torch_zip {
namespace {

// A header block of POSIX, in bytes:
//
//     0 name[100] | 100 mode, uid, gid | 124 size[12] | 136 mtime | 148 checksum[8] | 156 type |
//     157 link name | 257 "ustar" | 345 prefix[155] | 500 zeros
//
// Numbers are octal text. The member's bytes follow, filled up to a multiple of 512.
constexpr std::uint64_t kTarBlockNbytes = 512;
constexpr std::uint64_t kMaxPaxNbytes = std::uint64_t{1} << 20;
constexpr std::size_t kMaxMembers = 64;
constexpr std::string_view kMark = "ustar";
constexpr std::size_t kMarkOffset = 257;
constexpr std::size_t kChecksumOffset = 148;
constexpr std::size_t kChecksumNbytes = 8;

/// What a pax header says of the member that follows it.
struct PaxRecords {
  std::optional<std::string> path{};
  std::optional<std::uint64_t> nbytes{};
};

class TarReader {
 public:
  explicit TarReader(const ReadableFile& file) : file_(file) {}

  std::map<std::string, ByteRange> read() {
    std::map<std::string, ByteRange> members;
    PaxRecords pax;
    while (read_header()) {
      if (type() == 'x' || type() == 'g') {
        pax = read_pax();
        continue;
      }
      const std::string name = pax.path.value_or(name_in_header());
      require_plain_file(name);
      const ByteRange bytes = member_bytes(name, pax.nbytes);
      pax = {};
      if (members.size() == kMaxMembers) {
        refuse("tar archive", "at most " + std::to_string(kMaxMembers) + " members", "more");
      }
      if (!members.emplace(name, bytes).second) {
        fail("tar archive", "members with different names", "'" + printable(name, 80) + "' twice");
      }
    }
    return members;
  }

 private:
  [[noreturn]] void fail(std::string_view rule, const std::string& expected,
                         const std::string& found, ErrorKind kind = ErrorKind::corruption) const {
    throw Error::expected(kind,
                          {.path = file_.path(),
                           .byte_range = ByteRange{header_begin_, header_begin_ + kTarBlockNbytes}},
                          rule, expected, found);
  }
  [[noreturn]] void refuse(std::string_view rule, const std::string& expected,
                           const std::string& found) const {
    fail(rule, expected, found, ErrorKind::unsupported);
  }

  /// Reads the next header. Returns false at the end of the archive, which a block of zeros marks.
  bool read_header() {
    header_begin_ = position_;
    if (file_.nbytes() - position_ < kTarBlockNbytes) {
      fail("tar archive", "a block of zeros at the end", "the end of the file");
    }
    header_.resize(kTarBlockNbytes);
    file_.read_at(position_, std::as_writable_bytes(std::span(header_)));
    position_ += kTarBlockNbytes;
    if (header_.find_first_not_of('\0') == std::string::npos) return false;
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < header_.size(); ++i) {
      const bool is_checksum = i >= kChecksumOffset && i < kChecksumOffset + kChecksumNbytes;
      sum += is_checksum ? std::uint64_t{' '} : static_cast<unsigned char>(header_[i]);
    }
    const std::uint64_t expected = octal(kChecksumOffset, kChecksumNbytes, "checksum");
    if (sum != expected) {
      fail("tar header", "the checksum " + std::to_string(expected), std::to_string(sum));
    }
    const std::string mark = header_.substr(kMarkOffset, kMark.size());
    if (mark != kMark) {
      fail("tar header", "the mark '" + std::string(kMark) + "'", "'" + printable(mark) + "'");
    }
    return true;
  }

  char type() const { return header_[156]; }

  std::string text(std::size_t begin, std::size_t max_nbytes) const {
    const std::string_view field = std::string_view(header_).substr(begin, max_nbytes);
    return std::string(field.substr(0, field.find('\0')));
  }
  std::string name_in_header() const {
    const std::string prefix = text(345, 155);
    return (prefix.empty() ? "" : prefix + "/") + text(0, 100);
  }
  std::uint64_t octal(std::size_t begin, std::size_t max_nbytes, std::string_view rule) const {
    std::string digits = text(begin, max_nbytes);
    digits.erase(0, digits.find_first_not_of(' '));
    digits.erase(digits.find_last_not_of(' ') + 1);
    std::uint64_t number = 0;
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), number, 8);
    if (error != std::errc() || end != digits.data() + digits.size()) {
      fail("tar header", "an octal number as " + std::string(rule),
           "'" + printable(digits, 20) + "'");
    }
    return number;
  }

  void require_plain_file(const std::string& name) const {
    if (type() == '0' || type() == '\0') return;
    const bool is_link = type() == '1' || type() == '2';
    refuse("tar archive", "plain files",
           "'" + printable(name, 80) + "', which is " +
               (is_link ? "a link"
                        : std::string("a member of type '") + printable({header_.data() + 156, 1}) +
                              "'"));
  }

  /// Returns where the member's bytes are, and sets `position_` to the header after them.
  ByteRange member_bytes(const std::string& name, std::optional<std::uint64_t> pax_nbytes) {
    const std::uint64_t nbytes = pax_nbytes ? *pax_nbytes : octal(124, 12, "size");
    const std::uint64_t left = file_.nbytes() - position_;
    if (nbytes > left) {
      fail("member '" + printable(name, 80) + "'", std::to_string(nbytes) + " bytes",
           std::to_string(left) + " up to the end of the file (incomplete download?)");
    }
    const ByteRange bytes{position_, position_ + nbytes};
    const std::uint64_t num_blocks =
        nbytes / kTarBlockNbytes + (nbytes % kTarBlockNbytes != 0 ? 1 : 0);
    position_ += std::min(left, num_blocks * kTarBlockNbytes);
    return bytes;
  }

  /// Reads records `<length> <key>=<value>\n`. The length counts the whole record.
  PaxRecords read_pax() {
    const ByteRange range = member_bytes("pax header", {});
    if (range.nbytes() > kMaxPaxNbytes) {
      refuse("pax header", "at most " + std::to_string(kMaxPaxNbytes) + " bytes",
             std::to_string(range.nbytes()));
    }
    std::string bytes(static_cast<std::size_t>(range.nbytes()), '\0');
    file_.read_at(range.begin, std::as_writable_bytes(std::span(bytes)));
    PaxRecords records;
    for (std::string_view rest = bytes; !rest.empty();) {
      std::size_t length = 0;
      const auto parsed = std::from_chars(rest.data(), rest.data() + rest.size(), length);
      const auto num_digits = static_cast<std::size_t>(parsed.ptr - rest.data());
      const bool is_whole = parsed.ec == std::errc() && length <= rest.size() &&
                            length > num_digits + 1 && rest[num_digits] == ' ' &&
                            rest[length - 1] == '\n';
      if (!is_whole) fail("pax header", "records with their lengths", "other bytes");
      add_record(rest.substr(num_digits + 1, length - num_digits - 2), records);
      rest.remove_prefix(length);
    }
    return records;
  }

  void add_record(std::string_view record, PaxRecords& records) const {
    const std::size_t equals = record.find('=');
    const std::string_view key = record.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : record.substr(equals + 1);
    if (key.starts_with("GNU.sparse")) refuse("tar archive", "plain files", "a sparse file");
    if (key == "path") records.path = std::string(value);
    if (key != "size") return;
    std::uint64_t nbytes = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), nbytes);
    if (error != std::errc() || end != value.data() + value.size()) {
      fail("pax header", "a decimal number as size", "'" + printable(value, 20) + "'");
    }
    records.nbytes = nbytes;
  }

  const ReadableFile& file_;
  std::uint64_t position_ = 0;
  std::uint64_t header_begin_ = 0;
  std::string header_;
};

}  // namespace

bool begins_as_tar(std::string_view first_bytes) {
  return first_bytes.size() > kMarkOffset && first_bytes.substr(kMarkOffset).starts_with(kMark);
}

std::map<std::string, ByteRange> tar_members(const ReadableFile& file) {
  return TarReader(file).read();
}

}  // namespace tessera::formats::torch_zip

#include "inspect/manifest.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "base/digest.h"
#include "base/json.h"
#include "base/size_text.h"
#include "inspect/tensor_digests.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

constexpr std::string_view kSeparator = "  ";
constexpr std::string_view kWholeLabel = "whole: ";
constexpr std::string_view kPartLabel = "part ";
constexpr const char* kPartMember = "part_of_manifest";
constexpr std::string_view kFileLabel = "file ";
constexpr std::string_view kFilesLabel = "files: ";
constexpr std::size_t kDigestNumDigits = 32;

std::string digest_of(std::string_view text) {
  Xxh3Wide hash;
  hash.update(std::as_bytes(std::span(text)));
  return hash.hex_digest();
}

bool is_digest(std::string_view text) {
  return text.size() == kDigestNumDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Returns a name as manifests write it, in one line. Escapes control bytes and, so that different
// names stay different, backslashes.
std::string escape(std::string_view name) {
  std::string doubled;
  for (const char c : name) doubled.append(c == '\\' ? 2 : 1, c);
  return printable(doubled, doubled.size() * 4);
}

std::optional<unsigned> hex_value(std::string_view digits) {
  unsigned value = 0;
  for (const char c : digits) {
    const std::size_t digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    value = value * 16 + static_cast<unsigned>(digit);
  }
  return value;
}

std::optional<std::string> unescape(std::string_view text) {
  std::string name;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      name += text[i];
    } else if (text.substr(i, 2) == "\\\\") {
      name += text[++i];
    } else {
      const auto byte = hex_value(text.substr(std::min(i + 2, text.size()), 2));
      if (text.substr(i, 2) != "\\x" || text.size() - i < 4 || !byte) return std::nullopt;
      name += static_cast<char>(*byte);
      i += 3;
    }
  }
  return name;
}

std::string lines_of(const std::vector<Manifest::Entry>& entries, std::string_view label = {}) {
  std::string lines;
  for (const Manifest::Entry& entry : entries) {
    (((lines += label) += entry.digest) += kSeparator) += escape(entry.name);
    lines += '\n';
  }
  return lines;
}

void sort_by_name(std::vector<Manifest::Entry>& entries) {
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
}

std::string to_text(const Manifest::Part& part) {
  return std::to_string(part.index) + "/" + std::to_string(part.num_parts);
}

// Parses `1/3`, or `1/3 FILES`; returns nothing for another text.
std::optional<Manifest::Part> parse_part(std::string_view text) {
  const std::size_t space = text.find(' ');
  std::string_view files;
  if (space != std::string_view::npos) {
    files = text.substr(space + 1);
    if (!is_digest(files)) return std::nullopt;
    text = text.substr(0, space);
  }
  const std::size_t slash = text.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  const auto number_in = [](std::string_view digits) {
    int number = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    return error == std::errc() && end == digits.data() + digits.size() ? number : -1;
  };
  Manifest::Part part{number_in(text.substr(0, slash)), number_in(text.substr(slash + 1)),
                      std::string(files)};
  if (part.index < 0 || part.index >= part.num_parts) return std::nullopt;
  return part;
}

// Returns the indices of the tensors of a selection: selected tensors, and targets of selected
// aliases.
std::set<std::size_t> tensors_behind(const formats::CheckpointContents& contents,
                                     const Selection& selection) {
  std::set<std::size_t> tensors(selection.tensors.begin(), selection.tensors.end());
  for (std::size_t a : selection.aliases) tensors.insert(tensor_of(contents, contents.aliases[a]));
  tensors.erase(static_cast<std::size_t>(-1));
  return tensors;
}

class ManifestParser {
 public:
  explicit ManifestParser(const std::string& path) : path_(path) {}

  Manifest parse_lines(std::string_view text) {
    for (int line_number = 1; !text.empty(); ++line_number) {
      const std::string_view line = first_line(text);
      parse_line(without_return(line), "line " + std::to_string(line_number));
      text.remove_prefix(std::min(line.size() + 1, text.size()));
    }
    return finish();
  }

  /// Throws if no manifest can begin with the first line of `text`. The line's name may be cut off.
  void check_begin(std::string_view text) {
    if (text.empty() || text.starts_with('{') || text.starts_with(kWholeLabel)) return;
    if (text.starts_with(kPartLabel)) return;
    if (text.starts_with(kFileLabel)) text.remove_prefix(kFileLabel.size());
    require_entry(without_return(first_line(text)), "line 1");
  }

  Manifest parse_document(std::string_view text) {
    const Value document = parse_json(text, path_);
    if (const Value* whole = document.find("whole")) whole_ = string_of(whole, "whole");
    if (const Value* part = document.find(kPartMember)) {
      set_part(string_of(part->find("part"), kPartMember), kPartMember);
      if (const Value* files = part->find("files")) {
        manifest_.part->files = string_of(files, kPartMember);
        require_digest(manifest_.part->files, kPartMember);
      }
      whole_ = string_of(part->find("digest"), kPartMember);
    }
    if (const Value* files = document.find("extra_files")) {
      add_all(files, "extra_files", manifest_.files);
      files_ = digest_of(lines_of(manifest_.files, kFileLabel));
    }
    add_all(document.find("digests"), "digests", manifest_.entries);
    return finish();
  }

 private:
  void parse_line(std::string_view line, const std::string& where) {
    // Names have carriage returns only in escaped form.
    if (line.find('\r') != std::string_view::npos) {
      throw Error::expected(ErrorKind::corruption, {.path = path_}, where,
                            "a line that ends with LF or CRLF", "only carriage returns",
                            "did another program change the line endings?");
    }
    if (line.starts_with(kWholeLabel)) {
      if (whole_) refuse(where, "one line `whole:`", "a second one");
      whole_ = line.substr(kWholeLabel.size());
      return;
    }
    if (line.starts_with(kPartLabel)) {
      const std::size_t end = line.find(": ");
      if (whole_ || end == std::string_view::npos) refuse(where, "one line `part I/N:`", line);
      set_part(line.substr(kPartLabel.size(), end - kPartLabel.size()), where);
      whole_ = line.substr(end + 2);
      return;
    }
    if (line.starts_with(kFilesLabel)) {
      if (files_) refuse(where, "one line `files:`", "a second one");
      files_ = line.substr(kFilesLabel.size());
      return;
    }
    const bool is_file = line.starts_with(kFileLabel);
    if (is_file) line.remove_prefix(kFileLabel.size());
    require_entry(line, where);
    const auto name = unescape(line.substr(kDigestNumDigits + kSeparator.size()));
    if (!name) refuse(where, "a name with \\\\ and \\xNN as its only escapes", line);
    add(*name, std::string(line.substr(0, kDigestNumDigits)), where,
        is_file ? manifest_.files : manifest_.entries);
  }

  void set_part(std::string_view text, const std::string& where) {
    manifest_.part = parse_part(text);
    if (!manifest_.part) refuse(where, "a part I/N with I from 0 to N-1", text);
  }

  void require_entry(std::string_view line, const std::string& where) {
    const std::size_t digest_nbytes = std::min(kDigestNumDigits, line.size());
    if (line.substr(digest_nbytes, kSeparator.size()) != kSeparator) {
      refuse(where, "DIGEST  NAME", line);
    }
    require_digest(line.substr(0, digest_nbytes), where);
  }

  void require_digest(std::string_view digest, const std::string& where) {
    if (!is_digest(digest)) refuse(where, "32 lower-case hex digits", digest);
  }

  static std::string_view first_line(std::string_view text) {
    return text.substr(0, text.find('\n'));
  }

  /// Removes a carriage return at the end of a line, which an editor may have added. Names have
  /// carriage returns only in escaped form.
  static std::string_view without_return(std::string_view line) {
    if (line.ends_with('\r')) line.remove_suffix(1);
    return line;
  }

  void add(std::string name, std::string digest, const std::string& where,
           std::vector<Manifest::Entry>& entries) {
    require_digest(digest, where);
    entries.push_back({std::move(name), std::move(digest)});
  }

  /// Adds the entries of a list in a document.
  void add_all(const Value* list, const std::string& key, std::vector<Manifest::Entry>& entries) {
    const auto* items = list == nullptr ? nullptr : list->get_if<Value::List>();
    if (items == nullptr) refuse(key, "a list", "none");
    for (const Value& item : *items) {
      add(string_of(item.find("name"), "name"), string_of(item.find("digest"), "digest"), key,
          entries);
    }
  }

  Manifest finish() {
    auto& entries = manifest_.entries;
    sort_and_require_each_once(entries);
    sort_and_require_each_once(manifest_.files);
    if (entries.empty() && !whole_) refuse("manifest", "lines DIGEST  NAME", "none");
    const std::string digest = manifest_.whole_digest();
    if (!whole_)
      refuse_whole("the digest of all names", "none after " + counted(entries.size(), "name"));
    if (*whole_ != digest) refuse_whole(*whole_, digest + ", computed from the entries");
    const std::string files = digest_of(lines_of(manifest_.files, kFileLabel));
    if (files_.has_value() != !manifest_.files.empty() || (files_ && *files_ != files)) {
      throw Error::expected(ErrorKind::corruption, {.path = path_}, "digest of the extra files",
                            files_.value_or("the digest of all extra files"),
                            files + ", computed from the entries",
                            "was the manifest edited or cut short?");
    }
    return std::move(manifest_);
  }

  void sort_and_require_each_once(std::vector<Manifest::Entry>& entries) {
    sort_by_name(entries);
    const auto twice =
        std::adjacent_find(entries.begin(), entries.end(),
                           [](const auto& a, const auto& b) { return a.name == b.name; });
    if (twice != entries.end()) refuse("names", "each name once", twice->name + " twice");
  }

  [[noreturn]] void refuse_whole(std::string_view expected, std::string_view found) {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, "whole", expected, found,
                          "was the manifest edited or cut short?");
  }

  const std::string& string_of(const Value* value, const std::string& key) {
    const auto* text = value == nullptr ? nullptr : value->get_if<std::string>();
    if (text == nullptr) refuse(key, "a string", "none");
    return *text;
  }

  [[noreturn]] void refuse(const std::string& rule, std::string_view expected,
                           std::string_view found) {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, rule, expected,
                          "'" + printable(found) + "'", "not a manifest?");
  }

  const std::string& path_;
  Manifest manifest_;
  std::optional<std::string> whole_;
  std::optional<std::string> files_;
};

}  // namespace

std::string Manifest::whole_digest() const {
  return digest_of(lines_of(entries));
}

std::string Manifest::to_text() const {
  std::string text = lines_of(files, kFileLabel);
  if (!files.empty()) {
    const std::string digest = digest_of(text);
    ((text += kFilesLabel) += digest) += '\n';
  }
  text += lines_of(entries);
  if (part) {
    (text += kPartLabel) += inspect::to_text(*part);
    if (!part->files.empty()) (text += ' ') += part->files;
    text += ": ";
  } else {
    text += kWholeLabel;
  }
  return (text += whole_digest()) += '\n';
}

Manifest compute_manifest(const formats::CheckpointReader& reader, const Selection& selection,
                          const ScanOptions& options) {
  const formats::CheckpointContents& contents = reader.contents();
  const std::set<std::size_t> behind = tensors_behind(contents, selection);
  const std::vector<std::size_t> tensors(behind.begin(), behind.end());
  const std::vector<std::string> digests = compute_content_digests(reader, tensors, options);
  const auto digest_of_tensor = [&](std::size_t tensor) {
    const auto at = std::lower_bound(tensors.begin(), tensors.end(), tensor);
    return digests[static_cast<std::size_t>(at - tensors.begin())];
  };
  Manifest manifest;
  for (std::size_t t : selection.tensors) {
    manifest.entries.push_back({contents.tensors[t].meta.fqn, digest_of_tensor(t)});
  }
  for (std::size_t a : selection.aliases) {
    const formats::Alias& alias = contents.aliases[a];
    const std::size_t target = tensor_of(contents, alias);
    if (!behind.contains(target)) {
      throw Error::expected(ErrorKind::corruption, {reader.path(), alias.fqn, {}}, "alias",
                            "a tensor " + alias.target, "none");
    }
    manifest.entries.push_back({alias.fqn, digest_of_tensor(target)});
  }
  for (std::size_t v : selection.values) {
    const std::string json = value_to_json(reader.read_value(v));
    manifest.entries.push_back({contents.values[v].name, digest_of("value\n" + json)});
  }
  sort_by_name(manifest.entries);
  return manifest;
}

std::uint64_t manifest_nbytes(const formats::CheckpointContents& contents,
                              const Selection& selection) {
  std::uint64_t nbytes = 0;
  for (std::size_t t : tensors_behind(contents, selection)) {
    nbytes += contents.tensors[t].meta.nbytes();
  }
  return nbytes;
}

void check_manifest_begin(std::string_view begin, const std::string& path) {
  ManifestParser(path).check_begin(begin);
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  ManifestParser parser(path);
  return text.starts_with('{') ? parser.parse_document(text) : parser.parse_lines(text);
}

std::vector<Manifest::Entry> digest_files(const FileSystem& fs, const std::string& directory,
                                          const std::vector<std::string>& names) {
  constexpr std::uint64_t kReadNbytes = std::uint64_t{1} << 20;  // bytes of one read
  std::vector<Manifest::Entry> entries;
  std::vector<std::byte> room;
  for (const std::string& name : names) {
    const auto file = fs.open(join_path(directory, name));
    Xxh3Wide hash;
    for (std::uint64_t begin = 0; begin < file->nbytes(); begin += room.size()) {
      room.resize(static_cast<std::size_t>(std::min(kReadNbytes, file->nbytes() - begin)));
      file->read_at(begin, room);
      hash.update(room);
    }
    entries.push_back({name, hash.hex_digest()});
  }
  sort_by_name(entries);
  return entries;
}

namespace {

void add_differences(const std::vector<Manifest::Entry>& expected,
                     const std::vector<Manifest::Entry>& found, bool are_files,
                     std::vector<ManifestDifference>& differences) {
  using Kind = ManifestDifference::Kind;
  auto e = expected.begin();
  auto f = found.begin();
  while (e != expected.end() || f != found.end()) {
    if (f == found.end() || (e != expected.end() && e->name < f->name)) {
      differences.push_back({Kind::missing, e->name, e->digest, {}, are_files});
      ++e;
    } else if (e == expected.end() || f->name < e->name) {
      differences.push_back({Kind::extra, f->name, {}, f->digest, are_files});
      ++f;
    } else {
      if (e->digest != f->digest) {
        differences.push_back({Kind::changed, e->name, e->digest, f->digest, are_files});
      }
      ++e;
      ++f;
    }
  }
}

}  // namespace

std::vector<ManifestDifference> compare(const Manifest& expected, const Manifest& found) {
  std::vector<ManifestDifference> differences;
  add_differences(expected.entries, found.entries, false, differences);
  if (!expected.files.empty()) add_differences(expected.files, found.files, true, differences);
  return differences;
}

}  // namespace tessera::inspect

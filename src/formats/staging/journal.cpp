#include "formats/staging/journal.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <utility>

#include "base/digest.h"
#include "base/json.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

constexpr std::string_view kMagic = StagedDestination::kJournalMagic;
constexpr std::string_view kFirstLine = StagedDestination::kJournalFirstLine;
constexpr std::string_view kExchange = "exchange";
constexpr std::uint64_t kReadNbytes = std::uint64_t{64} << 10;  // in one read
constexpr std::size_t kMaxIdentityNbytes = std::size_t{64} << 20;
constexpr std::size_t kMaxBlockLineNbytes = 256;
constexpr std::size_t kMinTidiedEntries = std::size_t{1} << 16;
constexpr std::size_t kChecksumDigits = 16;
constexpr auto kLastForm = BlockForm::raw_chunk;

/// Lines are collected in memory. They are written when the collected lines, or the blocks that
/// they describe, reach these sizes.
constexpr std::uint64_t kMaxUnnotedNbytes = std::uint64_t{4} << 20;
constexpr std::size_t kMaxLinesNbytes = 8192;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string hex(std::uint64_t number) {
  char digits[kChecksumDigits + 1];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(number));
  return digits;
}

/// Returns a line of the journal: the checksum of the text, then the text.
std::string line_of(const std::string& text) {
  return hex(xxh3_64(bytes_of(text))) + " " + text + "\n";
}

/// Reads a journal line by line, with little more than one line in memory.
class JournalLines {
 public:
  JournalLines(const ReadableFile& file, std::uint64_t first_byte)
      : file_(file), end_nbytes_(first_byte), read_nbytes_(first_byte) {}

  /// Returns the next line without its checksum, valid until the next call; nothing at the end of
  /// the file, or if the line is torn, damaged or longer than `max_nbytes`.
  std::optional<std::string_view> take(std::size_t max_nbytes) {
    std::size_t end = text_.find('\n', taken_nbytes_);
    while (end == std::string::npos && text_.size() - taken_nbytes_ < max_nbytes &&
           read_nbytes_ < file_.nbytes()) {
      end = text_.find('\n', read_more());
    }
    if (end == std::string::npos || end - taken_nbytes_ > max_nbytes) return std::nullopt;
    const auto line = std::string_view(text_).substr(taken_nbytes_, end - taken_nbytes_);
    if (line.size() < kChecksumDigits + 1) return std::nullopt;
    const std::string_view content = line.substr(kChecksumDigits + 1);
    if (line.substr(0, kChecksumDigits + 1) != hex(xxh3_64(bytes_of(content))) + " ") {
      return std::nullopt;
    }
    end_nbytes_ += line.size() + 1;
    taken_nbytes_ = end + 1;
    return content;
  }

  /// Returns where in the file the last line taken ends.
  std::uint64_t end_nbytes() const { return end_nbytes_; }

 private:
  /// Reads more of the file. Returns where the newly read bytes begin in `text_`.
  std::size_t read_more() {
    text_.erase(0, std::exchange(taken_nbytes_, 0));
    const std::size_t before_nbytes = text_.size();
    text_.resize(before_nbytes + std::min(kReadNbytes, file_.nbytes() - read_nbytes_));
    const auto room = std::as_writable_bytes(std::span(text_).subspan(before_nbytes));
    file_.read_at(read_nbytes_, room);
    read_nbytes_ += room.size();
    return before_nbytes;
  }

  const ReadableFile& file_;
  std::uint64_t end_nbytes_;
  std::uint64_t read_nbytes_;
  std::string text_;              // the last part of the bytes read so far
  std::size_t taken_nbytes_ = 0;  // bytes of `text_` in lines already taken
};

std::string identity_line(const ResumeIdentity& identity) {
  Value::Dict members;
  for (const auto& [name, text] : identity) members.emplace_back(name, text);
  return line_of(value_to_json(Value(std::move(members))));
}

ResumeIdentity parse_identity(std::string_view text, const std::string& path) {
  ResumeIdentity identity;
  const Value value = value_from_json(parse_json(text, path), path);
  const auto* members = value.get_if<Value::Dict>();
  if (members == nullptr) return identity;
  for (const auto& [key, member] : *members) {
    const auto* name = key.get_if<std::string>();
    const auto* said = member.get_if<std::string>();
    if (name != nullptr && said != nullptr) identity.emplace(*name, *said);
  }
  return identity;
}

std::string block_line(const BlockId& id, const FinishedBlock& block) {
  std::string text;
  const auto add = [&](auto number) { text += std::to_string(number) + " "; };
  add(id.tensor_index);
  add(id.piece_index);
  add(id.begin);
  add(block.range.begin);
  add(block.range.end);
  add(static_cast<unsigned>(block.form));
  return line_of(text + hex(block.checksum));
}

std::optional<JournalContents::Entry> parse_block(std::string_view text) {
  const auto take = [&](auto& number, int base) {
    const char* const end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data(), end, number, base);
    if (error != std::errc()) return false;
    text.remove_prefix(static_cast<std::size_t>(at - text.data()));
    if (text.starts_with(' ')) text.remove_prefix(1);
    return true;
  };
  JournalContents::Entry entry{{{0, 0}, 0}, {}};
  unsigned form = 0;
  constexpr int kDecimal = 10;
  constexpr int kHexadecimal = 16;
  const bool is_whole = take(entry.id.tensor_index, kDecimal) &&
                        take(entry.id.piece_index, kDecimal) && take(entry.id.begin, kDecimal) &&
                        take(entry.block.range.begin, kDecimal) &&
                        take(entry.block.range.end, kDecimal) && take(form, kDecimal) &&
                        take(entry.block.checksum, kHexadecimal) && text.empty();
  if (!is_whole || form > static_cast<unsigned>(kLastForm) ||
      entry.block.range.begin > entry.block.range.end) {
    return std::nullopt;
  }
  entry.block.form = static_cast<BlockForm>(form);
  return entry;
}

/// Sorts the entries by id and keeps only the last entry of each id.
void keep_last_of_each(std::vector<JournalContents::Entry>& entries) {
  std::ranges::reverse(entries);
  std::ranges::stable_sort(entries, {}, &JournalContents::Entry::id);
  const auto repeated = std::ranges::unique(entries, {}, &JournalContents::Entry::id);
  entries.erase(repeated.begin(), repeated.end());
}

[[noreturn]] void throw_not_a_journal(const std::string& path) {
  throw Error(ErrorKind::already_exists, {.path = path},
              "journal: expected an unused name, which is needed while the checkpoint is written, "
              "found another file (remove or rename it)");
}

/// Says whether the first line is complete. Returns false if it is cut short. Throws if the file is
/// not a journal, or is a journal of another version.
bool has_first_line(const ReadableFile& file) {
  std::string begin(std::min<std::uint64_t>(kFirstLine.size() + kMaxBlockLineNbytes, file.nbytes()),
                    '\0');
  file.read_at(0, std::as_writable_bytes(std::span(begin)));
  if (begin.starts_with(kFirstLine)) return true;
  if (kFirstLine.starts_with(begin)) return false;
  if (!begin.starts_with(kMagic)) throw_not_a_journal(file.path());
  throw Error::expected(ErrorKind::unsupported, {.path = file.path()}, "journal", "version 1",
                        printable(begin.substr(0, begin.find('\n')), 40),
                        "written by a later release?");
}

}  // namespace

std::optional<JournalContents> read_journal(const FileSystem& fs, const std::string& path) {
  const auto kind = fs.kind_of(path);
  if (!kind) return std::nullopt;
  if (kind != FileKind::regular) throw_not_a_journal(path);
  const auto file = fs.open(path);
  if (!has_first_line(*file)) return std::nullopt;
  JournalLines lines(*file, kFirstLine.size());
  const auto first = lines.take(kMaxIdentityNbytes);
  if (!first) return std::nullopt;
  JournalContents contents;
  contents.identity = parse_identity(*first, path);
  std::size_t tidied_entries = kMinTidiedEntries;
  while (const auto line = lines.take(kMaxBlockLineNbytes)) {
    const auto entry = parse_block(*line);
    if (!entry) break;
    contents.entries.push_back(*entry);
    contents.end_nbytes = lines.end_nbytes();
    if (contents.entries.size() < tidied_entries) continue;
    keep_last_of_each(contents.entries);
    tidied_entries = std::max(kMinTidiedEntries, 2 * contents.entries.size());
  }
  if (contents.entries.empty()) return std::nullopt;
  keep_last_of_each(contents.entries);
  return contents;
}

JournalHead read_journal_head(const FileSystem& fs, const std::string& path) {
  JournalHead head;
  if (fs.kind_of(path) != FileKind::regular) return head;
  std::unique_ptr<ReadableFile> file;
  try {
    file = fs.open(path);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::not_found) throw;
    return head;  // removed meanwhile
  }
  std::string begin(std::min<std::uint64_t>(kFirstLine.size(), file->nbytes()), '\0');
  file->read_at(0, std::as_writable_bytes(std::span(begin)));
  if (begin != kFirstLine) return head;
  JournalLines lines(*file, kFirstLine.size());
  const auto identity = lines.take(kMaxIdentityNbytes);
  if (!identity) return head;
  head.identity = parse_identity(*identity, path);
  head.identity_end_nbytes = lines.end_nbytes();
  head.is_exchange = lines.take(kMaxBlockLineNbytes) == kExchange;
  return head;
}

std::string exchange_line() {
  return line_of(std::string(kExchange));
}

Journal::Journal(FileSystem& fs, std::string path, const ResumeIdentity& identity)
    : fs_(fs),
      path_(std::move(path)),
      is_resumed_(false),
      file_(fs.kind_of(path_) ? fs.open_for_update(path_) : fs.create(path_)) {
  const std::string text = std::string(kFirstLine) + identity_line(identity);
  file_->resize(0);  // so that lines of earlier work do not describe this work
  file_->write_at(0, bytes_of(text));
  end_nbytes_ = text.size();
}

Journal::Journal(FileSystem& fs, std::string path, JournalContents contents)
    : fs_(fs),
      path_(std::move(path)),
      is_resumed_(true),
      entries_(std::move(contents.entries)),
      file_(fs.open_for_update(path_)),
      end_nbytes_(contents.end_nbytes),
      has_finished_blocks_(true) {
  file_->resize(end_nbytes_);
}

Journal::~Journal() {
  try {
    flush_locked();
    file_->close();
  } catch (...) {
    // Ignored: a run that resumes this work writes again every block that has no line.
  }
}

bool Journal::has_finished_blocks() const {
  const std::lock_guard lock(mutex_);
  return has_finished_blocks_;
}

void Journal::note(const BlockId& id, const FinishedBlock& block) {
  const std::string line = block_line(id, block);
  const std::lock_guard lock(mutex_);
  lines_ += line;
  unnoted_data_nbytes_ += block.range.nbytes();
  has_finished_blocks_ = true;
  if (unnoted_data_nbytes_ >= kMaxUnnotedNbytes || lines_.size() >= kMaxLinesNbytes) flush_locked();
}

void Journal::flush() {
  const std::lock_guard lock(mutex_);
  flush_locked();
}

void Journal::sync() {
  const std::lock_guard lock(mutex_);
  flush_locked();
  file_->sync();
}

void Journal::flush_locked() {
  if (lines_.empty()) return;
  file_->write_at(end_nbytes_, bytes_of(lines_));
  end_nbytes_ += lines_.size();
  lines_.clear();
  unnoted_data_nbytes_ = 0;
}

std::optional<FinishedBlock> Journal::find(const BlockId& id) const {
  const auto found = std::ranges::lower_bound(entries_, id, {}, &JournalContents::Entry::id);
  if (found == entries_.end() || found->id != id) return std::nullopt;
  return found->block;
}

bool Journal::read_back(const std::string& path, ByteRange range, std::span<std::byte> out) const {
  if (range.nbytes() != out.size()) return false;
  try {
    std::shared_ptr<const ReadableFile> file;
    {
      const std::lock_guard lock(mutex_);
      if (open_path_ != path) {
        open_file_ = fs_.open(path);
        open_path_ = path;
      }
      file = open_file_;
    }
    file->read_at(range.begin, out);
    return true;
  } catch (const Error&) {
    return false;  // the caller writes the block again; if the disk fails, that throws
  }
}

std::optional<std::uint64_t> read_plain_block(const Journal* journal, const BlockId& id,
                                              const std::string& path, ByteRange range,
                                              std::span<std::byte> room) {
  const auto block = journal != nullptr ? journal->find(id) : std::nullopt;
  const bool is_there = block && block->form == BlockForm::plain && block->range == range &&
                        journal->read_back(path, range, room);
  return is_there ? std::optional(block->checksum) : std::nullopt;
}

FinishedBlock recorded_plain_block(const Journal* journal, const BlockId& id,
                                   const std::string& path, ByteRange range) {
  const auto block = journal != nullptr ? journal->find(id) : std::nullopt;
  if (block && block->form == BlockForm::plain && block->range == range) return *block;
  throw Error::expected(ErrorKind::corruption, {.path = path, .byte_range = range},
                        "finished blocks", "each block in the journal of one share",
                        "a block that no journal lists");
}

std::unique_ptr<WritableFile> begin_file(FileSystem& fs, const Journal* journal,
                                         const std::string& path) {
  if (journal != nullptr && journal->is_shared()) {
    try {
      if (!fs.kind_of(path)) return fs.create(path);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::already_exists) throw;
    }
    return fs.open_for_update(path);
  }
  const bool is_begun = journal != nullptr && journal->is_resumed() && fs.kind_of(path).has_value();
  return is_begun ? fs.open_for_update(path) : fs.create(path);
}

std::unique_ptr<WritableFile> create_anew(FileSystem& fs, const Journal* journal,
                                          const std::string& path) {
  if (journal != nullptr && journal->is_resumed()) fs.remove_all(path);
  return fs.create(path);
}

}  // namespace tessera::formats

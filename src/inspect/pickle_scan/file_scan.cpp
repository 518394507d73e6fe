#include "inspect/pickle_scan/file_scan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <span>
#include <utility>

#include "base/digest.h"
#include "base/size_text.h"
#include "formats/dcp/metadata.h"
#include "formats/signatures.h"
#include "formats/torch_zip/torch_stream.h"
#include "formats/zip/zip_reader.h"
#include "inspect/pickle_scan/byte_window.h"
#include "inspect/pickle_scan/data_end.h"
#include "inspect/pickle_scan/global_verdict.h"
#include "inspect/pickle_scan/tar_entries.h"

namespace tessera::inspect {
namespace {

constexpr int kMaxDepth = 6;  // most levels of archives within archives
constexpr std::size_t kHeadNbytes = 520;
constexpr std::size_t kMaxPicklesInARow = 10'000;
constexpr std::uint64_t kLeastBudgetNbytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kBudgetPerByte = 4;

// No tensor begins with this many bytes of a signature by chance.
constexpr std::size_t kSureNbytes = 6;

constexpr std::string_view kNumpySignature("\x93NUMPY", 6);

// The first bytes and names of compressions and archives that this scan cannot read.
constexpr std::pair<std::string_view, std::string_view> kOtherCompressions[] = {
    {"BZh", "bzip2"},
    {std::string_view("\xfd\x37zXZ\0", 6), "xz"},
    {std::string_view("\x04\x22\x4d\x18", 4), "lz4"},
    {std::string_view("\x28\xb5\x2f\xfd", 4), "zstd"},
    {std::string_view("7z\xbc\xaf\x27\x1c", 6), "7z"},
    {std::string_view("Rar!\x1a\x07", 6), "RAR"},
    {"\x1f\x9d", "compress (.Z)"},
    {"LZIP\x01", "lzip"},
    {std::string_view("MSCF\0\0\0\0", 8), "cab"},
    {std::string_view("\x89LZO\0\r\n\x1a\n", 9), "lzop"},
    {std::string_view("\xff\x06\0\0sNaPpY", 10), "snappy"},
};

/// Returns whether a file has a name of pickles. Loaders of torch look for `data.pkl` and the like
/// without regard to case. A name that other files have too counts if the first bytes are PROTO.
bool is_pickle_name(std::string_view name, std::string_view head) {
  constexpr std::array<std::string_view, 5> kSuffixes = {".pkl", ".pickle", ".joblib", ".dill",
                                                         ".pck"};
  constexpr std::array<std::string_view, 4> kSuffixesOfMore = {".pt", ".pth", ".ckpt",
                                                               formats::dcp::kMetadataFile};
  const std::string lower = formats::zip::without_case(name);
  const auto is_end = [&](std::string_view suffix) { return lower.ends_with(suffix); };
  const bool has_protocol = head.size() > 1 && head[0] == '\x80' && head[1] >= 0 && head[1] <= 5;
  return std::ranges::any_of(kSuffixes, is_end) ||
         (has_protocol && std::ranges::any_of(kSuffixesOfMore, is_end));
}

/// Decides whether bytes that may be any data are a pickle. `walk` has followed them up to the
/// first error. They count as a pickle if the walk reached STOP or a limit without an error, called
/// or changed something, found a dangerous name, or passed more than a few opcodes after PROTO.
bool is_pickle(const PickleWalk& walk) {
  constexpr std::uint64_t kFewOpcodes = 4;
  const bool is_whole = walk.has_stop && !walk.first_break && walk.num_opcodes > 1;
  const bool is_limited = walk.limit && !walk.first_break;
  const bool acts = std::ranges::any_of(walk.globals, [](const WalkedGlobal& global) {
    return global.is_called || global.is_changed || judge(global).verdict == Verdict::dangerous;
  });
  return is_whole || is_limited || acts || (walk.has_protocol && walk.num_opcodes > kFewOpcodes);
}

/// Says whether a walk that went on after errors found a call of a dangerous name. A loader may
/// forgive an error that the walk does not. Other finds after an error are probably chance.
bool calls_a_dangerous_name(const PickleWalk& walk) {
  return std::ranges::any_of(walk.globals, [](const WalkedGlobal& global) {
    return global.kind == WalkedGlobal::Kind::named && global.is_called &&
           is_identifier_path(global.module) && is_identifier_path(global.name) &&
           judge(global.module, global.name).verdict == Verdict::dangerous;
  });
}

/// Returns whether the last part of a name has an ending, such as `.xz`.
bool has_ending(std::string_view name) {
  return name.substr(name.find_last_of("/ ") + 1).find('.') != std::string_view::npos;
}

/// Returns whether a member of a tar archive has the name under which torch before 0.1.10 stored
/// pickles and raw tensors in turn.
bool has_raw_tensors(std::string_view name) {
  while (name.ends_with('/')) name.remove_suffix(1);  // as Python does
  return name == "storages" || name == "tensors" || name.ends_with("/storages") ||
         name.ends_with("/tensors");
}

/// Removes extension codes and computed names that the pickle never uses. They are probably not in
/// a pickle at all: single bytes of binary data look like opcodes.
void drop_chance_finds(PickleWalk& walk) {
  if (walk.has_protocol) return;
  std::erase_if(walk.globals, [](const WalkedGlobal& global) {
    return global.kind != WalkedGlobal::Kind::named && !global.is_called && !global.is_changed;
  });
}

std::string within(const std::string& member, std::string_view name) {
  return member.empty() ? std::string(name) : member + ": " + std::string(name);
}

/// Says whether two bytes can begin a zlib stream, of any window size.
bool is_zlib(std::string_view head) {
  if (head.size() < 2) return false;
  const unsigned first = static_cast<unsigned char>(head[0]);
  const unsigned second = static_cast<unsigned char>(head[1]);
  return (first & 0x0f) == 8 && first <= 0x78 && (first * 256 + second) % 31 == 0;
}

/// Returns the length of the header before the zlib stream of a file that joblib before 0.10 wrote:
/// `ZF`, then the size in 19 characters, and perhaps a blank. 0 for other files.
std::size_t zfile_header_nbytes(std::string_view head) {
  constexpr std::size_t kHeaderNbytes = 2 + 19;
  if (!head.starts_with("ZF") || head.size() <= kHeaderNbytes) return 0;
  return kHeaderNbytes + (head[kHeaderNbytes] == ' ' ? 1 : 0);
}

/// Says whether 13 bytes can begin a .lzma file ("LZMA alone"), by the same rules as Python's lzma
/// module: a size of the dictionary of 2^n or 2^n + 2^(n - 1), and a size of the content that is
/// unknown or below 2^38.
bool is_lzma_alone(std::string_view head) {
  constexpr std::size_t kHeaderNbytes = 13;
  if (head.size() < kHeaderNbytes || head[0] != '\x5d') return false;
  const auto number = [&](std::size_t begin, std::size_t nbytes) {
    std::uint64_t value = 0;
    for (std::size_t i = nbytes; i-- > 0;) {
      value = value << 8 | static_cast<unsigned char>(head[begin + i]);
    }
    return value;
  };
  const std::uint64_t dictionary = number(1, 4);
  const std::uint64_t highest = std::bit_floor(dictionary);
  const std::uint64_t rest = dictionary - highest;
  const bool is_size = rest == 0 || rest == highest / 2 || dictionary == 0xffffffff;
  const std::uint64_t nbytes = number(5, 8);
  return is_size && (nbytes < std::uint64_t{1} << 38 || nbytes == ~std::uint64_t{0});
}

}  // namespace

void ReportBuilder::add_problem(ScanProblem problem) {
  if (report_.problems.size() < kMaxProblems) report_.problems.push_back(std::move(problem));
}

void ReportBuilder::add_pickle(const PickleWalk& walk, const ScannedPlace& place,
                               const std::set<std::string>& packaged) {
  ++report_.num_pickles;
  for (const WalkedGlobal& global : walk.globals) {
    Judgement judgement = judge(global);
    if (judgement.verdict != Verdict::dangerous && packaged.contains(global.module)) {
      judgement = {Verdict::dangerous, "its source is in the archive and runs when it is loaded"};
    }
    const Key key{judgement.verdict, global.module, global.name, std::string(judgement.reason)};
    ScannedName& name = names_[key];
    name.is_called |= global.is_called;
    name.num_times += global.num_times;
    if (name.places.size() < ScannedName::kMaxPlaces) {
      name.places.push_back({place.path, place.member, global.offset});
    }
  }
  const auto problem = [&](ScanProblem::Kind kind, const std::optional<PickleBreak>& at) {
    if (at) add_problem({kind, place.path, place.member, at->offset, at->expected, at->found});
  };
  problem(ScanProblem::Kind::broken_pickle, walk.first_break);
  problem(ScanProblem::Kind::not_looked_at, walk.limit);
}

PickleScanReport ReportBuilder::take() {
  for (auto entry = names_.rbegin(); entry != names_.rend(); ++entry) {
    auto& [key, name] = *entry;
    std::tie(name.verdict, name.module, name.name, name.reason) = key;
    report_.names.push_back(std::move(name));
  }
  names_.clear();
  std::ranges::stable_sort(report_.names, [](const ScannedName& a, const ScannedName& b) {
    if (a.verdict != b.verdict) return a.verdict > b.verdict;
    return std::tie(a.module, a.name, a.reason) < std::tie(b.module, b.name, b.reason);
  });
  return std::move(report_);
}

FileScan::FileScan(ReportBuilder& report, const PickleScanLimits& limits, const ReadableFile& file)
    : report_(report),
      limits_(limits),
      file_(file),
      budget_nbytes_(std::max(kLeastBudgetNbytes, file.nbytes() * kBudgetPerByte)) {}

void FileScan::run() {
  report_.add_file();
  scan(file_, "", 0);
}

void FileScan::not_looked_at(const std::string& member, std::string expected, std::string found) {
  report_.add_problem({.kind = ScanProblem::Kind::not_looked_at,
                       .path = file_.path(),
                       .member = member,
                       .expected = std::move(expected),
                       .found = std::move(found)});
}

/// Takes `nbytes` from what the scan may still read. If less is left, takes all of it, reports once
/// that members overlap (naming `member`), and returns false.
bool FileScan::spend(const std::string& member, std::uint64_t nbytes) {
  const bool is_enough = nbytes <= budget_nbytes_;
  budget_nbytes_ -= is_enough ? nbytes : budget_nbytes_;
  if (!is_enough && !std::exchange(is_budget_spent_, true)) {
    not_looked_at(member, "members that do not overlap",
                  "members that overlap: together they have many times the bytes of the file");
  }
  return is_enough;
}

void FileScan::scan(const ReadableFile& file, const std::string& member, int depth) {
  if (depth > kMaxDepth) {
    return not_looked_at(
        member, "at most " + std::to_string(kMaxDepth) + " archives within each other", "more");
  }
  const std::string head = read_some(file, 0, kHeadNbytes);
  const bool begins_as_zip = head.starts_with(formats::detail::kZipSignature);
  const bool is_zip = (depth == 0 || begins_as_zip) && scan_zip(file, member, depth);
  if (is_tar(head)) scan_tar(file, member, depth);
  const bool is_compressed = scan_compressed(file, member, depth);
  // torch.save writes archives under any name: accelerate has random_states_0.pkl.
  const bool is_other = is_compressed || (begins_as_zip && is_zip);
  const bool must_be = !is_other && is_pickle_name(member.empty() ? file.path() : member, head);
  scan_in_a_row(file, member, must_be ? Expect::pickle : Expect::anything, is_zip);
}

void FileScan::add_faults(const std::vector<ArchiveFault>& faults, const std::string& member) {
  for (const ArchiveFault& fault : faults) {
    report_.add_problem(
        {.kind = fault.is_looked_at ? ScanProblem::Kind::archive : ScanProblem::Kind::not_looked_at,
         .path = file_.path(),
         .member = fault.member.empty() ? member : within(member, fault.member),
         .offset = fault.offset,
         .expected = fault.expected,
         .found = fault.found});
  }
}

bool FileScan::scan_zip(const ReadableFile& file, const std::string& member, int depth) {
  const ZipListing listing = list_zip_entries(file);
  add_faults(listing.faults, member);
  std::set<std::string> of_outer_archive =
      std::exchange(packaged_, packaged_modules(listing.entries, member));
  std::set<std::tuple<std::string, std::uint64_t, std::uint64_t>> done;
  for (const ZipEntry& entry : listing.entries) {
    if (done.emplace(entry.name, entry.data.begin, entry.data.end).second) {
      scan_zip_entry(file, entry, within(member, entry.name), depth);
    }
  }
  packaged_ = std::move(of_outer_archive);
  // In other files, such as a tar with an archive in it, the bytes behind are not the archive's.
  if (read_some(file, 0, 4) == formats::detail::kZipSignature) {
    scan_behind_zip(file, listing.end, member);
  }
  return listing.faults.empty() && !listing.entries.empty();
}

void FileScan::scan_behind_zip(const ReadableFile& file, std::uint64_t end,
                               const std::string& member) {
  if (end == 0 || end >= file.nbytes()) return;
  const PickleRow row = scan_pickles_at(file, end, member, Expect::anything);
  if (row.end >= file.nbytes()) return;
  not_looked_at(member, "an archive that reaches the end of the file",
                std::to_string(file.nbytes() - row.end) + " bytes behind it, from byte " +
                    std::to_string(row.end) + " on");
}

std::set<std::string> FileScan::packaged_modules(const std::vector<ZipEntry>& entries,
                                                 const std::string& member) {
  constexpr std::string_view kMark = "/.data/extern_modules";  // torch.package needs this member
  constexpr std::string_view kSource = ".py";
  constexpr std::string_view kPackage = ".__init__";
  const auto is_mark = [&](const ZipEntry& entry) {
    return formats::zip::without_case(entry.name).ends_with(kMark);
  };
  if (std::ranges::none_of(entries, is_mark)) return {};
  std::set<std::string> modules;
  std::string first;  // the name of the first source
  for (const ZipEntry& entry : entries) {
    if (!formats::zip::without_case(entry.name).ends_with(kSource)) continue;
    if (first.empty()) first = entry.name;
    std::string module = entry.name.substr(entry.name.find('/') + 1);
    module.resize(module.size() - kSource.size());
    std::ranges::replace(module, '/', '.');
    if (module.ends_with(kPackage)) module.resize(module.size() - kPackage.size());
    modules.insert(std::move(module));
  }
  if (!first.empty()) {
    not_looked_at(within(member, first), "no code in an archive of torch.package",
                  counted(modules.size(), "module") +
                      " of Python source, which runs when the archive is loaded");
  }
  return modules;
}

void FileScan::scan_zip_entry(const ReadableFile& file, const ZipEntry& entry,
                              const std::string& member, int depth) {
  const FileSlice data(file, entry.data);
  if (entry.is_deflated) return scan_inflated(data, Wrapping::none, member, depth, entry.crc);
  scan_member(data, entry.crc, member, depth);
}

/// Scans a member. If it has a pickle and at most 64 MiB, checks its CRC-32, unless `crc` is 0.
void FileScan::scan_member(const ReadableFile& data, std::uint32_t crc, const std::string& member,
                           int depth) {
  constexpr std::uint64_t kMaxCheckedNbytes = std::uint64_t{64} << 20;
  const std::uint64_t num_before = report_.num_pickles();
  scan(data, member, depth + 1);
  const bool is_pickle = report_.num_pickles() > num_before;
  if (crc == 0 || !is_pickle || data.nbytes() > kMaxCheckedNbytes) return;
  const std::string bytes = read_some(data, 0, data.nbytes());
  const std::uint32_t found = crc32(0, std::as_bytes(std::span(bytes)));
  if (found == crc) return;
  report_.add_problem({.kind = ScanProblem::Kind::archive,
                       .path = file_.path(),
                       .member = member,
                       .expected = "CRC-32 " + formats::zip::crc_text(crc),
                       .found = formats::zip::crc_text(found)});
}

void FileScan::scan_tar(const ReadableFile& file, const std::string& member, int depth) {
  const TarListing listing = list_tar_entries(file);
  add_faults(listing.faults, member);
  for (const TarEntry& entry : listing.entries) {
    const std::string name = within(member, entry.name);
    const FileSlice data(file, entry.data);
    if (has_raw_tensors(entry.name)) {
      const PickleRow row = scan_pickles_at(data, 0, name, Expect::pickle);
      if (row.end < data.nbytes()) not_looked_at(name, "only pickles", "raw tensors between them");
    } else {
      scan(data, name, depth + 1);
    }
  }
}

/// A member of an archive whose name has no ending can be a raw tensor, whose first bytes can look
/// like a short signature.
bool FileScan::scan_compressed(const ReadableFile& file, const std::string& member, int depth) {
  const std::string head = read_some(file, 0, 32);
  const std::uint64_t zlib_begin = zfile_header_nbytes(head);
  if (head.starts_with("\x1f\x8b") || is_zlib(std::string_view(head).substr(zlib_begin))) {
    const FileSlice data(file, {zlib_begin, file.nbytes()});
    scan_inflated(data, Wrapping::zlib_or_gzip, member, depth);
    // Windows below 32 KiB are rare, and their first bytes are also those of some pickles: `(S`.
    if (zlib_begin > 0 || head[0] == '\x78' || head[0] == '\x1f') return true;
  }
  const auto is_by_chance = [&](std::size_t signature_nbytes) {
    return depth > 0 && signature_nbytes < kSureNbytes && !has_ending(member);
  };
  const auto found = [&](std::string_view name) {
    not_looked_at(member, "gzip, zlib or no compression", std::string(name));
    return true;
  };
  if (is_lzma_alone(head) && !is_by_chance(3)) return found("lzma");
  for (const auto& [signature, name] : kOtherCompressions) {
    if (head.starts_with(signature) && !is_by_chance(signature.size())) return found(name);
  }
  return false;
}

void FileScan::scan_inflated(const ReadableFile& file, Wrapping wrapping, const std::string& member,
                             int depth, std::uint32_t crc) {
  if (!spend(member, file.nbytes())) return;
  Inflated inflated = inflate_file(file, wrapping, limits_.max_inflated_nbytes);
  const std::string name = wrapping == Wrapping::none ? member : within(member, "inflated");
  if (inflated.is_limited) {
    const std::string members = " and " + std::to_string(kMaxGzipMembers) + " gzip members";
    not_looked_at(name,
                  "at most " + std::to_string(limits_.max_inflated_nbytes) + " bytes" +
                      (wrapping == Wrapping::none ? "" : members),
                  "more");
  }
  if (inflated.bytes.empty() || !spend(member, inflated.bytes.size())) return;
  scan_member(BytesFile(file.path(), std::move(inflated.bytes)), crc, name, depth);
}

void FileScan::scan_in_a_row(const ReadableFile& file, const std::string& member, Expect expect,
                             bool is_zip) {
  std::uint64_t begin = 0;
  bool is_sure = expect == Expect::pickle;  // the bytes before `begin` look like this not by chance
  while (begin < file.nbytes()) {
    const std::string head = read_some(file, begin, kHeadNbytes);
    std::optional<std::uint64_t> end;
    if (head.starts_with(kNumpySignature)) {
      end = scan_numpy(file, begin, member);
      is_sure = true;
    } else {
      const PickleRow row = scan_pickles_at(file, begin, member, expect);
      if (!row.has_stop) return;  // the last pickle is broken, which add_pickle has reported
      if (row.end == begin) break;
      is_sure = is_sure || head.starts_with('\x80');
      end = formats::torch_zip::begins_as_stream(head) ? stream_end(file, begin) : row.end;
    }
    if (!end) {
      return not_looked_at(member, "data whose end the scan can tell",
                           "an array or a stream of torch.save of an unknown kind");
    }
    begin = *end;
    expect = Expect::anything;
  }
  const bool is_looked_at = begin == 0 || begin >= file.nbytes() ||
                            is_tar(read_some(file, 0, kHeadNbytes)) ||
                            (is_zip && read_some(file, begin, 4) == formats::detail::kZipSignature);
  if (is_sure && !is_looked_at) {
    not_looked_at(member, "only pickles and arrays",
                  counted(file.nbytes() - begin, "byte") + " behind them, from byte " +
                      std::to_string(begin) + " on");
  }
}

std::optional<std::uint64_t> FileScan::scan_numpy(const ReadableFile& file, std::uint64_t begin,
                                                  const std::string& member) {
  const std::string head = read_some(file, begin, 12);
  const bool is_short = head.size() > 6 && head[6] == 1;
  constexpr std::uint64_t kVersionNbytes = 2;
  ByteWindow in(file, std::min(begin + kNumpySignature.size() + kVersionNbytes, file.nbytes()));
  const std::uint64_t header_nbytes = in.number(is_short ? 2 : 4).value_or(0);
  const std::uint64_t header_begin = in.position();
  constexpr std::uint64_t kMaxHeaderNbytes = std::uint64_t{1} << 20;
  const std::string header =
      read_some(file, header_begin, std::min(header_nbytes, kMaxHeaderNbytes));
  const auto says = [&](std::string_view code) { return header.find(code) != std::string::npos; };
  const bool has_objects = says("O'") || says("O\"") || says("'object") || says("\"object");
  if (header_nbytes > kMaxHeaderNbytes)
    not_looked_at(member, "a NumPy header of at most 1 MiB", "a longer one");
  const std::uint64_t data_begin = header_begin + header_nbytes;
  if (data_begin >= file.nbytes()) return file.nbytes();
  if (has_objects) {
    const PickleRow row = scan_pickles_at(file, data_begin, member, Expect::pickle);
    return row.has_stop ? row.end : file.nbytes();
  }
  const auto data_nbytes = numpy_data_nbytes(header);
  if (data_nbytes == 0U) return data_begin;
  scan_pickles_at(file, data_begin, member, Expect::anything);
  if (!data_nbytes) return std::nullopt;
  // Only the header says where the array ends: its bytes may look like a pickle that reaches
  // further.
  return data_begin + std::min(*data_nbytes, file.nbytes() - data_begin);
}

/// Adds the pickle at `begin` to the report, if there is one, and sets `end`. Returns whether the
/// pickle ends with STOP, so that another pickle may follow.
bool FileScan::add_pickle(const ReadableFile& file, std::uint64_t begin, const std::string& member,
                          Expect expect, std::uint64_t& end) {
  PickleWalk walk;
  bool is_sure = expect == Expect::pickle;
  if (!is_sure) {
    walk = walk_pickle(file, begin, AfterBreak::stop);
    drop_chance_finds(walk);
    if (!spend(member, walk.end - begin)) return false;
    is_sure = is_pickle(walk);
    if (!is_sure && !walk.first_break) return false;
  }
  if (expect == Expect::pickle || walk.first_break) {
    walk = walk_pickle(file, begin);
    if (!spend(member, walk.end - begin)) return false;
    if (!is_sure && !calls_a_dangerous_name(walk)) return false;
  }
  report_.add_pickle(walk, {.path = file_.path(), .member = member}, packaged_);
  end = walk.end;
  return walk.has_stop;
}

FileScan::PickleRow FileScan::scan_pickles_at(const ReadableFile& file, std::uint64_t begin,
                                              const std::string& member, Expect expect) {
  PickleRow row{.end = begin, .has_stop = true};
  for (std::size_t i = 0; row.end < file.nbytes(); ++i) {
    if (i == kMaxPicklesInARow) {
      not_looked_at(member, "at most " + std::to_string(kMaxPicklesInARow) + " pickles in a row",
                    "more");
      row.has_stop = false;
      break;
    }
    const std::string head = read_some(file, row.end, 32);
    const bool is_data =
        head.starts_with(kNumpySignature) || formats::torch_zip::begins_as_stream(head);
    if (i > 0 && is_data) break;
    const std::uint64_t before = row.end;
    const Expect expected = i == 0 ? expect : Expect::anything;
    const bool has_stop = add_pickle(file, before, member, expected, row.end);
    if (!has_stop && row.end > before) row.has_stop = false;
    if (!has_stop) break;
  }
  return row;
}

}  // namespace tessera::inspect

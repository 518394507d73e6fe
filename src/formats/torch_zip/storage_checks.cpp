#include "formats/torch_zip/storage_checks.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>

#include "base/digest.h"
#include "formats/zip/zip_reader.h"

namespace tessera::formats::torch_zip {
namespace {

/// The most ranges that are kept of one storage. If a read would make one more, it is not added:
/// `check_rest` reads these bytes again.
constexpr std::size_t kMaxRanges = 4096;
constexpr std::uint64_t kBufferNbytes = std::uint64_t{1} << 20;

}  // namespace

StorageChecks::StorageChecks(const PartRead& part) {
  Check& check = checks_[part.storage];
  check.ranges.emplace(part.begin, std::pair(part.end, part.crc));
  check.nbytes = part.nbytes;
  check.nbytes_read = part.nbytes_read;
}

std::optional<StorageChecks::PartRead> StorageChecks::only_part() const {
  const std::scoped_lock lock(mutex_);
  if (checks_.size() != 1) return std::nullopt;
  const auto& [storage, check] = *checks_.begin();
  if (check.is_done || check.ranges.size() != 1 || storage > UINT32_MAX) return std::nullopt;
  const auto& [begin, range] = *check.ranges.begin();
  return PartRead{.begin = begin,
                  .end = range.first,
                  .nbytes = check.nbytes,
                  .nbytes_read = check.nbytes_read,
                  .storage = static_cast<std::uint32_t>(storage),
                  .crc = range.second};
}

void StorageChecks::add(const Storages& storages, const std::string& path, std::size_t storage,
                        std::uint64_t begin, std::span<const std::byte> bytes) {
  add(storages, path, storage, begin, bytes, kMaxRanges);
}

void StorageChecks::add(const Storages& storages, const std::string& path, std::size_t storage,
                        std::uint64_t begin, std::span<const std::byte> bytes,
                        std::size_t max_ranges) {
  if (bytes.empty() || !storages.crc32(storage)) return;
  const ByteRange read{begin, begin + bytes.size()};
  {
    const std::scoped_lock lock(mutex_);
    Check& check = checks_[storage];
    check.nbytes = storages.nbytes(storage);
    check.nbytes_read += bytes.size();
  }
  bool is_added = false;
  while (!is_added) {
    std::vector<ByteRange> missing;
    {
      const std::scoped_lock lock(mutex_);
      const Check& check = checks_[storage];
      if (check.is_done) return;
      missing = missing_in(check, read);
      const auto joins = [&](const ByteRange& range) {
        const auto next = check.ranges.lower_bound(range.end);
        const bool joins_next = next != check.ranges.end() && next->first == range.end;
        const bool joins_last =
            next != check.ranges.begin() && std::prev(next)->second.first == range.begin;
        return joins_next || joins_last;
      };
      if (check.ranges.size() >= max_ranges) std::erase_if(missing, std::not_fn(joins));
    }
    is_added = true;
    for (const ByteRange& range : missing) {
      const std::uint32_t crc = crc32(0, bytes.subspan(range.begin - begin, range.nbytes()));
      is_added = add_range(storages, path, storage, range, crc) && is_added;
    }
  }
}

/// Returns the parts of `range` that have not been added, in ascending order.
std::vector<ByteRange> StorageChecks::missing_in(const Check& check, ByteRange range) {
  std::vector<ByteRange> missing;
  auto next = check.ranges.upper_bound(range.begin);
  std::uint64_t at = range.begin;
  if (next != check.ranges.begin()) at = std::max(at, std::prev(next)->second.first);
  for (; at < range.end && next != check.ranges.end() && next->first < range.end; ++next) {
    if (at < next->first) missing.push_back({at, next->first});
    at = next->second.first;
  }
  if (at < range.end) missing.push_back({at, range.end});
  return missing;
}

/// Adds a range, and compares the CRC if the storage is now complete. Returns false and adds
/// nothing if another thread has added a part of the range meanwhile.
bool StorageChecks::add_range(const Storages& storages, const std::string& path,
                              std::size_t storage, ByteRange range, std::uint32_t crc) {
  const std::scoped_lock lock(mutex_);
  Check& check = checks_[storage];
  if (check.is_done) return true;
  if (missing_in(check, range) != std::vector{range}) return false;
  const auto added = check.ranges.emplace(range.begin, std::pair(range.end, crc)).first;
  const auto unite_with_next = [&](auto at) {
    const auto next = std::next(at);
    if (next == check.ranges.end() || next->first != at->second.first) return;
    at->second.second =
        crc32_combine(at->second.second, next->second.second, next->second.first - next->first);
    at->second.first = next->second.first;
    check.ranges.erase(next);
  };
  unite_with_next(added);
  if (added != check.ranges.begin()) unite_with_next(std::prev(added));
  const auto& [first, whole] = *check.ranges.begin();
  if (first != 0 || whole.first != storages.nbytes(storage)) return true;
  const std::uint32_t found = whole.second;
  check.ranges.clear();
  check.is_done = true;
  const std::optional<std::uint32_t> expected = storages.crc32(storage);
  if (found == *expected) return true;
  check.is_done = false;
  throw Error::expected(ErrorKind::corruption,
                        {.path = path, .byte_range = storages.data_range(storage)},
                        "CRC-32 of '" + printable(storages.name(storage), 80) + "'",
                        zip::crc_text(*expected), zip::crc_text(found), "damaged bytes?");
}

bool StorageChecks::has_rest() const {
  const std::scoped_lock lock(mutex_);
  return std::ranges::any_of(checks_, [](const auto& check) { return !check.second.is_done; });
}

bool StorageChecks::is_rest_small(const Check& check, double most_rest) {
  std::uint64_t kept_nbytes = 0;
  for (const auto& [begin, range] : check.ranges) kept_nbytes += range.first - begin;
  const auto rest = static_cast<double>(check.nbytes - kept_nbytes);
  return rest <= most_rest * static_cast<double>(std::min(check.nbytes, check.nbytes_read));
}

bool StorageChecks::has_rest_to_check(double most_rest) const {
  const std::scoped_lock lock(mutex_);
  return std::ranges::any_of(checks_, [&](const auto& each) {
    return !each.second.is_done && is_rest_small(each.second, most_rest);
  });
}

void StorageChecks::check_rest(const Storages& storages, const std::string& path,
                               const RestOptions& options) {
  std::map<std::size_t, std::vector<ByteRange>> missing_of;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& [storage, check] : checks_) {
      if (check.is_done || !is_rest_small(check, options.most_rest)) continue;
      missing_of.emplace(storage, missing_in(check, {0, check.nbytes}));
    }
  }
  std::vector<std::byte> buffer;
  for (const auto& [storage, missing] : missing_of) {
    for (const ByteRange& range : missing) {
      for (std::uint64_t at = range.begin; at < range.end;) {
        if (options.stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
        buffer.resize(std::min(kBufferNbytes, range.end - at));
        storages.read_at(storage, at, buffer);
        add(storages, path, storage, at, buffer, std::numeric_limits<std::size_t>::max());
        at += buffer.size();
      }
    }
  }
}

std::shared_ptr<StorageChecks> ChecksOfFiles::of(std::uint64_t file) {
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<StorageChecks>& kept = kept_[file];
  if (const auto part = parts_.extract(file)) {
    kept = std::make_shared<StorageChecks>(part.mapped());
  } else if (!kept) {
    kept = std::make_shared<StorageChecks>();
  }
  return kept;
}

void ChecksOfFiles::keep(std::uint64_t file, std::shared_ptr<StorageChecks> checks) {
  const std::scoped_lock lock(mutex_);
  kept_.erase(file);
  parts_.erase(file);
  if (const auto part = checks->only_part()) {
    parts_.emplace(file, *part);
  } else if (checks->has_rest()) {
    kept_.emplace(file, std::move(checks));
  }
}

std::vector<std::uint64_t> ChecksOfFiles::files_to_check(double most_rest) const {
  const std::scoped_lock lock(mutex_);
  std::vector<std::uint64_t> files;
  for (const auto& [file, checks] : kept_) {
    if (checks->has_rest_to_check(most_rest)) files.push_back(file);
  }
  for (const auto& [file, part] : parts_) {
    if (StorageChecks(part).has_rest_to_check(most_rest)) files.push_back(file);
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace tessera::formats::torch_zip

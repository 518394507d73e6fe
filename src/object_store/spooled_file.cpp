#include "object_store/spooled_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/checked_math.h"

namespace tessera::object_store {

using tessera::detail::FileDescriptor;
using tessera::detail::retry_on_interrupt;
using tessera::detail::throw_system_error;

std::uint64_t PartSizes::of_file(std::uint64_t nbytes, std::uint64_t min_nbytes) {
  constexpr std::uint64_t kMib = std::uint64_t{1} << 20;
  return std::max(min_nbytes, round_up(ceil_div(nbytes, kMaxParts), kMib));
}

void WrittenRanges::add(ByteRange range) {
  if (range.empty()) return;
  auto next = ends_.upper_bound(range.begin);
  if (next != ends_.begin() && std::prev(next)->second >= range.begin) {
    --next;
    range.begin = next->first;
  }
  while (next != ends_.end() && next->first <= range.end) {
    range.end = std::max(range.end, next->second);
    next = ends_.erase(next);
  }
  ends_.emplace_hint(next, range.begin, range.end);
}

bool WrittenRanges::covers(ByteRange range) const {
  const auto next = ends_.upper_bound(range.begin);
  return range.empty() || (next != ends_.begin() && std::prev(next)->second >= range.end);
}

SpooledFile::SpooledFile(std::string path, std::string url, std::uint64_t min_part_nbytes,
                         Release release)
    : path_(std::move(path)),
      url_(std::move(url)),
      min_part_nbytes_(min_part_nbytes),
      release_(release) {}

std::shared_ptr<const FileDescriptor> SpooledFile::open() const {
  const std::scoped_lock lock(open_mutex_);
  auto file = open_.lock();
  if (!file) {
    file = std::make_shared<const FileDescriptor>(tessera::detail::open_file(path_, O_RDWR));
    open_ = file;
  }
  return file;
}

std::uint64_t SpooledFile::nbytes() const {
  const std::scoped_lock lock(mutex_);
  return nbytes_;
}

bool SpooledFile::is_one_part() const {
  const std::scoped_lock lock(mutex_);
  return part_nbytes_ == 0 ? nbytes_ <= min_part_nbytes_ : nbytes_ <= part_nbytes_;
}

ByteRange SpooledFile::range_of(std::size_t part) const {
  const std::uint64_t begin = part * part_nbytes_;
  return {std::min(begin, nbytes_), std::min(begin + part_nbytes_, nbytes_)};
}

/// Sets the number of parts; the first call also sets their size. Throws if they are too many.
void SpooledFile::fix_part_nbytes() {
  if (part_nbytes_ == 0) part_nbytes_ = PartSizes::of_file(nbytes_, min_part_nbytes_);
  const std::uint64_t max_nbytes = part_nbytes_ * PartSizes::kMaxParts;
  if (nbytes_ > max_nbytes) {
    throw Error::expected(ErrorKind::unsupported, {.path = url_}, "object",
                          "at most " + std::to_string(max_nbytes) +
                              " bytes, as its size was not known when its upload began",
                          std::to_string(nbytes_) + " bytes", "write for more ranks");
  }
  parts_.resize(static_cast<std::size_t>(ceil_div(nbytes_, part_nbytes_)));
}

/// Marks the parts in `range` as open, because they are about to be written again.
void SpooledFile::touch(ByteRange range) {
  if (parts_.empty() || range.empty()) return;
  const auto first = static_cast<std::size_t>(range.begin / part_nbytes_);
  const auto last = static_cast<std::size_t>((range.end - 1) / part_nbytes_);
  for (std::size_t i = first; i <= last && i < parts_.size(); ++i) {
    TESSERA_CHECK(!parts_[i].is_released);
    if (parts_[i].state == State::open) continue;
    parts_[i].state = State::open;
    ++parts_[i].generation;
  }
}

/// Returns the parts with an index in `[begin, end)` that can be uploaded now, and marks them as
/// taken. Such a part is complete, was not taken since it was last written, and is not being
/// uploaded. If it was taken before, it must wait for the sync.
std::vector<SpooledFile::Work> SpooledFile::take(std::size_t begin, std::size_t end) {
  std::vector<Work> work;
  for (std::size_t i = begin; i < end; ++i) {
    Part& part = parts_[i];
    const ByteRange range = range_of(i);
    const bool is_whole = range.nbytes() == part_nbytes_ && written_.covers(range);
    if (part.state != State::open || part.is_uploading) continue;
    // A part that was written again may be written once more, so it is taken only after the sync.
    if (!is_synced_ && (!is_whole || part.generation > 0)) continue;
    part.state = State::taken;
    part.is_uploading = true;
    work.push_back({static_cast<int>(i), range, part.generation});
  }
  return work;
}

std::vector<SpooledFile::Work> SpooledFile::write_at(std::uint64_t offset,
                                                     std::span<const std::byte> bytes) {
  const ByteRange range{offset, offset + bytes.size()};
  {
    const std::scoped_lock lock(mutex_);
    touch(range);
  }
  const auto file = open();
  while (!bytes.empty()) {
    const ssize_t count = retry_on_interrupt([&] {
      return ::pwrite(file->get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    });
    if (count <= 0) throw_system_error(count < 0 ? errno : EIO, path_, "write", range);
    offset += static_cast<std::uint64_t>(count);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  const std::scoped_lock lock(mutex_);
  // Touch again: another thread may have completed and taken a part before this write ended.
  touch(range);
  nbytes_ = std::max(nbytes_, range.end);
  written_.add(range);
  const bool is_first = part_nbytes_ == 0;
  if (range.empty() || (is_first && nbytes_ <= 2 * min_part_nbytes_)) return {};
  fix_part_nbytes();
  if (is_first) return take(1, parts_.size());
  const auto first = static_cast<std::size_t>(range.begin / part_nbytes_);
  const auto last = static_cast<std::size_t>((range.end - 1) / part_nbytes_);
  return take(std::max<std::size_t>(first, 1), last + 1);
}

void SpooledFile::resize(std::uint64_t nbytes) {
  const auto file = open();
  const auto size = static_cast<off_t>(nbytes);
  if (retry_on_interrupt([&] { return ::ftruncate(file->get(), size); }) != 0) {
    throw_system_error(errno, path_, "resize");
  }
  const std::scoped_lock lock(mutex_);
  // The last part gets another size, so it is open again.
  if (nbytes != nbytes_) touch({std::min(nbytes, nbytes_), std::max(nbytes, nbytes_)});
  nbytes_ = nbytes;
  if (part_nbytes_ != 0) fix_part_nbytes();
}

std::vector<SpooledFile::Work> SpooledFile::sync() {
  const std::scoped_lock lock(mutex_);
  is_synced_ = true;
  if (part_nbytes_ == 0 && nbytes_ <= min_part_nbytes_) return {};
  fix_part_nbytes();
  for (std::size_t i = 1; i < parts_.size(); ++i) {
    if (parts_[i].state == State::uploaded) release(i);
  }
  return take(1, parts_.size());
}

std::vector<SpooledFile::Work> SpooledFile::rest() {
  const std::scoped_lock lock(mutex_);
  is_synced_ = true;
  fix_part_nbytes();
  return take(0, parts_.size());
}

std::vector<std::byte> SpooledFile::read(ByteRange range) const {
  const auto file = open();
  std::vector<std::byte> bytes(static_cast<std::size_t>(range.nbytes()));
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t count = retry_on_interrupt([&] {
      return ::pread(file->get(), bytes.data() + done, bytes.size() - done,
                     static_cast<off_t>(range.begin + done));
    });
    if (count <= 0) throw_system_error(count < 0 ? errno : EIO, path_, "read", range);
    done += static_cast<std::size_t>(count);
  }
  return bytes;
}

/// Frees the disk space of a part, if the file system can do this.
void SpooledFile::release(std::size_t part) {
  if (part == 0 || parts_[part].is_released) return;
  const ByteRange range = range_of(part);
  parts_[part].is_released = true;
  ::fallocate(open()->get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(range.begin), static_cast<off_t>(range.nbytes()));
}

void SpooledFile::note_uploaded(const Work& work, UploadedPart part) {
  const std::scoped_lock lock(mutex_);
  const auto i = static_cast<std::size_t>(work.index);
  if (i >= parts_.size()) return;
  parts_[i].is_uploading = false;
  if (parts_[i].generation != work.generation) return;
  parts_[i].state = State::uploaded;
  parts_[i].uploaded = std::move(part);
  if (is_synced_ || release_ == Release::after_upload) release(i);
}

std::vector<UploadedPart> SpooledFile::uploaded_parts() const {
  const std::scoped_lock lock(mutex_);
  std::vector<UploadedPart> uploaded;
  for (const Part& part : parts_) {
    TESSERA_CHECK(part.state == State::uploaded);
    uploaded.push_back(part.uploaded);
  }
  return uploaded;
}

}  // namespace tessera::object_store

#include "formats/pickle/pickle_bytes.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

namespace tessera::formats::pickle {
namespace {

// An object store answers a read of this size with one request, or with parallel ones.
constexpr std::size_t kPartNbytes = std::size_t{16} << 20;
constexpr std::size_t kTextBlockNbytes = std::size_t{64} << 10;

}  // namespace

PickleBytes::PickleBytes(const ReadableFile& file)
    : file_(&file),
      from_file_(std::make_unique_for_overwrite<char[]>(file.nbytes())),
      data_(from_file_.get()),
      nbytes_(file.nbytes()) {}

void PickleBytes::read_to(std::size_t end) {
  const std::size_t part_end = std::min(nbytes_, std::max(end, loaded_end_ + kPartNbytes));
  const std::span<char> part(from_file_.get() + loaded_end_, part_end - loaded_end_);
  file_->read_at(loaded_end_, std::as_writable_bytes(part));
  loaded_end_ = part_end;
}

std::optional<std::size_t> PickleBytes::find(char byte, std::size_t begin) {
  while (begin < nbytes_) {
    load(begin + 1);
    const void* const found = std::memchr(data_ + begin, byte, loaded_end_ - begin);
    if (found != nullptr) return static_cast<const char*>(found) - data_;
    begin = loaded_end_;
  }
  return std::nullopt;
}

std::size_t PickleBytes::release(std::size_t begin, std::size_t end) {
#ifdef __linux__
  if (file_ == nullptr || begin >= end) return begin;
  static const auto page_nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* page = from_file_.get() + begin;
  std::size_t left_nbytes = end - begin;
  if (std::align(page_nbytes, page_nbytes, page, left_nbytes) == nullptr) return begin;
  const std::size_t nbytes = left_nbytes / page_nbytes * page_nbytes;
  static_cast<void>(madvise(page, nbytes, MADV_DONTNEED));
  return static_cast<std::size_t>(static_cast<const char*>(page) - data_) + nbytes;
#else
  static_cast<void>(end);
  return begin;
#endif
}

void PickleBytes::unload(std::size_t begin) {
  if (file_ == nullptr || begin >= loaded_end_) return;
  release(begin, loaded_end_);
  loaded_end_ = begin;
}

std::string_view TextStore::add(std::string_view text) {
  if (text.size() > free_nbytes_) {
    free_nbytes_ = std::max(text.size(), kTextBlockNbytes);
    free_ = blocks_.emplace_back(std::make_unique_for_overwrite<char[]>(free_nbytes_)).get();
  }
  const std::string_view added(free_, text.size());
  std::ranges::copy(text, free_);
  free_ += text.size();
  free_nbytes_ -= text.size();
  return added;
}

}  // namespace tessera::formats::pickle

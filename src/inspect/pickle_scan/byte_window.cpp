#include "inspect/pickle_scan/byte_window.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "tessera/base/error.h"

namespace tessera::inspect {

void BytesFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
    throw Error(ErrorKind::corruption,
                {.path = path_, .byte_range = ByteRange{offset, offset + out.size()}},
                "the file ends before this range");
  }
  if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
}

std::string read_some(const ReadableFile& file, std::uint64_t offset, std::uint64_t max_nbytes) {
  if (offset >= file.nbytes()) return {};
  std::string bytes(std::min(max_nbytes, file.nbytes() - offset), '\0');
  file.read_at(offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

void ByteWindow::fill() {
  buffer_nbytes_ = static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size(), nbytes_left()));
  file_->read_at(position_, std::span(buffer_).first(buffer_nbytes_));
  buffer_begin_ = position_;
}

std::optional<unsigned char> ByteWindow::next() {
  if (position_ >= nbytes_) return std::nullopt;
  if (position_ < buffer_begin_ || position_ - buffer_begin_ >= buffer_nbytes_) fill();
  return std::to_integer<unsigned char>(buffer_[position_++ - buffer_begin_]);
}

std::optional<std::uint64_t> ByteWindow::number(int num_bytes) {
  if (nbytes_left() < static_cast<std::uint64_t>(num_bytes)) {
    position_ = nbytes_;
    return std::nullopt;
  }
  std::uint64_t value = 0;
  for (int i = 0; i < num_bytes; ++i) value |= std::uint64_t{*next()} << (8 * i);
  return value;
}

bool ByteWindow::skip(std::uint64_t num_bytes) {
  const bool is_there = num_bytes <= nbytes_left();
  position_ = is_there ? position_ + num_bytes : nbytes_;
  return is_there;
}

ByteRange ByteWindow::line() {
  const std::uint64_t begin = position_;
  while (const auto byte = next()) {
    if (*byte == '\n') return {begin, position_ - 1};
  }
  return {begin, std::max(begin, position_ - (position_ > begin ? 1 : 0))};
}

}  // namespace tessera::inspect

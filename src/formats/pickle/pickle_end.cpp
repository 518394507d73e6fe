#include "formats/pickle/pickle_end.h"

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/pickle/opcode.h"
#include "formats/pickle/opcode_argument.h"
#include "tessera/base/error.h"

namespace tessera::formats::pickle {
namespace {

/// Walks over the bytes of a pickle.
class EndWalk {
 public:
  EndWalk(const ReadableFile& file, std::uint64_t begin, std::uint64_t max_nbytes)
      : file_(file),
        begin_(begin),
        position_(begin),
        end_(begin + std::min(max_nbytes, file.nbytes() - begin)),
        is_limited_(end_ < file.nbytes()) {}

  std::uint64_t find_end() {
    for (;;) {
      const unsigned char opcode = take();
      const Argument argument = kArgumentOf[opcode];
      if (argument == Argument::no_opcode) {
        fail("opcode: expected a pickle opcode, found byte " + std::to_string(opcode));
      }
      skip_argument(*this, argument);
      if (opcode == static_cast<unsigned char>(Opcode::STOP)) return position_;
    }
  }

  // --- for skip_argument
  void skip_bytes(std::uint64_t nbytes) {
    if (nbytes > end_ - position_) fail_short();
    position_ += nbytes;
  }
  void skip_length(int width) { skip_bytes(take_number(width)); }
  void skip_line() {
    while (take() != '\n') {
    }
  }

 private:
  unsigned char take() {
    if (position_ == end_) fail_short();
    if (position_ >= buffer_end_) fill();
    const std::size_t index = buffer_.size() - static_cast<std::size_t>(buffer_end_ - position_);
    ++position_;
    return static_cast<unsigned char>(buffer_[index]);
  }

  std::uint64_t take_number(int nbytes) {
    std::uint64_t number = 0;
    for (int i = 0; i < nbytes; ++i) number |= std::uint64_t{take()} << (8 * i);
    return number;
  }

  void fill() {
    constexpr std::uint64_t kBufferNbytes = std::uint64_t{16} << 10;
    buffer_.resize(static_cast<std::size_t>(std::min(kBufferNbytes, end_ - position_)));
    file_.read_at(position_, std::as_writable_bytes(std::span(buffer_)));
    buffer_end_ = position_ + buffer_.size();
  }

  [[noreturn]] void fail(std::string_view what) const {
    throw Error(ErrorKind::corruption,
                {.path = file_.path(), .byte_range = ByteRange{begin_, position_}},
                "pickle: " + std::string(what));
  }
  [[noreturn]] void fail_short() const {
    if (is_limited_) {
      fail("pickle size: expected at most " + std::to_string(end_ - begin_) + " bytes, found more");
    }
    fail("expected a whole pickle, found the end of the file (incomplete download?)");
  }

  const ReadableFile& file_;
  std::uint64_t begin_;
  std::uint64_t position_;
  std::uint64_t end_;
  bool is_limited_;  // the limit, not the file, ends the walk
  std::vector<char> buffer_;
  std::uint64_t buffer_end_ = 0;  // in the file
};

}  // namespace

std::uint64_t pickle_end(const ReadableFile& file, std::uint64_t begin, std::uint64_t max_nbytes) {
  TESSERA_CHECK(begin <= file.nbytes());
  return EndWalk(file, begin, max_nbytes).find_end();
}

}  // namespace tessera::formats::pickle

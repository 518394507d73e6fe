#include "formats/pickle/pickle_end.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/pickle/opcode.h"
#include "tessera/base/error.h"

namespace tessera::formats::pickle {
namespace {

/// The kind of argument that follows an opcode.
enum class Argument : unsigned char {
  no_opcode,
  nothing,
  bytes_1,
  bytes_2,
  bytes_4,
  bytes_8,
  length_1,  // a length of 1 byte, then as many bytes
  length_4,
  length_8,
  line,
  two_lines,
};

constexpr std::array<Argument, 256> kArguments = [] {
  std::array<Argument, 256> arguments{};
  const auto add = [&arguments](Argument argument, std::initializer_list<Opcode> opcodes) {
    for (const Opcode opcode : opcodes) arguments[static_cast<unsigned char>(opcode)] = argument;
  };
  using enum Opcode;
  add(Argument::nothing,
      {STOP,       MARK,        POP,        POP_MARK,     DUP,       NONE,           NEWTRUE,
       NEWFALSE,   TUPLE,       TUPLE1,     TUPLE2,       TUPLE3,    LIST,           DICT,
       EMPTY_LIST, EMPTY_TUPLE, APPEND,     APPENDS,      EMPTY_SET, ADDITEMS,       FROZENSET,
       SETITEM,    SETITEMS,    EMPTY_DICT, REDUCE,       NEWOBJ,    NEWOBJ_EX,      OBJ,
       BUILD,      NEXT_BUFFER, MEMOIZE,    STACK_GLOBAL, BINPERSID, READONLY_BUFFER});
  add(Argument::bytes_1, {PROTO, BININT1, BINPUT, BINGET, EXT1});
  add(Argument::bytes_2, {BININT2, EXT2});
  add(Argument::bytes_4, {BININT, LONG_BINPUT, LONG_BINGET, EXT4});
  add(Argument::bytes_8, {BINFLOAT, FRAME});
  add(Argument::length_1, {LONG1, SHORT_BINSTRING, SHORT_BINUNICODE, SHORT_BINBYTES});
  add(Argument::length_4, {LONG4, BINSTRING, BINUNICODE, BINBYTES});
  add(Argument::length_8, {BINUNICODE8, BINBYTES8, BYTEARRAY8});
  add(Argument::line, {INT, LONG, FLOAT, STRING, UNICODE, PUT, GET, PERSID});
  add(Argument::two_lines, {GLOBAL, INST});
  return arguments;
}();

/// Walks over the bytes of a pickle.
class Walk {
 public:
  Walk(const ReadableFile& file, std::uint64_t begin, std::uint64_t max_nbytes)
      : file_(file),
        begin_(begin),
        position_(begin),
        end_(begin + std::min(max_nbytes, file.nbytes() - begin)),
        is_limited_(end_ < file.nbytes()) {}

  std::uint64_t find_end() {
    for (;;) {
      const unsigned char opcode = take();
      skip(kArguments[opcode], opcode);
      if (opcode == static_cast<unsigned char>(Opcode::STOP)) return position_;
    }
  }

 private:
  void skip(Argument argument, unsigned char opcode) {
    switch (argument) {
      case Argument::no_opcode:
        fail("opcode: expected a pickle opcode, found byte " + std::to_string(opcode));
      case Argument::nothing:
        return;
      case Argument::bytes_1:
        return skip_bytes(1);
      case Argument::bytes_2:
        return skip_bytes(2);
      case Argument::bytes_4:
        return skip_bytes(4);
      case Argument::bytes_8:
        return skip_bytes(8);
      case Argument::length_1:
        return skip_bytes(take_number(1));
      case Argument::length_4:
        return skip_bytes(take_number(4));
      case Argument::length_8:
        return skip_bytes(take_number(8));
      case Argument::line:
        return skip_line();
      case Argument::two_lines:
        skip_line();
        return skip_line();
    }
  }

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

  void skip_bytes(std::uint64_t nbytes) {
    if (nbytes > end_ - position_) fail_short();
    position_ += nbytes;
  }

  void skip_line() {
    while (take() != '\n') {
    }
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
  return Walk(file, begin, max_nbytes).find_end();
}

}  // namespace tessera::formats::pickle

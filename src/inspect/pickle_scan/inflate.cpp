#include "inspect/pickle_scan/inflate.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "inspect/pickle_scan/byte_window.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

class Stream {
 public:
  explicit Stream(int window_bits) { TESSERA_CHECK(inflateInit2(&stream_, window_bits) == Z_OK); }
  ~Stream() { inflateEnd(&stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  z_stream* operator->() { return &stream_; }
  z_stream* get() { return &stream_; }

 private:
  z_stream stream_{};
};

/// Inflates `input` into `out`, until the input or the stream ends or `out` has `max_nbytes`.
/// Returns zlib's status, but Z_OK for Z_BUF_ERROR; Z_MEM_ERROR if the content is longer than that.
int inflate_block(Stream& stream, std::string& input, std::string& out, std::uint64_t max_nbytes) {
  std::array<char, 65536> block;
  stream->next_in = reinterpret_cast<Bytef*>(input.data());
  stream->avail_in = static_cast<uInt>(input.size());
  int status = Z_OK;
  do {
    stream->next_out = reinterpret_cast<Bytef*>(block.data());
    stream->avail_out = static_cast<uInt>(block.size());
    status = inflate(stream.get(), Z_NO_FLUSH);
    const std::size_t num_new = block.size() - stream->avail_out;
    const std::uint64_t room = max_nbytes - out.size();
    out.append(block.data(), std::min<std::uint64_t>(num_new, room));
    if (num_new > room) return Z_MEM_ERROR;
  } while (status == Z_OK && stream->avail_out == 0);
  return status == Z_BUF_ERROR ? Z_OK : status;
}

/// Returns the number of bytes before the compressed data of the gzip member at `at`; nothing if
/// none begins there. Checks as little as Python's gzip module, which ignores the header's checksum
/// and unknown flags.
std::optional<std::uint64_t> gzip_header_nbytes(const ReadableFile& file, std::uint64_t at) {
  enum : unsigned char { has_checksum = 2, has_extra = 4, has_name = 8, has_comment = 16 };
  if (read_some(file, at, 3) != "\x1f\x8b\x08") return std::nullopt;
  ByteWindow in(file, at + 3);
  const unsigned char flags = in.next().value_or(0);
  in.skip(6);  // time, level, system
  if (flags & has_extra) in.skip(in.number(2).value_or(0));
  for (const auto flag : {has_name, has_comment}) {
    if ((flags & flag) == 0) continue;
    while (in.next().value_or('\0') != '\0') {
    }
  }
  if (flags & has_checksum) in.skip(2);
  return in.position() - at;
}

/// Returns where the zero bytes from `at` on end.
std::uint64_t after_zeros(const ReadableFile& file, std::uint64_t at) {
  ByteWindow in(file, at);
  while (in.next() == '\0') ++at;
  return at;
}

/// Inflates one stream that begins at `at`, and moves `at` to its end. Appends to `inflated.bytes`.
void inflate_stream(const ReadableFile& file, int window_bits, std::uint64_t max_nbytes,
                    std::uint64_t& at, Inflated& inflated) {
  constexpr std::uint64_t kInputNbytes = 16384;
  Stream stream(window_bits);
  int status = Z_OK;
  while (status == Z_OK && at < file.nbytes()) {
    std::string input = read_some(file, at, kInputNbytes);
    status = inflate_block(stream, input, inflated.bytes, max_nbytes);
    at += input.size() - stream->avail_in;
  }
  inflated.is_whole = status == Z_STREAM_END;
  inflated.is_limited = status == Z_MEM_ERROR;
}

}  // namespace

Inflated inflate_file(const ReadableFile& file, Wrapping wrapping, std::uint64_t max_nbytes) {
  constexpr std::uint64_t kTrailerNbytes = 8;  // CRC-32 and size
  Inflated inflated;
  std::uint64_t at = 0;
  auto header_nbytes = gzip_header_nbytes(file, at);
  if (wrapping == Wrapping::none || !header_nbytes) {
    inflate_stream(file, wrapping == Wrapping::none ? -MAX_WBITS : MAX_WBITS, max_nbytes, at,
                   inflated);
    return inflated;
  }
  for (std::size_t i = 0; header_nbytes; ++i) {
    if (i == kMaxGzipMembers) {
      inflated.is_whole = false;
      inflated.is_limited = true;
      break;
    }
    at += *header_nbytes;
    inflate_stream(file, -MAX_WBITS, max_nbytes, at, inflated);
    if (!inflated.is_whole) break;
    at = after_zeros(file, std::min(at + kTrailerNbytes, file.nbytes()));
    header_nbytes = gzip_header_nbytes(file, at);
  }
  return inflated;
}

}  // namespace tessera::inspect

#include "inspect/pickle_scan/inflate.h"

#include <zlib.h>

#include <algorithm>
#include <array>
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

}  // namespace

Inflated inflate_file(const ReadableFile& file, Wrapping wrapping, std::uint64_t max_nbytes) {
  constexpr std::uint64_t kInputNbytes = 65536;
  constexpr int kAnyWrapping = MAX_WBITS + 32;
  Stream stream(wrapping == Wrapping::none ? -MAX_WBITS : kAnyWrapping);
  Inflated inflated;
  std::uint64_t at = 0;
  while (at < file.nbytes()) {
    std::string input = read_some(file, at, kInputNbytes);
    const int status = inflate_block(stream, input, inflated.bytes, max_nbytes);
    at += input.size() - stream->avail_in;
    if (status != Z_OK && status != Z_STREAM_END) return inflated;
    if (status != Z_STREAM_END) continue;
    inflated.is_whole = true;
    const bool is_followed = wrapping != Wrapping::none && read_some(file, at, 2) == "\x1f\x8b";
    if (!is_followed) return inflated;
    inflated.is_whole = false;
    inflateReset(stream.get());
  }
  return inflated;
}

}  // namespace tessera::inspect

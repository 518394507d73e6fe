#include "formats/native/link_name.h"

#include "base/utf8.h"

namespace tessera::formats::native {
namespace {

constexpr std::size_t kMaxLinkNameNbytes = 1000;
constexpr std::size_t kLongNamePrefixNbytes = 200;

void append_escaped(std::string& out, unsigned char byte) {
  static constexpr char kHex[] = "0123456789ABCDEF";
  out += {'~', kHex[byte >> 4], kHex[byte & 0xF]};
}

bool is_plain(unsigned char byte) {
  return byte >= 0x20 && byte != 0x7F && byte != '/' && byte != '~';
}

}  // namespace

std::string tensor_link_name(std::string_view fqn, std::size_t number) {
  if (fqn.empty()) return "~empty";
  const bool is_dots = fqn == "." || fqn == "..";  // have a special meaning in HDF5 paths
  std::string name;
  std::size_t prefix_nbytes = 0;  // of the name, up to the end of a character
  for (std::size_t i = 0; i < fqn.size();) {
    const auto byte = static_cast<unsigned char>(fqn[i]);
    const std::size_t nbytes = tessera::detail::utf8_sequence_nbytes(fqn, i);
    if (nbytes == 0 || !is_plain(byte) || is_dots) {
      append_escaped(name, byte);
      ++i;
    } else {
      name.append(fqn.substr(i, nbytes));
      i += nbytes;
    }
    if (name.size() <= kLongNamePrefixNbytes) prefix_nbytes = name.size();
    if (name.size() > kMaxLinkNameNbytes) {
      return name.substr(0, prefix_nbytes) + "~long" + std::to_string(number);
    }
  }
  return name;
}

std::string piece_link_name(std::string_view fqn, std::size_t number, const Region& region) {
  return tensor_link_name(fqn, number) + "~" + region_to_string(region);
}

}  // namespace tessera::formats::native

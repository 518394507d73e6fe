#include "formats/native/h5_encoding.h"

#include <algorithm>
#include <array>
#include <bit>

#include "tessera/base/error.h"

namespace tessera::formats::native::h5 {
namespace {

constexpr std::uint32_t kHyperslab = 2;  // kinds of selections
constexpr std::uint32_t kAll = 3;

/// The state of the hash function lookup3: three sums.
struct Lookup3 {
  std::uint32_t a, b, c;

  void add(const char* bytes) {
    std::array<std::uint32_t, 3> words{};
    std::memcpy(words.data(), bytes, sizeof words);
    a += words[0];
    b += words[1];
    c += words[2];
  }
  void mix() {
    const auto step = [](std::uint32_t& x, std::uint32_t& y, std::uint32_t& z, int bits) {
      x -= z;
      x ^= std::rotl(z, bits);
      z += y;
    };
    step(a, b, c, 4);
    step(b, c, a, 6);
    step(c, a, b, 8);
    step(a, b, c, 16);
    step(b, c, a, 19);
    step(c, a, b, 4);
  }
  void finish() {
    const auto step = [](std::uint32_t& x, std::uint32_t y, int bits) {
      x ^= y;
      x -= std::rotl(y, bits);
    };
    step(c, b, 14);
    step(a, c, 11);
    step(b, a, 25);
    step(c, b, 16);
    step(a, c, 4);
    step(b, a, 14);
    step(c, b, 24);
  }
};

/// Appends the selection of all elements.
void put_all(std::string& out) {
  put(out, kAll);
  put(out, std::uint32_t{1});  // version
  put(out, std::uint64_t{0});  // reserved, then the length of what follows: 0
}

/// Appends the selection of a box. Version 1 holds 32-bit numbers, version 2 holds 64-bit ones.
void put_box(std::string& out, std::span<const std::int64_t> offsets,
             std::span<const std::int64_t> sizes) {
  const auto rank = static_cast<std::uint32_t>(offsets.size());
  bool is_small = true;
  for (std::size_t d = 0; d < rank; ++d) {
    is_small = is_small && offsets[d] + sizes[d] <= std::int64_t{UINT32_MAX};
  }
  put(out, kHyperslab);
  if (is_small) {
    put(out, std::uint32_t{1});  // version
    put(out, std::uint32_t{0});  // reserved
    put(out, std::uint32_t{8} + 8 * rank);
    put(out, rank);
    put(out, std::uint32_t{1});  // blocks
    for (const std::int64_t offset : offsets) put(out, static_cast<std::uint32_t>(offset));
    for (std::size_t d = 0; d < rank; ++d) {
      put(out, static_cast<std::uint32_t>(offsets[d] + sizes[d] - 1));
    }
    return;
  }
  put(out, std::uint32_t{2});  // version
  put(out, std::uint8_t{1});   // start, stride, count and block of each dimension
  put(out, std::uint32_t{4} + 32 * rank);
  put(out, rank);
  for (std::size_t d = 0; d < rank; ++d) {
    put(out, offsets[d]);
    put(out, std::int64_t{1});
    put(out, std::int64_t{1});
    put(out, sizes[d]);
  }
}

}  // namespace

void pad_to_8(std::string& out) {
  out.append((8 - out.size() % 8) % 8, '\0');
}

std::uint32_t lookup3(std::string_view bytes) {
  constexpr std::size_t kStepNbytes = 12;
  const std::uint32_t start = 0xDEADBEEF + static_cast<std::uint32_t>(bytes.size());
  Lookup3 sums{start, start, start};
  if (bytes.empty()) return sums.c;
  for (; bytes.size() > kStepNbytes; bytes.remove_prefix(kStepNbytes)) {
    sums.add(bytes.data());
    sums.mix();
  }
  std::array<char, kStepNbytes> last{};
  std::ranges::copy(bytes, last.begin());
  sums.add(last.data());
  sums.finish();
  return sums.c;
}

std::string text_type_message(std::size_t nbytes) {
  std::string out{'\x13', '\x11', '\0', '\0'};  // version 1, text; filled with NUL, UTF-8
  put(out, static_cast<std::uint32_t>(std::max<std::size_t>(nbytes, 1)));
  return out;
}

std::string shape_message(std::span<const std::int64_t> shape) {
  const bool is_scalar = shape.empty();
  std::string out{'\2', static_cast<char>(shape.size()), '\0', is_scalar ? '\0' : '\1'};
  for (const std::int64_t size : shape) put(out, size);
  return out;
}

std::string fill_message(std::string_view element) {
  // Version 3; space is allocated late, and filled if there is a fill value.
  std::string out{'\3', element.empty() ? '\x0A' : '\x2A'};
  if (element.empty()) return out;
  put(out, static_cast<std::uint32_t>(element.size()));
  return out.append(element);
}

std::string contiguous_layout_message(std::uint64_t address, std::uint64_t nbytes) {
  std::string out{'\3', '\1'};  // version, contiguous
  put(out, address);
  put(out, nbytes);
  return out;
}

std::string virtual_layout_message(std::uint64_t collection_address, std::uint32_t number) {
  std::string out{'\4', '\3'};  // version, virtual
  put(out, collection_address);
  put(out, number);
  return out;
}

std::string text_attribute_message(std::string_view name, std::string_view text) {
  const std::string type = text_type_message(text.size());
  const std::string shape = shape_message({});
  std::string out{'\3', '\0'};  // version, nothing shared
  put(out, static_cast<std::uint16_t>(name.size() + 1));
  put(out, static_cast<std::uint16_t>(type.size()));
  put(out, static_cast<std::uint16_t>(shape.size()));
  out += '\0';  // the name is ASCII
  out.append(name).append(1, '\0').append(type).append(shape).append(text);
  if (text.empty()) out += '\0';
  return out;
}

void ObjectHeader::add(MessageType type, std::string_view content) {
  constexpr char kConstant = 1;
  const bool is_constant = type == MessageType::element_type || type == MessageType::fill;
  messages_ += static_cast<char>(type);
  put(messages_, static_cast<std::uint16_t>(content.size()));
  messages_ += is_constant ? kConstant : '\0';
  messages_.append(content);
}

std::string ObjectHeader::finish() const {
  TESSERA_CHECK(messages_.size() <= UINT16_MAX);
  std::string out = "OHDR";
  out += '\2';  // version
  out += '\1';  // no times; the size has two bytes
  put(out, static_cast<std::uint16_t>(messages_.size()));
  out += messages_;
  put(out, lookup3(out));
  return out;
}

std::string group_header(std::uint64_t tree_address, std::uint64_t heap_address) {
  std::string out{'\1', '\0'};  // version, reserved
  put(out, std::uint16_t{1});   // messages
  put(out, std::uint32_t{1});   // links to this group
  put(out, std::uint64_t{24});  // bytes of the messages; then padding
  put(out, static_cast<std::uint16_t>(MessageType::symbol_table));
  put(out, std::uint16_t{16});
  put(out, std::uint32_t{0});  // flags, reserved
  put(out, tree_address);
  put(out, heap_address);
  return out;
}

std::string mappings_object(std::span<const std::int64_t> shape,
                            std::span<const VirtualMapping> mappings) {
  std::string out{'\0'};  // version
  put(out, std::uint64_t{mappings.size()});
  for (const VirtualMapping& mapping : mappings) {
    out.append(mapping.source_file).append(1, '\0');
    out.append(virtual_source_name(mapping.source_dataset)).append(1, '\0');
    const std::array<std::int64_t, 1> begin{mapping.source_begin};
    const std::array<std::int64_t, 1> numel{mapping.box.numel()};
    put_box(out, begin, numel);
    if (shape.empty()) {
      put_all(out);
    } else {
      put_box(out, mapping.box.offsets, mapping.box.sizes);
    }
  }
  put(out, lookup3(out));
  return out;
}

}  // namespace tessera::formats::native::h5
